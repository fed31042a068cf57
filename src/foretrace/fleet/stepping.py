"""The engine in plain Python: any policy, elastic jobs, several jobs on a GPU; with rules alone equal to `engine`.

One moment after the other: all that happens at it (ends, failures and repairs, ends of leases, submissions), then one
decision: who makes room (`preempt`), who is served next (`order`), who may be tried (`admit`), and where (`place`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet import reasons
from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.moment.rules import Rules
from foretrace.fleet.moment.state import RUNNING, WAITING, JobState, SteppingState
from foretrace.fleet.moment.view import View
from foretrace.fleet.policy import Policy, Wait
from foretrace.fleet.result import Cause, Decision, FleetResult
from foretrace.fleet.setup import NEVER, Engine
from foretrace.fleet.workload import SECOND, Int64, Workload

__all__ = ["Stepping", "View"]

_BOOKS = (
    "first", "ended", "held", "dead", "talk", "gpu_ns", "starts", "preempted", "failed", "cause", "cause_since", "mark",
    "ready", "talking", "part", "level", "stretch", "stretch_dead",
)  # fmt: skip
_IDLE_REVIEWS = 10_000  # so many in a row with nothing else ahead are taken for a policy that waits forever


class Stepping(Engine):
    """One simulation, step by step. `run(until_s=...)` continues from where it stopped.

    Arguments as `simulate` has them. Elastic jobs (min_gpus < max_gpus) run as fast as `speeds` says of so many GPUs;
    without a model, in proportion to them. Jobs may be on one GPU together while their shares sum to 1 at most, or by
    twos and more where the policy says so by options["sharers"]; the model's `pair` says what they do to each other.
    """

    policy: Policy

    def __init__(self, workload: Workload, cluster: ClusterTree, policy: Policy, **options: Any) -> None:
        super().__init__(workload, cluster, policy, **options)
        self.state = SteppingState(self)
        self.rules = Rules(self.state)
        self.view = View(self.state, self.rules)
        self._failed = 0  # failures and repairs that happened
        self._come = 0  # jobs that were submitted
        self._reviews = policy.overrides("review")
        self._preempts, self._ends = policy.overrides("preempt"), policy.overrides("end")
        self._requeues = policy.overrides("requeue")
        self._look_at: int | None = None
        self._idle = 0

    @property
    def now_s(self) -> float:
        """Time of the last event in seconds after the workload's zero."""
        return float(self.state.now) * 1e-9

    @property
    def finished(self) -> bool:
        """Whether nothing is left to happen."""
        return self.state.next_event() == NEVER and self._come == len(self.workload)

    @property
    def looks_again_s(self) -> float | None:
        """When a running job's or a timer's event is due, or the policy wants to decide again; None: never."""
        at = min(self.state.next_event(), NEVER if self._look_at is None else self._look_at)
        return None if at == NEVER else at * 1e-9

    def play(self, until: int, events: int) -> bool:
        """See `Engine.play`."""
        state = self.state
        while True:
            now = self._next()
            if now == NEVER:
                return False
            if now > until or state.events >= events:
                return True
            if now > self.foreseen:
                self.foresee()
                continue
            state.now = now
            self._happen()
            self._decide()
            if self._reviews:
                self._ask_when()

    def _next(self) -> int:
        """Return when something happens next."""
        now = self.state.next_event()
        if self._come < len(self.workload):
            now = min(now, int(self.workload.submit_ns[self._come]))
        # failures, repairs and looks of the policy matter while somebody runs, waits or comes
        busy = now < NEVER or bool(self.state.waiting)
        if busy and self._failed < len(self.failures[0]):
            now = min(now, int(self.failures[0][self._failed]))
        if busy and self._look_at is not None:
            now = min(now, self._look_at)
        return now

    def _ask_when(self) -> None:
        """Ask when the policy wants to look again."""
        state = self.state
        self._look_at = self.policy.review(self.view)
        who = f"policy {self.policy.name!r} at {state.seconds()}"
        if self._look_at is not None and self._look_at <= state.now:
            raise ForetraceError(
                f"{who} wants to decide again at {self._look_at} ns, which is not later; review gives a time after "
                "view.now_ns, or None."
            )
        ahead = state.next_event() < NEVER or self._come < len(self.workload) or self._failed < len(self.failures[0])
        self._idle = 0 if ahead or self._look_at is None else self._idle + 1
        if self._idle > _IDLE_REVIEWS:
            raise ForetraceError(
                f"{who} has looked {self._idle:,} times at {len(state.waiting)} waiting jobs and nobody runs or comes; "
                f"let it place them (first {self._name(min(state.waiting, default=0))}) or return None from review."
            )

    # ---- everything that happens at one moment
    def _happen(self) -> None:
        state, now = self.state, self.state.now
        expired = []
        while state.next_event() == now:
            job = state.jobs[state.heap[0][1]]
            state.unschedule(job)
            state.events += 1
            if job.status != RUNNING:
                continue  # a timer of a waiting job: the decision below looks at it again
            state.settle(job)
            if job.finish_at == now:
                state.finish(job)
                continue
            # half a nanosecond of service: the event was scheduled at a whole one
            if job.band < len(state.thresholds) and job.gpu_ns >= state.thresholds[job.band] - 0.5 * job.part:
                job.band += 1
            if state.lease and job.lease_end == now:
                expired.append(job)
            else:
                state.review(job)
        self._break_and_repair()
        while self._come < len(state.jobs) and state.jobs[self._come].submit == now:
            job = state.jobs[self._come]
            self._come += 1
            state.events += 1
            if not state.never[job.at]:
                job.last = now
                state.wait(job, Cause.UNDECIDED)
        bidding = bool(state.waiting)
        for job in expired:
            if job.status != RUNNING:
                continue
            if bidding:
                state.release_reclaimable(job)
            else:
                job.lease_end = now + state.lease
                state.review(job)
        state.adapt()

    def _break_and_repair(self) -> None:
        state = self.state
        times, units, ups = self.failures
        while self._failed < len(times) and times[self._failed] == state.now:
            unit, up = int(units[self._failed]), bool(ups[self._failed])
            self._failed += 1
            state.events += 1
            for gpu in range(*self.cluster.starts[0][unit : unit + 2].tolist()):
                if up:
                    if state.broken[gpu]:
                        state.broken[gpu] = False
                        state.count(gpu, 1)
                    continue
                for at in list(state.owners[gpu]):
                    state.fail(state.jobs[at])
                if not state.broken[gpu]:
                    state.broken[gpu] = True
                    state.count(gpu, -1)

    # ---- one decision
    def _decide(self) -> None:
        state = self.state
        self.rules.begin()
        for at in self.policy.end(self.view) if self._ends else ():
            self._expect(at, RUNNING, "ends")
            state.settle(state.jobs[at])
            state.unschedule(state.jobs[at])
            state.finish(state.jobs[at])
        for at in self.policy.requeue(self.view) if self._requeues else ():
            self._expect(at, RUNNING, "requeues")
            state.fail(state.jobs[at], "it was sent back to the queue")
        if state.waiting or (self._preempts and state.running):
            for at in [int(each) for each in self.policy.preempt(self.view)]:
                self._expect(at, RUNNING, "preempts")
                state.release_reclaimable(state.jobs[at])
        if state.waiting:
            self._offer()
            self._name_causes()
        state.newly.clear()
        if self.policy.migrate:
            self._tighten()
        state.adapt()

    def _offer(self) -> None:
        """Offer what is free to the waiting in their order."""
        state, policy, rules = self.state, self.policy, self.rules
        rules.line_up()
        for at in [int(each) for each in policy.order(self.view, self.view.waiting)]:
            full = state.free_gpus == 0 and not state.sharing and not policy.makes_room
            if full or rules.nobody_fits():
                if policy.admit_rule == "block" and rules.blocked is None:  # the first in line
                    self._refuse(state.jobs[at], Wait(Cause.FULL))
                break
            self._expect(at, WAITING, "offers GPUs to")
            job = state.jobs[at]
            answer: Wait | Sequence[int] | Int64 | None = policy.admit(self.view, at)
            if isinstance(answer, Wait) and answer.cause == Cause.BEHIND:
                break  # nobody passes
            if answer is None:
                fewest = job.fewest if policy.resizes else job.wanted
                if state.over_quota(job, fewest):
                    answer = Wait(Cause.QUOTA)
                else:
                    answer = policy.place(self.view, at)
                    if isinstance(answer, Wait):
                        rules.refused(job, answer)
            if not isinstance(answer, Wait):
                self._start(job, [int(each) for each in answer])
                rules.started(job)
                continue
            self._refuse(job, answer)
            if rules.blocked is None and not (policy.admit_rule == "backfill" and state.over_quota(job, job.wanted)):
                rules.blocked = job  # where the tenant holds too much, a reservation of GPUs would not help

    def _refuse(self, job: JobState, why: Wait) -> None:
        state = self.state
        if state.because(job, why.cause) and state.is_watched(job):
            words = why.words or reasons.waiting(why.cause, job.wanted, self.cluster, value=state.free_gpus)
            state.note(job, "wait", words)
        if why.until_ns is not None and why.until_ns != job.when:
            if why.until_ns <= state.now:
                raise self._error(job.at, f"lets wait until {why.until_ns} ns, which is not later; give a later time")
            state.schedule(job, why.until_ns)

    def _start(self, job: JobState, gpus: list[int]) -> None:
        """Give the job these GPUs, or give it back those that it had."""
        state = self.state
        self._check_gpus(job, gpus)
        state.wanting -= state.claim(job, job.wanted)
        if job.reclaims and set(gpus) == set(job.gpus):
            state.forget(job)
            state.take(job, job.gpus)
            if state.sharing:
                state.disturbed.add(job.at)  # its partners may be others now
            state.go(job, same=True)
            return
        if job.reclaims:
            state.lose(job)
        state.take(job, gpus)
        job.rate, job.talking, job.level, job.part = state.speed_on(job, gpus)
        self.rules.timers.remember(job, job.level)
        state.unschedule(job)
        if state.is_watched(job):
            state.note(job, "start", reasons.started(len(gpus), self.cluster, level=job.level, gpu=gpus[0]))
        state.go(job, same=False)

    def _check_gpus(self, job: JobState, gpus: list[int]) -> None:
        """Raise ForetraceError where the job cannot have these."""
        state = self.state
        fewest, most = (job.fewest, job.most) if self.policy.resizes else (job.wanted, job.wanted)
        if not fewest <= len(gpus) <= most:
            asks = f"{fewest} to {most}" if fewest < most else f"{fewest}"
            raise self._error(job.at, f"places it on {len(gpus)} GPUs and it runs on {asks}; give it as many or a Wait")
        if len(set(gpus)) < len(gpus):
            raise self._error(job.at, f"gives it a GPU twice ({sorted(gpus)[:8]}); name each once")
        if state.over_quota(job, len(gpus)):
            raise self._error(
                job.at, f"gives its tenant more than its quota with {len(gpus)} GPUs; see view.quota_left"
            )
        for gpu in gpus:
            if not 0 <= gpu < self.cluster.gpus:
                raise self._error(job.at, f"gives it GPU {gpu}; the cluster has GPUs 0 to {self.cluster.gpus - 1}")
            if state.broken[gpu]:
                raise self._error(job.at, f"gives it GPU {gpu}, which is broken; see view.may_use")
            if not state.has_room(gpu, job):
                holder = self._name(state.owners[gpu][0])
                raise self._error(job.at, f"gives it GPU {gpu}, which job {holder} holds; preempt that job first")
            if not state.allowed[job.demand][state.kind_of[gpu]]:
                raise self._error(job.at, f"gives it GPU {gpu}, a kind that it may not use; see view.may_use")
            if state.kind_of[gpu] != state.kind_of[gpus[0]]:
                raise self._error(job.at, f"mixes kinds of GPUs ({gpus[0]} and {gpu}); a gang runs on one kind")

    def _name_causes(self) -> None:
        """Name causes for jobs that the offer did not reach; those that could reclaim GPUs no longer can."""
        state = self.state
        for at in state.newly:
            job = state.jobs[at]
            if job.status != WAITING:
                continue
            if job.reclaims:
                state.lose(job)
            if job.cause == Cause.UNDECIDED and state.now == job.cause_since:
                self._refuse(job, Wait(Cause.BEHIND if self.policy.admit_rule == "block" else Cause.FULL))

    def _tighten(self) -> None:
        """Move running jobs to a tighter unit where one is free and they finish sooner."""
        state = self.state
        for at in sorted(state.running):
            job = state.jobs[at]
            count = len(job.gpus)
            shared = state.sharing and (job.share < 1 or any(len(state.owners[gpu]) > 1 for gpu in job.gpus))
            if shared or job.level == 0 or count > state.capacity[job.demand][job.level - 1]:
                continue
            _, gpus = self.rules.find([state.kind_of[job.gpus[0]]], range(job.level), count)
            if not gpus:
                continue
            state.settle(job)
            rate, talking, level, part = state.speed_on(job, gpus)
            ends = max(state.now, job.ready) + job.restart + job.remaining / rate
            if ends < float(job.finish_at):
                state.close(job)
                state.release(job)
                state.take(job, gpus)
                job.rate, job.talking, job.level, job.part = rate, talking, level, part
                job.cause_since = state.now
                state.go(job, same=False)
                if state.is_watched(job):
                    unit = self.cluster.levels[level]
                    words = f"a {unit} became free that holds all its {count} GPUs, and it ends sooner there"
                    state.note(job, "migrate", words)

    # ---- answers
    def devices_of(self, job: int) -> list[int]:
        """Return GPUs that a job holds now, in ascending order."""
        found = self.state.jobs[job]
        return sorted(found.gpus) if found.status == RUNNING else []

    def result(self) -> FleetResult:
        """Return what happened so far."""
        state, rows = self.state, self.state.segments
        jobs = {name: np.array([getattr(job, name) for job in state.jobs]) for name in _BOOKS}
        waiting, running = np.array(sorted(state.waiting), np.int64), np.array(sorted(state.running), np.int64)
        decisions = [
            Decision(time_s=time / SECOND, job=str(self.workload.job[at]), what=what, why=why)
            for time, at, what, why in state.log
        ]
        return self.answer(
            jobs,
            np.array(state.waited, np.int64),
            waiting=waiting,
            running=running,
            part=jobs["part"],
            now=state.now,
            engine="stepping",
            never=state.never,
            ended=(
                np.array([row[:6] for row in rows], np.int64).reshape(-1, 6).T,
                np.array([len(row[6]) for row in rows], np.int64),
                np.array([gpu for row in rows for gpu in row[6]], np.int64),
            ),
            decisions=tuple(decisions),
            events=state.events,
        )

    # ---- mistakes of a policy
    def _expect(self, at: int, status: str, verb: str) -> None:
        if not 0 <= at < len(self.workload):
            raise ForetraceError(
                f"policy {self.policy.name!r} at {self.state.seconds()} {verb} job number {at}; there are "
                f"{len(self.workload):,} jobs, counted from 0."
            )
        found = self.state.jobs[at].status
        if found != status:
            raise self._error(at, f"{verb} it, and it is not {status} but {found}; see view.{status}")

    def _error(self, at: int, what: str) -> ForetraceError:
        return ForetraceError(f"policy {self.policy.name!r} at {self.state.seconds()}, job {self._name(at)}: {what}.")

    def _name(self, at: int) -> str:
        return repr(str(self.workload.job[at]))
