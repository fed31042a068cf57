"""PipeDream's planner (Narayanan et al., SOSP 2019, section 3.1): stages and their replicas by dynamic programming.

With A(j, m) the least time per mini-batch of the slowest stage when the ideal j runs on m machines,

    A(j, m) = min over ideals k in j and m' <= m of max(A(k, m - m'), (T(k..j) + 4 (m' - 1) |w(k..j)| / (b m')) / m')

A network in levels is planned from the innermost: what a machine of one level takes is what all of the level below do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Float64, Mask
from foretrace.errors import ForetraceError
from foretrace.plan.pipelines.ideals import ideals, inside, totals


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """Layers with times in seconds, sizes in bytes, edges between their places."""

    names: tuple[str, ...]
    compute_s: Float64  # forward and backward
    weight_bytes: Float64
    edges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class ReplicatedStage:
    """Nodes of a stage and how many machines (of the outermost level) run it, each a share of the mini-batches."""

    nodes: tuple[int, ...]
    replicas: int
    time_s: float  # per mini-batch


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The stages that have the least bottleneck."""

    stages: tuple[ReplicatedStage, ...]
    bottleneck_s: float
    one_machine_s: float
    data_parallel_s: float  # all machines of the outermost level as replicas of everything


def plan_pipedream(profile: LayerProfile, levels: Sequence[tuple[int, float]]) -> StagePlan:
    """The best stages on machines in `levels`, innermost first: (how many, bytes per second between them).

    Raises ForetraceError where the graph cannot be cut, or a level is impossible.
    """
    if not levels or any(count < 1 or not bandwidth > 0 for count, bandwidth in levels):
        raise ForetraceError(f"levels must be machines and bytes per second above zero, got {list(levels)}.")
    nodes = len(profile.names)
    sets = ideals(nodes, profile.edges)
    part = inside(sets, nodes)
    time, weight = totals(sets, profile.compute_s), totals(sets, profile.weight_bytes)
    within = np.where(part, time[None, :] - time[:, None], np.inf)
    weights = np.where(part, weight[None, :] - weight[:, None], 0.0)
    inner = 1
    for count, bandwidth in levels[:-1]:
        starts = range(len(sets))
        tables = [_level(within, weights, part, start, count, bandwidth, inner) for start in starts]
        within = np.stack([best[-1] for best in tables])
        inner *= count
    count, bandwidth = levels[-1]
    best = _level(within, weights, part, 0, count, bandwidth, inner)
    return _stages(best, within, weights, sets, count, bandwidth, inner, profile)


def _replicated(within: Float64, weights: Float64, m: int, bandwidth: float, inner: int = 1) -> Float64:
    """What stages take per mini-batch on m machines, gradients exchanged as each does with all others."""
    found: Float64 = (within + 4 * (m - 1) * weights / (bandwidth * m * inner)) / m
    return found


def _level(
    within: Float64, weights: Float64, part: Mask, start: int,
    count: int, bandwidth: float, inner: int,
) -> list[Float64]:  # fmt: skip
    """The least bottleneck from ideal `start` to every other, for each number of machines up to `count`."""
    best = [_replicated(within[start], weights[start], m, bandwidth, inner) for m in range(1, count + 1)]
    rows = np.flatnonzero(part[start])
    single = [_replicated(within[rows], weights[rows], m, bandwidth) for m in range(1, count)]
    for m in range(2, count + 1):
        for mine in range(1, m):
            split = np.maximum(best[m - mine - 1][rows][:, None], single[mine - 1])
            if len(rows):
                best[m - 1] = np.minimum(best[m - 1], split.min(axis=0))
    return best


def _stages(
    best: list[Float64], within: Float64, weights: Float64,
    sets: list[int], count: int, bandwidth: float, inner: int, profile: LayerProfile,
) -> StagePlan:  # fmt: skip
    """The stages of the outermost level, read backwards from the whole graph."""
    end, left, found = len(sets) - 1, count, list[ReplicatedStage]()
    while True:
        whole = _replicated(within[0, end], weights[0, end], left, bandwidth, inner)
        options = [(float(whole), 0, left)]
        for mine in range(1, left):
            times = np.maximum(best[left - mine - 1], _replicated(within[:, end], weights[:, end], mine, bandwidth))
            times[0] = np.inf  # nothing ahead of it: that is the option above
            options.append((float(times.min()), int(times.argmin()), mine))
        _, cut, mine = min(options)
        took = float(whole) if cut == 0 else float(_replicated(within[cut, end], weights[cut, end], mine, bandwidth))
        nodes = sets[end] & ~sets[cut]
        found.append(
            ReplicatedStage(
                nodes=tuple(v for v in range(len(profile.names)) if nodes >> v & 1), replicas=mine, time_s=took
            )
        )
        end, left = cut, left - mine
        if cut == 0:
            break
    parallel = _replicated(within[0, -1], weights[0, -1], count, bandwidth, inner)
    return StagePlan(
        stages=tuple(reversed(found)),
        bottleneck_s=max(each.time_s for each in found),
        one_machine_s=float(profile.compute_s.sum()),
        data_parallel_s=float(parallel),
    )
