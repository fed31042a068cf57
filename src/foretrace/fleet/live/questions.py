"""When jobs of a live queue will start, why they wait, and what would let them start sooner."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.live import history, queue
from foretrace.fleet.live.forecast import HORIZON_S, Queue, play
from foretrace.fleet.live.snapshot import QueuedJob, Snapshot
from foretrace.fleet.policies.slurm_options import numbers
from foretrace.fleet.workload import Float64, Int64

LOW, HIGH = 10, 90  # percentiles of the ranges
PARAMETERS = ("bf_interval", "bf_window", "bf_max_job_test", "max_switch_wait")
AT_LEAST_S = 2.0  # Slurm's own times are whole seconds, and its schedulers look every second or two at best


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastStart:
    """When a job starts, seconds from now: the median, and the range in which 80 % of the draws lie.

    None where it does not start in what is played (or nothing says when). slurm_s: what `squeue --start` says.
    """

    job: str
    user: str
    partition: str
    name: str
    nodes: int
    gpus: int
    limit_s: float | None
    status: str  # running, waiting
    reason: str
    why: str
    start_s: float | None
    low_s: float | None
    high_s: float | None
    slurm_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sooner:
    """A change that was tried, and when the job would start then. sooner_s: by how much, in the median draw."""

    change: str
    command: str
    start_s: float | None
    low_s: float | None
    high_s: float | None
    sooner_s: float | None
    helps: bool
    risk: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChange:
    """What another cluster or setting does: mean further waiting of the jobs that wait, and its ratio with a range."""

    change: str
    before_s: float
    after_s: float
    ratio: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueAnswer:
    """What is asked of a live queue."""

    seen: Snapshot
    starts: tuple[ForecastStart, ...]
    asked: ForecastStart | None
    sooner: tuple[Sooner, ...]
    changes: tuple[ClusterChange, ...]
    draws: int
    past: int
    left_out: Mapping[str, str]
    notes: tuple[str, ...]


class PlayedQueue(NamedTuple):
    """A queue that was played on."""

    queue: Queue
    starts: Float64  # (draws, jobs), seconds from now
    at: Mapping[str, int]  # where in the queue a job stands, the first of its tasks
    free: Int64  # slots of each node that nobody holds now

    def of(self, job: QueuedJob) -> Float64:
        """Return (draws,) starts of a job; none where it is not played."""
        return self.starts[:, self.at[job.job]] if job.job in self.at else np.empty(0)


class Forecast:
    """One snapshot, played on `draws` times with the same run times and phases, as it is and with changes."""

    def __init__(self, seen: Snapshot, past: Sequence[QueuedJob], *, draws: int = 200, seed: int = 0) -> None:
        if draws < 20:
            raise ForetraceError(f"`draws={draws}`: a range needs 20 draws or more.")
        self.seen, self.draws, self.seed = seen, draws, seed
        self.past = history.with_queue(past, seen.jobs)

    def of(self, seen: Snapshot) -> PlayedQueue:
        """Play on the queue of a snapshot."""
        lined = queue.line_up(seen)
        random = np.random.default_rng(self.seed)
        phases = random.random(self.draws)
        # by number, so that a change of one job leaves the draws of all others as they were
        order = np.argsort([each.job for each in lined.jobs], kind="stable")
        jobs = [lined.jobs[i] for i in order]
        run = np.empty((self.draws, len(jobs)))
        run[:, order] = history.drawn(jobs, lined.limit[order], self.past, self.draws, random)
        at = {each.job: i for i, each in reversed(list(enumerate(lined.jobs)))}
        return PlayedQueue(lined, play(lined, run, phases), at, lined.slots - lined.held[lined.running].sum(axis=0))


def ask(
    seen: Snapshot,
    past: Sequence[QueuedJob],
    *,
    job: str | None = None,
    draws: int = 200,
    seed: int = 0,
    racks: int = 0,
    settings: Sequence[str] = (),
    progress: Callable[[float], None] | None = None,
) -> QueueAnswer:
    """Return when waiting jobs start; for `job` also what would start it sooner; with `racks` or `settings` what these
    do.

    settings: NAME=VALUE of SchedulerParameters to try, one by one. Raises ForetraceError for a job that does not exist.
    """
    chosen = seen.find(job) if job is not None else None
    told = progress or (lambda _: None)
    made = Forecast(seen, past, draws=draws, seed=seed)
    here = made.of(seen)
    told(0.3)
    found = [_start(each, here, seen) for each in seen.jobs if each.waiting]
    found.sort(key=lambda each: (each.start_s is None, each.start_s or 0.0))
    asked = _start(chosen, here, seen) if chosen is not None else None
    sooner: list[Sooner] = []
    if chosen is not None and chosen.waiting and asked is not None and asked.start_s is not None:
        tries = list(_tries(seen, chosen, made.past))
        for i, each in enumerate(tries):
            sooner.append(_tried(made, chosen, here.of(chosen), *each))
            told(0.3 + 0.5 * (i + 1) / len(tries))
    tried: dict[str, Snapshot] = {}
    if racks:
        tried[f"{racks} more rack{'s' if racks > 1 else ''}"] = queue.larger(seen, racks)
    for word in settings:
        tried[word] = replace(seen, parameters=replace(seen.parameters, **numbers("set", [word], PARAMETERS)))
    changes = [_operated(made, change, other, here) for change, other in tried.items()]
    told(1.0)
    notes = [*seen.notes, *here.queue.notes]
    if not made.past:
        notes.append("no history of run times: jobs are taken to end anywhere below their limits")
    return QueueAnswer(
        seen=seen, starts=tuple(found), asked=asked, sooner=tuple(sooner), changes=tuple(changes), draws=draws,
        past=len(made.past), left_out=here.queue.left_out, notes=tuple(notes),
    )  # fmt: skip


def spread_of(starts: Float64) -> tuple[float | None, float | None, float | None]:
    """Return median and range of starts, None where that many draws do not come to a start."""
    if not len(starts):
        return None, None, None
    low, mid, high = np.percentile(starts, [LOW, 50, HIGH], method="nearest")
    low, high = min(low, mid - AT_LEAST_S), max(high, mid + AT_LEAST_S)
    if mid >= HORIZON_S:
        return None, None, None
    return float(mid), float(max(low, 0.0)), float(high) if high < HORIZON_S else None


def _start(job: QueuedJob, played: PlayedQueue, seen: Snapshot) -> ForecastStart:
    limit = queue.limit_of(job, {each.name: each for each in seen.partitions})
    mid, low, high = (-job.ran_s,) * 3 if job.running else spread_of(played.of(job))
    why = played.queue.left_out.get(job.job, "" if job.running else _why(job, played))
    slurm = job.start_s - seen.now_s if job.waiting and math.isfinite(job.start_s) else None
    return ForecastStart(
        job=job.job, user=job.user, partition=job.partition, name=job.name, nodes=job.nodes, gpus=job.gpus,
        limit_s=limit if limit < 300 * 86400 else None, status="running" if job.running else "waiting",
        reason=job.reason, why=why, start_s=mid, low_s=low, high_s=high, slurm_s=slurm,
    )  # fmt: skip


def _why(job: QueuedJob, played: PlayedQueue) -> str:
    """Return Slurm's reason, and what stands behind it in numbers."""
    text, lined = queue.pending(job), played.queue
    if job.job not in played.at:
        return text
    at = played.at[job.job]
    ahead = sum(1 for each in lined.jobs[:at] if each.waiting and each.partition == job.partition)
    fit = int((lined.may[at] & (played.free >= lined.each[at])).sum())
    asks = f"it needs {lined.nodes[at]:,} node{'s' if lined.nodes[at] > 1 else ''} with {lined.each[at]:,} free each"
    parts = [text, f"{asks}, {fit:,} {'has' if fit == 1 else 'have'} that now"]
    if ahead:
        stand = "job of its partition stands" if ahead == 1 else "jobs of its partition stand"
        parts.append(f"{ahead:,} {stand} before it")
    if lined.switches[at] and lined.insists[at] > 0:
        parts.append(f"it insists on {lined.switches[at]} leaf switch for another {lined.insists[at]:.0f} s")
    return "; ".join(parts)


def _tries(seen: Snapshot, job: QueuedJob, past: Sequence[QueuedJob]) -> list[tuple[str, str, dict[str, object], str]]:
    """Return changes of a job: name, Slurm's command, fields, and what it risks."""
    parts = {each.name: each for each in seen.partitions}
    limit = queue.limit_of(job, parts)
    found: list[tuple[str, str, dict[str, object], str]] = []
    update = f"scontrol update JobId={job.job} "
    alike = [each.ran_s for each in past if each.user == job.user and history.stem(each.name) == history.stem(job.name)]
    for share in (0.5, 0.25):
        minutes = max(math.ceil(limit * share / 60), 1)
        if minutes * 60 < limit:
            cut = sum(ran > minutes * 60 for ran in alike) / len(alike) if alike else math.nan
            risk = f"{cut:.0%} of {len(alike)} such jobs ran longer" if alike else "no such job is in the history"
            change = f"time limit {minutes:,} min instead of {limit / 60:,.0f}"
            found.append((change, update + f"TimeLimit={minutes}", {"limit_s": minutes * 60.0}, risk))
    if job.nodes > 1:
        nodes = job.nodes // 2
        fields: dict[str, object] = {"nodes": nodes, "gpus": job.gpus * nodes // job.nodes}
        change = f"{nodes} node{'s' if nodes > 1 else ''} instead of {job.nodes}"
        found.append((change, update + f"NumNodes={nodes}", fields, "it runs longer"))
    if job.switches:
        found.append(("no --switches", update + "Switches=0", {"switches": 0}, "it may be spread over leaf switches"))
    for part in seen.partitions:
        if part.up and part.name not in job.partition.split(",") and part.limit_s >= limit and part.nodes:
            found.append((f"partition {part.name}", update + f"Partition={part.name}", {"partition": part.name}, ""))
    return found


def _tried(
    made: Forecast, job: QueuedJob, now: Float64, change: str, command: str, fields: dict[str, object], risk: str
) -> Sooner:
    then = made.of(queue.changed_job(made.seen, job.job, **fields)).of(job)
    if not len(then):
        return Sooner(
            change=change, command=command, start_s=None, low_s=None, high_s=None, sooner_s=None, helps=False,
            risk="it could not start at all",
        )  # fmt: skip
    mid, low, high = spread_of(then)
    gain = float(np.median(np.minimum(now, HORIZON_S) - np.minimum(then, HORIZON_S)))
    return Sooner(
        change=change, command=command, start_s=mid, low_s=low, high_s=high, sooner_s=gain,
        helps=gain > AT_LEAST_S, risk=risk,
    )  # fmt: skip


def _operated(made: Forecast, change: str, other: Snapshot, here: PlayedQueue) -> ClusterChange:
    there = made.of(other)
    both = [each.job for each in here.queue.jobs if each.waiting and each.job in there.at]
    if not both:
        raise ForetraceError(f"{made.seen.source} has no job that waits and could start; there is nothing to compare.")
    mine, theirs = (
        np.minimum(played.starts[:, [played.at[job] for job in both]], HORIZON_S).mean(axis=1)
        for played in (here, there)
    )
    ratio = theirs / np.maximum(mine, 1e-9)
    low, high = np.percentile(ratio, [LOW, HIGH])
    return ClusterChange(
        change=change, before_s=float(np.median(mine)), after_s=float(np.median(theirs)), ratio=float(np.median(ratio)),
        low=float(low), high=float(high),
    )  # fmt: skip
