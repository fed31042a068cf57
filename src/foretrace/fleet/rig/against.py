"""Hold the simulator's Slurm against a real one: the same jobs, predicted and played, job by job."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.policies import parse
from foretrace.fleet.policies.slurm import BACKGROUND_S, SlurmPolicy
from foretrace.fleet.policies.slurm_options import NodeWindow
from foretrace.fleet.policy import Policy
from foretrace.fleet.rig import on_ray
from foretrace.fleet.rig.cluster import SlurmSetup, private
from foretrace.fleet.rig.play import RigRun, Told, for_rig, play, slurm_setup, switches_of
from foretrace.fleet.setup import Costs
from foretrace.fleet.simulate import simulate
from foretrace.fleet.speeds import Speeds
from foretrace.fleet.workload import SECOND, Workload

SYNTHETIC = "synthetic"
_SIZES = {1: 0.4, 2: 0.15, 4: 0.15, 8: 0.15, 16: 0.1, 32: 0.05}  # GPUs, and the part of the jobs that have so many
_KEYS = {
    "jobs": (40, 1, 5000),
    "seed": (0, 0, 1e9),
    "load": (0.8, 0.01, 10),
    "run-s": (12_000, 1, 1e9),
}  # default, range


class RigPace(NamedTuple):
    """Seconds that a rig takes to start a job and notice its end, and for a turn of slurmctld's background thread."""

    launch_s: float = 0.1  # on an idle machine
    background_every_s: float = BACKGROUND_S


IDLE = RigPace()


@dataclass(frozen=True, slots=True)
class StartError:
    """Of the starts of jobs, seconds of the rig's clock."""

    mean: float
    p95: float
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RigErrors:
    """How far a simulation is from what a scheduler did, or that from what it did another time.

    jct_error: mean absolute difference of completion times over the mean completion time; jct_worst_s: the largest
    difference; order_equal: part of the pairs of jobs that started in the same order (or within a second); within: part
    of the jobs whose start differs by two intervals of the scheduler at most; switches_equal: part of the jobs that lie
    below as many leaf switches.
    """

    start_error_s: StartError
    jct_error: float
    jct_worst_s: float
    order_equal: float
    within: float
    switches_equal: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """What a private Slurm did with a workload, beside what was simulated; times on the rig's clock."""

    workload: Workload
    setup: SlurmSetup
    ran: tuple[RigRun, ...]
    simulated: tuple[RigRun, ...]  # one per run: the schedulers wake at another moment in each
    errors: RigErrors  # means over the runs
    repeats: RigErrors | None  # the same between the runs themselves; None of one
    seconds: float


def against(
    jobs: Workload, setup: SlurmSetup, policy: str, *, speedup: float, repeats: int = 1,
    failures: Sequence[NodeWindow] = (), progress: Told | None = None, on: str = "slurm",
) -> Against:  # fmt: skip
    """Play the jobs on a private Slurm (or Ray) so many times, and simulate each. Raises ForetraceError."""
    began = time.monotonic()
    decides = parse(policy)
    if isinstance(decides, SlurmPolicy) != (on == "slurm"):
        raise ForetraceError(
            f"`policy` must decide as the engine does, got {policy!r}; write fifo, backfill or priority with slurm=yes "
            "for Slurm, fifo-skip for Ray."
        )
    if failures and on == "ray":
        raise ForetraceError("`fail` is for Slurm; nodes of a private Ray do not fail, leave it out.")
    failures = [each._replace(begin_s=each.begin_s / speedup, end_s=each.end_s / speedup) for each in failures]
    for each in failures:
        if each.last >= setup.nodes:
            raise ForetraceError(f"`fail` must name nodes from 0 to {setup.nodes - 1}, got {each.last}.")
    ran: list[RigRun] = []
    setup = slurm_setup(setup, decides) if isinstance(decides, SlurmPolicy) else setup
    work = for_rig(jobs, setup, speedup)
    for at in range(repeats):
        share = None if progress is None else (lambda part, at=at: progress((at + part) / repeats))
        if not isinstance(decides, SlurmPolicy):
            ran.append(on_ray.play(setup, work, share))
            continue
        with private(setup) as slurm:
            ran.append(play(slurm, work, decides, failures=failures, progress=share))
    made = [predicted(work, setup, decides, each, failures=failures) for each in ran]
    found = [errors(one, each, setup, decides) for one, each in zip(made, ran, strict=True)]
    return Against(
        workload=work, setup=setup, ran=tuple(ran), simulated=tuple(made), errors=mean(found),
        repeats=between(ran, setup, decides), seconds=time.monotonic() - began,
    )  # fmt: skip


def predicted(
    work: Workload, setup: SlurmSetup, policy: Policy, ran: RigRun, *, failures: Sequence[NodeWindow] = (),
    pace: RigPace = IDLE, speeds: Speeds | None = None,
) -> RigRun:  # fmt: skip
    """Simulate the jobs of a run, with nothing of it but when Slurm's schedulers woke before its first job.

    speeds: where a job's length depends on its nodes.
    """
    whole = 1
    if isinstance(policy, SlurmPolicy):
        whole = SECOND  # as Slurm has times
        policy = replace(
            policy, backfill_s=ran.backfill_s, background_s=ran.background_s, checks_s=ran.checks_s,
            background_every_s=pace.background_every_s,
        )  # fmt: skip
    broken = tuple((each.begin_s, node, each.end_s) for each in failures for node in range(each.first, each.last + 1))
    costs = Costs(restart_s=pace.launch_s, first_start=True, failures=broken)
    made = simulate(
        replace(work, epoch_s=ran.epoch_s), setup.tree, policy, speeds=speeds, costs=costs, record="devices"
    )
    assert made.segments is not None
    start, nodes = np.full(len(work), np.nan), [()] * len(work)
    for at, job in enumerate(made.segments.job.tolist()):
        start[job] = made.segments.start_ns[at] // whole * whole / SECOND
        nodes[job] = tuple(np.unique(made.segments.devices_of(at) // setup.gpus).tolist())
    end = np.where(made.finished, made.end_ns // whole * whole / SECOND, np.nan)
    return replace(
        ran, submit_s=work.submit_ns // whole * whole / SECOND, start_s=start, end_s=end, nodes=tuple(nodes),
        launch_s=pace.launch_s,
    )  # fmt: skip


def interval_s(policy: Policy) -> float:
    """Return the longest time between two passes of the scheduler that starts jobs."""
    if not isinstance(policy, SlurmPolicy):
        return on_ray.RETRY_S
    given = policy.parameters
    return float(max(given.bf_interval * policy.backfill, given.batch_sched_delay, 1))


def compared(
    work: Workload, setup: SlurmSetup, policy: Policy, ran: Sequence[RigRun],
    paces: Sequence[RigPace] = (), **known: Any,
) -> RigErrors:  # fmt: skip
    """Return errors of simulations of runs of the same jobs; paces: per run; known: as `predicted` has it."""
    return mean([
        errors(predicted(work, setup, policy, each, pace=pace, **known), each, setup, policy)
        for each, pace in zip(ran, paces or [IDLE] * len(ran), strict=True)
    ])  # fmt: skip


def between(ran: Sequence[RigRun], setup: SlurmSetup, policy: Policy) -> RigErrors | None:
    """Return what runs of the same jobs differ by; None of one."""
    pairs = [errors(one, other, setup, policy) for one, other in itertools.combinations(ran, 2)]
    return mean(pairs) if pairs else None


def errors(one: RigRun, other: RigRun, setup: SlurmSetup, policy: Policy) -> RigErrors:
    """Return differences of the first from the second. Raises ForetraceError where a job never ended."""
    late, apart = np.abs(one.start_s - other.start_s), np.abs(one.jct_s - other.jct_s)
    if not np.isfinite(apart).all():
        raise ForetraceError("a job that ran on the private Slurm did not end in the simulation.")
    first, second = (np.subtract.outer(each.start_s, each.start_s) for each in (one, other))
    pairs = np.triu(np.ones_like(first, bool), 1) & (np.abs(second) > 1) & (np.abs(first) > 1)
    same = np.sign(first[pairs]) == np.sign(second[pairs])
    switches = [
        switches_of(mine, setup) == switches_of(its, setup) for mine, its in zip(one.nodes, other.nodes, strict=True)
    ]
    return RigErrors(
        start_error_s=StartError(float(late.mean()), float(np.percentile(late, 95)), float(late.max())),
        jct_error=float(apart.mean() / other.jct_s.mean()), jct_worst_s=float(apart.max()),
        order_equal=float(same.mean()) if same.size else 1.0, within=float((late <= 2 * interval_s(policy)).mean()),
        switches_equal=float(np.mean(switches)),
    )  # fmt: skip


def mean(found: Sequence[RigErrors]) -> RigErrors:
    """Return means over several comparisons; the worst is the worst of all."""

    def over(said: Callable[[RigErrors], float]) -> float:
        return float(np.mean([said(each) for each in found]))

    return RigErrors(
        start_error_s=StartError(
            over(lambda each: each.start_error_s.mean), over(lambda each: each.start_error_s.p95),
            max(each.start_error_s.worst for each in found),
        ),
        jct_error=over(lambda each: each.jct_error), jct_worst_s=max(each.jct_worst_s for each in found),
        order_equal=over(lambda each: each.order_equal), within=over(lambda each: each.within),
        switches_equal=over(lambda each: each.switches_equal),
    )  # fmt: skip


def synthetic(text: str, setup: SlurmSetup) -> Workload:
    """Return jobs from `synthetic jobs=40 seed=7 load=0.8 run-s=12000`: Poisson arrivals, sizes of powers of two,
    log-normal run times of this mean, limits 1.1 to 5 times the run time; load: GPU-seconds asked for over those there
    are.
    """
    given = {key: float(default) for key, (default, _, _) in _KEYS.items()}
    for word in text.split()[1:]:
        key, _, value = word.partition("=")
        _, low, high = _KEYS.get(key, (0, 1, 0))
        given[key] = math.nan
        with suppress(ValueError):
            given[key] = float(value)
        if not low <= given[key] <= high:
            known = ", ".join(f"{key}= from {low:g} to {high:g}" for key, (_, low, high) in _KEYS.items())
            raise ForetraceError(f"`trace`: {word!r} is not understood; write {known}.")
    count, load, run = int(given["jobs"]), given["load"], given["run-s"]
    random = np.random.default_rng(int(given["seed"]))
    most = max(setup.nodes * setup.gpus // 4, 1)
    sizes = [size for size in _SIZES if size <= most]
    odds = np.array([_SIZES[size] for size in sizes])
    gpus = random.choice(sizes, count, p=odds / odds.sum())
    work = np.maximum(random.lognormal(np.log(run) - 0.32, 0.8, count), 1.0)
    span = float((gpus * work).sum()) / (setup.nodes * setup.gpus) / load
    return Workload.of(
        submit_s=np.sort(random.uniform(0, span, count)), gpus=gpus, work_s=work, name="synthetic",
        estimate_s=work * random.uniform(1.1, 5.0, count),
    )  # fmt: skip
