"""The event loops of Tiresias' simulator; what each policy does, and what is odd about it, stands in `tiresias`.

Source of the mechanism: SymbioticLab/Tiresias, simulator/run_sim.py, revision 959f9b0 (NSDI'19).
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal

from foretrace.errors import ForetraceError
from reproductions.tiresias.cluster import ENDED, NEVER, PENDING, RUNNING, Job, Scheme

LIMITS = (3250, 7200)  # of the first two queues; the third has none
HORIZON = 3250  # seconds (GPU seconds) over which the Gittins rank looks ahead


def in_order(jobs: list[Job], scheme: Scheme, skip: bool) -> int:
    """Fifo and fjf. Returns the number of moments at which something happened."""
    starts: dict[int, list[Job]] = {}
    ends: dict[int, list[Job]] = {}
    for job in jobs:
        starts.setdefault(job.submit, []).append(job)
    times = sorted(starts)
    pending: list[Job] = []
    events = 0
    while times:
        now = heapq.heappop(times)
        while times and times[0] == now:
            heapq.heappop(times)
        events += 1
        for job in ends.pop(now, ()):
            scheme.release(job)
            job.state, job.end = ENDED, now
        pending += starts.pop(now, ())
        left = []
        blocked = False
        for job in pending:
            if blocked or scheme.free() <= 0 or not scheme.take(job):
                blocked = blocked or not skip or scheme.free() <= 0
                left.append(job)
                continue
            job.state, job.start, job.pending, job.total = RUNNING, now, now - job.submit, job.duration
            ends.setdefault(now + job.duration, []).append(job)
            heapq.heappush(times, now + job.duration)
        pending = left
    return events


def _switch(scheduled: list[Job], preempted: list[Job], now: int) -> None:
    for job in preempted:
        job.state = PENDING
        job.preempted += 1
    for job in scheduled:
        job.state = RUNNING
        job.resumed += 1
        job.start = min(job.start, now)


def shortest(jobs: list[Job], scheme: Scheme, key: Callable[[Job], float], samples: Samples | None) -> int:
    """Sjf and the family of shortest. Returns the number of events."""
    active: list[Job] = []
    arrived, events, finish = 0, 0, NEVER
    newest: Job | None = None
    while arrived < len(jobs) or active:
        now = min(finish, jobs[arrived].submit if arrived < len(jobs) else NEVER)
        if now == NEVER:
            break  # what is left never fits
        events += 1
        if now == finish:
            for job in [each for each in active if each.state == RUNNING and each.checked + each.remaining == now]:
                scheme.release(job)
                job.state, job.end, job.total = ENDED, now, job.duration
            active = [each for each in active if each.state != ENDED]
        while arrived < len(jobs) and jobs[arrived].submit == now:
            newest = jobs[arrived]
            newest.checked = now
            if samples is not None:
                newest.expected = samples.expected(0)
            active.append(newest)
            arrived += 1
        for job in active:
            passed, job.checked = now - job.checked, now
            if job.state == RUNNING:
                job.total += passed
                if samples is not None and newest is not None:
                    newest.expected = samples.expected(job.total)
            else:
                job.pending += passed
        active.sort(key=key)
        scheme.empty()
        scheduled, preempted = [], []
        finish = NEVER
        for job in active:
            fits = scheme.take(job)
            if fits:
                finish = min(finish, now + job.remaining)
            if fits and job.state == PENDING:
                scheduled.append(job)
            elif not fits and job.state == RUNNING:
                preempted.append(job)
        _switch(scheduled, preempted, now)
    return events


@dataclass(slots=True)
class Queues:
    """dlas and its variants."""

    jobs: list[Job]
    gpus: int
    by_gpu: bool
    promote: float  # 0: never
    samples: Samples | None  # ranks by Gittins where given
    ceil: bool  # round the time to a crossing up (Python 3) instead of down
    early: int = 0
    stale: int = 0
    active: list[Job] = field(default_factory=list)
    queues: tuple[list[Job], list[Job], list[Job]] = field(default_factory=lambda: ([], [], []))

    def run(self) -> int:
        self._check()
        arrivals: list[tuple[int, list[Job]]] = []
        for job in self.jobs:
            if not arrivals or arrivals[-1][0] != job.submit:
                arrivals.append((job.submit, []))
            arrivals[-1][1].append(job)
        kept: list[Job] = []  # completions remembered with the next arrival
        ends: list[Job] = []
        arrived, events, finish, crossing = 0, 0, NEVER, NEVER
        while arrived < len(arrivals) or self.active:
            start = arrivals[arrived][0] if arrived < len(arrivals) else NEVER
            if start == finish == NEVER:
                break  # what is left never fits
            if start == finish:
                kept = ends
            now = min(start, finish)
            if now > crossing:
                now = crossing
            else:
                for job in ends if finish < start else kept:
                    self._end(job, now)
                if start <= finish:
                    for job in arrivals[arrived][1]:
                        job.checked = now
                        self.active.append(job)
                        self.queues[0].append(job)
                    arrived += 1
                    kept = []
            events += 1
            self._account(now)
            self._give(now)
            finish = min((now + job.remaining for job in self.active if job.state == RUNNING), default=NEVER)
            ends = [job for job in self.active if job.state == RUNNING and now + job.remaining == finish]
            crossing = min((self._crossing(job, now) for job in self.active), default=NEVER)
        return events

    def _check(self) -> None:
        if not self.by_gpu or self.ceil:
            return
        for job in self.jobs:
            if LIMITS[0] < job.gpus <= self.gpus:
                raise ForetraceError(
                    f"a job asks for {job.gpus} GPUs, more than the first queue's limit of {LIMITS[0]} GPU"
                    " seconds, on which the published program never ends; leave it out or set the option python=3."
                )

    def _end(self, job: Job, now: int) -> None:
        if job.state == ENDED:
            self.stale += 1
            return
        self.early += job.state != RUNNING or job.checked + job.remaining != now
        if job.state == RUNNING:
            job.total += now - job.checked
        job.state, job.end = ENDED, now
        self.active.remove(job)
        self.queues[job.queue].remove(job)

    def _account(self, now: int) -> None:
        for job in self.active:
            passed, job.checked = now - job.checked, now
            if job.state == RUNNING:
                job.total += passed
                job.executed += passed
                if job.queue < 2 and self._attained(job) >= LIMITS[job.queue]:
                    self._move(job, job.queue + 1)
            else:
                job.pending += passed
                if job.executed > 0:
                    job.waited += passed
                if self._may_rise(job) and job.waited >= int(job.executed * self.promote):
                    job.executed = job.waited = 0
                    self._move(job, 0)
                    job.promoted += 1
            if self.samples is not None:
                job.rank = self.samples.rank(self._attained(job))

    def _attained(self, job: Job) -> int:
        return job.executed * job.gpus if self.by_gpu else job.executed

    def _may_rise(self, job: Job) -> bool:
        return self.promote > 0 and job.queue > 0 and job.total > 0 and job.executed > 0

    def _move(self, job: Job, queue: int) -> None:
        self.queues[job.queue].remove(job)
        self.queues[queue].append(job)
        job.queue = queue

    def _give(self, now: int) -> None:
        left = self.gpus
        scheduled, preempted = [], []
        for queue in self.queues:
            if self.samples is not None:
                queue.sort(key=lambda job: (job.rank, -job.submit), reverse=True)
            for job in queue:
                if left >= job.gpus:
                    left -= job.gpus
                    if job.state == PENDING:
                        scheduled.append(job)
                elif job.state == RUNNING:
                    preempted.append(job)
        _switch(scheduled, preempted, now)
        for queue in self.queues:
            queue.sort(key=lambda job: job.state == PENDING)

    def _crossing(self, job: Job, now: int) -> int:
        """When this job next changes its queue, as the original reckons (executed seconds against GPU seconds)."""
        if job.state == RUNNING and job.queue < 2:
            left = LIMITS[job.queue] - job.executed
            if not self.by_gpu:
                return now + left
            return now + (-(-left // job.gpus) if self.ceil else left // job.gpus)
        if job.state == PENDING and self._may_rise(job):
            wait = int(job.executed * self.promote - job.waited)
            return now + wait if wait > 0 else NEVER
        return NEVER


class Samples:
    """GPU times of past jobs and what they let expect of one that has attained so much."""

    def __init__(self, seconds: list[int], python3: bool) -> None:
        self.seconds = sorted(seconds)
        self.python3 = python3
        self.ranks = [self._gittins(value - 1) for value in self.seconds] + [0.0]

    def _round(self, value: float, digits: int) -> float:
        if self.python3:
            return round(value, digits)
        return float(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))

    def _gittins(self, attained: int) -> float:
        """Chance to end within the horizon over the expected service until then, x 10^6, as rounded by the original."""
        data, n = self.seconds, len(self.seconds)
        first = bisect_right(data, attained)
        ahead = attained + HORIZON
        until = n - 1 if ahead > data[-1] - 1 else bisect_right(data, ahead)
        chance = self._round((until - first) / (n - first), 5)
        service = sum(data[first:until]) + HORIZON * (n - until)
        expected = self._round(service / (n - first), 5) if self.python3 else float(service // (n - first))
        return self._round(chance * 1000000 / expected, 4)

    def rank(self, attained: int) -> float:
        return 0.0 if attained > self.seconds[-1] else self.ranks[bisect_right(self.seconds, attained)]

    def expected(self, attained: int) -> float:
        """Mean of the longer samples but the last; the last where only it is longer."""
        n = len(self.seconds)
        first = bisect_right(self.seconds, attained)
        if first == n - 1:
            return float(self.seconds[first])
        if first == n:
            return 0.0
        part = self.seconds[first : n - 1]
        return self._round(sum(part) * 1.0 / (n - 1 - first), 2)
