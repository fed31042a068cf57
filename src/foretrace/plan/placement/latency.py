"""Placement for the latency of one sample: how long a placement takes, and good ones.

An accelerator runs its operators as one piece (Tarnawski et al., section 3): it starts when every input is in host
memory, takes them in, computes, and gives its outputs back. Operators on CPUs run as soon as their inputs are there,
any number at a time. The largest finish is the latency.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf

import numpy as np

from foretrace.plan.placement.blocks import PlacementBlocks
from foretrace.plan.placement.problem import DeviceLoad, PlacementProblem, topological
from foretrace.plan.placement.series import in_series


def latency(problem: PlacementProblem, devices: Sequence[DeviceLoad]) -> float:
    """Return the time of one sample; inf where an accelerator's operators are too large or wait for themselves."""
    item = np.full(len(problem), -1)
    time: list[float] = []
    for each in devices:
        if each.kind == "accelerator" and each.nodes:
            item[list(each.nodes)] = len(time)
            time.append(each.load)
    alone = np.flatnonzero(item < 0)
    item[alone] = np.arange(len(time), len(time) + len(alone))
    time += problem.cpu_time[alone].tolist()
    ends = item[problem.edges]
    pairs = np.unique(ends[ends[:, 0] != ends[:, 1]], axis=0)
    after: list[list[int]] = [[] for _ in time]
    for source, target in pairs.tolist():
        after[source].append(target)
    order, end = topological(after), [0.0] * len(time)
    for at in order:
        end[at] += time[at]
        for reader in after[at]:
            end[reader] = max(end[reader], end[at])
    return max(end, default=0.0) if len(order) == len(time) else inf


def greedy(problem: PlacementProblem, blocks: PlacementBlocks) -> tuple[DeviceLoad, ...]:
    """Fill one accelerator after another with blocks in topological order; what is left runs on CPUs."""
    held: list[list[int]] = [[]]
    rest: list[int] = []
    for rows in blocks.rows:
        can = problem.accelerators > 0 and np.isfinite(problem.accelerator_time[list(rows)]).all()
        if can and problem.nbytes[[*held[-1], *rows]].sum() > problem.memory_limit and len(held) < problem.accelerators:
            held.append([])
        if can and problem.nbytes[[*held[-1], *rows]].sum() <= problem.memory_limit:
            held[-1] += rows
        else:
            rest += rows
    return _placement(problem, held, rest)


def _placement(problem: PlacementProblem, held: Sequence[Sequence[int]], rest: Iterable[int]) -> tuple[DeviceLoad, ...]:
    found = [problem.device("accelerator", rows) for rows in held if rows]
    on_cpus = problem.device("cpu", rest)
    return (*found, *([on_cpus] if on_cpus.nodes else []))


def candidates(problem: PlacementProblem, blocks: PlacementBlocks) -> Iterator[tuple[DeviceLoad, ...]]:
    """Yield good placements: the greedy ones, CPUs alone, and the best where no two devices work at a time.

    The last come from dynamic programming over ideals where there are few, and over intervals of topological orders.
    """
    orders = [blocks, blocks.reordered(deep=False)]
    for order in orders:
        yield greedy(problem, order)
    yield _placement(problem, (), range(len(problem)))
    for order in [*(each.linear() for each in orders), blocks]:
        found = in_series(problem, order)
        if found is not None:
            yield found
