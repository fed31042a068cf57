"""What the step-by-step engine knows at one moment: who holds which GPUs, how fast jobs run, what they did so far.

`engine` holds the same as numpy records for the compiled loop. Times are int nanoseconds, work is float nanoseconds at
speed 1. Nothing here decides; `rules` and policies do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.reasons import minutes, preempted
from foretrace.fleet.result import Cause
from foretrace.fleet.setup import NEVER, Engine
from foretrace.fleet.speeds import ROUNDING, Shape
from foretrace.fleet.workload import SECOND, nanoseconds

FUTURE, WAITING, RUNNING, DONE = "future", "waiting", "running", "done"


@dataclass(slots=True, eq=False)
class JobState:
    """One job. `gpus` it holds, or has released in this decision where it `reclaims` them unless others take them."""

    at: int  # position in the workload
    wanted: int  # GPUs asked for
    fewest: int
    most: int
    share: float
    submit: int
    work: float
    remaining: float
    estimate: float
    key: float
    restart: int
    demand: int  # class of (GPUs, kinds allowed)
    size: int  # class of GPUs alone
    tenant: int
    eager: bool
    status: str = FUTURE
    gpus: list[int] = field(default_factory=list)
    level: int = 0  # of the smallest unit around them, 0 the innermost units
    part: float = 0  # devices that count as its own: all of them where it shares none
    rate: float = 0.0
    talking: float = 0.0
    reclaims: bool = False
    band: int = 0
    last: int = 0  # when it last gained or lost GPUs
    lease_end: int = 0
    finish_at: int = 0
    mark: int = 0  # up to here progress is counted
    ready: int = 0  # from here it progresses
    fresh: int = 0  # when this stretch began to progress: what a failure can lose
    pace: list[tuple[int, float]] = field(default_factory=list)  # (since, speed) within this stretch
    stretch: int = 0
    stretch_dead: int = 0
    first: int = -1
    ended: int = -1
    held: int = 0
    dead: int = 0
    talk: float = 0.0
    gpu_ns: float = 0.0
    starts: int = 0
    preempted: int = 0
    failed: int = 0
    cause: int = 0
    cause_since: int = 0
    when: int = -1  # its event in the heap, −1 none


class SteppingState:
    """Jobs and GPUs. Levels are counted from the innermost units outwards; the last is the whole cluster."""

    def __init__(self, given: Engine) -> None:
        workload, cluster, policy, speeds = given.workload, given.cluster, given.policy, given.speeds
        self.workload, self.cluster, self.policy, self.speeds = workload, cluster, policy, speeds
        self.owners: list[list[int]] = [[] for _ in range(cluster.gpus)]
        self.broken = bytearray(cluster.gpus)
        self.sharers = int(policy.options.get("sharers", 1))  # jobs on one GPU even if their shares are above 1
        self.sharing = self.sharers > 1 or bool((workload.share < 1).any())
        self.speed_alone = given.speed  # of a job in a shape
        self.pair = getattr(speeds, "pair", None)
        self.levels = len(cluster.levels)
        self.unit_at = [cluster.units_of(level).tolist() for level in range(self.levels)]  # of each GPU
        self.kind_of = cluster.gpu_type.tolist()
        self.of_kind = [cluster.gpu_type == kind for kind in range(len(cluster.types))]
        self.open = np.ones(cluster.gpus, bool)  # GPUs that work and that nobody holds
        self.free = [self.kind_of.count(kind) for kind in range(len(cluster.types))]  # how many of each kind
        self.free_gpus = cluster.gpus
        self.costs, self.record, self.facts, self.watched = given.costs, given.record, given.facts, given.watched
        self.now, self.events = 0, 0
        self._meet_jobs()
        self.reclaimers: dict[int, list[int]] = {}  # jobs that may reclaim a GPU
        self.waiting: set[int] = set()
        self.running: set[int] = set()
        self.newly: list[int] = []  # who came to wait since the last decision
        self.disturbed: set[int] = set()  # whose partners on a GPU came or went
        self.used = [0.0] * len(self.facts.quota)  # GPUs by tenant
        self.wanting = 0.0  # GPUs that the waiting ask for
        self.heap: list[tuple[int, int]] = []
        self.waited = [[0] * len(Cause) for _ in range(len(workload))]
        self.segments: list[tuple[int, int, int, int, int, int, list[int]]] = []
        self.log: list[tuple[int, int, str, str]] = []
        self.lease = int(nanoseconds(policy.lease_s)) if policy.preempt_rule == "lease" else 0
        self.thresholds = [each * 1e9 for each in policy.thresholds_gpu_s] if policy.order_rule == "queues" else []
        self.checkpoint = int(nanoseconds(self.costs.checkpoint_s))

    def _meet_jobs(self) -> None:
        work, facts, policy = self.workload, self.facts, self.policy
        fewest, most = np.minimum(work.min_gpus, work.gpus), np.maximum(work.max_gpus, work.gpus)
        self.never = facts.never.copy()
        if policy.resizes:  # it may run elastic jobs on fewer GPUs than they ask for
            self.never = (fewest > facts.capacity[facts.demand, -1]) | (
                fewest * work.share > facts.quota[facts.tenant] + ROUNDING
            )
        self.capacity, self.allowed = facts.capacity.tolist(), facts.allowed[facts.demands].tolist()
        columns = (
            work.gpus, fewest, most, work.share, work.submit_ns, facts.work_ns, facts.work_ns, facts.estimate_ns,
            facts.key, facts.restart_ns, facts.demand, facts.size, facts.tenant, facts.eager,
        )  # fmt: skip
        rows = zip(*(column.tolist() for column in columns), strict=True)
        self.jobs = [JobState(at, *row) for at, row in enumerate(rows)]
        for job in self.jobs:
            if self.never[job.at]:
                job.status = DONE

    # ---- events
    def schedule(self, job: JobState, when: int) -> None:
        """Set the job's next event; it has one at most."""
        job.when = when
        heappush(self.heap, (when, job.at))

    def unschedule(self, job: JobState) -> None:
        """Remove the job's event."""
        job.when = -1

    def next_event(self) -> int:
        """Return when the first event of a job is due; NEVER where there is none."""
        while self.heap and self.jobs[self.heap[0][1]].when != self.heap[0][0]:
            heappop(self.heap)
        return self.heap[0][0] if self.heap else NEVER

    # ---- who holds GPUs
    def count(self, gpu: int, by: int) -> None:
        """Count one GPU more or less as free."""
        self.open[gpu] = by > 0
        self.free[self.kind_of[gpu]] += by
        self.free_gpus += by

    def load(self, gpu: int) -> float:
        """Return sum of the shares on a GPU."""
        return sum(self.jobs[each].share for each in self.owners[gpu])

    def has_room(self, gpu: int, job: JobState) -> bool:
        """Return whether the job may be on this GPU beside those that are there."""
        if self.broken[gpu]:
            return False
        owners = self.owners[gpu]
        return not owners or len(owners) < self.sharers or self.load(gpu) + job.share <= 1 + ROUNDING

    def take(self, job: JobState, gpus: list[int]) -> None:
        """Give the job these GPUs; jobs that could reclaim one of them no longer can."""
        for gpu in gpus:
            self.disturbed.update(self.owners[gpu])
            if not self.owners[gpu]:
                self.count(gpu, -1)
            self.owners[gpu].append(job.at)
            for other in self.reclaimers.pop(gpu, []):
                claimant = self.jobs[other]
                if claimant is job or not claimant.reclaims:
                    continue
                if self.has_room(gpu, claimant):
                    self.reclaimers.setdefault(gpu, []).append(other)
                else:
                    self.lose(claimant)
        job.gpus = gpus

    def release(self, job: JobState) -> None:
        """Stop the job; the list of its GPUs stays."""
        for gpu in job.gpus:
            self.owners[gpu].remove(job.at)
            self.disturbed.update(self.owners[gpu])
            if not self.owners[gpu]:
                self.count(gpu, 1)
        self.used[job.tenant] -= self.claim(job, len(job.gpus))
        self.running.discard(job.at)
        self.disturbed.discard(job.at)

    def claim(self, job: JobState, gpus: int) -> float:
        """Return what so many GPUs count against a quota."""
        return gpus if job.share == 1 else gpus * job.share

    def over_quota(self, job: JobState, gpus: int) -> bool:
        """Return whether its tenant would hold too much with so many GPUs for the job."""
        return self.used[job.tenant] + self.claim(job, gpus) > float(self.facts.quota[job.tenant]) + ROUNDING

    # ---- speeds
    def shape(self, gpus: list[int], *, sharers: int = 0) -> tuple[Shape, int]:
        """Return what speed depends on, and the level of the smallest unit around the GPUs (0 the innermost)."""
        units, even = [], True
        for unit_at in self.unit_at:
            counts: dict[int, int] = {}
            for gpu in gpus:
                counts[unit_at[gpu]] = counts.get(unit_at[gpu], 0) + 1
            units.append(len(counts))
            even = even and len(set(counts.values())) == 1
        kind = self.cluster.types[self.kind_of[gpus[0]]]
        shape = Shape(gpus=len(gpus), units=tuple(units), even=even, gpu_type=kind, sharers=sharers)
        return shape, units.index(1)

    def speed_on(self, job: JobState, gpus: list[int]) -> tuple[float, float, int, float]:
        """Return progress and communication on these GPUs beside their other jobs, the level, and its own part.

        A gang is as slow as on the GPU where its partners hold it up most. Where shares on a GPU are above 1, its time
        counts to each in proportion.
        """
        others = [[each for each in self.owners[gpu] if each != job.at] for gpu in gpus] if self.sharing else []
        crowd = max((len(each) for each in others), default=0)
        shape, level = self.shape(gpus, sharers=crowd)
        speed = self.speed_alone(job.at, shape)
        own: float = len(gpus)
        if job.share < 1 or crowd:
            loads = (max(1.0, job.share + sum(self.jobs[each].share for each in beside)) for beside in others)
            own = sum(job.share / load for load in loads)
        slowest = min((self._left(job, each) for each in others), default=1.0)
        return speed.progress * slowest, speed.communication, level, own

    def _left(self, job: JobState, others: list[int]) -> float:
        """Return what the partners on one GPU leave of the job's speed, one after the other."""
        factor = 1.0
        for other in others:
            if self.pair is None:
                if job.share + self.jobs[other].share > 1 + ROUNDING:
                    raise ForetraceError(
                        f"policy {self.policy.name!r} puts job {self._name(job.at)} on a GPU beside "
                        f"{self._name(other)}, and speed model {self.speeds.name!r} does not know what they do to each "
                        "other; give one with pair(workload, job, other), such as PairSpeeds."
                    )
                continue
            given = float(self.pair(self.workload, job.at, other))
            if not 0 < given < float("inf"):
                raise ForetraceError(
                    f"speed model {self.speeds.name!r} leaves job {self._name(job.at)} {given:g} of its speed beside "
                    f"{self._name(other)}; what is left is above 0."
                )
            factor *= given
        return factor

    def _name(self, at: int) -> str:
        return repr(str(self.workload.job[at]))

    # ---- waiting and why
    def note(self, job: JobState, what: str, why: str) -> None:
        """Write down a decision about a job that is watched."""
        if self.is_watched(job):
            self.log.append((self.now, job.at, what, why))

    def is_watched(self, job: JobState) -> bool:
        """Return whether decisions about the job are written down."""
        return self.watched is not None and self.watched in (-1, job.at)

    def because(self, job: JobState, cause: int) -> bool:
        """Let the job wait for this reason from now on, and return whether that is news."""
        if job.cause == cause:
            return False
        self.waited[job.at][job.cause] += self.now - job.cause_since
        job.cause, job.cause_since = cause, self.now
        return True

    def wait(self, job: JobState, cause: int) -> None:
        """Make the job a waiting one."""
        job.status = WAITING
        job.cause, job.cause_since = cause, self.now
        self.newly.append(job.at)
        self.waiting.add(job.at)
        self.wanting += self.claim(job, job.wanted)

    # ---- progress
    def settle(self, job: JobState) -> None:
        """Count what a running job did up to now."""
        now, mark = self.now, job.mark
        if now <= mark:
            return
        begun = max(mark, job.ready)
        if now > begun:
            job.remaining -= (now - begun) * job.rate
            job.talk += (now - begun) * job.talking
            job.dead += begun - mark
        else:
            job.dead += now - mark
        job.held += now - mark
        job.gpu_ns += float(now - mark) * job.part
        job.mark = now

    def review(self, job: JobState) -> None:
        """Set when to look at a running job again: its end, its lease's, or when it sinks into the next band."""
        at = min(job.finish_at, job.lease_end) if self.lease else job.finish_at
        if job.band < len(self.thresholds):
            left = self.thresholds[job.band] - job.gpu_ns
            at = min(at, job.mark + max(ceil(left / job.part), 1))
        self.schedule(job, at)

    def go(self, job: JobState, *, same: bool) -> None:
        """Start the job on its GPUs; `same` are those that it held a moment ago."""
        now = self.now
        job.status = RUNNING
        self.waiting.discard(job.at)
        self.running.add(job.at)
        self.used[job.tenant] += self.claim(job, len(job.gpus))
        self.waited[job.at][job.cause] += now - job.cause_since
        job.mark = now
        if self.lease:
            job.lease_end = now + self.lease
        if same:
            job.reclaims = False
            job.ready = max(job.ready, now)
        else:
            cost = job.restart if job.starts > 0 or self.costs.first_start else 0
            job.starts += 1
            job.stretch, job.stretch_dead = now, cost
            job.ready = job.fresh = now + cost
            job.last = now
            job.pace = [(job.fresh, job.rate)]
            if job.first < 0:
                job.first = now
        self.expect(job)

    def expect(self, job: JobState) -> None:
        """Note when a running job ends if nothing else happens."""
        job.finish_at = job.ready + max(ceil(job.remaining / job.rate), 0)
        self.review(job)

    def adapt(self) -> None:
        """Adapt the speeds of jobs whose partners came or went."""
        for at in sorted(self.disturbed):
            job = self.jobs[at]
            if job.status != RUNNING:
                continue
            self.settle(job)
            job.rate, job.talking, _, job.part = self.speed_on(job, job.gpus)
            job.ready = max(job.ready, self.now)
            job.pace.append((job.ready, job.rate))
            self.expect(job)
        self.disturbed.clear()

    # ---- ends of a stretch
    def close(self, job: JobState) -> None:
        """Write down the stretch that ends."""
        if self.record != "nothing":
            dead = min(job.stretch_dead, self.now - job.stretch)
            gpus = job.gpus if self.record == "devices" else []
            self.segments.append((job.at, job.stretch, self.now, len(job.gpus), job.level, dead, gpus))

    def release_reclaimable(self, job: JobState) -> None:
        """Release the GPUs of a job and queue it again; unless another job takes them, it may reclaim them."""
        self.settle(job)
        self.release(job)
        self.unschedule(job)
        job.reclaims = True
        for gpu in job.gpus:
            self.reclaimers.setdefault(gpu, []).append(job.at)
        if self.lease:
            job.last = self.now  # starvation counts from the end of a lease, also of one that is renewed (Dally)
        self.wait(job, Cause.OUTRANKED)

    def lose(self, job: JobState) -> None:
        """End the stretch of a job that can no longer reclaim its GPUs."""
        self.close(job)
        self.forget(job)
        job.reclaims = False
        job.preempted += 1
        job.last = self.now
        self.note(job, "preempt", preempted(len(job.gpus)))

    def forget(self, job: JobState) -> None:
        """Forget which GPUs the job could reclaim."""
        for gpu in job.gpus:
            if job.at in self.reclaimers.get(gpu, ()):
                self.reclaimers[gpu].remove(job.at)

    def finish(self, job: JobState) -> None:
        """End the job: all its work is done."""
        job.remaining = 0.0
        job.status, job.ended = DONE, self.now
        self.close(job)
        self.release(job)
        self.note(job, "finish", "all its work is done")

    def fail(self, job: JobState, why: str = "a machine under it broke") -> None:
        """Fail the job, as where a machine under it broke: what it did since its last checkpoint is lost."""
        self.settle(job)
        lost = max(self.now - job.fresh, 0)
        if self.checkpoint:
            lost %= self.checkpoint
        job.remaining = min(job.remaining + self._work_of(job, lost), job.work)
        job.dead += lost
        job.failed += 1
        self.close(job)
        self.release(job)
        self.unschedule(job)
        job.last = self.now
        self.note(job, "fail", f"{why}; {minutes(lost)} of work since its last checkpoint are lost")
        self.wait(job, Cause.UNDECIDED)

    def _work_of(self, job: JobState, span: int) -> float:
        """Return work done in the last `span` ns of this stretch, whose speed may have changed meanwhile."""
        done, end, start = 0.0, self.now, self.now - span
        for since, rate in reversed(job.pace):
            begin = max(since, start)
            if end > begin:
                done += (end - begin) * rate
                end = begin
        return done

    def seconds(self) -> str:
        """Return what is so now, for a sentence."""
        return f"{self.now / SECOND:,.9g} s"
