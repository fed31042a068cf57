"""Piper's planner (Tarnawski et al., NeurIPS 2021): stages with data- and tensor-parallel degrees, within memory.

With R(I, k, s) the least time per sample of the slowest stage behind ideal I on at most k devices, with data-parallel
degrees that add up to at most s,

    R(I, k, s) = min over ideals J that hold I, t and d of max(R(J, k - t d, s - d), load(J - I, t, d, s))

    load = compute / d + 2 (bytes over its edges and their synchronisation) / (d b) + 4 (d - 1) |w| / (d N b)

for N micro-batches per batch and links of b bytes per second. In flight are ceil(s / d) micro-batches, of which a node
keeps a bytes each beside its b. Where a stage does not fit, nodes that lose least time per byte are computed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from foretrace.arrays import Float64, Int64, Mask
from foretrace.errors import ForetraceError
from foretrace.plan.pipelines.ideals import ideals, inside, totals

_MOST_CUTS = 2_000  # ideals: tables have a row and a column for each


@dataclass(frozen=True, kw_only=True)
class NodeCosts:
    """Costs of every node at one tensor-parallel degree: rows are kept whole, and computed again."""

    time: Float64  # per sample, 2 x nodes
    kept_bytes: Float64  # per micro-batch in flight, 2 x nodes
    fixed_bytes: Float64  # 2 x nodes
    weight_bytes: Float64  # nodes
    entering: Mapping[tuple[int, int], float]  # bytes that synchronise an edge at its head, by (source, target)
    leaving: Mapping[tuple[int, int], float]  # and at its tail


@dataclass(frozen=True, kw_only=True)
class CostGraph:
    """A graph with the bytes of every edge, and costs by tensor-parallel degree."""

    edges: Mapping[tuple[int, int], float]
    costs: Mapping[int, NodeCosts]

    @property
    def nodes(self) -> int:
        """How many nodes it has."""
        return len(next(iter(self.costs.values())).weight_bytes)


@dataclass(frozen=True, kw_only=True)
class ParallelStage:
    """Nodes of a stage, its degrees, and its time per sample in the graph's unit."""

    nodes: tuple[int, ...]
    data: int
    tensor: int
    load: float


def plan_piper(
    graph: CostGraph, *, devices: int, memory_bytes: float, bandwidth: float, micro_batches: int
) -> tuple[ParallelStage, ...]:
    """The stages with the least maximal load. Raises ForetraceError where nothing fits."""
    if devices < 1 or micro_batches < 1 or not bandwidth > 0:
        raise ForetraceError(
            f"a plan must have devices, micro-batches and a bandwidth above zero, got {devices}, {micro_batches} and "
            f"{bandwidth:g}."
        )
    tables = StageLoads(graph, memory_bytes, bandwidth, micro_batches)
    n, degrees = len(tables.sets), [d for d in range(1, devices + 1) if micro_batches % d == 0]
    options = [(t, d) for t in sorted(graph.costs) for d in degrees if t * d <= devices]
    best = np.full((n, devices + 1, devices + 1), np.inf)
    best[-1] = 0.0
    for at in range(n - 2, -1, -1):
        for t, d in options:
            for s in range(d, devices + 1):
                rows, load = tables.loads(at, t, d, s)
                if len(rows):
                    found = np.maximum(best[rows, : devices + 1 - t * d, s - d], load[:, None]).min(axis=0)
                    np.minimum(best[at, t * d :, s], found, out=best[at, t * d :, s])
        best[at] = np.minimum.accumulate(np.minimum.accumulate(best[at], axis=0), axis=1)
    if not np.isfinite(best[0, devices, devices]):
        raise ForetraceError(
            f"nothing fits in {memory_bytes:,.0f} bytes on each of {devices} devices, every node computed again "
            "included; use more devices or memory."
        )
    return tables.stages(best, options)


@dataclass
class StageLoads:
    """Loads of all stages; a stage is ideal b without ideal a, at [a, b]."""

    graph: CostGraph
    memory_bytes: float
    bandwidth: float
    micro_batches: int

    @cached_property
    def sets(self) -> list[int]:
        return ideals(self.graph.nodes, self.graph.edges, most=_MOST_CUTS)

    @cached_property
    def part(self) -> Mask:
        return inside(self.sets, self.graph.nodes)

    @cached_property
    def member(self) -> Mask:
        return np.array([[each >> v & 1 for v in range(self.graph.nodes)] for each in self.sets], dtype=np.bool_)

    def __post_init__(self) -> None:
        self._times: dict[tuple[int, int], Float64] = {}
        self._sent = {t: self._over_edges(costs) for t, costs in self.graph.costs.items()}
        self._weights = {t: self._of(costs.weight_bytes) for t, costs in self.graph.costs.items()}

    def loads(self, at: int, t: int, d: int, s: int) -> tuple[Int64, Float64]:
        """Ideals that a stage behind ideal `at` can end with, and its load."""
        flight = -(-s // d)
        if (t, flight) not in self._times:
            self._times[t, flight] = self._computing(self.graph.costs[t], flight)
        time = self._times[t, flight][at]
        rows = np.flatnonzero(np.isfinite(time))
        exchanged = 4 * (d - 1) * self._weights[t][at, rows] / (d * self.micro_batches)
        return rows, time[rows] / d + (2 * self._sent[t][at, rows] / d + exchanged) / self.bandwidth

    def stages(self, best: Float64, options: list[tuple[int, int]]) -> tuple[ParallelStage, ...]:
        """The stages behind the empty ideal that have the least maximal load."""
        at, k, s, found = 0, best.shape[1] - 1, best.shape[2] - 1, list[ParallelStage]()
        while at < len(self.sets) - 1:
            at, k, s, stage = self._stage(best, options, at, k, s)
            found.append(stage)
        return tuple(found)

    def _stage(
        self, best: Float64, options: list[tuple[int, int]], at: int, k: int, s: int
    ) -> tuple[int, int, int, ParallelStage]:
        for t, d in options:
            for mine in range(d, s + 1) if t * d <= k else ():
                rows, load = self.loads(at, t, d, mine)
                for end in rows[np.maximum(best[rows, k - t * d, mine - d], load) <= best[at, k, s]][:1].tolist():
                    nodes = np.flatnonzero(self.member[end] & ~self.member[at])
                    own = float(load[rows == end][0])
                    return end, k - t * d, mine - d, ParallelStage(
                        nodes=tuple(nodes.tolist()), data=d, tensor=t, load=own
                    )  # fmt: skip
        raise AssertionError("the table was made from these options")

    def _of(self, values: Float64) -> Float64:
        whole = totals(self.sets, values)
        return whole[None, :] - whole[:, None]

    def _over_edges(self, costs: NodeCosts) -> Float64:
        found = np.zeros((len(self.sets), len(self.sets)))
        for (u, v), nbytes in self.graph.edges.items():
            tail, head = (self.member[None, :, w] & ~self.member[:, None, w] for w in (u, v))
            found += (nbytes + costs.leaving.get((u, v), 0.0)) * (tail & ~head)
            found += (nbytes + costs.entering.get((u, v), 0.0)) * (head & ~tail)
        return found

    def _computing(self, costs: NodeCosts, flight: int) -> Float64:
        """Time of every stage with as many nodes computed again as memory requires; infinite where none are enough."""
        nbytes = costs.kept_bytes * flight + costs.fixed_bytes
        saved, lost = nbytes[0] - nbytes[1], costs.time[1] - costs.time[0]
        order = np.argsort(lost / np.where(saved > 0, saved, 1.0), kind="stable")
        order = order[saved[order] > 0]
        start = np.zeros((len(self.sets), 1))
        savings, losses = (
            np.concatenate([start, np.cumsum(self.member[:, order] * each[order], axis=1)], axis=1)
            for each in (saved, lost)
        )
        over, time = self._of(nbytes[0]) - self.memory_bytes, self._of(costs.time[0])
        rows = np.arange(len(self.sets))
        for end in rows.tolist():
            enough = savings[end] - savings >= over[:, end, None]
            first = enough.argmax(axis=1)
            time[:, end] += losses[end][first] - losses[rows, first]
            time[~enough.any(axis=1), end] = np.inf
        time[~self.part] = np.inf
        return time
