"""Placement for the latency of one sample: how long a placement takes, good ones, and a bound that none can beat.

An accelerator runs its operators as one piece (Tarnawski et al., section 3): it starts when every input is in host
memory, takes them in, computes, and gives its outputs back. Operators on CPUs run as soon as their inputs are there,
any number at a time. The largest finish is the latency.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from foretrace.plan.placement.blocks import PlacementBlocks
from foretrace.plan.placement.ideals import solve
from foretrace.plan.placement.problem import ROUNDING, DeviceLoad, PlacementProblem

_FEW_IDEALS = 20_000  # beyond, the sum over all devices is not worth its time


def latency(problem: PlacementProblem, devices: Sequence[DeviceLoad]) -> float:
    """Time of one sample; inf where an accelerator's operators are too large for it or wait for themselves."""
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
    waiting = [0] * len(time)
    for source, target in pairs.tolist():
        after[source].append(target)
        waiting[target] += 1
    start = [0.0] * len(time)
    ready = [at for at, count in enumerate(waiting) if not count]
    finished = 0
    last = 0.0
    while ready:
        at = ready.pop()
        finished += 1
        end = start[at] + time[at]
        last = max(last, end)
        for reader in after[at]:
            start[reader] = max(start[reader], end)
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.append(reader)
    return last if finished == len(time) else inf


def greedy(problem: PlacementProblem, blocks: PlacementBlocks) -> tuple[DeviceLoad, ...]:
    """Fill one accelerator after another with blocks in topological order; what is left runs on CPUs."""
    held: list[list[int]] = [[]]
    rest: list[int] = []
    for rows in blocks.rows:
        can = np.isfinite(problem.accelerator_time[list(rows)]).all()
        if can and problem.nbytes[[*held[-1], *rows]].sum() > problem.memory_limit and len(held) < problem.accelerators:
            held.append([])
        if can and problem.nbytes[[*held[-1], *rows]].sum() <= problem.memory_limit:
            held[-1] += rows
        else:
            rest += rows
    return _placement(problem, held, rest)


def _placement(problem: PlacementProblem, held: Sequence[Sequence[int]], rest: Sequence[int]) -> tuple[DeviceLoad, ...]:
    found = [problem.device("accelerator", rows) for rows in held if rows]
    return (*found, *([problem.device("cpu", rest)] if rest else []))


def candidates(problem: PlacementProblem, blocks: PlacementBlocks) -> Iterator[tuple[DeviceLoad, ...]]:
    """Good placements: the greedy ones, and the best where no two devices work at a time.

    Those come from dynamic programming over ideals where there are few, else over intervals of topological orders.
    """
    orders = [blocks, blocks.reordered(deep=False)]
    for order in orders:
        yield greedy(problem, order)
    one = replace(problem, cpus=min(problem.cpus, 1))  # any number of operators may run on CPUs at a time
    for order in [*(each.linear() for each in orders), blocks]:
        found = solve(one, order, serial=True, most=_FEW_IDEALS)
        if found is not None and found.devices is not None:
            yield found.devices


def bound(problem: PlacementProblem, blocks: PlacementBlocks) -> float:
    """A latency that no placement can beat: the longest path, every operator on its faster device.

    With SciPy, as far as the memory of all accelerators together allows: a linear program shares every block out
    between the two.
    """
    of = {row: block for block, rows in enumerate(blocks.rows) for row in rows}
    cpu = problem.cpu_time if problem.cpus else np.full(len(problem), inf)
    able = np.array([np.isfinite(problem.accelerator_time[list(rows)]).all() for rows in blocks.rows])
    sizes = np.array([problem.nbytes[list(rows)].sum() for rows in blocks.rows])
    try:
        from scipy.optimize import linprog
        from scipy.sparse import coo_array
    except ImportError:
        linprog = None
    if linprog is None or not problem.cpus:
        quicker = np.minimum(
            np.where([able[of[row]] for row in range(len(problem))], problem.accelerator_time, inf), cpu
        )
        done = quicker.copy()
        for row in problem.order:
            for reader in problem.successors[row]:
                done[reader] = max(done[reader], done[row] + quicker[reader])
        return float(done.max())
    # Variables: the share of every block on accelerators, when every row is done, and the latency.
    n, b = len(problem), len(blocks)
    entries: list[tuple[int, int, float]] = []
    right: list[float] = []
    accelerated = np.where(np.isfinite(problem.accelerator_time), problem.accelerator_time, 0.0)
    befores = [(-1, row) for row in range(n)] + problem.edges.tolist()
    for before, row in befores:  # done[before] - done[row] + share * (accelerator - cpu) <= -cpu
        at = len(right)
        entries += [(at, b + row, -1.0), (at, of[row], accelerated[row] - cpu[row])]
        entries += [(at, b + before, 1.0)] if before >= 0 else []
        right.append(-cpu[row])
    for row in range(n):
        entries += [(len(right), b + row, 1.0), (len(right), b + n, -1.0)]
        right.append(0.0)
    room = problem.memory_limit * problem.accelerators
    entries += [(len(right), block, size / room) for block, size in enumerate(sizes.tolist())]
    right.append(1.0)
    rows, columns, values = zip(*entries, strict=True)
    cost = np.zeros(b + n + 1)
    cost[-1] = 1.0
    limits = [(0.0, float(each)) for each in able] + [(0.0, None)] * (n + 1)
    found = linprog(cost, A_ub=coo_array((values, (rows, columns))).tocsr(), b_ub=np.array(right), bounds=limits)
    return float(found.fun) * (1 - ROUNDING) if found.status == 0 else 0.0
