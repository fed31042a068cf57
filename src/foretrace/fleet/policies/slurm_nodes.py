"""Which nodes a job gets from Slurm, and when: select/cons_tres (job_test.c, _eval_nodes_topo), and backfill.c."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet import setup
from foretrace.fleet.policies import slurm_options as stated
from foretrace.fleet.policies.slurm_options import SchedulerParameters, SlurmOptions
from foretrace.fleet.setup import NEVER
from foretrace.fleet.workload import SECOND, Float64, Int64, nanoseconds

if TYPE_CHECKING:
    from foretrace.fleet.stepping import View

_FIRST_WINDOW_S = 30  # ends of jobs this close are tested together, the next ones twice as wide (job_test.c)
_MOST_AT_ONCE = 200
_EVICTED_NS = SECOND // 5  # until the nodes of a job that is preempted say that its processes are gone


class PlannedNodes(NamedTuple):
    """Nodes that are not reserved from one time to another (Unix seconds)."""

    begin: int
    end: int
    nodes: Any


def reserve(space: list[PlannedNodes], begin: int, end: int, nodes: Any) -> None:
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


class NodeTable:
    """Nodes and switches of a cluster, and who holds what at one moment (`look`)."""

    free: Int64  # (nodes,) GPUs that nobody holds
    up: Any  # (nodes,) True where nothing is broken
    held: dict[int, tuple[Int64, Int64]]  # per running job its nodes, and GPUs on each
    now_ns: int
    waited_s: Float64  # (jobs,) since their submission

    def __init__(self, view: View, policy: SlurmOptions) -> None:
        cluster = view.cluster
        self.switches, self.wait_s, self.exclusive = policy.switches, policy.switch_wait_s, policy.exclusive
        self.level = setup.waits_ns(policy, cluster)[1]
        starts = cluster.starts[self.level]
        self.size = np.diff(starts)
        self.node_of = cluster.units_of(self.level)
        # per level of switches the one above each node; on one level of nodes alone, one switch is taken
        above = [cluster.units_of(level)[starts[:-1]] for level in range(self.level + 1, len(cluster.levels))]
        self.above = np.array(above or [np.zeros(len(self.size), np.int64)])
        self.over = self.above[:, np.unique(self.above[0], return_index=True)[1]]  # (levels, leaves) the same of leaves
        # (leaves, leaves) links between two leaf switches
        self.apart = 2 * (self.over[:, :, None] != self.over[:, None, :]).sum(axis=0)
        # (jobs,) each needs nodes × per_node GPUs (the last one may need fewer), on nodes that are usable for it
        work, kind = view.workload, cluster.gpu_type[starts[:-1]]
        masks = {each: np.array(cluster.usable(each))[kind] for each in map(str, dict.fromkeys(work.gpu_type))}
        largest = {each: int(self.size[mask].max(initial=1)) for each, mask in masks.items()}
        self.gpus, self.usable = work.gpus, [masks[str(each)] for each in work.gpu_type]
        self.nodes = -(-work.gpus // np.array([largest[str(each)] for each in work.gpu_type]))
        self.per_node = -(-work.gpus // self.nodes)
        for job in np.flatnonzero(self.nodes > 1).tolist():
            if len(kinds := np.unique(kind[self.usable[job]])) > 1:
                raise ForetraceError(
                    f"job {work.job[job]!r} may get {' and '.join(cluster.types[each] for each in kinds)} at once from "
                    "Slurm, and how fast it is then is not known; name one of them as its gpu_type."
                )

    def look(self, view: View) -> None:
        """Take note of who holds what now."""
        self.free, self.held = np.array(view.free(self.level), np.int64), {}
        self.now_ns, self.waited_s = view.now_ns, (view.now_ns - view.workload.submit_ns) / SECOND
        for job in view.running.tolist():
            self.held[job] = np.unique(self.node_of[list(view.gpus_of(job))], return_counts=True)
        self.up = self.freed(self.held) == self.size

    def freed(self, jobs: Iterable[int]) -> Int64:
        """Return (nodes,) GPUs that would be free without these jobs."""
        free = self.free.copy()
        for job in jobs:
            on, gpus = self.held[job]
            free[on] += gpus
        return free

    def take(self, view: View, job: int, nodes: list[int]) -> list[int]:
        """Free GPUs of these nodes, as many as needed."""
        chosen: list[int] = []
        for node in sorted(nodes):
            chosen += view.free_in(node, self.level)[: min(self.per_node[job], self.gpus[job] - len(chosen))]
        self.held[job] = np.unique(self.node_of[chosen], return_counts=True)
        np.subtract.at(self.free, self.node_of[chosen], 1)
        return chosen

    def room(self, job: int, free: Int64) -> Any:
        """Return (nodes,) whether so many free GPUs are enough for a job on each."""
        return free >= (self.size if self.exclusive else self.per_node[job])

    def choose(self, job: int, free: Int64, nodes: Any) -> list[int] | None:
        """Return as many of these nodes as the job needs; None where too few have room, or they lie below too many
        switches and the job has not waited long enough.

        Leaf by leaf: one that holds all that is missing, and of these the one with the fewest nodes that fit; else the
        one with the most. The first of equals. Within a leaf the first nodes, whatever else is free on them.
        """
        fit, wanted = nodes & self.usable[job] & self.room(job, free), int(self.nodes[job])
        if np.count_nonzero(fit) < wanted:
            return None
        counts = np.array(
            [
                np.bincount(above[fit], minlength=above.max() + 1)[over]
                for above, over in zip(self.above, self.over, strict=True)
            ]
        )  # (levels, leaves) nodes that fit below the switch above each leaf
        far = np.zeros(counts.shape[1], np.int64)
        chosen: list[int] = []
        leaves = 0
        while len(chosen) < wanted:
            missing, best = wanted - len(chosen), -1
            for leaf in np.flatnonzero(counts[0]).tolist():  # _topo_choose_best_switch
                better = 1 if best < 0 else self._compare(counts, leaf, best, missing)
                if best < 0 or (far[leaf] < far[best] and better >= 0) or (far[leaf] == far[best] and better > 0):
                    best = leaf
            chosen += np.flatnonzero(fit & (self.above[0] == self.over[0, best]))[:missing].tolist()
            far += self.apart[best]
            counts[0, best] = 0
            leaves += 1
        return None if 0 < self.switches < leaves and self.waited_s[job] < self.wait_s else chosen

    def _compare(self, counts: Int64, one: int, other: int, missing: int) -> int:
        """Return a number above 0 where the first leaf suits better (_topo_compare_switches)."""
        for level, count in enumerate(counts):
            fits, others = count[one] >= missing, count[other] >= missing
            if fits and others:
                return int(np.sign(count[other] - count[one]))
            if fits != others:
                return 1 if fits else -1
            if level + 1 == len(counts) or self.over[level + 1, one] == self.over[level + 1, other]:
                return int(np.sign(count[one] - count[other]))
        return 0

    def victims(self, job: int, nodes: Any, jobs: list[int]) -> list[int]:
        """Return those of these jobs, the first first, that make room for one; none where all of them are too few.

        They are taken away one after the other until it fits, then sorted by how many of its nodes they hold, three
        times in all; those that hold none of its nodes stay (cons_common/job_test.c: _run_now).
        """
        for again in (2, 1, 0):
            for count in range(1, len(jobs) + 1):
                chosen = self.choose(job, self.freed(jobs[:count]), nodes)
                if chosen is not None:
                    break
            else:
                return []
            theirs = {each: len(set(chosen) & set(self.held[each][0].tolist())) for each in jobs[:count]}
            if not again or len(jobs) <= 3 - again:
                return [each for each in jobs[:count] if theirs[each]]
            theirs[jobs[count - 1]] = len(self.size) + 1
            jobs = sorted(jobs, key=lambda each: -theirs.get(each, 0))
        return []


def following(first: int, every: int, after: int) -> int:
    """Return the first time after this one of those that lie so far apart; all in ns."""
    return after + every - (after - first) % every


@dataclass(slots=True)
class SlurmClock:
    """Times in ns of the simulation, but `changed` and `looked` in whole Unix seconds, as difftime() compares them."""

    parameters: SchedulerParameters
    epoch: int  # Unix time of the simulation's zero
    turn: int  # how long a turn of the background thread takes
    full: int  # the last pass over the whole queue; at first, when the thread wakes
    looks: int  # when the backfill scheduler wakes next; NEVER without one
    last: int = -(10**12)  # the main scheduler's last pass
    next: int = NEVER  # and its next one
    asked: bool = False  # for a pass, by something that happened since
    looked: int = -1  # when the backfill scheduler looked last
    changed: int = 0  # when jobs or nodes changed last
    crowd: tuple[int, int] = (0, 0)  # jobs that waited and ran when it was noted last

    def backfills(self, now: int) -> bool:
        """Return whether the backfill scheduler looks now: where something changed since it did (_more_work)."""
        return self.looks == now and self.changed >= self.looked

    def note(self, view: View) -> bool:
        """Return whether jobs came, started or ended since this was asked last."""
        crowd = len(view.waiting), len(view.running)
        news, self.crowd = crowd != self.crowd, crowd
        if news:
            self.changed = self.epoch + view.now_ns // SECOND
        return news

    def catch_up(self, now: int) -> None:
        """Catch up on passes and looks that found nobody waiting, which were not played."""
        while self.looks < now:
            self._look()
        if self.next < now:
            self._passed(self.next)
            self.next = NEVER

    def decided(self, view: View, *, told: bool, idle: bool) -> None:
        """Work out the next pass. told: an operator or a reservation changed nodes now; idle: nothing happened."""
        now, tried = view.now_ns, view.now_ns == self.next
        self.note(view)
        if told or (tried and len(view.waiting) > 1):  # a pass updates those that it does not try, too
            self.changed = self.epoch + now // SECOND
        self.catch_up(now)
        if tried:
            self._passed(now)
        elif told or not (idle or self.looks == now):
            self.asked = True
        if self.looks == now:
            self._look()
        zero, due = self.epoch * SECOND, self.full + self.parameters.sched_interval * SECOND
        if self.asked:  # whole seconds
            due = min(due, (zero + self.last) // SECOND * SECOND + self.parameters.batch_sched_delay * SECOND - zero)
        due = max(due, now + 1)
        self.next = due + (self.full - due) % self.turn

    def _passed(self, at: int) -> None:
        self.last, self.asked = at, False
        if at - self.full >= self.parameters.sched_interval * SECOND:
            self.full = at

    def _look(self) -> None:
        """Wake the backfill scheduler; where it has nothing to do, it sleeps for a second instead of its interval."""
        works = self.changed >= self.looked
        self.looked = self.epoch + self.looks // SECOND if works else self.looked
        self.looks += self.parameters.bf_interval * SECOND if works else SECOND


class SlurmMemory(NodeTable):
    """What the scheduler remembers of one simulation; times in Unix seconds. (n,): of each job."""

    def __init__(self, view: View, policy: SlurmOptions) -> None:
        super().__init__(view, policy)
        self.policy = policy
        work, epoch, nodes = view.workload, round(view.workload.epoch_s), np.arange(len(self.size))
        policy.fits(len(nodes))
        turn, wakes, looks, self.checks = (  # limits are enforced and priorities weighted for the first time, ns
            int(nanoseconds(each))
            for each in (policy.background_every_s, policy.background_s, policy.backfill_s, policy.checks_s)
        )
        self.clock = SlurmClock(policy.parameters, epoch, turn, wakes, looks if policy.backfill else NEVER)
        self.limits_s: list[int] = (stated.limits_min(work) * 60).tolist()  # (n,)
        self.awaits = stated.dependencies(work)
        self.array, self.at_once = stated.arrays_of(work)  # (n,)
        # (n,) PriorityTier of its partition, and priority of its QOS over the highest
        self.tiers = np.array([policy.tiers.get(str(name), 1) for name in work.tenant])
        self.qos = np.array([policy.qos.get(name, 0) for name in policy.qos_of(work)]) / max([1, *policy.qos.values()])
        self.closed, self.drained = (  # by reservations, and for all new jobs: their `nodes` are closed or drained
            [
                PlannedNodes(
                    epoch + int(each.begin_s), epoch + int(min(each.end_s, 1e12)),
                    (nodes >= each.first) & (nodes <= each.last),
                )
                for each in given
            ]
            for given in (policy.reservations, policy.drains)
        )  # fmt: skip
        self.now = 0  # the time of this decision
        self.backfills = False  # this decision is one of the backfill scheduler
        self.blocked = False  # the main scheduler has met a job that does not fit
        self.tested = 0
        self.space: list[PlannedNodes] = []
        self.ends: dict[int, int] = {}  # when those that run reach their limits
        self.overdue: set[int] = set()  # jobs that a limit has ended
        self.idle = False  # this decision is for a check of limits that ended nobody
        self.planned = Counter[int]()  # tasks that nodes are reserved for, by array
        self.refused: set[int] = set()  # arrays of which one could not be planned
        self.moved: dict[int, int] = {}  # when a task of an array started last, ns
        self.evicted: list[int] = []  # jobs that are being preempted
        self.evicts = -1  # when they are gone, ns
        self.weighed = -1  # when shares were counted last, ns
        self.shares: Float64 | float = 0.0

    def preemptees(self, job: int) -> list[int]:
        """Return running jobs that have to make room for this one, in order (slurm_find_preemptable_jobs)."""
        if self.policy.preempt_mode == "off" or self.evicted:
            return []
        held, tiers = self.held, self.tiers
        found = [each for each in held if tiers[each] < tiers[job]]
        return sorted(found, key=lambda each: (int(tiers[each]), len(held[each][0]), each))

    def evict(self, job: int, nodes: Any) -> None:
        """Take nodes from jobs that have to make room; it starts at a later pass, when they are gone."""
        if not self.policy.makes_room:
            return
        self.evicted = self.evicted or self.victims(job, nodes, self.preemptees(job))
        if self.evicted and self.evicts <= self.now_ns:
            self.evicts = self.now_ns + _EVICTED_NS

    def backfilled(self, job: int) -> list[int] | None:
        """Return nodes for a job that may start now; else nodes are reserved for it (backfill.c: _attempt_backfill)."""
        step, now, limit = self.policy.parameters.bf_resolution, self.now, self.limits_s[job]
        window = now + self.policy.parameters.bf_window * 60
        later = now
        while True:
            start_from = later
            nodes, later = self._unreserved(start_from, start_from + limit)
            found = self._will_run(job, nodes) if nodes.sum() >= self.nodes[job] else None
            if found is None:
                if not later:
                    return None
                continue
            start, chosen = max(found[0], start_from), found[1]
            if start <= now and self.room(job, self.free)[chosen].all():
                return chosen
            if start <= now:  # if others made room
                self.evict(job, nodes)
            if start > found[0]:
                self.clock.changed = now
            if later and start > later:
                continue
            if start > window:
                return None
            begin, end = start // step * step, (start + limit) // step * step
            overlaps = (each.end > begin and each.begin < end and not each.nodes[chosen].all() for each in self.space)
            if start > now and any(overlaps):
                later = start
                continue
            reserve(self.space, begin, max(end, begin + step), chosen)
            self.planned[int(self.array[job])] += 1
            return None

    def _unreserved(self, begin: int, end: int) -> tuple[Any, int]:
        """Return nodes that are up and reserved at no time in between, and when more will be (0: never)."""
        nodes, later = self.up.copy(), 0
        for at, each in enumerate(self.space):
            if each.end > begin and at + 1 < len(self.space) and not later:
                more = self.up & self.space[at + 1].nodes
                if (more & ~(nodes & each.nodes)).any():
                    later = each.end
            if each.begin > end:
                break
            if each.end > begin:
                nodes &= each.nodes
        return nodes, later

    def _will_run(self, job: int, nodes: Any) -> tuple[int, list[int]] | None:
        """Return when and on which of these nodes a job can start by the limits of those that run (job_test.c)."""
        away = self.preemptees(job)  # whose GPUs are not awaited, even where suspending them frees none
        for gone in ([], away) if away and self.policy.makes_room else ([],):
            free = self.freed(gone)
            chosen = self.choose(job, free, nodes)
            if chosen is not None:
                return self.now, chosen
        running = sorted((self.ends[each], each) for each in self.held if each not in away)
        at, window, first_end = 0, _FIRST_WINDOW_S, 0
        while at < len(running):
            last = removed = 0
            while at < len(running):
                end, other = running[at]
                at += 1
                on, gpus = self.held[other]
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
            chosen = self.choose(job, free, nodes)
            if chosen is not None:
                return max(last, self.now + 1), chosen
        return None
