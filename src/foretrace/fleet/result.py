"""`FleetResult`: what every simulator of this room returns, per job and over time."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.fleet.workload import SECOND, Float64, Int64, Workload


class Cause(IntEnum):
    """Why a job waits: the constraint that binds, as the last decision about it found."""

    UNDECIDED = 0  # the policy has not looked at it since it was submitted (others stood before it)
    BEHIND = 1
    FULL = 2
    SCATTERED = 3  # no unit that its consolidation requests has them together
    TIMER = 4  # as SCATTERED, and the job may spread wider once the timer has run out
    QUOTA = 5
    TYPE = 6
    RESERVED = 7  # backfill
    OUTRANKED = 8  # its turn ended, or others came first
    ROUND = 9  # the policy decides at the next round only

    @property
    def why(self) -> str:
        """The reason of many jobs in words that follow "because"."""
        return (
            "the policy has not looked at them yet",
            "a job that is served first does not fit, and nobody may pass it",
            "fewer GPUs are free than they ask for",
            "enough GPUs are free, but not together",
            "the free GPUs are scattered, and a delay timer runs",
            "their tenant, array or QOS holds all that it may",
            "the kind of GPU that they need is not free",
            "they would delay a job that holds a reservation",
            "others have a better claim to the GPUs",
            "they fit, but the next round has to come",
        )[self]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """Stretches during which a job held the same GPUs, in order of their start.

    job: (k,) int64 position; start_ns, end_ns: (k,) int64, with restart; gpus: (k,) int64; level: (k,) int64, the
    level of the smallest unit that contains them (0: one GPU); offset: (k + 1,) int64 into `devices`, which lists the
    GPUs (empty where a simulator places counts only). dead_ns: (k,) int64 at its start without progress.
    """

    job: Int64
    start_ns: Int64
    end_ns: Int64
    gpus: Int64
    level: Int64
    dead_ns: Int64
    offset: Int64
    devices: Int64

    def __len__(self) -> int:
        return len(self.job)

    def devices_of(self, segment: int) -> Int64:
        """Return GPUs of one stretch."""
        return self.devices[self.offset[segment] : self.offset[segment + 1]]

    @classmethod
    def of(cls, rows: npt.NDArray[Any], sizes: Int64, devices: Int64) -> Segments:
        """Make segments from stretches in any order: job, start, end, GPUs, level (0 the innermost) and dead time.

        sizes: how many of `devices`, which stand one stretch after the other, are of each.
        """
        order = np.lexsort((rows[0], rows[1]))
        job, start, end, gpus, level, dead = rows[:, order]
        offset = np.concatenate([[0], np.cumsum(sizes)])
        each = [np.sort(devices[offset[i] : offset[i + 1]]) for i in order]
        return cls(
            job=job,
            start_ns=start,
            end_ns=end,
            gpus=gpus,
            level=np.where(gpus == 1, 0, level + 1),
            dead_ns=dead,
            offset=np.concatenate([[0], np.cumsum(sizes[order])]),
            devices=np.concatenate([np.zeros(0, np.int64), *each]),
        )


def up_to_now(
    jobs: Mapping[str, Any], waited: Int64, *, waiting: Int64, running: Int64, part: npt.NDArray[Any], now: int
) -> dict[str, npt.NDArray[Any]]:
    """Return columns of a `FleetResult` from the books of an engine, which last counted each job at its `mark`.

    waiting, running: jobs that are so now; part: (n,) GPUs that count as each job's own.
    """
    made = {name: np.array(jobs[of]) for name, of in _BOOKS.items()} | {"waited_ns": waited.copy()}
    made["waited_ns"][waiting, jobs["cause"][waiting]] += now - jobs["cause_since"][waiting]
    mark, ready = jobs["mark"][running], jobs["ready"][running]
    since, begun = now - mark, np.clip(now - np.maximum(mark, ready), 0, None)
    made["held_ns"][running] += since
    made["dead_ns"][running] += since - begun
    made["comm_ns"][running] += begun * jobs["talking"][running]
    made["gpu_ns"][running] += since * part[running]
    return made


_BOOKS = {
    "start_ns": "first", "end_ns": "ended", "held_ns": "held", "dead_ns": "dead", "comm_ns": "talk", "gpu_ns": "gpu_ns",
    "starts": "starts", "preempted": "preempted", "failed": "failed",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One thing a policy decided: when, about which job, what, and why in words."""

    time_s: float
    job: str
    what: str  # start, wait, preempt, resume, migrate, finish, fail, refuse
    why: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FleetResult:
    """How a workload went on a cluster under a policy; columns are (n,) in the order of `workload`.

    start_ns: first start, −1 never; end_ns: completion, −1 not finished; held_ns: time holding GPUs; dead_ns: of it
    without progress (restarts, repeated work); comm_ns: of it beyond what the same progress takes without any
    communication (0 where the speed model does not say); starts: int64 times it began to run;
    preempted: times it lost its GPUs before its end; failed: times a failure stopped it.
    gpu_ns: (n,) devices × held time, of shared devices the job's part. waited_ns: (n, number of causes) waiting by
    `Cause`; may have no column.
    never: (n,) True where the cluster can never hold the job; such jobs are named, not silently dropped.
    """

    workload: Workload
    policy: str
    cluster: str
    gpus: int
    start_ns: Int64
    end_ns: Int64
    held_ns: Int64
    gpu_ns: Float64
    dead_ns: Int64
    comm_ns: Float64
    starts: Int64
    preempted: Int64
    failed: Int64
    waited_ns: Int64
    never: npt.NDArray[np.bool_]
    segments: Segments | None = None
    decisions: tuple[Decision, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)  # what only this simulator knows, by name
    stopped_ns: int | None = None  # the simulation was asked to stop here
    events: int = 0

    @property
    def finished(self) -> npt.NDArray[np.bool_]:
        """(n,) jobs that ended."""
        return self.end_ns >= 0

    @property
    def jct_s(self) -> Float64:
        """(n,) completion minus submission in seconds, nan where a job did not finish."""
        return np.where(self.finished, (self.end_ns - self.workload.submit_ns) / SECOND, np.nan)

    @property
    def queue_s(self) -> Float64:
        """(n,) seconds between submission and completion without GPUs, nan where a job did not finish."""
        return np.where(self.finished, (self.end_ns - self.workload.submit_ns - self.held_ns) / SECOND, np.nan)

    @property
    def makespan_s(self) -> float:
        """Last completion minus first submission in seconds (nan where nothing finished)."""
        if not self.finished.any():
            return float("nan")
        return int(self.end_ns.max() - self.workload.submit_ns.min()) / SECOND

    @property
    def utilisation(self) -> float:
        """GPU time held over GPU time there was, from the first submission to the last completion, or where stopped."""
        until = int(self.end_ns.max()) if self.stopped_ns is None else self.stopped_ns
        span = until - int(self.workload.submit_ns.min())
        return float(self.gpu_ns.sum() / (span * self.gpus)) if span > 0 else float("nan")


def per_job(result: FleetResult, only: Int64 | None = None) -> str:
    """Return CSV text with a row per job: times in seconds after the log's zero, empty where there is none."""
    load, done = result.workload, result.end_ns >= 0

    def seconds(times_ns: Int64) -> list[str]:
        return [repr(each / 1e9) if each >= 0 else "" for each in times_ns.tolist()]

    def of_done(values: Float64) -> list[str]:
        return [repr(each) if known else "" for each, known in zip(values.tolist(), done.tolist(), strict=True)]

    columns = {
        "job": load.job.tolist(),
        "gpus": load.gpus.tolist(),
        "submit_s": seconds(load.submit_ns),
        "start_s": seconds(result.start_ns),
        "end_s": seconds(result.end_ns),
        "jct_s": of_done(result.jct_s),
        "queue_s": of_done(result.queue_s),
        "held_s": seconds(result.held_ns),
        "dead_s": seconds(result.dead_ns),
        "starts": result.starts.tolist(),
        "preempted": result.preempted.tolist(),
        "failed": result.failed.tolist(),
        "status": np.select(
            [result.never, done, result.start_ns >= 0], ["never", "done", "running"], "waiting"
        ).tolist(),
    }
    rows = list(zip(*columns.values(), strict=True))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows if only is None else [rows[at] for at in only.tolist()])
    return out.getvalue()
