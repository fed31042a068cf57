"""Stages with replicas and tensor-parallel degrees by dynamic programming over ideals: PipeDream's planner and Piper's.

With R(I, k, s) the least time per sample of the slowest stage behind ideal I on at most k devices, with data-parallel
degrees that add up to at most s,

    R(I, k, s) = min over ideals J that hold I, t and d of max(R(J, k - t d, s - d), load(J - I, t, d, s))

    load = compute / d + 2 (bytes over its edges and their synchronisation) / (d b) + 4 (d - 1) |w| / (d N b)

with links of b bytes per second. Piper (Tarnawski et al., NeurIPS 2021): N micro-batches are a batch, of which
ceil(s / d) are in flight and a node keeps a bytes each beside its b; where a stage does not fit, nodes that lose least
time per byte are computed again. PipeDream (Narayanan et al., SOSP 2019, section 3.1): replicas exchange gradients
after one mini-batch each, N = d, and memory is not looked at. A network in levels is planned from the innermost: what a
machine of one level takes is what all devices of the level below do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf, isfinite

import numpy as np

from foretrace.arrays import Float64, Int64, Mask
from foretrace.errors import ForetraceError
from foretrace.plan.placement.blocks import PlacementBlocks
from foretrace.plan.placement.ideals import lattice, words
from foretrace.plan.placement.problem import ROUNDING

MOST_CUTS = 2_000  # ideals: tables have a row and a column for each
MOST_WORK = 1_000_000  # options behind all ideals: a minute or two


@dataclass(frozen=True, kw_only=True)
class NodeCosts:
    """Costs of every node at one tensor-parallel degree: rows are kept whole, and computed again."""

    time: Float64  # per sample, 2 x nodes
    kept_bytes: Float64  # per micro-batch in flight, 2 x nodes
    fixed_bytes: Float64  # 2 x nodes
    weight_bytes: Float64  # nodes
    entering: Mapping[tuple[int, int], float]  # bytes that synchronise an edge at its head, by (source, target)
    leaving: Mapping[tuple[int, int], float]  # and at its tail

    def held(self, flight: int) -> tuple[Float64, Float64, Int64]:
        """Return bytes with so many micro-batches in flight; what computing a node again saves; which ones first."""
        nbytes = self.kept_bytes * flight + self.fixed_bytes
        saved = nbytes[0] - nbytes[1]
        order = np.argsort((self.time[1] - self.time[0]) / np.where(saved > 0, saved, 1.0), kind="stable")
        return nbytes[0], saved, order[saved[order] > 0]


@dataclass(frozen=True, kw_only=True)
class CostGraph:
    """A graph with the bytes of every edge, and costs by tensor-parallel degree."""

    edges: Mapping[tuple[int, int], float]
    costs: Mapping[int, NodeCosts]

    @property
    def nodes(self) -> int:
        return len(next(iter(self.costs.values())).weight_bytes)


@dataclass(frozen=True, kw_only=True)
class ParallelStage:
    """Nodes of a stage, those of them that are computed again, its degrees, and its time in the graph's unit."""

    nodes: tuple[int, ...]
    again: tuple[int, ...]
    data: int
    tensor: int
    load: float  # per sample


def plan_stages(
    graph: CostGraph, levels: Sequence[tuple[int, float]], *, memory_bytes: float = inf, micro_batches: int = 0
) -> tuple[ParallelStage, ...]:
    """Return the stages with the least maximal load, on devices in `levels`, innermost first: (count, bytes/s).

    With `micro_batches` of a batch as Piper, without as PipeDream; degrees of a stage are then of the outermost level.
    Raises ForetraceError for what is no network, where the graph cannot be cut and where nothing fits.
    """
    if micro_batches < 0 or not levels or any(count < 1 or not bandwidth > 0 for count, bandwidth in levels):
        raise ForetraceError(
            f"devices, bandwidths and micro-batches must be above zero, got {list(levels)}, {micro_batches}; give more."
        )
    if len(levels) > 1 and (isfinite(memory_bytes) or list(graph.costs) != [1]):
        raise ForetraceError("a network in levels must have no memory limit and tensor degree 1; give one level.")
    loads = StageLoads(graph, memory_bytes, levels[0][1], micro_batches)
    for (count, _), (_, bandwidth) in pairwise(levels):
        best = loads.best(count, list(range(len(loads.sets))))
        loads = replace(loads, bandwidth=bandwidth, machine=np.where(loads.part, best[:, :, -1, -1], inf))
    return loads.stages(levels[-1][0])


@dataclass
class StageLoads:
    """Loads of all stages; a stage is ideal b without ideal a, at [a, b]."""

    graph: CostGraph
    memory_bytes: float
    bandwidth: float
    micro_batches: int
    machine: Float64 | None = None  # time of every stage on what counts as a device, instead of the nodes'

    @cached_property
    def sets(self) -> list[int]:
        """All ideals as bit masks, the empty one first, sorted by size. Raises ForetraceError."""
        n = self.graph.nodes
        found = lattice(PlacementBlocks.of(((v,) for v in range(n)), set(self.graph.edges)), MOST_CUTS)
        if found is None:
            raise ForetraceError(
                f"the graph has more than {MOST_CUTS:,} ways to be cut in two; merge nodes that belong together."
            )
        if found[-1] != 2**n - 1:
            raise ForetraceError("the edges of the graph form a cycle; give one without.")
        return found

    @cached_property
    def part(self) -> Mask:
        """Whether ideal a (rows) is a proper subset of ideal b (columns)."""
        subset = np.ones((len(self.sets), len(self.sets)), dtype=np.bool_)
        for word in words(self.sets, self.graph.nodes).T:
            subset &= (word[:, None] & ~word[None, :]) == 0
        np.fill_diagonal(subset, False)
        return subset

    @cached_property
    def member(self) -> Mask:
        """Whether an ideal has a node."""
        return np.array([[each >> v & 1 for v in range(self.graph.nodes)] for each in self.sets], dtype=np.bool_)

    def __post_init__(self) -> None:
        self._times: dict[tuple[int, int], Float64] = {}
        self._sent = {t: self._over_edges(costs) for t, costs in self.graph.costs.items()}
        self._weights = {t: self._of(costs.weight_bytes) for t, costs in self.graph.costs.items()}

    def loads(self, at: int, t: int, d: int, s: int) -> tuple[Int64, Float64]:
        """Return ideals that a stage behind ideal `at` can end with, and its load."""
        flight = max(-(-s // d), 1)
        if (t, flight) not in self._times:
            costs = self.graph.costs[t]
            self._times[t, flight] = self._computing(costs, flight) if self.machine is None else self.machine
        time = self._times[t, flight][at]
        rows = np.flatnonzero(np.isfinite(time))
        exchanged = 4 * (d - 1) * self._weights[t][at, rows] / (d * (self.micro_batches or d))
        return rows, time[rows] / d + (2 * self._sent[t][at, rows] / d + exchanged) / self.bandwidth

    def options(self, devices: int) -> list[tuple[int, int, int, int]]:
        """Return degrees t and d, s, and what is left of s behind the stage; s is 0 where memory has no limit."""
        replicas = [d for d in range(1, devices + 1) if self.micro_batches % d == 0]
        split = [(t, d) for t in sorted(self.graph.costs) for d in replicas if t * d <= devices]
        if not isfinite(self.memory_bytes):
            return [(t, d, 0, 0) for t, d in split]
        return [(t, d, s, s - d) for t, d in split for s in range(d, devices + 1)]

    def _work(self, devices: int) -> int:
        """Return how many options there are behind all ideals, or, in that unit, numbers to keep, if more."""
        limited, replicas = isfinite(self.memory_bytes), np.arange(1, devices + 1)
        replicas = replicas[self.micro_batches % replicas == 0]
        options = len(self.graph.costs) * int((devices - replicas + 1).sum() if limited else len(replicas))
        return len(self.sets) * max(options, (devices + 1) * (devices + 1 if limited else 1) // 250)

    def best(self, devices: int, ends: list[int]) -> Float64:
        """Return R from every ideal to each of `ends` (ideals x ends x devices + 1 x values of s)."""
        n = len(self.sets)
        if self._work(devices) > MOST_WORK:
            most = devices
            while self._work(most) > MOST_WORK:
                most //= 2
            raise ForetraceError(
                f"stages with replicas for {devices:,} devices and {n:,} ways to cut take too long to find; give "
                f"{most:,} devices, or stages without replicas."
            )
        options = self.options(devices)
        best = np.full((n, len(ends), devices + 1, devices + 1 if isfinite(self.memory_bytes) else 1), np.inf)
        best[ends, np.arange(len(ends))] = 0.0
        for at in range(n - 2, -1, -1):
            for t, d, s, left in options:
                rows, load = self.loads(at, t, d, s)
                if len(rows):
                    behind = best[rows, :, : devices + 1 - t * d, left]
                    found = np.maximum(behind, load[:, None, None]).min(axis=0)
                    np.minimum(best[at, :, t * d :, s], found, out=best[at, :, t * d :, s])
            best[at] = np.minimum.accumulate(np.minimum.accumulate(best[at], axis=1), axis=2)
        return best

    def stages(self, devices: int) -> tuple[ParallelStage, ...]:
        """Return the stages behind the empty ideal that have the least maximal load. Raises ForetraceError."""
        best = self.best(devices, [len(self.sets) - 1])[:, 0]
        if not np.isfinite(best[0, -1, -1]):
            raise ForetraceError(
                f"nothing fits in {self.memory_bytes:,.0f} bytes on each of {devices} devices, every node computed "
                "again included; use more devices or memory."
            )
        at, k, s, found = 0, devices, best.shape[2] - 1, list[ParallelStage]()
        while at < len(self.sets) - 1:
            at, k, s, stage = self._stage(best, at, k, s)
            found.append(stage)
        return tuple(found)

    def _stage(self, best: Float64, at: int, k: int, s: int) -> tuple[int, int, int, ParallelStage]:
        for t, d, mine, left in self.options(best.shape[1] - 1):
            if t * d > k or mine > s:
                continue
            rows, load = self.loads(at, t, d, mine)
            for end in rows[np.maximum(best[rows, k - t * d, left], load) <= best[at, k, s]][:1].tolist():
                inside = self.member[end] & ~self.member[at]
                return end, k - t * d, left, ParallelStage(
                    nodes=tuple(np.flatnonzero(inside).tolist()), again=self._again(inside, t, -(-mine // d)), data=d,
                    tensor=t, load=float(load[rows == end][0]),
                )  # fmt: skip
        raise AssertionError("the table was made from these options")

    def _of(self, values: Float64) -> Float64:
        whole = self.member @ values
        return whole[None, :] - whole[:, None]

    def _over_edges(self, costs: NodeCosts) -> Float64:
        found = np.zeros((len(self.sets), len(self.sets)))
        for (u, v), nbytes in self.graph.edges.items():
            tail, head = (self.member[None, :, w] & ~self.member[:, None, w] for w in (u, v))
            found += (nbytes + costs.leaving.get((u, v), 0.0)) * (tail & ~head)
            found += (nbytes + costs.entering.get((u, v), 0.0)) * (head & ~tail)
        return found

    def _again(self, inside: Mask, t: int, flight: int) -> tuple[int, ...]:
        """Return nodes that a stage computes again so that it fits."""
        nbytes, saved, order = self.graph.costs[t].held(flight)
        order = order[inside[order]]
        left = nbytes[inside].sum() - np.cumsum([0.0, *saved[order]])
        return tuple(order[: int((left > self.memory_bytes * (1 + ROUNDING)).sum())].tolist())

    def _computing(self, costs: NodeCosts, flight: int) -> Float64:
        """Return the time of every stage, with as many nodes computed again as memory requires; infinite if none do."""
        nbytes, saved, order = costs.held(flight)
        start = np.zeros((len(self.sets), 1))
        savings, losses = (
            np.concatenate([start, np.cumsum(self.member[:, order] * each[order], axis=1)], axis=1)
            for each in (saved, costs.time[1] - costs.time[0])
        )
        over, time = self._of(nbytes) - self.memory_bytes, self._of(costs.time[0])
        rows = np.arange(len(self.sets))
        for end in rows.tolist():
            enough = savings[end] - savings >= over[:, end, None]
            first = enough.argmax(axis=1)
            time[:, end] += losses[end][first] - losses[rows, first]
            time[~enough.any(axis=1), end] = np.inf
        time[~self.part] = np.inf
        return time
