"""Rounds of the Shockwave study: who runs when, by which clock, on which GPUs (see `shockwave.py` for the sources)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.workload import Float64, Int64
from reproductions.shockwave.policies import Active, Policy
from reproductions.shockwave.profile import Job

FOREVER = 10**9  # seconds after which something is wrong
Places = dict[int, tuple[int, ...]]  # job -> GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Constants of the mechanism, seconds; `stops`: a change of batch size ends the job's round."""

    round_s: float = 120.0
    restart_s: float = 24.0
    reset_s: float = 1000.0
    stops: bool = True
    gpus: int = 32
    per_node: int = 4
    strict: bool = False  # the first job that does not fit ends the round's choice (isolated_plus)
    ahead: bool = False  # rounds are decided half a round before, as on the real cluster


class Chooser(Protocol):
    """Who runs in a round."""

    def choose(self, now: float, index: int, fleet: Fleet) -> list[int]:
        """Positions of the jobs of round `index`, as things stand now; no more GPUs than there are."""
        ...

    def ran(self, job: int, seconds: float) -> None:
        """A job made progress for so long."""
        ...

    def stopped(self, job: int) -> None:
        """A job's process ended."""
        ...


@dataclass(slots=True, eq=False)
class Fleet:
    """What changes as rounds go by. jobs: profile of each; submit: (n,) s since the first round."""

    jobs: list[Job]
    gpus: Int64
    submit: Float64
    changed: bool = True  # jobs came, left or changed their batch size since shares were computed
    epoch: list[float] = field(default_factory=list)  # epochs done
    phase: list[int] = field(default_factory=list)
    present: list[int] = field(default_factory=list)  # positions, in order of submission

    def active(self, now: float, total: int) -> Active:
        """The jobs that are there as a policy sees them."""
        at = self.present
        phases = [(self.jobs[i], self.phase[i]) for i in at]
        steps = np.array([job.steps[p] for job, p in phases])
        left = np.array([max(self.jobs[i].ends[-1] - self.epoch[i], 1e-9) for i in at])
        return Active(
            job=np.array(at, np.int64),
            gpus=self.gpus[at].astype(float),
            elapsed_s=now - self.submit[at],
            steps=left * steps,
            speed=steps / np.array([job.epoch_s[p] for job, p in phases]),
            total=total,
        )

    def run(self, job: int, seconds: float, stops: bool) -> tuple[float, str]:
        """Let a job progress for so long at most; how long it did, and "", "change" or "end"."""
        profile, left = self.jobs[job], seconds
        while True:
            p = self.phase[job]
            need = (profile.ends[p] - self.epoch[job]) * profile.epoch_s[p]
            if need > left:
                self.epoch[job] += left / profile.epoch_s[p]
                return seconds, ""
            left -= need
            self.epoch[job] = float(profile.ends[p])
            if p + 1 == len(profile.ends):
                return seconds - left, "end"
            self.phase[job] = p + 1
            self.changed = True
            if stops:
                return seconds - left, "change"


class Shares:
    """Rounds by shares: who is furthest behind the share that the policy gives it goes first."""

    def __init__(self, policy: Policy, rules: Rules, n: int) -> None:
        self.policy, self.rules = policy, rules
        self.share, self.received, self.deficit = np.zeros(n), np.full(n, rules.round_s / 2), np.zeros(n)
        self.all_received, self.reset = 0.0, -1.0
        self.running: dict[int, float] = {}  # job with a process -> what that received since the last reset
        self.process = np.zeros(n)  # what the process received in all
        self.due = False  # shares changed since accounts were reset

    def choose(self, now: float, index: int, fleet: Fleet) -> list[int]:
        """See Chooser."""
        at = np.array(fleet.present, np.int64)
        if fleet.changed:
            self.share[at] = self.policy.share(fleet.active(now, self.rules.gpus))
            fleet.changed, self.due = False, True
        credit = self.rules.round_s / 2
        if self.due and (self.reset < 0 or now - self.reset >= self.rules.reset_s):
            since = now - max(self.reset, 0.0)
            self.deficit[at] += self.share[at] * since - (self.received[at] - credit)
            self.received[at] = credit
            self.all_received, self.reset, self.due = credit * len(at), now, False
            self.running = dict.fromkeys(self.running, 0.0)
        received, total = self.received.copy(), self.all_received
        for job, seconds in self.running.items():
            received[job] += seconds
            total += seconds
        priority = self.share[at] / (received[at] / total)
        order = np.lexsort((-self.share[at], -self.deficit[at], -priority))
        left, chosen = self.rules.gpus, []
        for job in at[order].tolist():
            if fleet.gpus[job] <= left:
                chosen.append(job)
                left -= int(fleet.gpus[job])
            elif self.rules.strict:
                break
        return chosen

    def ran(self, job: int, seconds: float) -> None:
        """See Chooser."""
        if self.rules.ahead:
            self.running[job] = self.running.get(job, 0.0) + seconds
            self.process[job] += seconds
        else:
            self.received[job] += seconds
            self.all_received += seconds

    def stopped(self, job: int) -> None:
        """See Chooser. All that the process received counts now, also what it received before the last reset."""
        if self.running.pop(job, None) is not None:
            self.received[job] += self.process[job]
            self.all_received += float(self.process[job])
        self.process[job] = 0.0


class Runs:
    """Processes on GPUs. rows: [job, start, end] of each stretch; end: (n,) completion, seconds, −1 not yet."""

    def __init__(self, fleet: Fleet, chooser: Chooser, rules: Rules) -> None:
        n = len(fleet.jobs)
        self.fleet, self.chooser, self.rules = fleet, chooser, rules
        self.end, self.rows = np.full(n, -1.0), [[0.0] * 3 for _ in range(0)]
        self.preempted, self.rounds, self.moved = np.zeros(n, np.int64), 0, 0
        self.now: Places = {}  # of this round
        self.ready: dict[int, float] = {}  # job that has a process -> when it progresses
        self.row: dict[int, int] = {}
        self.left: dict[int, float] = {}  # job -> when its process ended in this round

    def plan(self, now: float, index: int) -> Places:
        """GPUs of the jobs of a round: where they are if they can stay, else the first left, wide jobs first."""
        chosen = self.chooser.choose(now, index, self.fleet)
        gpus = self.fleet.gpus
        if int(gpus[chosen].sum()) > self.rules.gpus or len(set(chosen)) < len(chosen):
            raise AssertionError(f"round {index} gives out more than {self.rules.gpus} GPUs, or one job twice")
        taken, next_, places = set[int](), 0, dict[int, tuple[int, ...]]()
        for width in sorted({int(gpus[job]) for job in chosen}, reverse=True):
            alike = [job for job in chosen if gpus[job] == width]
            for job in alike:
                before = self.now.get(job)
                if before and taken.isdisjoint(before):
                    places[job] = before
                    taken.update(before)
            for job in alike:
                if job not in places:
                    mine: list[int] = []
                    while len(mine) < width:
                        if next_ not in taken:
                            mine.append(next_)
                        next_ += 1
                    places[job] = tuple(mine)
                    taken.update(mine)
        return places

    def begin(self, now: float, places: Places) -> None:
        """Start of a round: processes without GPUs end, jobs without a process get one."""
        for job in [job for job in self.ready if job not in places]:
            self._stop(job, now)
            self.preempted[job] += 1
        for job, mine in places.items():
            if self.end[job] >= 0:
                continue  # ended after the round was decided: its GPUs stay idle
            if job in self.ready and self.rules.ahead and self.now.get(job, mine) != mine:
                self._stop(job, now)
                self.moved += 1
            if job not in self.ready:
                self._start(job, now)
        self.now, self.left = places, {}
        self.rounds += 1

    def _start(self, job: int, now: float) -> None:
        self.ready[job] = now + self.rules.restart_s
        self.row[job] = len(self.rows)
        self.rows.append([job, now, now])

    def _stop(self, job: int, now: float) -> None:
        self.rows[self.row[job]][2] = self.left[job] = now
        del self.ready[job]
        self.chooser.stopped(job)

    def advance(self, since: float, to: float, jobs: list[int] | None = None) -> None:
        """Let processes progress from one time to another."""
        for job in list(self.ready) if jobs is None else jobs:
            begin = max(since, self.ready[job])
            if begin >= to:
                continue
            ran, why = self.fleet.run(job, to - begin, self.rules.stops)
            self.chooser.ran(job, ran)
            if why:
                self._stop(job, begin + ran)
            if why == "end":
                self.end[job] = begin + ran
                self.fleet.present.remove(job)
                self.fleet.changed = True

    def second_half(self, since: float, to: float, coming: Places) -> None:
        """As on the real cluster, where processes of the coming round wait for their nodes' GPUs from its decision on.

        A job that stays on its GPUs goes on. Any other of the coming round starts as soon as GPUs of its nodes are
        free, in the order of dispatch (wide first), and pays its restart then.
        """
        stays = {job for job, mine in coming.items() if job in self.ready and self.now.get(job) == mine}
        alive = set(self.ready)
        self.advance(since, to)
        node = self.rules.per_node
        free: dict[int, list[float]] = {}
        held = {gpu: job for job, mine in self.now.items() for gpu in mine}
        for gpu in range(self.rules.gpus):
            job = held.get(gpu)
            if job is None or job not in alive:
                free.setdefault(gpu // node, []).append(since)
            elif job not in self.ready:
                free.setdefault(gpu // node, []).append(self.left[job])
            elif job not in stays:
                free.setdefault(gpu // node, []).append(to)
        for each in free.values():
            each.sort(reverse=True)
        for job, mine in coming.items():
            if job in stays:
                continue
            at = since
            for gpu in mine:
                pool = free.get(gpu // node)
                at = max(at, pool.pop() if pool else to)
            if self.end[job] >= 0 or job in self.ready:
                continue
            at = max(at, self.left.get(job, at))
            if at < to:
                self.now.pop(job, None)
                self._start(job, at)
                self.advance(at, to, [job])
                if self.end[job] >= 0:  # noticed when its round begins
                    self.end[job] = to


def simulate(fleet: Fleet, chooser: Chooser, rules: Rules, queue: list[int]) -> Runs:
    """All rounds until the jobs of `queue` (positions in order of submission) are done; the first begins at 0."""
    runs = Runs(fleet, chooser, rules)
    at, index, lead = 0, 0, rules.round_s / 2 if rules.ahead else 0.0
    coming: Places = {}

    def arrive(now: float) -> None:
        nonlocal at
        while at < len(queue) and fleet.submit[queue[at]] <= now:
            fleet.present.append(queue[at])
            at, fleet.changed = at + 1, True

    while at < len(queue) or fleet.present:
        now = index * rules.round_s
        if index == 0 or not rules.ahead:
            arrive(now)
            coming = runs.plan(now, index) if fleet.present else {}
        runs.begin(now, coming)
        end = now + rules.round_s
        runs.advance(now, end - lead)
        if rules.ahead:
            arrive(end - lead)
            coming = runs.plan(end - lead, index + 1) if fleet.present else {}
            runs.second_half(end - lead, end, coming)
        index += 1
        if not fleet.present and not runs.ready and at < len(queue):  # boundaries stay where they are
            index = max(index, int(fleet.submit[queue[at]] // rules.round_s) - 1)
        if now > FOREVER:
            raise ForetraceError("jobs are not done after thirty years; give the cluster more GPUs.")
    return runs
