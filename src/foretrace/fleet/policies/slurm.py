"""Deciding as Slurm does (22.05): its two schedulers at their intervals, time limits, and its choice of nodes.

Nothing is decided when a batch job is submitted or ends; that only requests a pass of the main scheduler. slurmctld's
background thread makes one (controller.c: _slurmctld_background wakes every second) once `batch_sched_delay` seconds
have passed since the last, and every `sched_interval` in any case. The main scheduler (job_scheduler.c: _schedule) goes
in order of priority and stops at the first job that does not fit. sched/backfill (backfill.c) looks at the whole queue
every `bf_interval`: each job gets the earliest time at which it fits by the time limits of those that run, and whole
nodes are reserved for it from then on, to whole `bf_resolution`; a job starts if that time is now. A limit is a whole
number of minutes, and all that Slurm knows. `slurm_nodes` chooses the nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from weakref import WeakKeyDictionary

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.policies.slurm_nodes import NodeRequest, NodeTable
from foretrace.fleet.policy import Policy, Wait
from foretrace.fleet.result import Cause
from foretrace.fleet.workload import SECOND, Float64, Int64, Workload, nanoseconds
from foretrace.names import near

if TYPE_CHECKING:
    from foretrace.fleet.cluster import ClusterTree
    from foretrace.fleet.stepping import View

BACKGROUND_NS = 1_005_000_000  # the background thread sleeps ten times 0.1 s, and works a little
LIMIT_CHECK_NS = 30 * SECOND  # how often limits are enforced (slurmctld.h: PERIODIC_TIMEOUT)
PRIORITY_CALC_NS = 60 * SECOND  # PriorityCalcPeriod, the least there is
REQUEUE_S = 121  # a job that a failure sent back to the queue is held so long (credentials have to expire)
_FIRST_WINDOW_S = 30  # ends of jobs this close are tested together, the next ones twice as wide (job_test.c)
_MOST_AT_ONCE = 200
DEFAULTS = ("yes", "defaults")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerParameters:
    """Those of slurm.conf(5) that are simulated, with Slurm's defaults: seconds, but bf_window in minutes."""

    sched_interval: int = 60
    batch_sched_delay: int = 3
    bf_interval: int = 30
    bf_window: int = 1440
    bf_max_job_test: int = 500
    bf_resolution: int = 60
    max_switch_wait: int = 300

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `bf_interval=5,bf_resolution=1`; "yes": all as by default. Raises ForetraceError."""
        known = [each.name for each in fields(cls)]
        given: dict[str, int] = {}
        for word in text.split(",") if text not in DEFAULTS else ():
            key, _, value = word.partition("=")
            if key not in known:
                close = near(key, known)
                hint = f"did you mean {close[0]}?" if close else f"those that are simulated: {', '.join(known)}."
                raise ForetraceError(f"`slurm`: {key!r} is no SchedulerParameters that is simulated; {hint}")
            least = 0 if key == "batch_sched_delay" else 1
            if not (value.isdecimal() and least <= int(value) <= 10**7):
                raise ForetraceError(f"`slurm`: {key} must be a whole number from {least} up, got {value!r}.")
            given[key] = int(value)
        return cls(**given)

    def items(self) -> dict[str, int]:
        """By the names of slurm.conf."""
        return {each.name: int(getattr(self, each.name)) for each in fields(self)}


def limits_min(workload: Workload) -> Int64:
    """(n,) time limits in whole minutes, as sbatch rounds them up; where none is stated, above the true run time."""
    stated = np.where(np.isnan(workload.estimate_s), workload.work_s + 5, workload.estimate_s)
    return np.maximum(np.ceil(stated / 60), 1).astype(np.int64)


class PlannedNodes(NamedTuple):
    """Nodes that are not reserved from one time to another (Unix seconds)."""

    begin: int
    end: int
    nodes: Any


@dataclass(slots=True)
class SlurmMemory:
    """What the scheduler remembers of one simulation; times in Unix seconds."""

    table: NodeTable
    limits_s: list[int]
    epoch: int
    last: int  # the main scheduler's last pass, ns
    full: int  # its last one in any case, ns
    next: int | None = None  # its next pass, ns
    asked: bool = False  # for a pass, by something that happened since
    runs: bool = False  # this decision is one of the main scheduler
    backfills: bool = False  # and this of the backfill scheduler
    blocked: bool = False  # the main scheduler has met a job that does not fit
    tested: int = 0
    space: list[PlannedNodes] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)  # when those that run reach their limits
    awaits: dict[int, list[tuple[str, list[int]]]] = field(default_factory=dict)  # `dependencies`
    overdue: set[int] = field(default_factory=set)  # jobs that a limit has ended
    crowd: tuple[int, int] = (0, 0)  # jobs that waited and ran after the last decision
    idle: bool = False  # this one was for a check of limits that ended nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityWeights:
    """priority/multifactor without accounting: PriorityWeightAge, PriorityWeightJobSize, PriorityMaxAge (min)."""

    age: int = 0
    size: int = 0
    max_age: int = 10_080

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """From `age=1000,size=500,max-age=60`; None of "". Raises ForetraceError."""
        given: dict[str, int] = {}
        for word in text.split(",") if text else ():
            key, _, value = word.partition("=")
            if key not in ("age", "size", "max-age") or not value.isdecimal() or not int(value) < 2**31:
                raise ForetraceError(f"`weights` must be such as age=1000,size=500,max-age=60, got {word!r}.")
            given[key.replace("-", "_")] = int(value)
        return cls(**given) if given else None

    def priorities(self, workload: Workload, cluster: ClusterTree, at_ns: int) -> Int64:
        """(n,) as weighted at that time; jobs that came later have no age (priority_multifactor.c)."""
        nodes = np.diff(cluster.starts[cluster.level("node")])
        size = (-(-workload.gpus // nodes.max()) / len(nodes) + workload.gpus / cluster.gpus) / 2
        age = np.clip((at_ns - workload.submit_ns) / SECOND / (60 * max(self.max_age, 1)), 0, 1)
        return np.asarray(self.age * age + self.size * size, np.int64)

    @property
    def lines(self) -> tuple[str, ...]:
        """The same in slurm.conf."""
        return (
            "PriorityType=priority/multifactor", "PriorityCalcPeriod=1",
            f"PriorityWeightAge={self.age}", f"PriorityWeightJobSize={self.size}",
            f"PriorityMaxAge={self.max_age}",
        )  # fmt: skip


def dependencies(workload: Workload) -> dict[int, list[tuple[str, list[int]]]]:
    """What each job waits for, from the column `dependency` (afterok:JOB, afterany:JOB:JOB, singleton; with commas all
    of them). Raises ForetraceError for anything else, or jobs that come no earlier.
    """
    found: dict[int, list[tuple[str, list[int]]]] = {}
    names = {str(name): at for at, name in enumerate(workload.job)}
    for job, text in enumerate(workload.details.get("dependency", ())):
        for word in filter(None, str(text).split(",")):
            kind, *others = word.split(":")
            known = [names.get(other, job) for other in others]
            if (
                kind not in ("afterok", "afterany", "singleton")
                or bool(others) == (kind == "singleton")
                or max(known, default=-1) >= job
            ):
                raise ForetraceError(
                    f"job {workload.job[job]!r}: `dependency` must be afterok or afterany with earlier jobs, or "
                    f"singleton, such as afterok:3:4, got {word!r}."
                )
            found.setdefault(job, []).append((kind, known))
    return found


_memories: WeakKeyDictionary[View, SlurmMemory] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class SlurmPolicy(Policy):
    """First come first served, by priority, with or without backfill, as Slurm decides."""

    parameters: SchedulerParameters = SchedulerParameters()
    backfill: bool = False
    by_priority: bool = False
    switches: str = ""
    exclusive: bool = False
    backfill_s: float = 0.0  # a time at which the backfill scheduler looks
    background_s: float = 0.0  # a time at which the background thread wakes
    checks_s: float = 0.0  # and one at which it enforces limits and priorities are weighted
    weights: PriorityWeights | None = None  # None: priorities as stated

    @property
    def request(self) -> NodeRequest:
        """What all jobs ask of their nodes. Raises ForetraceError where `switches` says nothing."""
        return NodeRequest.parse(self.switches, most_s=self.parameters.max_switch_wait, exclusive=self.exclusive)

    def validate(self) -> None:
        """As `Policy.validate`."""
        _ = self.request
        Policy.validate(self)

    def key(self, workload: Workload) -> Float64:
        """(n,) sorted ascending."""
        return -workload.priority if self.by_priority else np.zeros(len(workload))

    def memory(self, view: View) -> SlurmMemory:
        """What this policy remembers of the simulation that is looked at."""
        if view not in _memories:
            work = view.workload
            epoch = round(work.epoch_s)
            limits = (limits_min(work) * 60).tolist()
            _memories[view] = SlurmMemory(
                NodeTable(view, self), limits, epoch, -(10**12), self._main_ns, awaits=dependencies(work)
            )
        return _memories[view]

    # ---- when
    def order(self, view: View, waiting: Int64) -> Sequence[int] | Int64:
        """At a pass of one of the schedulers by priority, those that a failure sent back left out while held."""
        memory, now = self.memory(view), view.now_ns
        self._catch_up(memory, now)
        memory.runs = now == memory.next
        memory.backfills = self.backfill and self._bf_next(now - 1) == now
        memory.blocked, memory.tested = not memory.runs, 0
        if not (memory.runs or memory.backfills):
            return []
        memory.table.look(view)
        if memory.backfills:
            at, step, window = int(self._now(view)), self.parameters.bf_resolution, self.parameters.bf_window * 60
            memory.space = [PlannedNodes(at // step * step, (at + window) // step * step, memory.table.up.copy())]
        found = [job for job in view.ordered(waiting).tolist() if self._held_ns(view, job) <= now]
        if memory.awaits:
            found = [job for job in found if self._independent(view, job)]
        if self.weights is None:
            return found
        at = self._next(self.checks_s, PRIORITY_CALC_NS, now) - PRIORITY_CALC_NS
        priorities = self.weights.priorities(view.workload, view.cluster, at)
        return sorted(found, key=lambda job: -int(priorities[job]))  # stable: equal ones by submission

    def end(self, view: View) -> Sequence[int]:
        """Jobs above their limits, at a check of limits."""
        memory, now = self.memory(view), view.now_ns
        checks = self._next(self.checks_s, LIMIT_CHECK_NS, now - 1) == now
        over = [job for job in view.running.tolist() if memory.ends[job] <= self._now(view)] if checks else []
        memory.overdue.update(over)
        memory.idle = checks and not over and memory.crowd == (len(view.waiting), len(view.running))
        return over

    def _independent(self, view: View, job: int) -> bool:
        """Whether nothing that it depends on is left (depend.c: test_job_dependency)."""
        memory, work = self.memory(view), view.workload
        for kind, others in memory.awaits.get(job, ()):
            same = (work.model[:job] == work.model[job]) & (work.user[:job] == work.user[job])
            left = np.flatnonzero(same).tolist() if kind == "singleton" else others
            if any(view.status(each) != "done" or (kind == "afterok" and each in memory.overdue) for each in left):
                return False
        return True

    def review(self, view: View) -> int | None:
        """The next pass of either scheduler, if anybody waits for it."""
        memory, now = self.memory(view), view.now_ns
        memory.crowd = len(view.waiting), len(view.running)
        self._catch_up(memory, now)
        if now == memory.next:
            self._passed(memory, now)
        elif not (memory.idle or (self.backfill and self._bf_next(now - 1) == now)):
            memory.asked = True
        delay, every = self.parameters.batch_sched_delay * SECOND, self.parameters.sched_interval * SECOND
        zero = memory.epoch * SECOND
        due = memory.full + every
        if memory.asked:  # difftime() of whole seconds
            due = min(due, ((zero + memory.last) // SECOND * SECOND + delay) - zero)
        memory.next = self._tick(max(due, now + 1))
        late = [memory.ends[job] for job in view.running.tolist()]
        check = (
            self._next(self.checks_s, LIMIT_CHECK_NS, max((min(late) - memory.epoch) * SECOND - 1, now)) if late else 0
        )
        if not len(view.waiting):
            return check or None
        held = [self._held_ns(view, job) for job in view.waiting.tolist() if view.starts(job)]
        times = [memory.next, check, *held, *([self._bf_next(now)] if self.backfill else [])]
        return min(each for each in times if each > now)

    def _catch_up(self, memory: SlurmMemory, now: int) -> None:
        """A pass that found nobody waiting was not played."""
        if memory.next is not None and memory.next < now:
            self._passed(memory, memory.next)
            memory.next = None

    def _passed(self, memory: SlurmMemory, at: int) -> None:
        memory.last, memory.asked = at, False
        if at - memory.full >= self.parameters.sched_interval * SECOND:
            memory.full = at

    def _tick(self, least: int) -> int:
        """When the background thread wakes from this time on."""
        return least + (self._main_ns - least) % BACKGROUND_NS

    def _bf_next(self, after: int) -> int:
        """When the backfill scheduler looks after this time."""
        return self._next(self.backfill_s, self.parameters.bf_interval * SECOND, after)

    @staticmethod
    def _next(since_s: float, every: int, after: int) -> int:
        """The first time after this one of those that lie so far apart; all but the first in ns."""
        return after + every - (after - int(nanoseconds(since_s))) % every

    @property
    def _main_ns(self) -> int:
        return int(nanoseconds(self.background_s))

    def _now(self, view: View) -> float:
        """Unix time."""
        return self.memory(view).epoch + view.now_ns / SECOND

    def _held_ns(self, view: View, job: int) -> int:
        return view.last_ns(job) + REQUEUE_S * SECOND if view.starts(job) else 0

    # ---- who, and where
    def admit(self, view: View, job: int) -> Wait | None:
        """Anybody until one does not fit; then those that the backfill scheduler still tests."""
        memory = self.memory(view)
        if not memory.blocked or (memory.backfills and memory.tested < self.parameters.bf_max_job_test):
            return None
        return Wait(Cause.ROUND if self.backfill else Cause.BEHIND)

    def place(self, view: View, job: int) -> Sequence[int] | Wait:
        """GPUs of the nodes that the main scheduler or the backfill scheduler gives it."""
        memory = self.memory(view)
        table, asks = memory.table, memory.table.asks(job)
        nodes = None
        if not memory.blocked:
            nodes = table.choose(asks, table.free, table.up, self._waited_s(view, job))
            memory.blocked = nodes is None
        if nodes is None and memory.backfills:
            memory.tested += 1
            nodes = self._backfilled(view, job)
        if nodes is None:
            full = view.free_gpus < int(view.workload.gpus[job])
            return Wait(Cause.FULL if full else Cause.RESERVED if memory.backfills else Cause.SCATTERED)
        memory.ends[job] = int(self._now(view)) + memory.limits_s[job]
        return table.take(view, job, nodes)

    def _waited_s(self, view: View, job: int) -> float:
        return (view.now_ns - int(view.workload.submit_ns[job])) / SECOND

    def _backfilled(self, view: View, job: int) -> list[int] | None:
        """Nodes for a job that may start now; else a reservation is made for it (backfill.c: _attempt_backfill)."""
        memory = self.memory(view)
        table, asks, space = memory.table, memory.table.asks(job), memory.space
        step, now, limit = self.parameters.bf_resolution, int(self._now(view)), memory.limits_s[job]
        later = now
        while True:
            start_from, later = later, 0
            nodes, later = self._unreserved(space, table.up, start_from, start_from + limit)
            found = self._will_run(view, job, nodes) if nodes.sum() >= asks.nodes else None
            if found is None:
                if not later:
                    return None
                continue
            start, chosen = max(found[0], start_from), found[1]
            if start <= now:
                return chosen
            if later and start > later:
                continue
            if start > now + self.parameters.bf_window * 60:
                return None
            begin, end = start // step * step, (start + limit) // step * step
            if any(each.end > begin and each.begin < end and not each.nodes[chosen].all() for each in space):
                later = start
                continue
            _reserve(space, begin, max(end, begin + step), chosen)
            return None

    @staticmethod
    def _unreserved(space: list[PlannedNodes], up: Any, begin: int, end: int) -> tuple[Any, int]:
        """Nodes that are up and reserved at no time in between, and when more will be (0: never)."""
        nodes, later = up.copy(), 0
        for at, each in enumerate(space):
            if each.end > begin and at + 1 < len(space) and not later:
                more = up & space[at + 1].nodes
                if (more & ~(nodes & each.nodes)).any():
                    later = each.end
            if each.end <= begin:
                continue
            if each.begin > end:
                break
            nodes &= each.nodes
        return nodes, later

    def _will_run(self, view: View, job: int, nodes: Any) -> tuple[int, list[int]] | None:
        """When and on which of these nodes a job can start by the limits of those that run (job_test.c)."""
        memory, now = self.memory(view), int(self._now(view))
        table, asks, waited = memory.table, memory.table.asks(job), self._waited_s(view, job)
        chosen = table.choose(asks, table.free, nodes, waited)
        if chosen is not None:
            return now, chosen
        free = table.free.copy()
        running = sorted((memory.ends[each], each) for each in table.held)
        at, window, first_end = 0, _FIRST_WINDOW_S, 0
        while at < len(running):
            last = removed = 0
            while at < len(running):
                end, other = running[at]
                at += 1
                on, gpus = table.held[other]
                if not nodes[on].any():
                    continue
                first_end = first_end or end + window - end % window
                free[on] += gpus
                last, removed = end, removed + 1
                if at < len(running) and (running[at][0] > first_end + window or removed > _MOST_AT_ONCE):
                    break
            if not last:
                return None
            window *= 2
            while at < len(running) and running[at][0] > first_end + window:
                window *= 2
            chosen = table.choose(asks, free, nodes, waited)
            if chosen is not None:
                return max(last, now + 1), chosen
        return None


def _reserve(space: list[PlannedNodes], begin: int, end: int, nodes: list[int]) -> None:
    """Take nodes out of a stretch of time; stretches are split at its ends, alike neighbours joined."""
    made: list[PlannedNodes] = []
    for each in space:
        cuts = [each.begin, *(cut for cut in (begin, end) if each.begin < cut < each.end), each.end]
        for low, high in itertools.pairwise(cuts):
            left = each.nodes.copy()
            if low >= begin and high <= end:
                left[nodes] = False
            if made and (made[-1].nodes == left).all():
                made[-1] = made[-1]._replace(end=high)
            else:
                made.append(PlannedNodes(low, high, left))
    space[:] = made


def slurm_policy(
    name: str, slurm: str, *, switches: str, exclusive: bool, backfill: bool = False, by_priority: bool = False,
    weights: str = "",
) -> SlurmPolicy:  # fmt: skip
    """The policy of this name as Slurm has it."""
    return SlurmPolicy(
        name=name, parameters=SchedulerParameters.parse(slurm), switches=switches, exclusive=exclusive,
        backfill=backfill, by_priority=by_priority, weights=PriorityWeights.parse(weights),
    )  # fmt: skip
