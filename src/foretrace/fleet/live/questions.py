"""When jobs of a live queue will start, why they wait, and what would let them start sooner."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.live import history, queue
from foretrace.fleet.live.forecast import HORIZON_S, play
from foretrace.fleet.live.records import QueuedJob, Snapshot
from foretrace.fleet.policies.slurm_options import numbers
from foretrace.fleet.workload import Float64

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


class PlayedQueue:
    """The queue of a snapshot, played on with the same run times and phases for the same seed."""

    def __init__(self, seen: Snapshot, past: Sequence[QueuedJob], draws: int, seed: int) -> None:
        self.queue = lined = queue.line_up(seen)
        random = np.random.default_rng(seed)
        phases = random.random(draws)
        # by number, so that a change of one job leaves the draws of all others as they were
        order = np.argsort([each.job for each in lined.jobs], kind="stable")
        run = np.empty((draws, len(order)))
        run[:, order] = history.drawn([lined.jobs[i] for i in order], past, draws, random)
        self.starts = play(lined, run, phases)  # (draws, jobs), seconds from now
        # where in the queue a job stands, the first of its tasks
        self.at = {each.job: i for i, each in reversed(list(enumerate(lined.jobs)))}

    def of(self, job: QueuedJob) -> Float64:
        """Return (draws,) starts of a job; none where it is not played."""
        return self.starts[:, self.at[job.job]] if job.job in self.at else np.empty(0)


def ask(
    seen: Snapshot, past: Sequence[QueuedJob], *, job: str | None = None, draws: int = 200, seed: int = 0,
    racks: int = 0, settings: Sequence[str] = (), progress: Callable[[float], None] | None = None,
) -> QueueAnswer:  # fmt: skip
    """Return when waiting jobs start; what would start `job` sooner; what `racks` and each of `settings` do.

    settings: NAME=VALUE of SchedulerParameters. Raises ForetraceError for a job that does not exist.
    """
    chosen = seen.find(job) if job is not None else None
    told = progress or (lambda _: None)
    past = history.with_queue(past, seen.jobs)
    again = partial(PlayedQueue, past=past, draws=draws, seed=seed)
    here = again(seen)
    told(0.3)
    found = [_start(each, here, seen) for each in seen.jobs if each.waiting]
    found.sort(key=lambda each: (each.start_s is None, each.start_s or 0.0))
    asked = _start(chosen, here, seen) if chosen is not None else None
    sooner: list[Sooner] = []
    if chosen is not None and chosen.waiting and chosen.job in here.at and asked is not None:
        tries = list(_tries(seen, chosen, past)) if asked.start_s is not None else []
        for i, (change, command, fields, risk) in enumerate(tries):
            other = replace(seen, jobs=tuple(replace(each, **fields) if each is chosen else each for each in seen.jobs))
            then = again(other).of(chosen)
            sooner.append(_sooner(here.of(chosen), then, change, command, risk))
            told(0.3 + 0.5 * (i + 1) / len(tries))
    others: dict[str, Snapshot] = {}
    if racks:
        others[f"{racks} more rack{'s' if racks > 1 else ''}"] = queue.larger(seen, racks)
    for word in settings:
        others[word] = replace(seen, parameters=replace(seen.parameters, **numbers("set", [word], PARAMETERS)))
    changes = [_operated(change, here, again(other)) for change, other in others.items()]
    told(1.0)
    notes = [*seen.notes, *here.queue.notes]
    if not past:
        notes.append("no history of run times: jobs are taken to end anywhere below their limits")
    return QueueAnswer(
        seen=seen, starts=tuple(found), asked=asked, sooner=tuple(sooner), changes=tuple(changes), draws=draws,
        past=len(past), left_out=here.queue.left_out, notes=tuple(notes),
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


def _start(job: QueuedJob, here: PlayedQueue, seen: Snapshot) -> ForecastStart:
    limit = queue.limit_of(job, seen.partitions)
    mid, low, high = (-job.ran_s,) * 3 if job.running else spread_of(here.of(job))
    why = here.queue.left_out.get(job.job, "" if job.running else _why(job, here))
    slurm = job.start_s - seen.now_s if job.waiting and math.isfinite(job.start_s) else None
    return ForecastStart(
        job=job.job, user=job.user, partition=job.partition, name=job.name, nodes=job.nodes, gpus=job.gpus,
        limit_s=limit if limit < 300 * 86400 else None, status="running" if job.running else "waiting",
        reason=job.reason, why=why, start_s=mid, low_s=low, high_s=high, slurm_s=slurm,
    )  # fmt: skip


def _why(job: QueuedJob, here: PlayedQueue) -> str:
    """Return Slurm's reason, and what stands behind it in numbers."""
    if job.job not in here.at:
        return queue.pending(job).words
    at = here.at[job.job]
    row = here.queue.rows[at]
    ahead = sum(each.waiting and each.partition == job.partition for each in here.queue.jobs[:at])
    free = here.queue.slots - here.queue.held.sum(axis=0)
    fit = int((here.queue.may[at] & (free >= row["each"])).sum())
    asks = f"it needs {row['nodes']:,} node{'s' if row['nodes'] > 1 else ''} with {row['each']:,} free each"
    parts = [queue.pending(job).words, f"{asks}, {fit:,} {'has' if fit == 1 else 'have'} that now"]
    if ahead:
        stand = "job of its partition stands" if ahead == 1 else "jobs of its partition stand"
        parts.append(f"{ahead:,} {stand} before it")
    if job.switches and row["insists"] > 0:
        parts.append(f"it insists on {job.switches} leaf switch for another {row['insists']:.0f} s")
    return "; ".join(parts)


def _tries(seen: Snapshot, job: QueuedJob, past: Sequence[QueuedJob]) -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """Yield changes of a job: name, Slurm's command, fields, and what it risks."""
    limit = queue.limit_of(job, seen.partitions)
    update = f"scontrol update JobId={job.job} "
    alike = [each.ran_s for each in past if each.user == job.user and history.stem(each.name) == history.stem(job.name)]
    for share in (0.5, 0.25):
        minutes = max(math.ceil(limit * share / 60), 1)
        if minutes * 60 < limit:
            cut = np.mean([ran > minutes * 60 for ran in alike]) if alike else math.nan
            risk = (
                f"{100 * cut:.0f} % of {len(alike)} such jobs ran longer" if alike else "no such job is in the history"
            )
            change = f"time limit {minutes:,} min instead of {limit / 60:,.0f}"
            yield change, update + f"TimeLimit={minutes}", {"limit_s": minutes * 60.0}, risk
    if job.nodes > 1:
        nodes = job.nodes // 2
        change = f"{nodes} node{'s' if nodes > 1 else ''} instead of {job.nodes}"
        fewer = {"nodes": nodes, "gpus": job.gpus * nodes // job.nodes}
        yield change, update + f"NumNodes={nodes}", fewer, "it runs longer"
    if job.switches:
        yield "no --switches", update + "Switches=0", {"switches": 0}, "it may be spread over leaf switches"
    for name, part in seen.partitions.items():
        if part.up and name not in job.partition.split(",") and part.limit_s >= limit and part.nodes:
            yield f"partition {name}", update + f"Partition={name}", {"partition": name}, ""


def _sooner(now: Float64, then: Float64, change: str, command: str, risk: str) -> Sooner:
    mid, low, high = spread_of(then)
    gain = None
    if len(then):
        gain = float(np.median(np.minimum(now, HORIZON_S) - np.minimum(then, HORIZON_S)))
    return Sooner(
        change=change, command=command, start_s=mid, low_s=low, high_s=high, sooner_s=gain,
        helps=(gain or 0.0) > AT_LEAST_S, risk="it could not start at all" if gain is None else risk,
    )  # fmt: skip


def _operated(change: str, here: PlayedQueue, there: PlayedQueue) -> ClusterChange:
    both = [each.job for each in here.queue.jobs if each.waiting and each.job in there.at]
    if not both:
        raise ForetraceError("no job of this queue waits and could start; there is nothing to compare.")
    mine, theirs = (
        np.minimum(each.starts[:, [each.at[job] for job in both]], HORIZON_S).mean(axis=1) for each in (here, there)
    )
    ratio = np.maximum(theirs, AT_LEAST_S) / np.maximum(mine, AT_LEAST_S)  # 1 where all start at once as it is
    low, high = np.percentile(ratio, [LOW, HIGH])
    return ClusterChange(
        change=change, before_s=float(np.median(mine)), after_s=float(np.median(theirs)), ratio=float(np.median(ratio)),
        low=float(low), high=float(high),
    )  # fmt: skip
