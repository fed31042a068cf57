"""Integer programs for placements that dynamic programming does not reach, solved by CP-SAT (Google OR-Tools).

The solver runs in a process of its own (`plan/solver.py`). Times become integers of 2^-24 of the hint's objective,
rounded down, so that the bound holds for the real times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from foretrace.plan.placement.blocks import PlacementBlocks, crossing
from foretrace.plan.placement.problem import DeviceLoad, PlacementProblem
from foretrace.plan.solver import SolverLimits, answer, apart

_STEPS = 1 << 24  # units of time in the objective of the hint


def improve(
    problem: PlacementProblem,
    blocks: PlacementBlocks,
    hint: Sequence[DeviceLoad],
    objective: float,
    *,
    latency: bool,
    limits: SolverLimits,
) -> tuple[tuple[DeviceLoad, ...], float]:
    """Start from a placement with this objective and search for the best one, contiguous or not.

    Return what was found within the limits, no worse than the hint, and a bound that no placement can beat. Raises
    MissingExtraError without OR-Tools, and ForetraceError where the solver fails.
    """
    accelerators, cpus = (min(count, len(blocks)) for count in (problem.accelerators, problem.cpus))
    problem = replace(problem, accelerators=accelerators, cpus=cpus)
    hint = sorted(hint, key=lambda each: -each.load)  # alike accelerators stand in this order
    where = {row: number for number, each in enumerate(hint) for row in each.nodes}
    places, kinds = [where[rows[0]] for rows in blocks.rows], [each.kind for each in hint]
    given = (problem, blocks, places, kinds, objective, latency)
    solved = apart("foretrace.plan.placement.programs", given, limits, "a placement that is not contiguous")
    if solved is None:
        return tuple(hint), 0.0
    chosen, bound = solved
    held: dict[int, list[int]] = defaultdict(list)
    for block, machine in enumerate(chosen):
        held[machine] += blocks.rows[block]
    devices = tuple(
        problem.device("accelerator" if machine < problem.accelerators else "cpu", rows)
        for machine, rows in sorted(held.items())
    )
    return devices, bound


def _solve(
    problem: PlacementProblem,
    blocks: PlacementBlocks,
    hint: list[int],
    kinds: list[str],
    objective: float,
    latency: bool,
    limits: SolverLimits,
    began: float,
) -> tuple[list[int], float]:
    from ortools.sat.python import cp_model

    scale = _STEPS / objective
    model = cp_model.CpModel()
    cpus = min(problem.cpus, 1) if latency else problem.cpus  # for latency, one stands for any number
    machines = range(problem.accelerators + cpus)
    accelerators = machines[: problem.accelerators]
    runs: list[list[Any]] = [[model.new_bool_var("") for _ in machines] for _ in blocks.rows]
    for block, rows in enumerate(blocks.rows):
        model.add_exactly_one(runs[block])
        if not np.isfinite(problem.accelerator_time[list(rows)]).all():
            for machine in accelerators:
                model.add(runs[block][machine] == 0)
    home, readers, moved = crossing(problem, blocks)
    # Outputs of a block with the same readers cross together.
    weight: dict[tuple[int, tuple[int, ...]], float] = defaultdict(float)
    for block, read, row in zip(home, readers, moved, strict=True):
        weight[block, tuple(read)] += float(problem.transfer[row])
    time = [float(problem.accelerator_time[list(rows)].sum()) for rows in blocks.rows]
    cpu = [float(problem.cpu_time[list(rows)].sum()) for rows in blocks.rows]
    nbytes = [float(problem.nbytes[list(rows)].sum()) for rows in blocks.rows]
    unit = max(problem.memory_limit / (1 << 40), 1e-300)
    loads = []
    for machine in machines:
        if machine not in accelerators:
            loads.append(sum(int(cpu[block] * scale) * runs[block][machine] for block in range(len(blocks))))
            continue
        terms = [int(each * scale) * runs[block][machine] for block, each in enumerate(time) if np.isfinite(each)]
        for (block, others), cost in weight.items():
            crosses = model.new_bool_var("")
            inside = runs[block][machine]
            for other in others:
                there = runs[other][machine]
                model.add_bool_or(crosses, ~inside, there)
                model.add_bool_or(crosses, inside, ~there)
            terms.append(int(cost * scale) * crosses)
        loads.append(sum(terms))
        sizes = [int(np.ceil(each / unit)) * runs[block][machine] for block, each in enumerate(nbytes)]
        model.add(sum(sizes) <= int(problem.memory_limit / unit) + len(sizes))
    top = 2 * _STEPS
    most = model.new_int_var(0, top, "most")
    if latency:
        _finishes(model, problem, blocks, runs, loads, scale, most, top)
    else:
        for machine in machines:
            model.add(loads[machine] <= most)
        for machine in accelerators[1:]:  # accelerators are alike
            model.add(loads[machine] <= loads[machine - 1])
    model.minimize(most)
    order = [each for each, kind in enumerate(kinds) if kind == "accelerator"]
    place = {each: at for at, each in enumerate(order)}
    place |= {each: problem.accelerators + at for at, each in enumerate(e for e in range(len(kinds)) if e not in place)}
    for block, number in enumerate(hint):
        for machine in machines:
            model.add_hint(runs[block][machine], int(place[number] == machine))
    solver = cp_model.CpSolver()
    limits.set(solver.parameters, began)
    status = solver.solve(model)
    bound = solver.best_objective_bound / scale
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return [place[number] for number in hint], bound
    chosen = [next(machine for machine in machines if solver.value(each[machine])) for each in runs]
    return chosen, bound


def _finishes(
    model: Any,
    problem: PlacementProblem,
    blocks: PlacementBlocks,
    runs: Any,
    loads: Any,
    scale: float,
    most: Any,
    top: int,
) -> None:
    """Compute when every row is done: on a CPU after what it reads, on an accelerator with all that this one runs."""
    block_of = {row: block for block, rows in enumerate(blocks.rows) for row in rows}
    accelerators = range(problem.accelerators)
    host = problem.accelerators
    start = [model.new_int_var(0, top, "") for _ in accelerators]
    done = [model.new_int_var(0, top, "") for _ in range(len(problem))]
    for row in range(len(problem)):
        here = runs[block_of[row]]
        for on_host in here[host:]:
            model.add(done[row] >= int(problem.cpu_time[row] * scale)).only_enforce_if(on_host)
        for machine in accelerators:
            model.add(done[row] >= start[machine] + loads[machine]).only_enforce_if(here[machine])
        if not problem.successors[row]:
            model.add(most >= done[row])
        for reader in problem.successors[row]:
            there = runs[block_of[reader]]
            step = int(problem.cpu_time[reader] * scale)
            for on_host in there[host:]:
                model.add(done[reader] >= done[row] + step).only_enforce_if(on_host)
            for machine in accelerators:
                model.add(start[machine] >= done[row]).only_enforce_if(there[machine], ~here[machine])
    for machine in accelerators[1:]:
        model.add(start[machine - 1] <= start[machine])


if __name__ == "__main__":
    answer(_solve)
