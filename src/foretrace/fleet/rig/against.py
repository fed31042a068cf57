"""Hold the simulator's Slurm against a real one: the same jobs, predicted and played, job by job."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.policies import parse
from foretrace.fleet.policies.slurm import SlurmPolicy
from foretrace.fleet.policies.slurm_options import BACKGROUND_S, NodeWindow, within
from foretrace.fleet.policy import Policy
from foretrace.fleet.rig import on_ray
from foretrace.fleet.rig.cluster import SlurmSetup, private
from foretrace.fleet.rig.play import RigRun, Told, for_rig, play, slurm_setup, switches_of
from foretrace.fleet.setup import Costs
from foretrace.fleet.simulate import simulate
from foretrace.fleet.speeds import Speeds
from foretrace.fleet.workload import SECOND, Workload
from foretrace.names import numbers

SYNTHETIC = "synthetic"
LAUNCH_S = 0.1  # until a job starts and its end is noticed, on an idle machine
_SIZES = {1: 0.4, 2: 0.15, 4: 0.15, 8: 0.15, 16: 0.1, 32: 0.05}  # GPUs, and the part of the jobs that have so many
_KEYS = {"jobs": (40, 1, 5000), "seed": (0, 0, 10**9), "load": (0.8, 0.01, 10), "run_s": (12e3, 1, 1e9)}  # and range


@dataclass(frozen=True, slots=True)
class StartError:
    """Of the starts of jobs, seconds of the rig's clock."""

    mean: float
    p95: float
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RigErrors:
    """How far simulations are from what a scheduler did, or that from what it did another time.

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

    setup: SlurmSetup
    ran: tuple[RigRun, ...]
    simulated: tuple[RigRun, ...]  # one per run: the schedulers wake at another moment in each
    errors: RigErrors
    repeated: RigErrors | None  # the same between the runs themselves; None of one
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
    within("fail", failures, setup.nodes)
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
    return Against(
        setup=setup, ran=tuple(ran), simulated=tuple(made),
        errors=errors(list(zip(made, ran, strict=True)), setup, decides), repeated=between(ran, setup, decides),
        seconds=time.monotonic() - began,
    )  # fmt: skip


def predicted(
    work: Workload, setup: SlurmSetup, policy: Policy, ran: RigRun, *, failures: Sequence[NodeWindow] = (),
    launch_s: float = LAUNCH_S, background_every_s: float = BACKGROUND_S, speeds: Speeds | None = None,
) -> RigRun:  # fmt: skip
    """Simulate the jobs of a run, with nothing of it but when Slurm's schedulers woke before its first job.

    launch_s, background_every_s: how quick the machine is (`RigRun`). speeds: where lengths depend on nodes.
    """
    whole = 1
    if isinstance(policy, SlurmPolicy):
        whole = SECOND  # as Slurm has times
        policy = replace(
            policy, backfill_s=ran.backfill_s, background_s=ran.background_s, checks_s=ran.checks_s,
            background_every_s=background_every_s,
        )  # fmt: skip
    broken = tuple((each.begin_s, node, each.end_s) for each in failures for node in range(each.first, each.last + 1))
    costs = Costs(restart_s=launch_s, first_start=True, failures=broken)
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
        launch_s=launch_s,
    )  # fmt: skip


def between(ran: Sequence[RigRun], setup: SlurmSetup, policy: Policy) -> RigErrors | None:
    """Return what runs of the same jobs differ by; None of one."""
    pairs = list(itertools.combinations(ran, 2))
    return errors(pairs, setup, policy) if pairs else None


def errors(pairs: Sequence[tuple[RigRun, RigRun]], setup: SlurmSetup, policy: Policy) -> RigErrors:
    """Return differences of the first from the second, means over pairs of runs of the same jobs, and the worst of all.

    Raises ForetraceError where a job never ended.
    """
    late = np.array([np.abs(one.start_s - other.start_s) for one, other in pairs])  # (pairs, jobs)
    apart = np.array([np.abs(one.jct_s - other.jct_s) for one, other in pairs])
    if not np.isfinite(apart).all():
        raise ForetraceError("a job that ran on the private Slurm did not end in the simulation.")
    interval_s = on_ray.RETRY_S  # the longest time between two passes of the scheduler that starts jobs
    if isinstance(policy, SlurmPolicy):
        given = policy.parameters
        interval_s = max(given.bf_interval * policy.backfill, given.batch_sched_delay, 1)
    lengths = np.array([other.jct_s.mean() for _, other in pairs])
    switches = [
        switches_of(mine, setup) == switches_of(its, setup)
        for one, other in pairs for mine, its in zip(one.nodes, other.nodes, strict=True)
    ]  # fmt: skip
    return RigErrors(
        start_error_s=StartError(
            float(late.mean()), float(np.percentile(late, 95, axis=1).mean()), float(late.max())
        ),
        jct_error=float((apart.mean(axis=1) / lengths).mean()), jct_worst_s=float(apart.max()),
        order_equal=float(np.mean([_order_equal(one, other) for one, other in pairs])),
        within=float((late <= 2 * interval_s).mean()), switches_equal=float(np.mean(switches)),
    )  # fmt: skip


def _order_equal(one: RigRun, other: RigRun) -> float:
    first, second = (np.subtract.outer(each.start_s, each.start_s) for each in (one, other))
    pairs = np.triu(np.ones_like(first, bool), 1) & (np.abs(second) > 1) & (np.abs(first) > 1)
    same = np.sign(first[pairs]) == np.sign(second[pairs])
    return float(same.mean()) if same.size else 1.0


def synthetic(text: str, setup: SlurmSetup) -> Workload:
    """Return jobs from `synthetic jobs=40 seed=7 load=0.8 run-s=12000`: Poisson arrivals, powers of two, log-normal run
    times of this mean, limits 1.1 to 5 times as long; load: GPU-seconds asked for over those there are.
    """
    given = numbers(text.split()[1:], {key: default for key, (default, _, _) in _KEYS.items()}, "`trace`")
    for key, (_, low, high) in _KEYS.items():
        if not low <= given[key] <= high:
            raise ForetraceError(f"`trace`: {key.replace('_', '-')} must be {low:g} to {high:g}, got {given[key]:g}.")
    count, load, run = given["jobs"], given["load"], given["run_s"]
    random = np.random.default_rng(given["seed"])
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
