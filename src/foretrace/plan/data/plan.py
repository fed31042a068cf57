"""Choose loader, buffer and order for a graph under a limit of memory, by predicted seconds of an epoch.

Candidates are all rows in memory, a buffer of partitions in the order BETA or COMET for several numbers of partitions,
and rows read one by one. An epoch is simulated on two lanes: the training computes a state while the disk
writes what left the buffer and reads what comes next.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace as but

from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Row
from foretrace.experiment.processes import limited
from foretrace.experiment.statistics import Ratio, paired_ratio
from foretrace.experiment.trial import figured
from foretrace.plan.data.costs import AccessCosts, Probe, epochs, measure
from foretrace.simulate.timeline import Timeline, simulate
from foretrace.training.rows import graphs, links, nodes, orders, out_of_core, partitions
from foretrace.training.rows.disk import partition_bytes
from foretrace.training.rows.graphs import NodeData
from foretrace.training.rows.out_of_core import Task, TrainedGraph, TrainingJob, train
from foretrace.training.rows.partitions import GraphSizes, PartitionedGraph

PARTITIONS = (8, 16, 32, 64)  # that are tried
HALF = 0.5  # of a graph, from which accuracy was within two points of memory on the graphs tried
_RUNTIME = 16_000_000  # bytes: modules that are imported late, stacks of threads, what a heap leaves unused
_HEAP = 1.25  # of what is counted: blocks that a heap cannot give back
# Of a prediction: what two lanes do not know, as caches that the disk's thread shares. Epochs of nodes, which take
# milliseconds, were up to 9 % off on a quiet machine, and up to 20 % either way on a busy one.
_MODEL = {"links": 0.05, "nodes": 0.2}
Tell = Callable[[str, float], object]


class DataCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A loader with its parameters, and the epoch that is predicted: all that is waited for is in its seconds."""

    name: str  # loader and parameters, as in "partition buffer partitions=16 buffer=4 order=comet"
    loader: str  # "in memory", "partition buffer", "rows from disk", "fcr", ...
    parameters: dict[str, int | float | str]
    epoch_s: float  # infinite before it is timed
    low_s: float
    high_s: float
    batches: int  # of an epoch
    memory_bytes: int  # at the peak, beyond interpreter and libraries; temporaries of a batch included
    disk_bytes: int = 0  # files that it needs
    swaps: int | None = None  # loads of a partition after the first `buffer` ones; null without any
    swaps_bound: int | None = None
    reach: float = 1.0  # share of a node's neighbours that are held when it is trained
    notes: tuple[str, ...] = ()  # what it changes beside time, as "a hub shows 24 of its 1,900 neighbours"

    @staticmethod
    def name_of(loader: str, parameters: Mapping[str, int | float | str]) -> str:
        """Return what to call it."""
        return " ".join([loader, *(f"{key}={value}" for key, value in parameters.items())])


def ranked(candidates: Iterable[DataCandidate], memory_bytes: float) -> tuple[DataCandidate, ...]:
    """Return those that fit into the memory, the quickest epoch first; of equal ones that with less memory.

    Those that hold less than half of a node's neighbours come last: their accuracy is lower than in memory.
    Raises ForetraceError where none fits, with the least memory that one of them needs.
    """
    known = sorted(candidates, key=lambda each: (each.reach < HALF, each.epoch_s, each.memory_bytes))
    fitting = tuple(each for each in known if each.memory_bytes <= memory_bytes)
    if not fitting:
        least = min(known, key=lambda each: each.memory_bytes)
        raise ForetraceError(
            f"Nothing fits into `memory={memory_bytes / 1e6:g}MB`; the least that works is "
            f"{-(-least.memory_bytes // 10**6)}MB ({least.name})."
        )
    return fitting


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlan:
    """The answer: `candidates`, the best first, of those that fit; `left_out` with the reason."""

    graph: str
    job: TrainingJob  # of the choice; its folder is "" where the graph is not yet in partitions
    sizes: GraphSizes  # of the choice
    limit_bytes: int
    candidates: tuple[DataCandidate, ...]
    left_out: dict[str, str]
    timeline: Timeline  # of an epoch of the choice

    @property
    def choice(self) -> DataCandidate:
        """The best."""
        return self.candidates[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSource:
    """A graph as it is given: in partitions already, or to be partitioned."""

    name: str
    data: NodeData | None  # None: it lies in partitions in the folder `name`
    sizes: GraphSizes  # its edges are those that are trained
    training: int  # nodes

    @staticmethod
    def of(text: str) -> GraphSource:
        """Return a folder of partitions, an NPZ file, or `planted:...`. Raises ForetraceError."""
        if Path(text).is_dir():
            graph = partitions.read(Path(text))
            return GraphSource(name=text, data=None, sizes=graph.sizes, training=len(graph.train))
        data = graphs.parse(text)
        count = len(data.adjacency.edges())
        sizes = GraphSizes(
            nodes=data.adjacency.nodes, edges=count - min(int(partitions.HELD_SHARE * count), partitions.HELD_OUT),
            partitions=0, features=data.features.shape[1], classes=data.classes,
        )  # fmt: skip
        return GraphSource(name=text, data=data, sizes=sizes, training=len(data.train))

    def partitioned(self, folder: Path, count: int, *, seed: int = 0) -> PartitionedGraph:
        """Return it in so many partitions: in `folder`, unless it lies in partitions already."""
        if self.data is None:
            return partitions.read(Path(self.name))
        return partitions.write(self.data, folder, partitions=count, seed=seed)


def plan_data(
    source: GraphSource, *, memory_bytes: int, task: str = "", batch: int = 10_000, width: int = 32, seed: int = 0,
    tell: Tell | None = None,
) -> DataPlan:  # fmt: skip
    """Return the candidates for a graph, with costs measured here.

    Args:
        source: the graph.
        memory_bytes: that training may take beyond interpreter and libraries.
        task: "links", "nodes", or "" for nodes where the graph has features and nodes to train.
        batch: edges, or training nodes, of a batch.
        width: numbers of an embedding, or of a hidden layer.
        seed: of orders.
        tell: called with what is going on, and the share that is done.

    Raises:
        ForetraceError: a task that the graph does not allow, or where nothing fits, with the least that works.

    """
    sizes = source.sizes
    able = bool(sizes.features and source.training)
    if task not in ("", "links", "nodes") or (task == "nodes" and not able):
        raise ForetraceError(
            f"`task={task}` must be links, or nodes for a graph with features and training nodes; choose another one."
        )
    kind: Task = "nodes" if task == "nodes" or (not task and able) else "links"
    if kind == "links" and not sizes.edges:
        raise ForetraceError(f"{source.name} has no edges to train links by; give a graph with edges.")
    base = TrainingJob(
        folder="", task=kind, loader="in memory", batch=batch, width=width, seed=seed,
        rate=0.1 if kind == "links" else 0.01,
    )  # fmt: skip
    if tell is not None:
        tell("timing steps and the disk", 0.0)
    ways: dict[str, tuple[TrainingJob, GraphSizes]] = {}
    known: list[DataCandidate] = []
    for way in candidate_jobs(base, sizes, source.training, memory_bytes):
        known.append(untimed(*way, source.training))
        ways[known[-1].name] = way
    fitting = ranked(known, memory_bytes)
    with tempfile.TemporaryDirectory(dir=None if source.data is not None else source.name) as folder:

        def timed(those: Sequence[DataCandidate]) -> list[tuple[DataCandidate, AccessCosts]]:
            probes = [Probe(but(job, folder=folder, order=""), cut) for job, cut in (ways[each.name] for each in those)]
            once = tuple(dict.fromkeys(probes))
            costs = dict(zip(once, limited(measure, once), strict=True))
            return [
                (priced(each, *ways[each.name], source.training, costs[probe]), costs[probe])
                for each, probe in zip(those, probes, strict=True)
            ]

        found = {each.name: (each, costs) for each, costs in timed(fitting)}
        checked = set[str]()
        # The quickest of many noisy measurements likely came out too quick: what is predicted is timed again, until
        # the quickest is one that was.
        while (best := ranked((each for each, _ in found.values()), memory_bytes)[0]).name not in checked:
            checked.add(best.name)
            ((again, costs),) = timed([best])
            wide = but(again, low_s=min(best.low_s, again.low_s), high_s=max(best.high_s, again.high_s))
            found[best.name] = wide, costs
    candidates = ranked((each for each, _ in found.values()), memory_bytes)
    best, costs = found[candidates[0].name]
    job, cut = ways[best.name]
    return DataPlan(
        graph=source.name, job=job, sizes=cut, limit_bytes=memory_bytes, candidates=candidates,
        left_out={each.name: f"needs {each.memory_bytes / 1e6:.0f} MB" for each in known if each not in fitting},
        timeline=simulate(epochs(job, cut, source.training, costs)[1][0]),
    )  # fmt: skip


def candidate_jobs(
    base: TrainingJob, sizes: GraphSizes, training: int, memory_bytes: int
) -> Iterator[tuple[TrainingJob, GraphSizes]]:
    """Yield every way that is tried: of buffers in one order the largest that fits, else the smallest there can be."""
    counts = (sizes.partitions,) if sizes.partitions else tuple(each for each in PARTITIONS if 2 * each <= sizes.nodes)
    whole = but(sizes, partitions=counts[0] if counts else 1)
    yield base, whole
    most = 2 if memory_of(base, whole, training) <= memory_bytes else 1  # where all fits, no buffer of nearly all
    for count in counts:
        cut = but(sizes, partitions=count)
        for order, step in (("beta", 1), ("comet", 2)) if base.task == "links" else (("", 1),):
            jobs = [
                but(base, loader="partition buffer", order=order, buffer=held)
                for held in range(2 * step, max(count // most, 2 * step + 1), step)
                if count % step == 0
            ]
            fitting = [job for job in jobs if memory_of(job, cut, training) <= memory_bytes]
            if jobs:
                yield (fitting or jobs[:1])[-1], cut
    yield but(base, loader="rows from disk"), whole


def memory_of(job: TrainingJob, sizes: GraphSizes, training: int) -> int:
    """Return bytes that a job takes at its peak, beyond interpreter and libraries."""
    linked, count = job.task == "links", sizes.partitions
    columns = job.width + 1 if linked else sizes.features
    part = partition_bytes(sizes.nodes, columns, count)
    held = {"in memory": 4 * sizes.nodes * columns, "partition buffer": (job.buffer + out_of_core.spare_of(job)) * part}
    share = min(job.buffer / count, 1.0) if job.loader == "partition buffer" else 1.0
    edges = int(sizes.edges * share**2)
    if linked:
        states = len(orders.ORDERS[job.order](count, job.buffer, np.random.default_rng(0))) if job.order else 1
        lists = states * count**2 * (10 if job.order == "comet" else 2)
        pairs = min(int(partitions.HELD_SHARE * sizes.edges) + 1, partitions.HELD_OUT)
        passing = max(8 * edges + links.batch_bytes(job.width, job.batch), lists, links.judging_bytes(job.width, pairs))
        passing = max(passing, 3 * part)  # first values
    else:
        reach = int(np.cumprod([1, *job.fanouts]).sum()) * min(job.batch, max(training, 1))
        read = min(reach, int(sizes.nodes * share))
        passing = max(
            nodes.graph_bytes(sizes.nodes, edges) + nodes.batch_bytes(sizes.features, job.width, read),
            nodes.judging_bytes(sizes.nodes, max(job.width, sizes.classes), part, -(-sizes.edges // count)),
        )
    arrays = 8 * (3 * sizes.nodes + count**2)
    return _RUNTIME + int(_HEAP * (held.get(job.loader, 0) + passing + arrays))


def untimed(job: TrainingJob, sizes: GraphSizes, training: int) -> DataCandidate:
    """Return a candidate before its steps were timed."""
    linked, count = job.task == "links", sizes.partitions
    columns, items = (job.width + 1, sizes.edges) if linked else (sizes.features, training)
    words: dict[str, int | float | str] = {"partitions": count, "buffer": job.buffer} if job.buffer else {}
    swaps = bound = None
    if job.order:
        words["order"] = job.order
        swaps = orders.swaps(orders.ORDERS[job.order](count, job.buffer, np.random.default_rng(job.seed)))
        bound = orders.swaps_bound(count, job.buffer)
    reach = job.buffer / count if job.buffer and not linked else 1.0
    few = f"about {100 * reach:.0f} % of a node's neighbours are held: expect lower accuracy than in memory"
    return DataCandidate(
        name=DataCandidate.name_of(job.loader, words), loader=job.loader, parameters=words,
        epoch_s=inf, low_s=inf, high_s=inf, batches=max(-(-items // job.batch), 1), swaps=swaps, swaps_bound=bound,
        memory_bytes=memory_of(job, sizes, training),
        disk_bytes=(2 if linked else 1) * count * partition_bytes(sizes.nodes, columns, count) + 8 * sizes.edges,
        reach=reach, notes=(few,) if reach < HALF else (),
    )  # fmt: skip


def priced(
    each: DataCandidate, job: TrainingJob, sizes: GraphSizes, training: int, costs: AccessCosts
) -> DataCandidate:
    """Return the candidate with its seconds."""
    batches, graphs = epochs(job, sizes, training, costs)
    times = [simulate(graph).window_ns / 1e9 for graph in graphs]
    low_s, high_s = (1 - _MODEL[job.task]) * min(times), (1 + _MODEL[job.task]) * max(times)
    return but(each, batches=batches, epoch_s=times[0], low_s=low_s, high_s=high_s)


class DataTrial(msgspec.Struct, frozen=True, kw_only=True):
    """The choice, trained within its limit, and the same with all rows in memory. Seconds are CPU and waiting."""

    epochs_s: tuple[float, ...]
    waited_s: tuple[float, ...]  # for the disk
    moved_bytes: int  # of partitions, read and written in the last epoch
    peak_bytes: int  # resident, beyond what the process had before
    limit_bytes: int  # enforced
    quality: float  # AUC of links kept apart, or accuracy on test nodes
    in_memory_s: tuple[float, ...]
    in_memory_peak_bytes: int
    in_memory_quality: float
    measured: Ratio  # epochs over the predicted one
    over_memory: Ratio  # epochs over those in memory
    error: float  # of the prediction
    verdict: str
    direct: bool  # whether the page cache was passed by


def try_plan(
    plan: DataPlan, source: GraphSource, *, epochs: int = 3, tell: Tell | None = None
) -> tuple[Row, DataTrial]:
    """Train so many epochs of the choice within the plan's limit, and in memory without one, in a temporary folder.

    What the ledger keeps of it, and what came of it. Raises ForetraceError for fewer than 3 epochs, and where the limit
    does not suffice.
    """
    if epochs < 3:
        raise ForetraceError(f"`epochs=` must be 3 or more for a median, got {epochs}.")
    say = tell or (lambda what, share: None)
    job, sizes, choice = plan.job, plan.sizes, plan.choice
    with tempfile.TemporaryDirectory() as folder:
        say("partitioning", 0.0)
        graph = source.partitioned(Path(folder) / "graph", sizes.partitions, seed=job.seed)

        def trained(job: TrainingJob, name: str, limit: int) -> TrainedGraph:
            (Path(folder) / name).mkdir()
            given = but(job, folder=str(graph.folder), into=str(Path(folder) / name), epochs=epochs)
            return limited(train, given, memory_bytes=limit)

        say("training within the limit", 0.2)
        chosen = trained(job, "chosen", plan.limit_bytes)
        say("training in memory", 0.6)
        memory = trained(but(job, loader="in memory", buffer=0, order=""), "memory", 0)
    epochs_s, in_memory_s = (tuple(each.s for each in run.epochs) for run in (chosen, memory))
    tried = figured((choice.epoch_s, choice.low_s, choice.high_s), epochs_s, clock="cpu", seed=job.seed)
    row = tried.row(
        f"plan-data {job.task}", model=plan.graph,
        parameters={"loader": job.loader, "memory": plan.limit_bytes, **choice.parameters},
        size=f"{sizes.nodes} nodes, {sizes.edges} edges, batch {job.batch}, width {job.width}",
        notes=("Seconds are those of the processor and of waiting for the disk.",),
    )  # fmt: skip
    last = chosen.epochs[-1]
    return row, DataTrial(
        epochs_s=epochs_s, waited_s=tuple(each.wait_s for each in chosen.epochs),
        moved_bytes=last.bytes_read + last.bytes_written, peak_bytes=chosen.peak_bytes,
        limit_bytes=chosen.limit_bytes, quality=chosen.quality, in_memory_s=in_memory_s,
        in_memory_peak_bytes=memory.peak_bytes, in_memory_quality=memory.quality, measured=tried.measured,
        over_memory=paired_ratio(in_memory_s, epochs_s), error=tried.error, verdict=tried.verdict, direct=chosen.direct,
    )  # fmt: skip
