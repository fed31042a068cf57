"""Gavel's round mechanism: who gets which type of GPU in the next 360 seconds, given how much of each type he is due.

Source of the mechanism: stanford-futuredata/gavel, scheduler/scheduler.py, revision c4fa400 (OSDI'20, section 5).

A round: (1) if jobs came or went and 1,920 s have passed, the policy allots anew, and the time that everybody had so
far is reset; (2) per type, jobs and pairs of jobs are taken by (priority, deficit, allotment) while they fit, where
priority is the allotment over the share of the type's time had since the reset; (3) each runs whole steps for at most
360 s; (4) the clock jumps to the end of the longest, or to the next arrival where nothing ran.

Oddities of the original that decide its figures, and are the same here: a job that is done leaves its GPUs idle to the
end of the round; jobs with an allotment of zero run where GPUs are left over; a job that came after the last allotment
does not run, but counts as if it did; after an idle gap the time of the gap counts as run time of the next round; a job
on k GPUs with fewer than k steps left fails, and is given up after five rounds of it; a pair of jobs that share GPUs is
one entry beside its members. Only counts of GPUs per type matter, not which.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from foretrace.errors import ForetraceError
from foretrace.fleet.speeds.throughputs import ThroughputTable

ROUND = 360.0
BETWEEN_RESETS = 1920
GIVEN_UP = 5  # rounds in a row without a step
OFFERED = ("v100", "p100", "k80")  # types are filled in this order by policies that know speeds

Key = int | tuple[int, int]


@dataclass(slots=True, eq=False)
class Member:
    """One job while it is active; `rates` by type in order of the alphabet."""

    at: int
    model: str
    scale: int
    steps: float
    arrival: float
    weight: float
    done: float = 0
    failures: int = 0

    @property
    def remaining(self) -> float:
        return self.steps - self.done


@dataclass(slots=True, eq=False)
class Entry:
    """What can be run as one: a job, or two that share their GPUs. Lists are by type in order of the alphabet."""

    key: Key
    members: tuple[Member, ...]
    rates: Sequence[tuple[float, ...]]  # steps per second of each member
    had: list[float]
    deficit: list[float]
    due: list[float] | None = None  # None: came after the last allotment
    scale: int = 1
    runs_on: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        self.scale = self.members[0].scale
        self.runs_on = tuple(min(each) > 0 for each in self.rates)


@dataclass(slots=True)
class State:
    """What a policy may look at when it allots: `workers` by type in order of the alphabet, entries by key."""

    now: float
    types: tuple[str, ...]
    workers: tuple[int, ...]
    entries: dict[Key, Entry]

    @property
    def jobs(self) -> list[Entry]:
        """Entries of single jobs, first come first."""
        return [entry for key, entry in self.entries.items() if isinstance(key, int)]


class Allotter(Protocol):
    """A policy of Gavel. knows_speeds: types are filled in a fixed order, not shuffled each round. pairs: jobs may
    share GPUs. in_order: nothing runs that is not due (FIFO).
    """

    knows_speeds: bool
    pairs: bool
    in_order: bool

    def allot(self, state: State) -> Mapping[Key, Sequence[float]]:
        """Fractions of time by type for every entry that is to be considered; empty for no jobs."""
        ...


@dataclass(slots=True)
class Outcome:
    """What the rounds came to; lists by job in the order given."""

    start: list[float]
    end: list[float]  # nan: not finished, or given up
    held: list[float]  # seconds on GPUs
    shared: list[float]  # seconds of it with a partner
    starts: list[int]
    given_up: list[int] = field(default_factory=list)
    busy: float = 0.0  # GPU seconds as the original counts them, gaps included
    now: float = 0.0
    rounds: int = 0
    allotments: int = 0
    arrived: int = 0

    def hold(self, entry: Entry, seconds: float) -> None:
        """Add time on GPUs."""
        for job in entry.members:
            self.held[job.at] += seconds
            if len(entry.members) > 1:
                self.shared[job.at] += seconds

    def count_starts(self, running: Sequence[tuple[float, Entry, int, list[float]]], now: float, ran: set[int]) -> None:
        """A job starts where it did not run in the round before."""
        for _, entry, _, _ in running:
            for job in entry.members:
                if job.at not in ran:
                    self.starts[job.at] += 1
                    if self.starts[job.at] == 1:
                        self.start[job.at] = now


@dataclass(slots=True)
class Rounds:
    """One simulation. `window`: positions after which to stop, as the original does for jobs without end."""

    jobs: Sequence[Member]
    table: ThroughputTable
    workers: Mapping[str, int]
    policy: Allotter
    seed: int
    window: range | None = None
    round_s: float = ROUND
    types: tuple[str, ...] = ()
    entries: dict[Key, Entry] = field(default_factory=dict)
    total: list[float] = field(default_factory=list)  # time had on each type since the reset
    last_reset: float = 0.0
    changed: bool = True
    now: float = 0.0

    def run(self) -> Outcome:
        """Raises ForetraceError for jobs that no type can hold, and for those the table does not know."""
        self.types = tuple(sorted(kind for kind, count in self.workers.items() if count))
        counts = [self.workers[kind] for kind in self.types]
        self.total = [0.0] * len(self.types)
        n = len(self.jobs)
        out = Outcome([float("nan")] * n, [float("nan")] * n, [0.0] * n, [0.0] * n, [0] * n)
        if not n:
            return out
        shuffler = random.Random(self.seed + 5)
        left = set(self.window) if self.window is not None else set(range(n))
        active: dict[int, Member] = {}
        running: list[tuple[float, Entry, int, list[float]]] = []
        round_start, round_end, dispatched = 0.0, None, 0.0
        ran: set[int] = set()
        self.now = self.jobs[0].arrival
        while left:
            if self.window is None and out.arrived == n and not running:
                self.last_reset = 0.0
            if running:
                if round_end is not None:
                    round_start = round_end
                self.now = round_end = running[0][0]
            elif out.arrived < n:
                self.now = self.jobs[out.arrived].arrival
            for finish, entry, kind, steps in running:
                out.hold(entry, finish - dispatched)
                for job in self._finish(entry, kind, steps, finish, finish - round_start, out):
                    left.discard(job.at)
                    del active[job.at]
            while out.arrived < n and self.jobs[out.arrived].arrival <= self.now:
                job = self.jobs[out.arrived]
                self._arrive(job, active)
                active[job.at] = job
                out.arrived += 1
            if not left:
                break
            self._reset_if_due(counts, out)
            order = [self.types.index(kind) for kind in OFFERED if kind in self.types]
            if not self.policy.knows_speeds:
                shuffler.shuffle(order)
            chosen = self._choose(order, counts)
            running = [self._start(entry, kind) for kind, entry in chosen]
            running.sort(key=lambda each: (-each[0], len(each[1].members), each[1].key))
            dispatched = self.now
            out.count_starts(running, self.now, ran)
            ran = {job.at for _, entry in chosen for job in entry.members}
            out.rounds += 1
            if not running and out.arrived == n and not self.changed:
                raise ForetraceError(
                    f"{len(left)} jobs are never started by this policy on this cluster; take another policy or"
                    " cluster."
                )
        out.now = self.now
        return out

    def _arrive(self, job: Member, active: Mapping[int, Member]) -> None:
        kinds = range(len(self.types))
        credit = self.round_s / 2.0  # seconds that a job is taken to have had when it comes, and after each reset
        alone = [(self.table.rate(kind, job.model, job.scale),) for kind in self.types]
        self.entries[job.at] = Entry(job.at, (job,), alone, [credit for _ in kinds], [0.0 for _ in kinds])
        if self.policy.pairs:
            for other in active.values():
                if other.scale == job.scale:
                    both = [
                        self.table.pair_rates(kind, (other.model, other.scale), (job.model, job.scale))
                        for kind in self.types
                    ]
                    key = (other.at, job.at)
                    self.entries[key] = Entry(key, (other, job), both, [0.0 for _ in kinds], [0.0 for _ in kinds])
        self.changed = True

    def _reset_if_due(self, counts: list[int], out: Outcome) -> None:
        elapsed = self.now - self.last_reset
        if not self.changed or (elapsed < BETWEEN_RESETS and self.last_reset != 0):
            return
        credit = self.round_s / 2.0
        for kind in range(len(self.types)):
            total = 0.0
            for entry in self.entries.values():
                due = entry.due[kind] * elapsed if entry.due is not None else 0
                entry.deficit[kind] += due - (entry.had[kind] - credit)
                entry.had[kind] = credit
                total += credit
            self.total[kind] = total
        self.last_reset = self.now
        self.changed = False
        out.allotments += 1
        allotted = self.policy.allot(State(self.now, self.types, tuple(counts), self.entries))
        for key, entry in self.entries.items():
            given = allotted.get(key)
            entry.due = None if given is None else [float(each) for each in given]

    def _choose(self, order: list[int], counts: list[int]) -> list[tuple[int, Entry]]:
        """Entries that run in this round and on which type; those without an allotment take room but are not in it."""
        taken: set[int] = set()
        chosen: list[tuple[int, Entry]] = []
        rest = list(self.entries.values())
        for kind in order:
            left = counts[kind]
            if taken:
                rest = [entry for entry in rest if not any(job.at in taken for job in entry.members)]
            if not rest:
                break
            able = [entry for entry in rest if entry.runs_on[kind]]
            if not (self.policy.pairs or self.policy.in_order) and sum(entry.scale for entry in able) <= left:
                taken.update(entry.members[0].at for entry in able)
                chosen += [(kind, entry) for entry in able if entry.due is not None]
                continue
            for entry in self._by_claim(able, kind):
                if not left:
                    break
                if entry.scale <= left and not any(job.at in taken for job in entry.members):
                    left -= entry.scale
                    taken.update(job.at for job in entry.members)
                    if entry.due is not None:
                        chosen.append((kind, entry))
        return chosen

    def _by_claim(self, able: list[Entry], kind: int) -> Iterator[Entry]:
        """By (priority, deficit, allotment), largest first; ties as they came. Those that are due nothing come last,
        and are put in order only if somebody asks for them.
        """
        due = [(entry.due[kind] if entry.due is not None else 0.0, entry) for entry in able]
        some = [
            (self._priority(entry, kind, share), entry.deficit[kind], share, -at, entry)
            for at, (share, entry) in enumerate(due)
            if share != 0.0
        ]
        for *_, entry in sorted(some, key=lambda each: each[:4], reverse=True):
            yield entry
        if not self.policy.in_order:
            none = [(entry.deficit[kind], -at, entry) for at, (share, entry) in enumerate(due) if share == 0.0]
            for *_, entry in sorted(none, key=lambda each: each[:2], reverse=True):
                yield entry

    def _priority(self, entry: Entry, kind: int, due: float) -> float:
        """What is due, above zero, over the share of the type's time had."""
        share = entry.had[kind] / self.total[kind] if self.total[kind] else 0.0
        return due / share if share > 0 else due * 1e9

    def _start(self, entry: Entry, kind: int) -> tuple[float, Entry, int, list[float]]:
        """(end, entry, type, steps of each member) of one round."""
        if len(entry.members) == 1:  # nearly all; the same as below
            rate, job = entry.rates[kind][0], entry.members[0]
            most, left = int(rate * self.round_s), job.steps - job.done
            count = most if most <= left else left
            return self.now + count / rate, entry, kind, [count]
        end = self.now
        steps = []
        for job, rate in zip(entry.members, entry.rates[kind], strict=True):
            steps.append(min(int(rate * self.round_s), job.remaining))
            end = max(end, self.now + steps[-1] / rate)
        return end, entry, kind, steps

    def _finish(
        self, entry: Entry, kind: int, steps: list[float], end: float, seconds: float, out: Outcome
    ) -> list[Member]:
        """Account for a round; returns jobs that leave."""
        if entry.scale == 1 and len(entry.members) == 1 and seconds > 0 and steps[0] > 0:  # nearly all; as below
            job = entry.members[0]
            job.failures = 0
            job.done += steps[0]
            entry.had[kind] += seconds
            self.total[kind] += seconds
            out.busy += seconds
            if job.steps - job.done > 0:
                return []
            out.end[job.at] = end
            return self._leave([job])
        parts = [_parts(each, entry.scale) for each in steps]
        gone: list[Member] = []
        if seconds <= 0 or min(map(min, parts)) <= 0:
            self.changed = True
            if len(entry.members) == 1:
                job = entry.members[0]
                job.failures += 1
                if job.failures >= GIVEN_UP:
                    gone.append(job)
                    out.given_up.append(job.at)
        else:
            if len(entry.members) == 1:
                entry.members[0].failures = 0
            for job, each in zip(entry.members, parts, strict=True):
                job.done += sum(each)
                if job.remaining <= 0:
                    gone.append(job)
                    out.end[job.at] = end
            entry.had[kind] += seconds
            self.total[kind] += seconds
            out.busy += seconds * entry.scale
        return self._leave(gone)

    def _leave(self, gone: list[Member]) -> list[Member]:
        for job in gone:
            self.changed = True
            del self.entries[job.at]
            if self.policy.pairs:
                for key in [key for key in self.entries if not isinstance(key, int) and job.at in key]:
                    del self.entries[key]
        return gone


def _parts(steps: float, scale: int) -> list[float]:
    """Steps as shared out among the GPUs of a job: the last takes the rest."""
    if scale == 1:
        return [steps]
    each = steps // scale
    return [each] * (scale - 1) + [steps - sum([each] * (scale - 1))]
