"""What the parts of an epoch cost on this machine, and the epoch as a task graph.

The training is on one lane, the disk on another, which does one request after the other.

Every candidate is probed with a table of its own sizes, since caches, the translation of addresses and the length of a
transfer decide: no time is carried over from one size to another.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil
from pathlib import Path
from time import perf_counter, thread_time

import msgspec
import numpy as np
import torch
from msgspec.structs import replace as but

from foretrace.arrays import Float32
from foretrace.graph.taskgraph import EdgeKind, GraphInfo, Lane, TaskGraph, TaskKind
from foretrace.graph.writer import GraphWriter
from foretrace.trace.trace import LaneKind
from foretrace.training.rows import disk, links, nodes, out_of_core
from foretrace.training.rows.disk import RowsOnDisk
from foretrace.training.rows.out_of_core import TrainingJob
from foretrace.training.rows.partitions import GraphSizes, PartitionedGraph
from foretrace.training.rows.rows import Rows, RowsInMemory
from foretrace.training.rows.samplers import NeighborLoader

_STEPS, _MOVES = 20, 3
_ONE_BY_ONE = 64  # edges or targets of a step that reads and writes its rows one by one
_SAMPLE = 1_000_000  # edges that are put in order
LEVELS = (0.1, 0.9)  # quantiles: the range of a cost

Cost = tuple[float, float, float]  # seconds: value, low, high


class Probe(msgspec.Struct, frozen=True):
    """A candidate to be timed on the disk where the folder of its job is."""

    job: TrainingJob
    sizes: GraphSizes

    @property
    def held(self) -> int:
        """Partitions in memory; none where rows are read one by one."""
        return self.sizes.partitions if self.job.loader == "in memory" else self.job.buffer


class AccessCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Measured seconds, and what a step reads."""

    step_s: Cost  # with `batch` edges or targets
    few_s: Cost  # with `few` of them
    batch: int
    few: int
    edge_s: Cost  # of a state: read and put among neighbours; of links: put in order
    read_s: Cost  # a partition
    commit_s: Cost  # of a table with `held` partitions

    def steps_s(self, items: float, steps: float) -> Cost:
        """Return seconds of so many steps of so many items in all: linear between the two sizes timed."""
        item = [max(a - b, 0) / (self.batch - self.few) for a, b in zip(self.step_s, self.few_s, strict=True)]
        value, low, high = (
            max(steps * (few - self.few * each), 0) + items * each
            for few, each in zip(self.few_s, item, strict=True)
        )  # fmt: skip
        return value, min(low, value), max(high, value)


def measure(probes: tuple[Probe, ...]) -> tuple[AccessCosts, ...]:
    """Time all probes here."""
    return tuple(map(measure_one, probes))


def measure_one(probe: Probe) -> AccessCosts:
    """Time the parts of an epoch in this process, in about a second. Raises ForetraceError where the disk fails."""
    random, job, sizes = np.random.default_rng(0), probe.job, probe.sizes
    parts, linked, whole = max(probe.held, 1), job.task == "links", job.loader == "in memory"
    total, columns = parts * -(-sizes.nodes // sizes.partitions), job.width + 1 if linked else sizes.features

    def values(begin: int, end: int) -> Float32:
        return 0.1 * random.standard_normal((end - begin, columns), np.float32)

    held = tuple(range(probe.held))
    batch = job.batch if held else min(job.batch, _ONE_BY_ONE)
    few = max(batch // 4, 1)
    reads, commits = list[float](), list[float]()
    with tempfile.TemporaryDirectory(dir=job.folder) as folder:
        path, table = Path(folder) / "probe.rows", values(0, total)
        disk.create(path, total, columns, parts, lambda begin, end: table[begin:end])
        with RowsOnDisk(path, buffer=probe.held, spare=0) as kept:
            list(kept.visit([held]))
            rows: Rows = RowsInMemory(table) if whole else kept
            call, edge_s = _linking(rows, random) if linked else _classifying(probe, rows, random, Path(folder))
            step_s, few_s = (_timed(call, each, kept) for each in (batch, few))
            for _ in range(_MOVES if held else 0):
                begin = perf_counter()
                if whole and linked:
                    disk.create(path, total, columns, parts, lambda begin, end: table[begin:end])
                elif linked:
                    for k in held:
                        kept.put(np.array([k * kept.size]), kept.get(np.array([k * kept.size])))
                    kept.commit()
                commits.append(perf_counter() - begin)
                begin = perf_counter()
                list(kept.visit([(), held]))  # all are taken out, and read again
                reads.append((perf_counter() - begin) / parts)
            kept.discard()
    return AccessCosts(
        step_s=step_s, few_s=few_s, batch=batch, few=few, edge_s=edge_s, read_s=_levels(reads),
        commit_s=_levels(commits),
    )  # fmt: skip


Call = Callable[[int], object]


def _timed(call: Call, items: int, rows: RowsOnDisk) -> Cost:
    """Return seconds of a step: of the processor, and those that it waits for the disk."""
    found = []
    call(items)
    for _ in range(_STEPS):
        begin, waited = thread_time(), rows.disk.wait_s
        call(items)
        found.append(thread_time() - begin + rows.disk.wait_s - waited)
    return _levels(found)


def _linking(rows: Rows, random: np.random.Generator) -> tuple[Call, Cost]:
    """Return a step on so many edges, and the cost of an edge's order."""

    def call(edges: int) -> None:
        heads, tails, others = random.integers(0, rows.count, (3, edges), np.int32)
        links.step(rows, heads, tails, others, 0.0)

    found = []
    for _ in range(3):
        pairs = random.integers(0, 2**40, _SAMPLE)
        begin = thread_time()
        random.shuffle(pairs)
        found.append((thread_time() - begin) / _SAMPLE)
    return call, _levels(found)


def _classifying(probe: Probe, rows: Rows, random: np.random.Generator, folder: Path) -> tuple[Call, Cost]:
    """Return the same for targets, whose neighbours are drawn from a random graph of the degree that a buffer leaves.

    The graph lies on the disk as that of a training does, but for the ends of its edges, which fit no bucket. It has
    all nodes, as lists of neighbours are made and numbered for all, held or not.
    """
    job, sizes = probe.job, probe.sizes
    model = nodes.Sage((sizes.features, job.width, sizes.classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    labels = random.integers(0, sizes.classes, rows.count)
    parts, near = max(probe.held, 1), (probe.held or sizes.partitions) / sizes.partitions
    edges = max(int(rows.count * sizes.edges / sizes.nodes * near), 1)
    random.integers(0, rows.count, (edges, 2), np.int32).tofile(folder / "edges.bin")
    none, cut = np.empty(0, np.int64), but(sizes, nodes=max(sizes.nodes, rows.count), edges=edges, partitions=parts)
    graph = PartitionedGraph(
        folder=folder, sizes=cut, starts=np.linspace(0, edges, parts**2 + 1).astype(np.int64), order=none,
        held_out=none, labels=none, train=none, test=none,
    )  # fmt: skip
    found = []
    for _ in range(1 + _MOVES):  # the first call in a process takes several times as long
        begin = thread_time()
        lists = nodes.neighbours_within(graph, tuple(range(parts)))
        loader = NeighborLoader(lists, num_neighbors=job.fanouts, seed=random)
        found.append((thread_time() - begin) / edges)

    def call(targets: int) -> None:
        chosen = random.choice(rows.count, min(targets, rows.count), replace=False)
        nodes.step(labels, rows, model, optimizer, loader.sample(chosen))

    return call, _levels(found[1:])


def _levels(found: list[float]) -> Cost:
    """Return the mean, as an epoch is a sum, and the range of most."""
    times = np.array(found or [0.0])
    low, high = np.quantile(times, LEVELS).tolist()
    value = float(times.mean())
    return value, min(low, value), max(high, value)


def epoch_graph(
    compute_s: Sequence[float], fresh: Sequence[float], *, read_s: float = 0.0, write_s: float = 0.0, spare: int = 0,
    commit_s: float = 0.0,
) -> TaskGraph:  # fmt: skip
    """Return states that are computed in `compute_s`, for each of which `fresh` partitions are read; then a commit.

    `spare` partitions are read while the state before is computed, after what that state put out was written.
    """
    lanes = Lane(rank=0, kind=LaneKind.CPU, label="training"), Lane(rank=0, kind=LaneKind.LINK, label="disk")
    writer = GraphWriter(lanes, GraphInfo(source="an epoch", platform="cpu", world_size=1, steps=(0,)))
    writer.mark(0, "epoch", release=0, step=0)

    def move(what: str, partitions: float, seconds: float, state: int, after: int) -> None:
        if partitions:
            task = writer.task(
                TaskKind.COPY, 1, what, round(1e9 * partitions * seconds), step=0, layer=f"state {state}"
            )
            writer.edge(after, task, EdgeKind.DATA)

    move("read", fresh[0], read_s, 0, writer.last[0])
    for k, (seconds, after) in enumerate(zip(compute_s, (*fresh[1:], 0), strict=True)):
        before, loaded = writer.last[0], writer.last.get(1)
        work = writer.task(TaskKind.OPERATOR, 0, "train", round(1e9 * seconds), step=0, layer=f"state {k}")
        if fresh[k] and loaded is not None:
            writer.edge(loaded, work, EdgeKind.DATA)
        ahead = min(spare, after)
        move("write", fresh[k] if k else 0, write_s, k - 1, before)
        move("read", ahead, read_s, k + 1, before)
        move("read", after - ahead, read_s, k + 1, work)
    move("commit", 1 if commit_s else 0, commit_s, len(compute_s) - 1, writer.last[0])
    writer.mark(0, "epoch", [writer.last[1]] if 1 in writer.last else [], step=-1)
    return writer.graph()


def epochs(job: TrainingJob, sizes: GraphSizes, training: int, costs: AccessCosts) -> tuple[int, list[TaskGraph]]:
    """Return batches of an epoch with so many `training` nodes, and its graph with the costs, with low and with high
    ones.

    Of links every state is told; of nodes all states are one, whose neighbours are put in order before they are
    trained, and nothing is read meanwhile.
    """
    linked, held, count = job.task == "links", job.loader == "partition buffer", sizes.partitions
    items, edges, fresh, states = [float(sizes.edges if linked else training)], [float(sizes.edges)], [0.0], 1
    if held and linked:
        order, buckets = out_of_core.link_states(job, count, np.random.default_rng(job.seed))
        items = edges = [len(each) * sizes.edges / count**2 for each in buckets]
        fresh = [len(order[0]), *(len({*after} - {*before}) for before, after in pairwise(order))]
    elif held:
        own = min(-(-training // -(-sizes.nodes // count)), count)  # partitions of training nodes
        states, drawn = max(-(-own // job.buffer), 1), max(job.buffer - own, 0)
        stays = drawn / max(count - own, 1) if states == 1 else 0.0
        fresh = [(drawn if states == 1 else states * job.buffer) * (1 - stays)]
        edges = [states * sizes.edges * (job.buffer / count) ** 2]
    steps = [float(ceil(each / job.batch)) for each in items]
    batches = max(int(sum(steps)), states)
    if job.loader == "rows from disk":
        steps = [each / costs.batch for each in items]
    found = []
    for k in range(3):
        compute = [costs.steps_s(n, m)[k] + e * costs.edge_s[k] for n, m, e in zip(items, steps, edges, strict=True)]
        commit_s = costs.commit_s[k] if linked else 0.0
        found.append(
            epoch_graph(
                compute, fresh, read_s=costs.read_s[k], write_s=commit_s / max(job.buffer, 1), commit_s=commit_s,
                spare=out_of_core.spare_of(job) if linked else 0,
            )
        )  # fmt: skip
    return batches, found
