"""Neighbour samplers as candidates of the data planner: work of a batch, counted, times costs of units, measured.

What a batch reads and draws is counted in a few batches of the graph itself. What a unit of it costs is measured on the
store (a get, a block, the next block, a neighbour in a block) and on random lists in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

import numpy as np

from foretrace.arrays import Float32, Float64, Int64
from foretrace.errors import ForetraceError
from foretrace.plan.data.candidate import BatchTime, DataCandidate, ranked
from foretrace.training.rows.disk import RowsOnDisk, create
from foretrace.training.rows.drawing import positions
from foretrace.training.rows.graphs import NodeData
from foretrace.training.rows.neighbours import (
    MOST_DRAWN,
    MOST_READ,
    CachePolicy,
    NeighbourCache,
    NeighbourLists,
    blocks,
    distinct,
    parts,
    policies,
)
from foretrace.training.rows.rows import RowCounters, Rows
from foretrace.training.rows.samplers import NeighborLoader, SampledBatch

UNITS = (
    "get", "block", "next block", "neighbour read", "neighbour drawn", "renewed of all nodes", "renewed of some", "hop"
)  # fmt: skip
DISK_WIDTH = 1024  # neighbours of a block on disk: 4096 bytes, as a disk reads them
_ROUNDS = 9  # of measurements, all units in turn
_BLOCKS, _NUMBERS = 256, 1 << 17  # so many blocks are read at once to time one, or so many numbers: 512 KB
_DRAWN = 20_000  # neighbours
_PILOTS = 3  # batches that are counted
_PARTS = 16  # parts of a refresh of all nodes that are counted
_BATCH_BYTES, _REFRESH_BYTES = 144, 64  # of temporary arrays, per neighbour of a batch and of a part of a refresh
_OFF = 0.2  # share by which sums of units were off where it was tried, beside what rounds differ by


class WaitingRows(Rows):
    """Rows whose waiting is known: `clock` says CPU seconds of this process and those that it waited for `rows`.

    So what others compute on the same processor meanwhile is left out, which a clock on the wall counts.
    """

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows.count, rows.width)
        self.rows, self.waited_s = rows, 0.0

    def clock(self) -> float:
        """Seconds since some time."""
        return process_time() + self.waited_s

    def _get(self, ids: Int64) -> Float32:
        wall, own = perf_counter(), process_time()
        found = self.rows.get(ids)
        self.waited_s += max(perf_counter() - wall - (process_time() - own), 0.0)
        return found

    def _put(self, ids: Int64, values: Float32) -> None:
        self.rows.put(ids, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingCosts:
    """Seconds of every unit of UNITS: (3, units), the mean of the middle rounds between a quick and a slow one."""

    seconds: Float64

    @classmethod
    def measure(cls, lists: NeighbourLists, *, seed: int = 0) -> SamplingCosts:
        """Time every unit on these lists, on the clock of `WaitingRows` where they lie in such ones.

        Reads some thousand blocks, and takes the memory of lists of 24 neighbours.
        """
        random = np.random.default_rng(seed)
        clock = clock_of(lists)
        timed = _drawing(len(lists.starts) - 1, clock, random)
        rounds = [[*_reading(lists, clock, random), *(each() for each in timed)] for _ in range(_ROUNDS + 1)]
        kept = np.sort(np.maximum(rounds[1:], 0.0), axis=0)
        return cls(seconds=np.stack([kept[1], kept[2:-2].mean(axis=0), kept[-2]]))


def candidates(
    lists: NeighbourLists, costs: SamplingCosts, *, num_neighbors: tuple[int, ...], input_nodes: Int64,
    batch_size: int, among: Mapping[str, CachePolicy | None] | None = None, seed: int = 0,
) -> Iterator[DataCandidate]:  # fmt: skip
    """Samplers with their memory and predicted seconds per batch, of sampling alone.

    `among` are policies by name, None for plain sampling; by default plain sampling and all of `policies`. Notes say
    what a cache changes: how few neighbours of the node with most an epoch sees, and how long it takes to fill.
    """
    random = np.random.default_rng(seed)
    pilot = NeighborLoader(
        lists, num_neighbors=num_neighbors, input_nodes=input_nodes, batch_size=batch_size, shuffle=True, seed=seed
    )
    batches = [batch for batch, _ in zip(pilot, range(_PILOTS), strict=False)] or [pilot.sample(input_nodes)]
    if among is None:
        among = {"plain": None, **(policies() if min(num_neighbors, default=0) >= 0 else {})}
    for name, policy in among.items():
        counts = [_of_batch(lists, policy, num_neighbors, batch, random) for batch in batches]
        refresh, memory = np.zeros(len(UNITS)), pilot.memory_bytes
        notes: tuple[str, ...] = ()
        if policy:
            fill = np.zeros(len(UNITS))
            for fan_out in policy.fan_outs(num_neighbors):
                fill += _of_all(lists, policy.size(fan_out), 0, random)
                if policy.all_nodes:
                    refresh += _of_all(lists, policy.replaced(fan_out), policy.size(fan_out), random) / policy.every
            notes = _notes(lists, policy, num_neighbors, len(pilot), costs.seconds @ fill)
            memory += policy.memory_bytes(np.diff(lists.starts), num_neighbors)
        counted = (np.min(counts, axis=0), np.mean(counts, axis=0), np.max(counts, axis=0))
        low, s, high = sorted(float(at @ (of + refresh)) for at, of in zip(costs.seconds, counted, strict=True))
        yield DataCandidate(
            loader=name, parameters={"fan_out": ",".join(map(str, num_neighbors)), "batch": batch_size},
            memory_bytes=memory + _temporary_bytes(lists, policy, batches), batches=len(pilot),
            batch_s=BatchTime(s=s, low_s=low * (1 - _OFF), high_s=high * (1 + _OFF)), notes=notes,
        )  # fmt: skip


def clock_of(lists: NeighbourLists) -> Callable[[], float]:
    """What says the seconds of sampling from these lists: in memory CPU time, as nothing is waited for."""
    if isinstance(lists.kept, WaitingRows):
        return lists.kept.clock
    return process_time if isinstance(lists.kept, np.ndarray) else perf_counter


def samplers(
    data: NodeData, *, memory_bytes: int, num_neighbors: tuple[int, ...], batch_size: int, folder: Path | None = None,
    seed: int = 0,
) -> tuple[DataCandidate, ...]:  # fmt: skip
    """Ways to sample neighbours within a memory, the quickest first: lists in memory, or in a file with each cache.

    Batches are of training nodes, of all nodes where there are none. The file is made in `folder`, by default that of
    temporary files, to time reads from its disk, and removed. Seconds are those of the processor and of waiting for the
    disk, of sampling alone; what a cache changes is in the notes.

    Raises ForetraceError where nothing fits, with the least that works.
    """
    adjacency = data.adjacency
    input_nodes = data.train if len(data.train) else np.arange(adjacency.nodes)
    held = blocks(adjacency, DISK_WIDTH)
    priced = partial(candidates, num_neighbors=num_neighbors, input_nodes=input_nodes, batch_size=batch_size, seed=seed)
    found = []
    memory = NeighbourLists.of(adjacency)
    for each in priced(memory, SamplingCosts.measure(memory), among={"plain": None}):
        found.append(replace(each, parameters={**each.parameters, "lists": "memory"}))
    with TemporaryDirectory(dir=folder) as own:
        path = Path(own) / "lists"
        create(path, held.shape[0], held.shape[1], 1, lambda i, j: held[i:j])
        with RowsOnDisk(path, buffer=0, spare=0) as rows:
            lists = NeighbourLists(adjacency.starts, WaitingRows(rows))
            for each in priced(lists, SamplingCosts.measure(lists)):
                parameters = {**each.parameters, "lists": "disk"}
                found.append(replace(each, parameters=parameters, disk_bytes=path.stat().st_size))
    return ranked(found, memory_bytes)


def fan_outs(text: str) -> tuple[int, ...]:
    """Numbers of neighbours per hop as a user writes them: `10,10`. Raises ForetraceError."""
    found = tuple(int(each) for each in text.split(",") if re.fullmatch(r" *(-1|0*[1-9][0-9]*) *", each))
    if len(found) != text.count(",") + 1:
        raise ForetraceError(
            f"`sample=` must be numbers of neighbours per hop above 0, as 10,10, or -1 for all, got {text!r}."
        )
    return found


def _timed(call: Callable[[], object], clock: Callable[[], float]) -> float:
    begin = clock()
    call()
    return clock() - begin


def _reading(
    lists: NeighbourLists, clock: Callable[[], float], random: np.random.Generator
) -> tuple[float, float, float, float]:
    """Seconds of a get, a block, the block after another one, and a neighbour of a block that is there."""
    if isinstance(lists.kept, np.ndarray) or not lists.starts[-1]:
        return 0.0, 0.0, 0.0, 0.0  # those drawn from memory are timed below
    total, width = int(lists.starts[-1]), lists.kept.width
    count = min(max(_BLOCKS, _NUMBERS // width), -(-total // width))
    first = int(random.integers(0, -(-total // width) - count + 1)) * width
    spread = np.minimum(np.arange(count) * (total // count) + random.integers(0, max(total // count, 1)), total - 1)
    run = np.minimum(first + np.arange(count) * width, total - 1)
    same = first + random.integers(0, min(width, total - first), _DRAWN)
    lists.read(spread[:1])  # what has slept wakes up
    one_s, spread_s, run_s, same_s = (_timed(partial(lists.read, at), clock) for at in (run[:1], spread, run, same))
    runs = 1 + np.count_nonzero(np.diff(np.unique(spread // width)) != 1)
    after = (run_s - one_s) / max(count - 1, 1)
    block = (spread_s - one_s - (count - runs) * after) / (runs - 1) if runs > 1 else after
    return one_s - block, block, after, (same_s - one_s) / _DRAWN


def _drawing(nodes: int, clock: Callable[[], float], random: np.random.Generator) -> list[Callable[[], float]]:
    """What times a neighbour drawn from memory and numbered, and one renewed in each kind of cache, on random lists."""
    lists = NeighbourLists(np.arange(nodes + 1) * 24, random.integers(0, nodes, 24 * nodes, dtype=np.int32))
    loader = NeighborLoader(lists, num_neighbors=[10, 10])
    seeds, some, chosen_one = min(_DRAWN // 40, nodes), min(_DRAWN // 4, nodes), np.zeros(1, np.int64)

    def draw() -> float:
        chosen = random.choice(nodes, seeds, replace=False)
        drawn: list[SampledBatch] = []
        took = _timed(lambda: drawn.append(loader.sample(chosen)), clock)
        return took / sum(drawn[0].num_sampled_edges)

    def hop() -> float:
        return _timed(lambda: loader.sample(chosen_one), clock) / 2

    def renewing(policy: CachePolicy) -> Callable[[], float]:
        cache = NeighbourCache(lists, policy, 10, random, RowCounters())

        def renew() -> float:
            chosen = np.arange(some) if policy.all_nodes else random.choice(nodes, some, replace=False)
            return _timed(lambda: cache.refresh(chosen), clock) / (some * cache.replaced)

        return renew

    return [draw, *(renewing(policies()[name]) for name in ("fcr", "otf")), hop]


def _of_batch(
    lists: NeighbourLists, policy: CachePolicy | None, num_neighbors: tuple[int, ...], batch: SampledBatch,
    random: np.random.Generator,
) -> Float64:  # fmt: skip
    """Units of one batch, with its share of the refresh of those whose neighbours it draws: (units,)."""
    found = np.zeros(len(UNITS))
    ends = np.cumsum((0, *batch.num_sampled_nodes))
    for hop, fan_out in enumerate(num_neighbors):
        nodes = batch.n_id[ends[hop] : ends[hop + 1]]
        sizes = lists.sizes(nodes)
        wanted = sizes if fan_out < 0 else np.minimum(sizes, fan_out)
        found[4] += wanted.sum()
        found[7] += 1
        if policy is None:
            found += _read(lists, nodes, wanted, random)
            continue
        made_for = max(num_neighbors) if policy.shared else fan_out
        cut = sizes > policy.size(made_for)
        found += _read(lists, nodes[cut], wanted[cut] - policy.drawn(fan_out), random)
        if not policy.all_nodes:
            renewed = np.full(np.count_nonzero(cut), policy.replaced(made_for))
            found += _read(lists, nodes[cut], renewed, random) / policy.every
            found[6] += renewed.sum() / policy.every
    return found


def _of_all(lists: NeighbourLists, most: int, above: int, random: np.random.Generator) -> Float64:
    """Units of reading up to `most` neighbours of all nodes with more than `above`, from a sample of them: (units,)."""
    found = np.zeros(len(UNITS))
    every = list(parts(np.flatnonzero(np.diff(lists.starts) > above), most))
    some = every[:: max(len(every) // _PARTS, 1)]
    for nodes in some:
        wanted = np.minimum(lists.sizes(nodes), most)
        found += _read(lists, nodes, wanted, random)
        found[5] += wanted.sum()
    return found * len(every) / max(len(some), 1)


def _read(lists: NeighbourLists, nodes: Int64, wanted: Int64, random: np.random.Generator) -> Float64:
    """Units of drawing neighbours from the lists, without reading them: (units,)."""
    found = np.zeros(len(UNITS))
    at = positions(lists.starts[nodes], lists.sizes(nodes), wanted, random)
    if not isinstance(lists.kept, np.ndarray) and len(at):
        ids = np.unique(at // lists.kept.width)
        runs = 1 + np.count_nonzero(np.diff(ids) != 1)
        found[:4] = -(-len(ids) // max(MOST_READ // lists.kept.width, 1)), runs, len(ids) - runs, len(at)
    return found


def _temporary_bytes(lists: NeighbourLists, policy: CachePolicy | None, batches: list[SampledBatch]) -> int:
    """Bytes of the arrays of one batch, or of a part of a refresh where that is more."""
    edges = max(sum(batch.num_sampled_edges) for batch in batches)
    part = min(MOST_DRAWN, int(lists.starts[-1])) if policy else 0
    found = max(edges * _BATCH_BYTES, part * _REFRESH_BYTES)
    if isinstance(lists.kept, np.ndarray):
        return found
    width = lists.kept.width
    return found + 4 * width * min(max(edges, part), lists.kept.count, max(MOST_READ // width, 1))


def _notes(
    lists: NeighbourLists, policy: CachePolicy, num_neighbors: tuple[int, ...], batches: int, fill_s: Float64
) -> tuple[str, ...]:
    """What a cache changes, in sentences."""
    fan_out, degree = max(num_neighbors, default=0), int(np.diff(lists.starts).max(initial=0))
    whole = policy.served == 1
    alone = "every batch alone is drawn as without one" if whole else "a batch may draw a neighbour twice"
    seen, plain = policy.distinct(degree, fan_out, batches), distinct(degree, fan_out, batches)
    return (
        f"a node of {degree:,} neighbours shows {seen:,.0f} of them in an epoch of {batches:,} batches that all draw "
        f"from it, without a cache {plain:,.0f}; {alone}",
        f"its caches are filled once in {fill_s[1]:.3g} s ({fill_s[0]:.3g} to {fill_s[2]:.3g})",
    )
