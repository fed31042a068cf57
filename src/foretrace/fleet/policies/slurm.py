"""Deciding as Slurm does (22.05): its two schedulers at their intervals, time limits, and its choice of nodes.

Nothing is decided when a batch job is submitted or ends; that only requests a pass of the main scheduler. slurmctld's
background thread makes one (controller.c: _slurmctld_background wakes every second) once `batch_sched_delay` seconds
have passed since the last, and every `sched_interval` in any case. The main scheduler (job_scheduler.c: _schedule) goes
in order of priority and stops at the first job that does not fit. sched/backfill (backfill.c) looks at the whole queue
every `bf_interval`: each job gets the earliest time at which it fits by the time limits of those that run, and whole
nodes are reserved for it from then on, to whole `bf_resolution`; a job starts if that time is now. A limit is a whole
number of minutes, and all that Slurm knows. `slurm_nodes` chooses the nodes, `slurm_options` is what may be stated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.policies.slurm_clock import SlurmClock, following
from foretrace.fleet.policies.slurm_nodes import NodeRequest, NodeTable, PlannedNodes, reserve
from foretrace.fleet.policies.slurm_options import (
    Arrays,
    NodeWindow,
    Preemption,
    PriorityWeights,
    SchedulerParameters,
    dependencies,
    fair_tree,
    limits_min,
    tasks_of,
    windows,
)  # fmt: skip
from foretrace.fleet.policy import Policy, Wait
from foretrace.fleet.result import Cause
from foretrace.fleet.setup import NEVER
from foretrace.fleet.workload import SECOND, Float64, Int64, Workload, nanoseconds

if TYPE_CHECKING:
    from foretrace.fleet.stepping import View

BACKGROUND_S = 1.005  # the background thread sleeps ten times 0.1 s, and works a little; 1.002 on an idle machine
LIMIT_CHECK_NS = 30 * SECOND  # how often limits are enforced (slurmctld.h: PERIODIC_TIMEOUT)
PRIORITY_CALC_NS = 60 * SECOND  # PriorityCalcPeriod, the least there is
REQUEUE_S = 121  # a job that a failure sent back to the queue is held so long (credentials have to expire)
_FIRST_WINDOW_S = 30  # ends of jobs this close are tested together, the next ones twice as wide (job_test.c)
_MOST_AT_ONCE = 200
_ARRAY_RESERVATIONS = 20  # bf_max_job_array_resv: tasks of one array that nodes are reserved for
_EVICTED_NS = SECOND // 5  # until the nodes of a job that is preempted say that its processes are gone
_MOVES = 10  # times that a start is moved behind reservations of everything (job_test_resv)


@dataclass(slots=True)
class SlurmMemory:
    """What the scheduler remembers of one simulation; times in Unix seconds."""

    table: NodeTable
    before: tuple[Int64, Int64]  # `Preemption.ranks`
    limits_s: list[int]
    epoch: int
    clock: SlurmClock
    runs: bool = False  # this decision is one of the main scheduler
    backfills: bool = False  # and this of the backfill scheduler
    blocked: bool = False  # the main scheduler has met a job that does not fit
    tested: int = 0
    space: list[PlannedNodes] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)  # when those that run reach their limits
    awaits: dict[int, list[tuple[str, list[int]]]] = field(default_factory=dict)  # `dependencies`
    overdue: set[int] = field(default_factory=set)  # jobs that a limit has ended
    idle: bool = False  # this decision is for a check of limits that ended nobody
    closed: list[PlannedNodes] = field(default_factory=list)  # reservations; `nodes` are the reserved ones
    drained: list[PlannedNodes] = field(default_factory=list)
    arrays: Arrays = field(default_factory=lambda: Arrays(np.zeros(0, np.int64)))
    qos: list[str] = field(default_factory=list)
    planned: Counter[int] = field(default_factory=Counter)  # tasks that nodes are reserved for, by array
    refused: set[int] = field(default_factory=set)  # arrays of which one could not be planned
    moved: dict[int, int] = field(default_factory=dict)  # when a task of an array started last, ns
    victims: list[int] = field(default_factory=list)  # jobs that are being preempted
    evicts: int = -1  # when they are gone, ns
    weighed: int = -1  # when shares were counted last, ns
    shares: Float64 | float = 0.0

    def since(self, job: int, submit: int) -> int:
        """Return since when a job stands in Slurm's list of jobs, ns."""
        return self.moved.get(int(self.arrays.of[job]), submit)


_memories: WeakKeyDictionary[View, SlurmMemory] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class SlurmPolicy(Policy):
    """First come first served, by priority, with or without backfill, as Slurm decides."""

    parameters: SchedulerParameters = field(default_factory=SchedulerParameters)
    backfill: bool = False
    by_priority: bool = False
    switches: str = ""
    exclusive: bool = False
    backfill_s: float = 0.0  # a time at which the backfill scheduler looks
    background_s: float = 0.0  # a time at which the background thread wakes
    background_every_s: float = BACKGROUND_S
    checks_s: float = 0.0  # and one at which it enforces limits and priorities are weighted
    weights: PriorityWeights | None = None  # None: priorities as stated
    drains: tuple[NodeWindow, ...] = ()
    reservations: tuple[NodeWindow, ...] = ()  # for maintenance: nobody may use them, who runs there runs on
    preemption: Preemption = field(default_factory=Preemption)

    @property
    def request(self) -> NodeRequest:
        """What all jobs ask of their nodes. Raises ForetraceError where `switches` says nothing."""
        return NodeRequest.parse(self.switches, most_s=self.parameters.max_switch_wait, exclusive=self.exclusive)

    def validate(self) -> None:
        """See `Policy.validate`."""
        _ = self.request
        Policy.validate(self)

    def key(self, workload: Workload) -> Float64:
        """Return (n,) sorted ascending."""
        return -workload.priority if self.by_priority else np.zeros(len(workload))

    def takes(self, workload: Workload) -> Workload:
        """Return a row for each task of an array."""
        return tasks_of(workload)

    def fits(self, nodes: int) -> None:
        """Raise ForetraceError where an option names nodes that the cluster does not have."""
        for name, given in (("drain", self.drains), ("reservation", self.reservations)):
            for each in given:
                if each.last >= nodes:
                    raise ForetraceError(
                        f"`{name}` names node {each.last}; the cluster has nodes 0 to {nodes - 1}, name one of these."
                    )

    def memory(self, view: View) -> SlurmMemory:
        """Return what this policy remembers of the simulation that is looked at."""
        if view not in _memories:
            work, table = view.workload, NodeTable(view, self)
            nodes, epoch = np.arange(len(table.size)), round(work.epoch_s)
            self.fits(len(nodes))

            def stated(given: Sequence[NodeWindow]) -> list[PlannedNodes]:
                ends = [int(min(each.end_s, 1e12)) for each in given]
                on = [(nodes >= each.first) & (nodes <= each.last) for each in given]
                return [
                    PlannedNodes(epoch + int(each.begin_s), epoch + end, which)
                    for each, end, which in zip(given, ends, on, strict=True)
                ]

            turn, wakes, looks = map(
                int, map(nanoseconds, (self.background_every_s, self.background_s, self.backfill_s))
            )
            clock = SlurmClock(self.parameters, epoch, turn, wakes, looks if self.backfill else NEVER)
            _memories[view] = SlurmMemory(
                table, self.preemption.ranks(work), (limits_min(work) * 60).tolist(), epoch, clock,
                awaits=dependencies(work), closed=stated(self.reservations), drained=stated(self.drains),
                arrays=Arrays.read(work), qos=self.preemption.named(work),
            )  # fmt: skip
        return _memories[view]

    # ---- when
    def order(self, view: View, waiting: Int64) -> Sequence[int] | Int64:
        """Return jobs by priority at a pass of one of the schedulers, those that a failure sent back left out while
        held.
        """
        memory, now = self.memory(view), view.now_ns
        memory.runs, memory.backfills = now == memory.clock.next, memory.clock.backfills(now)
        memory.blocked, memory.tested = not memory.runs, 0
        if not (memory.runs or memory.backfills) or not (view.free_gpus or self.makes_room):
            return []
        memory.table.look(view)
        at = int(self._now(view))
        for each in memory.drained:
            if each.begin <= at < each.end:
                memory.table.up &= ~each.nodes
        if memory.backfills:
            memory.planned.clear()
            memory.refused.clear()
            step, window = self.parameters.bf_resolution, self.parameters.bf_window * 60
            memory.space = [PlannedNodes(at // step * step, (at + window) // step * step, memory.table.up.copy())]
        found = [job for job in view.ordered(waiting).tolist() if self._held_ns(view, job) <= now]
        if memory.awaits:
            found = [job for job in found if self._independent(view, job)]
        if self.by_priority or self.weights is not None:
            # equal ones by submission, as which a requeue counts; with priority/basic no two are equal
            priorities = view.workload.priority if self.weights is None else self._weighed(view)
            found.sort(key=lambda job: (-float(priorities[job]), view.last_ns(job) if view.starts(job) else -1))
        elif not self.backfill and memory.moved:
            # the rest of an array moves to the end of the list with every task that starts (job_array_split), and
            # sched/builtin goes through the list
            submit = view.workload.submit_ns
            found.sort(key=lambda job: int(submit[job]) if view.starts(job) else memory.since(job, int(submit[job])))
        ranks = memory.before[0]
        return sorted(found, key=lambda job: -int(ranks[job])) if self.by_rank else found

    @property
    def by_rank(self) -> bool:
        """Whether partitions or QOS say who stands before whom (job_scheduler.c: sort_job_queue2)."""
        return bool(self.preemption.tiers) or (self.preemption.mode != "OFF" and self.preemption.by_qos)

    def _weighed(self, view: View) -> Int64:
        """Return (n,) priorities as last weighted."""
        assert self.weights is not None
        memory, work = self.memory(view), view.workload
        at = following(self._checks, PRIORITY_CALC_NS, view.now_ns) - PRIORITY_CALC_NS
        if self.weights.fairshare and at != memory.weighed:
            used = Counter[str]()
            for job in range(len(work)):
                used[str(work.user[job])] += view.attained_gpu_s(job)  # type: ignore[assignment]  # floats
            memory.weighed, memory.shares = at, fair_tree(work, used)
        named = [self.preemption.qos[name].priority if name else 0 for name in memory.qos]
        most = max((each.priority for each in self.preemption.qos.values()), default=0)
        return self.weights.priorities(work, view.cluster, at, np.array(named) / max(most, 1), memory.shares)

    def end(self, view: View) -> Sequence[int]:
        """Return jobs above their limits, at a check of limits; those that are preempted by PreemptMode=CANCEL."""
        memory, now = self.memory(view), view.now_ns
        memory.clock.catch_up(now)
        news = memory.clock.note(view)
        killed = self._evicted(view, "CANCEL")
        checks = following(self._checks, LIMIT_CHECK_NS, now - 1) == now
        over = [job for job in view.running.tolist() if memory.ends[job] <= self._now(view)] if checks else []
        memory.overdue.update(over, killed)
        memory.idle = checks and not over and not news
        return [*over, *killed]

    def requeue(self, view: View) -> Sequence[int]:
        """Return jobs that are preempted by PreemptMode=REQUEUE."""
        return self._evicted(view, "REQUEUE")

    def _evicted(self, view: View, mode: str) -> list[int]:
        memory = self.memory(view)
        if self.preemption.mode != mode or memory.evicts != view.now_ns:
            return []
        gone, memory.victims = memory.victims, []
        return [job for job in gone if view.status(job) == "running"]

    def _independent(self, view: View, job: int) -> bool:
        """Return whether nothing that it depends on is left (depend.c: test_job_dependency)."""
        memory, work = self.memory(view), view.workload
        for kind, others in memory.awaits.get(job, ()):
            same = (work.model[:job] == work.model[job]) & (work.user[:job] == work.user[job])
            left = np.flatnonzero(same).tolist() if kind == "singleton" else others
            if any(view.status(each) != "done" or (kind == "afterok" and each in memory.overdue) for each in left):
                return False
        return True

    def review(self, view: View) -> int | None:
        """Return the next pass of either scheduler, if anybody waits for it."""
        memory, now = self.memory(view), view.now_ns
        # scontrol requests a pass, and so does a reservation that begins or ends
        given = (*memory.drained, *memory.closed)
        said = [(at - memory.epoch) * SECOND for each in given for at in (each.begin, each.end)]
        memory.clock.decided(view, told=now in said, idle=memory.idle)
        late = [memory.ends[job] for job in view.running.tolist()]
        over = max((min(late) - memory.epoch) * SECOND - 1, now) if late else 0
        check = following(self._checks, LIMIT_CHECK_NS, over) if late else 0
        if not len(view.waiting):
            return check or None
        held = [self._held_ns(view, job) for job in view.waiting.tolist() if view.starts(job)]
        times = (memory.clock.next, memory.clock.looks, check, memory.evicts, *held, *said)
        return min(each for each in times if each > now)

    @property
    def _checks(self) -> int:
        return int(nanoseconds(self.checks_s))

    def _now(self, view: View) -> float:
        """Return Unix time."""
        return self.memory(view).epoch + view.now_ns / SECOND

    def _held_ns(self, view: View, job: int) -> int:
        return view.last_ns(job) + REQUEUE_S * SECOND if view.starts(job) else 0

    # ---- who, and where
    @property
    def makes_room(self) -> bool:
        """Whether it continues where no GPU is free."""
        return self.preemption.evicts

    def admit(self, view: View, job: int) -> Wait | None:
        """Return anybody until one does not fit; then those that the backfill scheduler still tests."""
        memory = self.memory(view)
        if self._throttled(view, job):
            return Wait(Cause.QUOTA)
        if not memory.blocked or (memory.backfills and memory.tested < self.parameters.bf_max_job_test):
            return None
        return Wait(Cause.ROUND if self.backfill else Cause.BEHIND)

    def _throttled(self, view: View, job: int) -> bool:
        """Return whether its array or QOS runs as many as it may, which holds up nobody behind it
        (job_array_start_test).
        """
        memory, running = self.memory(view), view.running
        array = int(memory.arrays.of[job])
        if array >= 0:
            most = memory.arrays.limits[array]
            if most and np.count_nonzero(memory.arrays.of[running] == array) >= most:
                return True
            if memory.blocked and (array in memory.refused or memory.planned[array] >= _ARRAY_RESERVATIONS):
                return True
        qos = self.preemption.qos.get(memory.qos[job])
        if qos is None:
            return False
        work = view.workload
        same = [each for each in running.tolist() if memory.qos[each] == memory.qos[job]]
        mine = [each for each in same if work.user[each] == work.user[job]]
        return (
            bool(qos.max_jobs_pu and len(mine) >= qos.max_jobs_pu)
            or bool(qos.max_tres_pu and work.gpus[[*mine, job]].sum() > qos.max_tres_pu)
            or bool(qos.grp_tres and work.gpus[[*same, job]].sum() > qos.grp_tres)
        )

    def place(self, view: View, job: int) -> Sequence[int] | Wait:
        """Return GPUs of the nodes that the main scheduler or the backfill scheduler gives it."""
        memory = self.memory(view)
        table, asks = memory.table, memory.table.asks(job)
        nodes = None
        if not memory.blocked:
            now = int(self._now(view))
            usable = self._unclosed(memory, now, now + memory.limits_s[job])
            nodes = table.choose(asks, table.free, usable, self._waited_s(view, job))
            if nodes is None:
                self._evict(view, job, usable)
            # where only reservations leave it too few nodes, those behind it are looked at (ESLURM_RESERVATION_BUSY);
            # where drained nodes do, they are not
            short = np.count_nonzero(usable & asks.usable) < asks.nodes <= np.count_nonzero(table.up)
            memory.blocked = nodes is None and not short
        if nodes is None and memory.backfills:
            memory.tested += 1
            array = int(memory.arrays.of[job])
            before = memory.planned[array]
            nodes = self._backfilled(view, job)
            if nodes is None and memory.planned[array] == before:
                memory.refused.add(array)
        if nodes is None:
            full = view.free_gpus < int(view.workload.gpus[job])
            return Wait(Cause.FULL if full else Cause.RESERVED if memory.backfills else Cause.SCATTERED)
        memory.ends[job] = int(self._now(view)) + memory.limits_s[job]
        if memory.arrays.of[job] >= 0:
            memory.moved[int(memory.arrays.of[job])] = view.now_ns
        return table.take(view, job, nodes)

    @staticmethod
    def _unclosed(memory: SlurmMemory, begin: int, end: int) -> Any:
        """Return nodes that are up and that no reservation closes in between (reservation.c: job_test_resv)."""
        usable = memory.table.up.copy()
        for each in memory.closed:
            if each.begin < end and each.end > begin:
                usable &= ~each.nodes
        return usable

    def _preemptees(self, view: View, job: int) -> list[int]:
        """Return running jobs that have to make room for this one, in order (preempt.c:
        slurm_find_preemptable_jobs).
        """
        memory = self.memory(view)
        if self.preemption.mode == "OFF" or memory.victims:
            return []
        ranks, firsts = memory.before
        qos = self.preemption.qos.get(memory.qos[job])
        found = [
            each for each in memory.table.held
            if (qos is not None and memory.qos[each] in qos.preempt if self.preemption.by_qos
                else ranks[each] < ranks[job])
        ]  # fmt: skip
        return sorted(found, key=lambda each: (int(firsts[each]), len(memory.table.held[each][0]), each))

    def _evict(self, view: View, job: int, nodes: Any) -> None:
        """Take nodes from jobs that have to make room; it starts at a later pass, when they are gone."""
        memory = self.memory(view)
        if not self.preemption.evicts:
            return
        asks, waited = memory.table.asks(job), self._waited_s(view, job)
        memory.victims = memory.victims or memory.table.victims(asks, nodes, self._preemptees(view, job), waited)
        if memory.victims and memory.evicts <= view.now_ns:
            memory.evicts = view.now_ns + _EVICTED_NS

    def _waited_s(self, view: View, job: int) -> float:
        return (view.now_ns - int(view.workload.submit_ns[job])) / SECOND

    def _backfilled(self, view: View, job: int) -> list[int] | None:
        """Return nodes for a job that may start now; else a reservation is made for it (backfill.c:
        _attempt_backfill).
        """
        memory = self.memory(view)
        table, asks, space = memory.table, memory.table.asks(job), memory.space
        step, now, limit = self.parameters.bf_resolution, int(self._now(view)), memory.limits_s[job]
        later = now
        while True:
            start_from, later = later, 0
            start_from, usable, opens = self._opened(memory, start_from, limit)
            nodes, later = self._unreserved(space, usable, start_from, start_from + limit)
            if opens and opens < now + self.parameters.bf_window * 60 and (not later or opens < later):
                later = opens
            found = self._will_run(view, job, nodes) if nodes.sum() >= asks.nodes else None
            if found is None:
                if not later:
                    return None
                continue
            start, chosen = max(found[0], start_from), found[1]
            if start <= now and (table.free >= table.wanted(asks))[chosen].all():
                return chosen
            if start <= now:  # if others made room
                self._evict(view, job, nodes)
            if start > found[0]:
                memory.clock.changed = now
            if later and start > later:
                continue
            if start > now + self.parameters.bf_window * 60:
                return None
            begin, end = start // step * step, (start + limit) // step * step
            overlaps = (each.end > begin and each.begin < end and not each.nodes[chosen].all() for each in space)
            if start > now and any(overlaps):
                later = start
                continue
            reserve(space, begin, max(end, begin + step), chosen)
            memory.planned[int(memory.arrays.of[job])] += 1
            return None

    def _opened(self, memory: SlurmMemory, begin: int, limit: int) -> tuple[int, Any, int]:
        """Return when a job may start as far as reservations go, on which nodes, and when to look again (0:
        as ever).
        """
        for _ in range(_MOVES):
            met = [each for each in memory.closed if each.begin < begin + limit and each.end > begin]
            whole = [each.end for each in met if each.nodes.all()]
            if not whole:
                break
            begin = whole[0]
        step = self.parameters.bf_resolution
        opens = -(-min(each.end for each in memory.closed if each.end >= begin) // step) * step + 1 if met else 0
        return begin, self._unclosed(memory, begin, begin + limit), opens

    @staticmethod
    def _unreserved(space: list[PlannedNodes], up: Any, begin: int, end: int) -> tuple[Any, int]:
        """Return nodes that are up and reserved at no time in between, and when more will be (0: never)."""
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
        """Return when and on which of these nodes a job can start by the limits of those that run (job_test.c)."""
        memory, now = self.memory(view), int(self._now(view))
        table, asks, waited = memory.table, memory.table.asks(job), self._waited_s(view, job)
        chosen = table.choose(asks, table.free, nodes, waited)
        if chosen is not None:
            return now, chosen
        free = table.free.copy()
        away = self._preemptees(view, job)  # whose GPUs are not awaited, even where suspending them frees none
        if away and self.preemption.evicts:
            for each in away:
                on, gpus = table.held[each]
                free[on] += gpus
            chosen = table.choose(asks, free, nodes, waited)
            if chosen is not None:
                return now, chosen
        running = sorted((memory.ends[each], each) for each in table.held if each not in away)
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


def slurm_policy(
    name: str, slurm: str, *, switches: str, exclusive: bool, drain: str, reservation: str, backfill: bool = False,
    by_priority: bool = False, weights: str = "", preempt_mode: str = "", priority_tier: str = "", qos: str = "",
) -> SlurmPolicy | None:  # fmt: skip
    """Return the policy of this name as Slurm has it; None without `slurm`. Raises ForetraceError for Slurm's options
    then.
    """
    options = {
        "switches": switches, "exclusive": exclusive, "drain": drain, "reservation": reservation, "weights": weights,
        "preempt-mode": preempt_mode, "priority-tier": priority_tier, "qos": qos,
    }  # fmt: skip
    if not slurm:
        if given := [option for option, value in options.items() if value]:
            raise ForetraceError(f"`{given[0]}` is an option of Slurm; add slurm=yes.")
        return None
    return SlurmPolicy(
        name=name, parameters=SchedulerParameters.parse(slurm), switches=switches, exclusive=exclusive,
        backfill=backfill, by_priority=by_priority and not weights, weights=PriorityWeights.parse(weights),
        drains=windows("drain", drain), reservations=windows("reservation", reservation),
        preemption=Preemption.parse(preempt_mode, priority_tier, qos),
    )  # fmt: skip
