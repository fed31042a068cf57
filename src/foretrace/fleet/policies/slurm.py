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

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.policies import slurm_options as stated
from foretrace.fleet.policies.slurm_nodes import PlannedNodes, SlurmMemory, following, reserve
from foretrace.fleet.policies.slurm_options import PriorityWeights, SchedulerParameters
from foretrace.fleet.policy import Wait
from foretrace.fleet.result import Cause
from foretrace.fleet.workload import SECOND, Int64

if TYPE_CHECKING:
    from foretrace.fleet.stepping import View

LIMIT_CHECK_NS = 30 * SECOND  # how often limits are enforced (slurmctld.h: PERIODIC_TIMEOUT)
PRIORITY_CALC_NS = 60 * SECOND  # PriorityCalcPeriod, the least there is
REQUEUE_S = 121  # a job that a failure sent back to the queue is held so long (credentials have to expire)
_ARRAY_RESERVATIONS = 20  # bf_max_job_array_resv: tasks of one array that nodes are reserved for


class SlurmPolicy(stated.SlurmOptions):
    """First come first served, by priority, with or without backfill, as Slurm decides."""

    def memory(self, view: View) -> SlurmMemory:
        """Return what this policy remembers of the simulation that is looked at."""
        return view.memory(lambda view: SlurmMemory(view, self))

    # ---- when
    def order(self, view: View, waiting: Int64) -> Sequence[int] | Int64:
        """Return jobs by priority at a pass of one of the schedulers, without those that are held."""
        memory, now = self.memory(view), view.now_ns
        memory.blocked, memory.tested = now != memory.clock.next, 0
        memory.backfills = memory.clock.backfills(now)
        if (memory.blocked and not memory.backfills) or not (view.free_gpus or self.makes_room):
            return []
        memory.look(view)
        memory.now = at = memory.clock.epoch + now // SECOND
        for each in memory.drained:
            if each.begin <= at < each.end:
                memory.up &= ~each.nodes
        if memory.backfills:
            memory.planned.clear()
            memory.refused.clear()
            step, window = self.parameters.bf_resolution, self.parameters.bf_window * 60
            memory.space = [PlannedNodes(at // step * step, (at + window) // step * step, memory.up.copy())]
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
        at = following(memory.checks, PRIORITY_CALC_NS, view.now_ns) - PRIORITY_CALC_NS
        if weights.fairshare and at != memory.weighed:
            used = dict.fromkeys(map(str, work.user), 0.0)
            for job, user in enumerate(work.user):
                used[str(user)] += view.attained_gpu_s(job)
            memory.weighed, memory.shares = at, stated.fair_tree(work, used)
        return weights.priorities(work, view.cluster, at, memory.qos, memory.shares)

    def end(self, view: View) -> Sequence[int]:
        """Return jobs above their limits, at a check of limits."""
        memory, now = self.memory(view), view.now_ns
        memory.clock.catch_up(now)
        news = memory.clock.note(view)
        checks = following(memory.checks, LIMIT_CHECK_NS, now - 1) == now
        at = memory.clock.epoch + now // SECOND
        over = [job for job in view.running.tolist() if checks and memory.ends[job] <= at]
        memory.overdue.update(over)
        memory.idle = checks and not over and not news
        return over

    def requeue(self, view: View) -> Sequence[int]:
        """Return jobs that are preempted."""
        memory = self.memory(view)
        if memory.evicts != view.now_ns:
            return []
        gone, memory.evicted = memory.evicted, []
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
        check = following(memory.checks, LIMIT_CHECK_NS, over) if late else 0
        if not len(view.waiting):
            return check or None
        held = [self._held_ns(view, job) for job in view.waiting.tolist()]
        times = (memory.clock.next, memory.clock.looks, check, memory.evicts, *held, *said)
        return min(each for each in times if each > now)

    def _held_ns(self, view: View, job: int) -> int:
        """Return until when a job that was sent back is held."""
        return view.last_ns(job) + REQUEUE_S * SECOND if view.starts(job) else 0

    # ---- who, and where
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
        memory, nodes = self.memory(view), None
        now, array = memory.now, int(memory.array[job])
        if not memory.blocked:
            usable = memory.up.copy()
            for each in memory.closed:  # by a reservation before the job ends (reservation.c: job_test_resv)
                if each.begin < now + memory.limits_s[job] and each.end > now:
                    usable &= ~each.nodes
            nodes = memory.choose(job, memory.free, usable)
            if nodes is None:
                memory.evict(job, usable)
            # where only reservations leave it too few nodes, those behind it are looked at (ESLURM_RESERVATION_BUSY);
            # where drained nodes do, they are not
            short = np.count_nonzero(usable & memory.usable[job]) < memory.nodes[job] <= np.count_nonzero(memory.up)
            memory.blocked = nodes is None and not short
        if nodes is None and memory.backfills:
            memory.tested += 1
            before = memory.planned[array]
            nodes = memory.backfilled(job)
            if nodes is None and memory.planned[array] == before:
                memory.refused.add(array)
        if nodes is None:
            full = view.free_gpus < int(view.workload.gpus[job])
            return Wait(Cause.FULL if full else Cause.RESERVED if memory.backfills else Cause.SCATTERED)
        memory.ends[job] = now + memory.limits_s[job]
        if array >= 0:
            memory.moved[array] = view.now_ns
        return memory.take(view, job, nodes)


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
    switches, wait_s = stated.switch_request(options["switches"], parameters.max_switch_wait)
    return SlurmPolicy(
        name=name, parameters=parameters, switches=switches, switch_wait_s=wait_s, exclusive=options["exclusive"],
        backfill=backfill, by_priority=by_priority and "weights" not in given,
        weights=PriorityWeights.parse(given.get("weights", "")), drains=stated.windows("drain", options["drain"]),
        reservations=stated.windows("reservation", options["reservation"]),
        qos=stated.levels("qos", given.get("qos", "")), preempt_mode=given.get("preempt_mode", "off").lower(),
        tiers=stated.levels("priority-tier", given.get("priority_tier", "")),
    )  # fmt: skip
