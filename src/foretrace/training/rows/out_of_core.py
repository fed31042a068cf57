"""Train on a graph in partitions, within memory that the operating system enforces or without a limit.

A job says what is trained and how rows are read; `train` does it in this process. Every epoch ends with a commit, so an
interrupted job continues after the last one, by the same random numbers.
"""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from time import perf_counter, thread_time
from typing import Literal

import msgspec
import numpy as np
import torch

from foretrace.arrays import Int64
from foretrace.errors import ForetraceError
from foretrace.training.rows import disk, links, nodes, orders, partitions
from foretrace.training.rows.disk import RowsOnDisk
from foretrace.training.rows.graphs import Adjacency
from foretrace.training.rows.neighbours import NeighbourLists
from foretrace.training.rows.orders import State
from foretrace.training.rows.partitions import PartitionedGraph
from foretrace.training.rows.rows import RowCounters, Rows, RowsInMemory
from foretrace.training.rows.samplers import NeighborLoader

Task = Literal["links", "nodes"]
Loader = Literal["in memory", "partition buffer", "rows from disk"]


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained. The sizes after `seed` are the model's."""

    folder: str  # of a graph in partitions
    into: str = ""  # folder of the embeddings; by default the graph's
    task: Task
    loader: Loader
    buffer: int = 0  # partitions that are held
    order: Literal["beta", "comet", ""] = ""
    epochs: int = 1
    batches: int = 0  # of an epoch at most; 0: all
    batch: int = 10_000
    seed: int = 0
    width: int = 32  # of an embedding, or of the layer between features and classes
    rate: float = 0.1
    fanouts: tuple[int, ...] = (10, 10)

    @property
    def table(self) -> Path:
        """Where embeddings are kept."""
        return Path(self.into or self.folder) / "embeddings.rows"


class EpochRun(msgspec.Struct, frozen=True, kw_only=True):
    """One epoch: seconds of the processor in the training thread, seconds that it waited for the disk, and both."""

    loss: float
    batches: int
    swaps: int
    cpu_s: float
    wait_s: float
    wall_s: float
    bytes_read: int  # from the disk by partitions
    bytes_written: int

    @property
    def s(self) -> float:
        """What the epoch takes where nothing else wants the processor."""
        return self.cpu_s + self.wait_s


class TrainedGraph(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a job."""

    epochs: tuple[EpochRun, ...]
    quality: float  # links: AUC of edges kept apart; nodes: accuracy on test nodes
    peak_bytes: int  # of resident memory, beyond what the process had before; 0 where the system does not say
    limit_bytes: int  # enforced; 0: none
    direct: bool  # whether the page cache was passed by


def states_of(
    job: TrainingJob, graph: PartitionedGraph, random: np.random.Generator
) -> tuple[list[State], list[Int64]]:
    """Return states of an epoch, and the buckets that are trained in each."""
    if job.loader != "partition buffer":
        whole = tuple(range(graph.sizes.partitions))
        return [whole], orders.assign([whole], len(whole))
    if job.task == "nodes":
        return nodes.node_states(graph, job.buffer, random), []
    return link_states(job, graph.sizes.partitions, random)


def link_states(job: TrainingJob, count: int, random: np.random.Generator) -> tuple[list[State], list[Int64]]:
    """Return the same for edges among so many partitions, by the order of the job."""
    states = list(orders.ORDERS[job.order or "beta"](count, job.buffer, random))
    return states, orders.assign(states, count, random if job.order == "comet" else None)


def train(job: TrainingJob) -> TrainedGraph:
    """Run a job; the embeddings, or the model beside the features, are those of the last epoch.

    Raises ForetraceError for a job that its graph does not allow, and where the disk fails.
    """
    graph = partitions.read(Path(job.folder))
    if min(job.batch, job.width, job.epochs) < 1 or job.batches < 0:
        raise ForetraceError(f"A batch, a width and an epoch must be 1 or more, got {job}.")
    if job.task == "nodes" and not (graph.sizes.features and len(graph.train)):
        raise ForetraceError(f"{job.folder} must have features and training nodes to classify nodes; train links.")
    if job.task == "links" and not graph.sizes.edges:
        raise ForetraceError(f"{job.folder} must have edges to train links.")
    torch.manual_seed(job.seed)
    resident = _resident()
    opened = _Links(job, graph) if job.task == "links" else _Nodes(job, graph)
    runs = []
    with opened.rows as rows:
        counters = rows.disk if isinstance(rows, RowsOnDisk) else RowCounters()
        for epoch in range(opened.first, job.epochs):
            random = np.random.default_rng([job.seed, epoch])
            before = replace(counters)
            cpu, wall = thread_time(), perf_counter()
            states, buckets = states_of(job, graph, np.random.default_rng([job.seed, epoch, 1]))
            loss, batches = opened.epoch(states, buckets, random)
            run = EpochRun(
                loss=loss, batches=batches, swaps=orders.swaps(states), cpu_s=thread_time() - cpu,
                wait_s=counters.wait_s - before.wait_s, wall_s=perf_counter() - wall,
                bytes_read=counters.bytes_read - before.bytes_read,
                bytes_written=counters.bytes_written - before.bytes_written,
            )  # fmt: skip
            runs.append(run)
        quality = opened.judge()
    peak = max(_resident("VmHWM") - resident, 0)
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return TrainedGraph(
        epochs=tuple(runs), quality=quality, peak_bytes=peak, limit_bytes=max(limit, 0),
        direct=not isinstance(opened.rows, RowsOnDisk) or opened.rows.direct,
    )  # fmt: skip


class _Links:
    def __init__(self, job: TrainingJob, graph: PartitionedGraph) -> None:
        self.job, self.graph = job, graph
        sizes, table = graph.sizes, job.table
        if not table.exists():
            disk.create(
                table, sizes.nodes, job.width + 1, sizes.partitions,
                lambda begin, end: links.first_values(job.width, job.seed, begin, end),
            )  # fmt: skip
        self.rows, self.first = _opened(job, table)
        if (self.rows.count, self.rows.width) != (sizes.nodes, job.width + 1):
            raise ForetraceError(f"{table} is the table of another training; remove it.")

    def epoch(self, states: list[State], buckets: list[Int64], random: np.random.Generator) -> tuple[float, int]:
        """Train every bucket of edges once, in the state that it is assigned to; mean loss of an edge, and batches."""
        job, total, items, done = self.job, 0.0, 0, 0
        for state, chosen in zip(self.rows.visit(states), buckets, strict=True):
            edges = self.graph.edges_of(chosen)
            random.shuffle(edges.view(np.int64).ravel())  # in place: no memory beside them
            for begin in range(0, len(edges), job.batch)[: job.batches - done if job.batches else None]:
                part = edges[begin : begin + job.batch]
                others = links.draw(self.graph, state, len(part), random)
                total += links.step(self.rows, part[:, 0], part[:, 1], others, job.rate)
                items, done = items + len(part), done + 1
        if isinstance(self.rows, RowsOnDisk):
            self.rows.commit()
        elif isinstance(self.rows, RowsInMemory):
            values, sizes = self.rows.values, self.graph.sizes
            disk.create(job.table, sizes.nodes, self.rows.width, sizes.partitions, lambda begin, end: values[begin:end])
        return total / max(items, 1), done

    def judge(self) -> float:
        return links.link_auc(self.graph, self.rows, seed=self.job.seed) if self.job.loader != "rows from disk" else 0.0


class _Nodes:
    first = 0

    def __init__(self, job: TrainingJob, graph: PartitionedGraph) -> None:
        self.job, self.graph = job, graph
        self.rows, _ = _opened(job, graph.features)
        self.model = nodes.Sage((graph.sizes.features, job.width, graph.sizes.classes))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=job.rate, weight_decay=5e-4)

    def epoch(self, states: list[State], buckets: list[Int64], random: np.random.Generator) -> tuple[float, int]:
        """Train every training node once; the mean loss of one, and batches."""
        graph, total, items, done = self.graph, 0.0, 0, 0
        self.model.train()
        for state in self.rows.visit(states):
            loader = NeighborLoader(
                nodes.neighbours_within(graph, state), num_neighbors=self.job.fanouts, batch_size=self.job.batch,
                input_nodes=graph.train[np.isin(graph.train // graph.size, state)], shuffle=True, seed=random,
            )  # fmt: skip
            for read in loader:
                loss = nodes.step(graph.labels, self.rows, self.model, self.optimizer, read)
                total, items, done = total + read.batch_size * loss, items + read.batch_size, done + 1
        return total / max(items, 1), done

    def judge(self) -> float:
        return nodes.accuracy(self.graph, self.rows, self.model, self.graph.test)


def _opened(job: TrainingJob, table: Path) -> tuple[Rows, int]:
    """Return the rows of a table as a job reads them, and how often they were committed."""
    if job.loader == "in memory":
        return RowsInMemory(disk.read_whole(table)), 0
    buffer = job.buffer if job.loader == "partition buffer" else 0
    on_disk = RowsOnDisk(table, buffer=buffer, spare=spare_of(job) if buffer else 0)
    return on_disk, on_disk.commits


def spare_of(job: TrainingJob) -> int:
    """Return partitions for which there is room beside the buffer: those that an order changes at a time."""
    return 2 if job.order == "comet" else 1


def _resident(what: str = "VmRSS") -> int:
    """Return bytes of this process by a line of its status; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:")), 0)


def limit_memory(bytes_more: int) -> None:
    """Let this process have so many bytes of data beyond what it has now: RLIMIT_DATA.

    Raises ForetraceError where the system does not say what it has.
    """
    warm = nodes.Sage((4, 4, 2))  # libraries take memory of their own, and import more, at the first update
    alone = Adjacency(starts=np.zeros(3, np.int64), neighbours=np.zeros(0, np.int64))
    (read,) = NeighborLoader(NeighbourLists.of(alone), num_neighbors=(1, 1), batch_size=2)
    nodes.step(
        np.zeros(2, int), RowsInMemory(np.ones((2, 4), np.float32)), warm, torch.optim.Adam(warm.parameters()), read
    )
    one = np.zeros(1, np.int32)
    links.step(RowsInMemory(np.ones((2, 3), np.float32)), one, one, one, 0.0)
    now = _resident("VmData")
    if not now:
        raise ForetraceError("A limit of memory can be enforced on Linux alone; plan without running it.")
    resource.setrlimit(resource.RLIMIT_DATA, (now + bytes_more, resource.getrlimit(resource.RLIMIT_DATA)[1]))
