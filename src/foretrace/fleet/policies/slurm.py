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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.policies.slurm_clock import SlurmClock, following
from foretrace.fleet.policies.slurm_nodes import NodeTable, PlannedNodes, reserve
from foretrace.fleet.policies.slurm_options import (
    NodeWindow,
    PriorityWeights,
    SchedulerParameters,
    arrays_of,
    dependencies,
    fair_tree,
    levels,
    limits_min,
    switch_request,
    tasks_of,
    windows,
    within,
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
MODES = ("off", "requeue", "suspend")  # PreemptMode; suspended jobs keep their GPUs (gres.html)
_FIRST_WINDOW_S = 30  # ends of jobs this close are tested together, the next ones twice as wide (job_test.c)
_MOST_AT_ONCE = 200
_ARRAY_RESERVATIONS = 20  # bf_max_job_array_resv: tasks of one array that nodes are reserved for
_EVICTED_NS = SECOND // 5  # until the nodes of a job that is preempted say that its processes are gone


@dataclass(slots=True, kw_only=True)
class SlurmMemory:
    """What the scheduler remembers of one simulation; times in Unix seconds. (n,): of each job."""

    table: NodeTable
    clock: SlurmClock
    limits_s: list[int]  # (n,)
    awaits: dict[int, list[tuple[str, list[int]]]]  # `dependencies`
    array: Int64  # (n,) `arrays_of`
    at_once: Int64
    tiers: Int64  # (n,) PriorityTier of its partition
    qos: Float64  # (n,) priority of its QOS over the highest
    closed: list[PlannedNodes]  # reservations; `nodes` are the reserved ones
    drained: list[PlannedNodes]
    backfills: bool = False  # this decision is one of the backfill scheduler
    blocked: bool = False  # the main scheduler has met a job that does not fit
    tested: int = 0
    space: list[PlannedNodes] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)  # when those that run reach their limits
    overdue: set[int] = field(default_factory=set)  # jobs that a limit has ended
    idle: bool = False  # this decision is for a check of limits that ended nobody
    planned: Counter[int] = field(default_factory=Counter)  # tasks that nodes are reserved for, by array
    refused: set[int] = field(default_factory=set)  # arrays of which one could not be planned
    moved: dict[int, int] = field(default_factory=dict)  # when a task of an array started last, ns
    victims: list[int] = field(default_factory=list)  # jobs that are being preempted
    evicts: int = -1  # when they are gone, ns
    weighed: int = -1  # when shares were counted last, ns
    shares: Float64 | float = 0.0


_memories: WeakKeyDictionary[View, SlurmMemory] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class SlurmPolicy(Policy):
    """First come first served, by priority, with or without backfill, as Slurm decides.

    tiers: PriorityTier by partition, which a job's tenant is; qos: Priority by QOS, a column `qos` of the jobs.
    """

    parameters: SchedulerParameters = field(default_factory=SchedulerParameters)
    backfill: bool = False
    by_priority: bool = False
    switches: int = 0  # leaf switches that all jobs insist on, for so long; 0: any
    switch_wait_s: float = 0.0
    exclusive: bool = False  # and nobody else on their nodes
    backfill_s: float = 0.0  # a time at which the backfill scheduler looks
    background_s: float = 0.0  # a time at which the background thread wakes
    background_every_s: float = BACKGROUND_S
    checks_s: float = 0.0  # and one at which it enforces limits and priorities are weighted
    weights: PriorityWeights | None = None  # None: priorities as stated
    drains: tuple[NodeWindow, ...] = ()
    reservations: tuple[NodeWindow, ...] = ()  # for maintenance: nobody may use them, who runs there runs on
    preempt_mode: str = "off"
    tiers: Mapping[str, int] = field(default_factory=dict)
    qos: Mapping[str, int] = field(default_factory=dict)

    def validate(self) -> None:
        """See `Policy.validate`."""
        if self.preempt_mode not in MODES:
            raise ForetraceError(f"`preempt-mode` must be one of {', '.join(MODES)}, got {self.preempt_mode!r}.")
        if self.preempt_mode != "off" and not self.tiers:
            raise ForetraceError("`preempt-mode` needs to know who comes before whom; add priority-tier=high=10,low=1.")
        Policy.validate(self)

    def key(self, workload: Workload) -> Float64:
        """Return (n,) sorted ascending."""
        return -workload.priority if self.by_priority else np.zeros(len(workload))

    def takes(self, workload: Workload) -> Workload:
        """Return a row for each task of an array."""
        return tasks_of(workload)

    def fits(self, nodes: int) -> None:
        """Raise ForetraceError where an option names nodes that the cluster does not have."""
        within("drain", self.drains, nodes)
        within("reservation", self.reservations, nodes)

    def qos_of(self, workload: Workload) -> list[str]:
        """Return (n,) QOS of each job, "" where it has none. Raises ForetraceError for one that `qos` does not name."""
        names = [str(each) for each in workload.details.get("qos", np.full(len(workload), "", object)).tolist()]
        for job, name in enumerate(names):
            if name and self.qos and name not in self.qos:
                raise ForetraceError(
                    f"job {workload.job[job]!r}: `qos` {name!r} is not among {', '.join(self.qos)}; name it in qos=."
                )
        return names

    def memory(self, view: View) -> SlurmMemory:
        """Return what this policy remembers of the simulation that is looked at."""
        if view not in _memories:
            work = view.workload
            table = NodeTable(view, self, switches=self.switches, wait_s=self.switch_wait_s, exclusive=self.exclusive)
            nodes, epoch = np.arange(len(table.size)), round(work.epoch_s)
            self.fits(len(nodes))

            def stated(given: Sequence[NodeWindow]) -> list[PlannedNodes]:
                return [
                    PlannedNodes(
                        epoch + int(each.begin_s), epoch + int(min(each.end_s, 1e12)),
                        (nodes >= each.first) & (nodes <= each.last),
                    )
                    for each in given
                ]  # fmt: skip

            turn, wakes, looks = (
                int(nanoseconds(each)) for each in (self.background_every_s, self.background_s, self.backfill_s)
            )
            array, at_once = arrays_of(work)
            _memories[view] = SlurmMemory(
                table=table, clock=SlurmClock(self.parameters, epoch, turn, wakes, looks if self.backfill else NEVER),
                limits_s=(limits_min(work) * 60).tolist(), awaits=dependencies(work), array=array, at_once=at_once,
                tiers=np.array([self.tiers.get(str(name), 1) for name in work.tenant]),
                qos=np.array([self.qos.get(name, 0) for name in self.qos_of(work)]) / max([1, *self.qos.values()]),
                closed=stated(self.reservations), drained=stated(self.drains),
            )  # fmt: skip
        return _memories[view]

    # ---- when
    def order(self, view: View, waiting: Int64) -> Sequence[int] | Int64:
        """Return jobs by priority at a pass of one of the schedulers, without those that are held."""
        memory, now = self.memory(view), view.now_ns
        memory.blocked, memory.tested = now != memory.clock.next, 0
        memory.backfills = memory.clock.backfills(now)
        if (memory.blocked and not memory.backfills) or not (view.free_gpus or self.makes_room):
            return []
        memory.table.look(view)
        at = self._now(view)
        for each in memory.drained:
            if each.begin <= at < each.end:
                memory.table.up &= ~each.nodes
        if memory.backfills:
            memory.planned.clear()
            memory.refused.clear()
            step, window = self.parameters.bf_resolution, self.parameters.bf_window * 60
            memory.space = [PlannedNodes(at // step * step, (at + window) // step * step, memory.table.up.copy())]
            for each in memory.closed:
                reserve(memory.space, each.begin, each.end, each.nodes)
        ready = (job for job in view.ordered(waiting).tolist() if self._held_ns(view, job) <= now)
        found = [job for job in ready if self._independent(view, job)]
        if self.by_priority or self.weights is not None:
            # equal ones by submission, as which a requeue counts; with priority/basic no two are equal
            priorities = view.workload.priority if self.weights is None else self._weighed(view, self.weights)
            found.sort(key=lambda job: (-float(priorities[job]), view.last_ns(job) if view.starts(job) else -1))
        elif not self.backfill and memory.moved:
            # the rest of an array moves to the end of the list with every task that starts (job_array_split), and
            # sched/builtin goes through the list
            listed = {job: int(view.workload.submit_ns[job]) for job in found}
            for job in found:
                if not view.starts(job):
                    listed[job] = memory.moved.get(int(memory.array[job]), listed[job])
            found.sort(key=listed.__getitem__)
        return sorted(found, key=lambda job: -int(memory.tiers[job])) if self.tiers else found

    def _weighed(self, view: View, weights: PriorityWeights) -> Int64:
        """Return (n,) priorities as last weighted."""
        memory, work = self.memory(view), view.workload
        at = following(self._checks, PRIORITY_CALC_NS, view.now_ns) - PRIORITY_CALC_NS
        if weights.fairshare and at != memory.weighed:
            used = dict.fromkeys(map(str, work.user), 0.0)
            for job, user in enumerate(work.user):
                used[str(user)] += view.attained_gpu_s(job)
            memory.weighed, memory.shares = at, fair_tree(work, used)
        return weights.priorities(work, view.cluster, at, memory.qos, memory.shares)

    def end(self, view: View) -> Sequence[int]:
        """Return jobs above their limits, at a check of limits."""
        memory, now = self.memory(view), view.now_ns
        memory.clock.catch_up(now)
        news = memory.clock.note(view)
        checks = following(self._checks, LIMIT_CHECK_NS, now - 1) == now
        over = [job for job in view.running.tolist() if checks and memory.ends[job] * SECOND <= self._unix_ns(view)]
        memory.overdue.update(over)
        memory.idle = checks and not over and not news
        return over

    def requeue(self, view: View) -> Sequence[int]:
        """Return jobs that are preempted."""
        memory = self.memory(view)
        if memory.evicts != view.now_ns:
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
        said = [(at - memory.clock.epoch) * SECOND for each in given for at in (each.begin, each.end)]
        memory.clock.decided(view, told=now in said, idle=memory.idle)
        late = [memory.ends[job] for job in view.running.tolist()]
        over = max((min(late) - memory.clock.epoch) * SECOND - 1, now) if late else 0
        check = following(self._checks, LIMIT_CHECK_NS, over) if late else 0
        if not len(view.waiting):
            return check or None
        held = [self._held_ns(view, job) for job in view.waiting.tolist()]
        times = (memory.clock.next, memory.clock.looks, check, memory.evicts, *held, *said)
        return min(each for each in times if each > now)

    @property
    def _checks(self) -> int:
        return int(nanoseconds(self.checks_s))

    def _unix_ns(self, view: View) -> int:
        return self.memory(view).clock.epoch * SECOND + view.now_ns

    def _now(self, view: View) -> int:
        """Return Unix time in whole seconds."""
        return self._unix_ns(view) // SECOND

    def _held_ns(self, view: View, job: int) -> int:
        """Return until when a job that was sent back is held."""
        return view.last_ns(job) + REQUEUE_S * SECOND if view.starts(job) else 0

    # ---- who, and where
    @property
    def makes_room(self) -> bool:
        """Whether it continues where no GPU is free: GPUs of a suspended job stay its own (gres.html)."""
        return self.preempt_mode == "requeue"

    def admit(self, view: View, job: int) -> Wait | None:
        """Return anybody until one does not fit; then those that the backfill scheduler still tests.

        Tasks of an array that runs as many as it may hold up nobody behind them (job_array_start_test).
        """
        memory = self.memory(view)
        array = int(memory.array[job])
        if array >= 0:
            running = np.count_nonzero(memory.array[view.running] == array)
            planned = array in memory.refused or memory.planned[array] >= _ARRAY_RESERVATIONS
            if 0 < memory.at_once[job] <= running or (memory.blocked and planned):
                return Wait(Cause.QUOTA)
        if not memory.blocked or (memory.backfills and memory.tested < self.parameters.bf_max_job_test):
            return None
        return Wait(Cause.ROUND if self.backfill else Cause.BEHIND)

    def place(self, view: View, job: int) -> Sequence[int] | Wait:
        """Return GPUs of the nodes that the main scheduler or the backfill scheduler gives it."""
        memory, now, array = self.memory(view), self._now(view), int(self.memory(view).array[job])
        table, nodes = memory.table, None
        if not memory.blocked:
            usable = self._unclosed(memory, now, now + memory.limits_s[job])
            nodes = table.choose(job, table.free, usable, self._waited_s(view, job))
            if nodes is None:
                self._evict(view, job, usable)
            # where only reservations leave it too few nodes, those behind it are looked at (ESLURM_RESERVATION_BUSY);
            # where drained nodes do, they are not
            short = np.count_nonzero(usable & table.usable[job]) < table.nodes[job] <= np.count_nonzero(table.up)
            memory.blocked = nodes is None and not short
        if nodes is None and memory.backfills:
            memory.tested += 1
            before = memory.planned[array]
            nodes = self._backfilled(view, job)
            if nodes is None and memory.planned[array] == before:
                memory.refused.add(array)
        if nodes is None:
            full = view.free_gpus < int(view.workload.gpus[job])
            return Wait(Cause.FULL if full else Cause.RESERVED if memory.backfills else Cause.SCATTERED)
        memory.ends[job] = now + memory.limits_s[job]
        if array >= 0:
            memory.moved[array] = view.now_ns
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
        """Return running jobs that have to make room for this one, in order (slurm_find_preemptable_jobs)."""
        memory = self.memory(view)
        if self.preempt_mode == "off" or memory.victims:
            return []
        held, tiers = memory.table.held, memory.tiers
        found = [each for each in held if tiers[each] < tiers[job]]
        return sorted(found, key=lambda each: (int(tiers[each]), len(held[each][0]), each))

    def _evict(self, view: View, job: int, nodes: Any) -> None:
        """Take nodes from jobs that have to make room; it starts at a later pass, when they are gone."""
        memory = self.memory(view)
        if not self.makes_room:
            return
        jobs, waited = self._preemptees(view, job), self._waited_s(view, job)
        memory.victims = memory.victims or memory.table.victims(job, nodes, jobs, waited)
        if memory.victims and memory.evicts <= view.now_ns:
            memory.evicts = view.now_ns + _EVICTED_NS

    def _waited_s(self, view: View, job: int) -> float:
        return (view.now_ns - int(view.workload.submit_ns[job])) / SECOND

    def _backfilled(self, view: View, job: int) -> list[int] | None:
        """Return nodes for a job that may start now; else nodes are reserved for it (backfill.c: _attempt_backfill)."""
        memory = self.memory(view)
        table, space = memory.table, memory.space
        step, now, limit = self.parameters.bf_resolution, self._now(view), memory.limits_s[job]
        window = now + self.parameters.bf_window * 60
        later = now
        while True:
            start_from = later
            nodes, later = self._unreserved(space, table.up, start_from, start_from + limit)
            found = self._will_run(view, job, nodes) if nodes.sum() >= table.nodes[job] else None
            if found is None:
                if not later:
                    return None
                continue
            start, chosen = max(found[0], start_from), found[1]
            if start <= now and table.room(job, table.free)[chosen].all():
                return chosen
            if start <= now:  # if others made room
                self._evict(view, job, nodes)
            if start > found[0]:
                memory.clock.changed = now
            if later and start > later:
                continue
            if start > window:
                return None
            begin, end = start // step * step, (start + limit) // step * step
            overlaps = (each.end > begin and each.begin < end and not each.nodes[chosen].all() for each in space)
            if start > now and any(overlaps):
                later = start
                continue
            reserve(space, begin, max(end, begin + step), chosen)
            memory.planned[int(memory.array[job])] += 1
            return None

    @staticmethod
    def _unreserved(space: list[PlannedNodes], up: Any, begin: int, end: int) -> tuple[Any, int]:
        """Return nodes that are up and reserved at no time in between, and when more will be (0: never)."""
        nodes, later = up.copy(), 0
        for at, each in enumerate(space):
            if each.end > begin and at + 1 < len(space) and not later:
                more = up & space[at + 1].nodes
                if (more & ~(nodes & each.nodes)).any():
                    later = each.end
            if each.begin > end:
                break
            if each.end > begin:
                nodes &= each.nodes
        return nodes, later

    def _will_run(self, view: View, job: int, nodes: Any) -> tuple[int, list[int]] | None:
        """Return when and on which of these nodes a job can start by the limits of those that run (job_test.c)."""
        memory, now = self.memory(view), self._now(view)
        table, waited = memory.table, self._waited_s(view, job)
        away = self._preemptees(view, job)  # whose GPUs are not awaited, even where suspending them frees none
        for gone in ([], away) if away and self.makes_room else ([],):
            free = table.freed(gone)
            chosen = table.choose(job, free, nodes, waited)
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
            chosen = table.choose(job, free, nodes, waited)
            if chosen is not None:
                return max(last, now + 1), chosen
        return None


def slurm_policy(
    name: str, slurm: str, *, backfill: bool = False, by_priority: bool = False, **options: Any
) -> SlurmPolicy | None:
    """Return the policy of this name as Slurm has it; None without `slurm`, where Slurm's options raise ForetraceError.

    options: switches, exclusive, drain, reservation, weights, preempt_mode, priority_tier, qos, as a user writes them.
    """
    given = {key: value for key, value in options.items() if value}
    if not slurm:
        if given:
            raise ForetraceError(f"`{next(iter(given)).replace('_', '-')}` is an option of Slurm; add slurm=yes.")
        return None
    parameters = SchedulerParameters.parse(slurm)
    switches, wait_s = switch_request(options["switches"], parameters.max_switch_wait)
    return SlurmPolicy(
        name=name, parameters=parameters, switches=switches, switch_wait_s=wait_s, exclusive=options["exclusive"],
        backfill=backfill, by_priority=by_priority and "weights" not in given,
        weights=PriorityWeights.parse(given.get("weights", "")), drains=windows("drain", options["drain"]),
        reservations=windows("reservation", options["reservation"]), qos=levels("qos", given.get("qos", "")),
        preempt_mode=given.get("preempt_mode", "off").lower(),
        tiers=levels("priority-tier", given.get("priority_tier", "")),
    )  # fmt: skip
