"""What the parts of an epoch cost on this machine: steps with rows in a buffer, partitions read and committed.

Every candidate is probed with a table of its own sizes, since caches, the translation of addresses and the length of a
transfer decide: no time is carried over from one size to another.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, thread_time

import msgspec
import numpy as np
import torch

from foretrace.arrays import Float32
from foretrace.training.rows import dense, disk, links, nodes
from foretrace.training.rows.disk import RowsOnDisk
from foretrace.training.rows.out_of_core import Task
from foretrace.training.rows.partitions import GraphSizes, PartitionedGraph
from foretrace.training.rows.rows import Rows, RowsInMemory

_STEPS, _MOVES = 20, 3
_ONE_BY_ONE = 64  # edges or targets of a step that reads and writes its rows one by one
_SAMPLE = 1_000_000  # edges that are put in order
LEVELS = (0.1, 0.9)  # quantiles: the range of a cost

Cost = tuple[float, float, float]  # seconds: value, low, high


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a candidate: `held` partitions of `rows` rows are in memory, none where rows are read one by one."""

    folder: str  # on the disk that is meant
    task: Task
    rows: int
    held: int
    in_memory: bool  # all rows, as one array
    width: int
    features: int
    classes: int
    batch: int
    fanouts: tuple[int, ...]
    degree: float  # neighbours of a node among those held


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
        """Return seconds of so many steps that have so many items in all: linear between the two sizes that
        were timed.
        """
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
    random = np.random.default_rng(0)
    parts, linked = max(probe.held, 1), probe.task == "links"
    total, columns = probe.rows * parts, probe.width + 1 if linked else probe.features

    def values(begin: int, end: int) -> Float32:
        return 0.1 * random.standard_normal((end - begin, columns), np.float32)

    held = tuple(range(probe.held))
    batch = probe.batch if held else min(probe.batch, _ONE_BY_ONE)
    few = max(batch // 4, 1)
    reads, commits = list[float](), list[float]()
    with tempfile.TemporaryDirectory(dir=probe.folder) as folder:
        path, table = Path(folder) / "probe.rows", values(0, total)
        disk.create(path, total, columns, parts, lambda begin, end: table[begin:end])
        with RowsOnDisk(path, buffer=probe.held, spare=0) as kept:
            list(kept.visit([held]))
            rows: Rows = RowsInMemory(table) if probe.in_memory else kept
            call, edge_s = _linking(rows, random) if linked else _classifying(probe, rows, random, Path(folder))
            step_s, few_s = (_timed(call, each, kept) for each in (batch, few))
            for _ in range(_MOVES if held else 0):
                begin = perf_counter()
                if probe.in_memory and linked:
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

    The graph lies on the disk as that of a training does, but for the ends of its edges, which fit no bucket.
    """
    model = nodes.Sage((probe.features, probe.width, probe.classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    labels = random.integers(0, probe.classes, rows.count)
    edges, parts = max(int(rows.count * probe.degree / 2), 1), max(probe.held, 1)
    random.integers(0, rows.count, (edges, 2), np.int32).tofile(folder / "edges.bin")
    sizes = GraphSizes(nodes=rows.count, edges=edges, partitions=parts, features=probe.features, classes=probe.classes)
    none = np.empty(0, np.int64)
    graph = PartitionedGraph(
        folder=folder, sizes=sizes, starts=np.linspace(0, edges, parts**2 + 1).astype(np.int64), order=none,
        held_out=none, labels=none, train=none, validation=none, test=none,
    )  # fmt: skip
    found = []
    for _ in range(_MOVES):
        begin = thread_time()
        adjacency = nodes.neighbours_within(graph, tuple(range(parts)))
        found.append((thread_time() - begin) / edges)

    def call(targets: int) -> None:
        chosen = random.choice(rows.count, min(targets, rows.count), replace=False)
        read = dense.sample(adjacency, chosen, probe.fanouts, random)
        nodes.step(labels, rows, model, optimizer, read)

    return call, _levels(found)


def _levels(found: list[float]) -> Cost:
    """Return the mean, as an epoch is a sum, and the range of most."""
    times = np.array(found or [0.0])
    low, high = np.quantile(times, LEVELS).tolist()
    value = float(times.mean())
    return value, min(low, value), max(high, value)
