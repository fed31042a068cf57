"""`place`: the best placement of a problem, with a bound and whether it is proven."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import ceil, inf

import numpy as np

from foretrace.deadline import Deadline, ending
from foretrace.errors import ForetraceError
from foretrace.plan.placement import latency as one_sample
from foretrace.plan.placement import programs
from foretrace.plan.placement.blocks import PlacementBlocks, contract
from foretrace.plan.placement.ideals import least_load, solve
from foretrace.plan.placement.latency import bound
from foretrace.plan.placement.problem import ROUNDING, DeviceLoad, PlacementProblem
from foretrace.plan.solver import SolverLimits

OBJECTIVES = ("throughput", "latency")
_PROVEN = 1e-6  # relative: integer programs round times
_NEAR = 16  # other numbers of devices that are tried where nothing fits, beside powers of two


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A placement, its objective in the problem's unit of time, and a bound that no placement of its kind can beat."""

    problem: PlacementProblem
    objective: str  # throughput: the largest load; latency: time of one sample
    contiguous: bool
    devices: tuple[DeviceLoad, ...]
    objective_value: float
    bound: float
    seconds: float
    method: str  # what found the placement and what the bound

    @property
    def gap(self) -> float:
        """How much lower the objective could be at most, as a share of it."""
        return max(1 - self.bound / self.objective_value, 0.0) if self.objective_value else 0.0

    @property
    def interval(self) -> tuple[float, float] | None:
        """The objective with every operator as fast and as slow as it may be; None where times are given."""
        ends = [
            value(end, [end.device(each.kind, each.nodes) for each in self.devices], self.objective)
            for end in self.problem.ends()
        ]
        return (ends[0], ends[1]) if ends else None

    @property
    def launch_bound(self) -> dict[int, float]:
        """Devices whose host takes longer to launch their operators than these take, and the host's time."""
        if self.problem.host_time is None:
            return {}
        hosts = [float(self.problem.host_time[list(each.nodes)].sum()) for each in self.devices]
        return {at: host for at, host in enumerate(hosts) if host > self.devices[at].load}

    @property
    def proven(self) -> bool:
        """Whether no placement of its kind is better."""
        return self.gap <= _PROVEN


def value(problem: PlacementProblem, devices: Sequence[DeviceLoad], objective: str) -> float:
    """Return what a placement is judged by. Raises ForetraceError where it is none of this problem."""
    load = problem.check(devices)
    return one_sample.latency(problem, devices) if objective == "latency" else load


def place(
    problem: PlacementProblem, *, objective: str = "throughput", contiguous: bool = True, seconds: float = 30.0,
    work: float = inf,
) -> Placement:  # fmt: skip
    """Find the best placement; an integer program, where one is needed, gets what is left of `seconds`.

    With `work` it gets so many seconds as the solver counts them instead, which give the same answer on every machine.

    Raises ForetraceError where nothing fits, with what would, and MissingExtraError for placements that need OR-Tools.
    """
    deadline = Deadline(seconds)
    ending("seconds", seconds, 30)
    if objective not in OBJECTIVES:
        raise ForetraceError(f"`objective=` must be {' or '.join(OBJECTIVES)}, got {objective!r}.")
    if objective == "latency" and not contiguous:
        raise ForetraceError("an accelerator runs its operators as one piece, so `objective=latency` is contiguous.")
    if problem.accelerators + problem.cpus < 1 or min(problem.accelerators, problem.cpus) < 0:
        raise ForetraceError("a placement needs at least one device; give `devices=1` or more.")
    assert problem.order  # no operator waits for itself
    if objective == "latency" and problem.saved is not None:  # of one batch
        problem = replace(problem, nbytes=problem.on(1).nbytes, saved=None)
    blocks = contract(problem, whole=objective == "latency" and not problem.cpus)
    find = _throughput if objective == "throughput" else _latency
    devices, reached, least, method = find(problem, blocks)
    if not contiguous:  # more placements are allowed, so less is known
        blocks = contract(problem, contiguous=False)
        least, method = least_load(problem, blocks, reached), f"{method} as a start"
    wants_program = not contiguous or (objective == "latency" and find_spec("ortools") is not None)
    limits = SolverLimits(seconds=deadline.left) if work == inf else SolverLimits(work=work)
    if wants_program and reached * (1 - _PROVEN) > least and limits.seconds > 0:
        tried, bounded = programs.improve(
            problem, blocks, devices, reached, latency=objective == "latency", limits=limits
        )
        least = max(least, bounded)
        found = value(problem, tried, objective)
        if found < reached:
            devices, reached = tried, found
        method = f"{method}; CP-SAT"
    return Placement(
        problem=problem, objective=objective, contiguous=contiguous, devices=devices, objective_value=reached,
        bound=min(least, reached), seconds=deadline.spent, method=method,
    )  # fmt: skip


Found = tuple[tuple[DeviceLoad, ...], float, float, str]


def _intervals(problem: PlacementProblem, blocks: PlacementBlocks) -> list[tuple[DeviceLoad, ...]]:
    """Return the best intervals of two topological orders by their largest load, where some fit."""
    lines = [each.linear() for each in (blocks, blocks.reordered(deep=False))]
    found = [solve(problem, line, _even_shares(problem, line) * (1 + ROUNDING) or inf) for line in lines]
    return [each[0] for each in found if each and each[0]]


def _even_shares(problem: PlacementProblem, line: PlacementBlocks) -> float:
    """Return the largest load where accelerators take intervals with as much time each; inf where they cannot."""
    if not problem.accelerators:
        return inf
    time, count = np.cumsum([problem.accelerator_time[list(rows)].sum() for rows in line.rows]), problem.accelerators
    parts = np.arange(1, min(count, len(line)))
    shares = np.split(np.arange(len(line)), np.searchsorted(time, time[-1] * parts / (len(parts) + 1)))
    devices = [problem.device("accelerator", [row for at in share for row in line.rows[at]]) for share in shares]
    return max(each.load for each in devices)


def _throughput(problem: PlacementProblem, blocks: PlacementBlocks) -> Found:
    """Return the least largest load of contiguous sets."""
    best = min(_intervals(problem, blocks), key=problem.check, default=None)
    value = inf if best is None else problem.check(best)
    exact = solve(problem, blocks, value * (1 - ROUNDING))
    if exact and exact[0]:
        best, value = exact[0], problem.check(exact[0])
    if best is None:
        raise _misfit(problem, blocks)
    if exact is None:
        return best, value, least_load(problem, blocks, value), "intervals of topological orders; time of all operators"
    return best, value, value * (1 - ROUNDING), f"dynamic programming over {exact[1]} ideals"


def _latency(problem: PlacementProblem, blocks: PlacementBlocks) -> Found:
    """Return the least latency that is found quickly."""
    found = [*one_sample.candidates(problem, blocks), *_intervals(problem, blocks)]
    able = [each for each in found if problem.cpus or all(device.kind == "accelerator" for device in each)]
    best = min(able, key=lambda each: one_sample.latency(problem, each), default=())
    reached = one_sample.latency(problem, best) if best else inf
    if reached == inf:
        best = _throughput(problem, blocks)[0]  # which looks at all ideals before it says that nothing fits
        reached = one_sample.latency(problem, best)
    return best, reached, bound(problem, blocks), "dynamic programming over ideals"


def _misfit(problem: PlacementProblem, blocks: PlacementBlocks) -> ForetraceError:
    """Return why nothing fits, and changes with which something does."""
    line, n, limit = blocks.linear(), problem.accelerators, problem.memory_limit
    each = [float(problem.nbytes[list(rows)].sum()) for rows in blocks.rows]

    def fits(changed: PlacementProblem) -> bool:
        found = solve(changed, line)
        return found is not None and found[0] is not None

    largest, least, most = max(each), limit, sum(each) * (1 + ROUNDING)
    if not fits(replace(problem, memory_limit=most)):
        return ForetraceError(f"{problem.name} has operators that no accelerator can run; give CPUs (maxCPUs), too.")
    while most > 1.001 * least:
        middle = (least + most) / 2
        least, most = (least, middle) if fits(replace(problem, memory_limit=middle)) else (middle, most)
    others = {*range(n - _NEAR, n + _NEAR), *(1 << power for power in range(16))}
    nearest = sorted((count for count in others if 1 <= count <= len(blocks)), key=lambda count: abs(count - n))
    enough = next((count for count in nearest if fits(problem.on(count))), None)
    change = f"`memory_limit={ceil(most / 1e6)}MB`" + (f" or `devices={enough}`" if enough else "")
    row = problem.ids[blocks.rows[each.index(largest)][0]]
    why = f": what must stay together with node {row} has {largest / 1e9:.4g} GB" if largest > limit else ""
    why += ", saved activations once per device" if why and problem.saved is not None else ""
    have = f"{n} accelerator{'s' if n != 1 else ''} of {limit / 1e9:.4g} GB"
    return ForetraceError(f"{problem.name} does not fit on {have}{why}; give {change}.")
