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
from foretrace.fleet.policies.slurm_options import NodeWindow
from foretrace.fleet.policy import Policy
from foretrace.fleet.result import FleetResult
from foretrace.fleet.setup import Costs
from foretrace.fleet.simulate import simulate
from foretrace.fleet.slurm.cluster import SlurmSetup, private
from foretrace.fleet.slurm.play import SlurmRun, Told, for_rig, play, slurm_setup, switches_of
from foretrace.fleet.speeds import Speeds
from foretrace.fleet.workload import SECOND, Float64, Workload

LAUNCH_S = 0.1  # what starting a batch job and noticing its end takes on an idle machine
SYNTHETIC = "synthetic"
_SIZES = {1: 0.4, 2: 0.15, 4: 0.15, 8: 0.15, 16: 0.1, 32: 0.05}  # GPUs, and the part of the jobs that have so many
_KEYS = {"jobs": 40.0, "seed": 0.0, "load": 0.8, "run-s": 12_000.0}


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
    policy: SlurmPolicy
    setup: SlurmSetup
    ran: tuple[SlurmRun, ...]
    simulated: tuple[FleetResult, ...]  # one per run: the schedulers wake at another moment in each
    errors: RigErrors  # means over the runs
    repeats: RigErrors | None  # the same between the runs themselves; None of one
    seconds: float


def against(
    jobs: Workload, setup: SlurmSetup, policy: str, *, speedup: float, repeats: int = 1,
    failures: Sequence[NodeWindow] = (), launch_s: float = LAUNCH_S, progress: Told | None = None,
) -> Against:  # fmt: skip
    """Play the jobs on a private Slurm so many times, and simulate each. Raises ForetraceError."""
    began = time.monotonic()
    decides = parse(policy)
    if not isinstance(decides, SlurmPolicy):
        raise ForetraceError(
            f"`policy` must decide as Slurm does, got {policy!r}; write fifo, backfill or priority with slurm=yes."
        )
    setup = slurm_setup(setup, decides)
    failures = [each._replace(begin_s=each.begin_s / speedup, end_s=each.end_s / speedup) for each in failures]
    for each in failures:
        if each.last >= setup.nodes:
            raise ForetraceError(f"`fail` must name nodes from 0 to {setup.nodes - 1}, got {each.last}.")
    work = for_rig(jobs, setup, speedup)
    ran: list[SlurmRun] = []
    for at in range(repeats):
        share = None if progress is None else (lambda part, at=at: progress((at + part) / repeats))
        with private(setup) as slurm:
            ran.append(play(slurm, work, decides, failures=failures, progress=share))
    simulated = [predicted(work, setup, decides, each, failures=failures, launch_s=launch_s) for each in ran]
    near = interval_s(decides)
    found = [errors(_of(made, setup), _seen(each, setup), near) for made, each in zip(simulated, ran, strict=True)]
    return Against(
        workload=work, policy=decides, setup=setup, ran=tuple(ran), simulated=tuple(simulated), errors=mean(found),
        repeats=between(ran, setup, decides), seconds=time.monotonic() - began,
    )  # fmt: skip


def predicted(
    work: Workload, setup: SlurmSetup, policy: SlurmPolicy, ran: SlurmRun, *, failures: Sequence[NodeWindow] = (),
    launch_s: float = LAUNCH_S, speeds: Speeds | None = None,
) -> FleetResult:  # fmt: skip
    """Simulate the jobs of a run, with nothing of it but when the schedulers woke before its first job.

    speeds: where a job's length depends on its nodes.
    """
    decides = replace(policy, backfill_s=ran.backfill_s, background_s=ran.background_s, checks_s=ran.checks_s)
    broken = tuple((each.begin_s, node, each.end_s) for each in failures for node in range(each.first, each.last + 1))
    costs = Costs(restart_s=launch_s, first_start=True, failures=broken)
    return simulate(
        replace(work, epoch_s=ran.epoch_s), setup.tree, decides, speeds=speeds, costs=costs, record="devices"
    )


def compared(
    work: Workload, setup: SlurmSetup, policy: SlurmPolicy, ran: SlurmRun, *, launch_s: float = LAUNCH_S,
    plain: Policy | None = None, speeds: Speeds | None = None, failures: Sequence[NodeWindow] = (),
) -> RigErrors:  # fmt: skip
    """Errors of a simulation against one run; with `plain` of that policy, which knows nothing of Slurm."""
    if plain is None:
        made = predicted(work, setup, policy, ran, failures=failures, launch_s=launch_s, speeds=speeds)
    else:
        made = simulate(work, setup.tree, plain, record="devices")
    return errors(_of(made, setup), _seen(ran, setup), interval_s(policy))


def between(ran: Sequence[SlurmRun], setup: SlurmSetup, policy: SlurmPolicy) -> RigErrors | None:
    """What runs of the same jobs differ by; None of one."""
    seen = [_seen(each, setup) for each in ran]
    pairs = [errors(one, other, interval_s(policy)) for one, other in itertools.combinations(seen, 2)]
    return mean(pairs) if pairs else None


def interval_s(policy: SlurmPolicy) -> float:
    """The longest time between two passes of the scheduler that starts jobs."""
    given = policy.parameters
    return float(max(given.bf_interval * policy.backfill, given.batch_sched_delay, 1))


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """Per job: start (of the last one) and completion time in whole seconds, and leaf switches."""

    start_s: Float64
    jct_s: Float64
    switches: Float64


def _seen(ran: SlurmRun, setup: SlurmSetup) -> Seen:
    return Seen(ran.start_s, ran.jct_s, np.array([switches_of(each, setup) for each in ran.nodes], float))


def _of(made: FleetResult, setup: SlurmSetup) -> Seen:
    """A simulation, rounded as Slurm rounds times."""
    assert made.segments is not None
    start, switches = np.full(len(made.workload), np.nan), np.zeros(len(made.workload))
    for at, job in enumerate(made.segments.job.tolist()):
        start[job] = made.segments.start_ns[at] // SECOND
        switches[job] = switches_of(made.segments.devices_of(at) // setup.gpus, setup)
    end = np.where(made.finished, made.end_ns // SECOND, np.nan)
    return Seen(start, end - made.workload.submit_ns // SECOND, switches)


def errors(one: Seen, other: Seen, interval_s: float) -> RigErrors:
    """Differences of the first from the second. Raises ForetraceError where a job never started."""
    late = np.abs(one.start_s - other.start_s)
    apart = np.abs(one.jct_s - other.jct_s)
    if not np.isfinite(apart).all():
        raise ForetraceError("a job that ran on the private Slurm did not end in the simulation.")
    first, second = (np.subtract.outer(each.start_s, each.start_s) for each in (one, other))
    pairs = np.triu(np.ones_like(first, bool), 1) & (np.abs(second) > 1) & (np.abs(first) > 1)
    same = np.sign(first[pairs]) == np.sign(second[pairs])
    return RigErrors(
        start_error_s=StartError(float(late.mean()), float(np.percentile(late, 95)), float(late.max())),
        jct_error=float(apart.mean() / other.jct_s.mean()), jct_worst_s=float(apart.max()),
        order_equal=float(same.mean()) if same.size else 1.0, within=float((late <= 2 * interval_s).mean()),
        switches_equal=float((one.switches == other.switches).mean()),
    )  # fmt: skip


def mean(found: Sequence[RigErrors]) -> RigErrors:
    """Means over several comparisons; the worst is the worst of all."""

    def over(name: str) -> float:
        return float(np.mean([getattr(each, name) for each in found]))

    starts = [each.start_error_s for each in found]
    return RigErrors(
        start_error_s=StartError(
            float(np.mean([each.mean for each in starts])), float(np.mean([each.p95 for each in starts])),
            max(each.worst for each in starts),
        ),
        jct_error=over("jct_error"), jct_worst_s=max(each.jct_worst_s for each in found),
        order_equal=over("order_equal"), within=over("within"), switches_equal=over("switches_equal"),
    )  # fmt: skip


def synthetic(text: str, setup: SlurmSetup) -> Workload:
    """Jobs from `synthetic jobs=40 seed=7 load=0.8 run-s=12000`: Poisson arrivals, sizes of powers of two, log-normal
    run times of this mean, limits 1.1 to 5 times the run time; load: GPU-seconds asked for over those there are.
    """
    given = dict(_KEYS)
    for word in text.split()[1:]:
        key, equals, value = word.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not equals or key not in given or not 0 <= number < 1e9:
            raise ForetraceError(f"`trace`: {word!r} is not understood; write {' '.join(f'{k}=' for k in _KEYS)}.")
        given[key] = number
    count, load, run = int(given["jobs"]), given["load"], given["run-s"]
    if not (1 <= count <= 5000 and 0 < load <= 10 and run >= 1):
        raise ForetraceError("`trace`: jobs= must be 1 to 5000, load= above 0 to 10, run-s= 1 or more.")
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
