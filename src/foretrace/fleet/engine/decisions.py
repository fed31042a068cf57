"""The fleet's loop: what happens at a moment, then who makes room, who may be tried, and who starts.

`stepping` says in plain Python what it computes, for any policy. Times are int64 nanoseconds, work is float64
nanoseconds at speed 1. The loop can stop at any event and be called again: whatever it needs from outside (a speed it
has not met, room in a log) it requests by its return value.
"""

# The compiler takes plain loops and nested conditions as they are.
# ruff: noqa: SIM102, PLR1714
# mypy: disable-error-code="assignment,arg-type,no-untyped-call,no-any-return,misc,call-arg,var-annotated"

from __future__ import annotations

import numpy as np

from foretrace.compiled import inner, njit
from foretrace.fleet.engine import memory, placing, waiting
from foretrace.fleet.engine.memory import EngineState, read


@inner
def _find(st, j, most):  # type: ignore[no-untyped-def]
    """Return (unit, level, kind of GPU), the tightest up to a level with room for the job; unit −1 without one."""
    demand = st.jobs[j].demand
    wanted, capacity, group = st.jobs[j].gpus, st.capacity, st.demands[demand]
    found = np.int64(-1)
    for level in range(group.memo + 1, most + 1):
        if capacity[demand, level] < wanted:
            continue
        for kind in range(st.free.shape[0]):
            if st.allowed[demand, kind] == 1:
                found = placing.best(st, kind, level, wanted)
                if found >= 0:
                    return found, level, kind
        group.memo = level
    return found, np.int64(0), np.int64(0)


@inner
def _usable(st, j):  # type: ignore[no-untyped-def]
    """Return whether as many GPUs of one kind that the job may use are free at all."""
    job, root = st.jobs[j], len(st.units) - 2
    for kind in range(st.free.shape[0]):
        if st.allowed[job.demand, kind] == 1 and st.free[kind, root] >= job.gpus:
            return True
    return False


@inner
def _over_quota(st, j):  # type: ignore[no-untyped-def]
    """Return whether its tenant would hold too much with the job, for which a reservation of GPUs would not help."""
    tenant = st.tenants[st.jobs[j].tenant]
    return tenant.used + st.jobs[j].gpus > tenant.quota


@inner
def _try(st, j):  # type: ignore[no-untyped-def]
    """Place the job if its rules allow: 1 placed, 0 it waits, −1 a speed is missing (and nothing changed)."""
    s, job = st.s, st.jobs[j]
    wanted, group = job.gpus, st.demands[job.demand]
    if _over_quota(st, j):
        waiting.refuse(st, j, memory.C_QUOTA, 0, 0)
        return 0
    if not _usable(st, j):
        waiting.refuse(st, j, memory.C_TYPE if s.free >= wanted and st.free.shape[0] > 1 else memory.C_FULL, 0, s.free)
        return 0
    most, opens = placing.widest(st, j)
    group.widest = most
    unit, level, kind = _find(st, j, most)
    row = np.int64(-1)
    if job.reclaims == 1 and job.level <= most and (unit < 0 or job.level <= level):
        gpu = job.head
        while gpu >= 0:
            st.devs[gpu].reclaimer = -1
            st.devs[gpu].owner = j
            placing.change(st, gpu, -1)
            gpu = st.devs[gpu].nxt
    elif unit < 0:
        if opens < memory.NEVER:
            waiting.refuse(st, j, memory.C_TIMER, most, opens)
            if job.pos < 0 or job.when != opens:
                waiting.schedule(st, j, opens)
        else:
            waiting.refuse(st, j, memory.C_SCATTERED, most, s.free)
        return 0
    else:
        # the old list must be whole when its stretch is closed, so a job that moves loses it before it takes others
        if job.reclaims == 1:
            placing.lose(st, j)
        before = job.level
        placing.fill(st, j, kind, level, unit)
        row = placing.speed(st, j)
        if row < 0:
            placing.untake(st, job.head)
            job.head = -1
            job.level = before
            return -1
        if s.auto == 1:
            placing.remember(st, j, job.level)
        waiting.unschedule(st, j)
        waiting.note(st, j, memory.L_START, job.level, st.devs[job.head].nxt if wanted > 1 else job.head)
    s.wanted -= wanted
    group.waiting -= 1
    placing.go(st, j, row)
    return 1


@inner
def _running(st):  # type: ignore[no-untyped-def]
    """Put the jobs that run into `order`, and say how many."""
    n = np.int64(0)
    for i in range(st.s.heap):
        if st.jobs[st.heap[i]].status == memory.RUNNING:
            st.order[n] = st.heap[i]
            n += 1
    return n


@inner
def _competes(st, j, kind):  # type: ignore[no-untyped-def]
    """Return whether a waiting job may use this kind of GPU and fits on no other one by number."""
    job, root = st.jobs[j], len(st.units) - 2
    for other in range(st.free.shape[0]):
        if other != kind and st.allowed[job.demand, other] == 1 and st.free[other, root] >= job.gpus:
            return False
    return st.allowed[job.demand, kind] == 1


@inner
def _outrank(st):  # type: ignore[no-untyped-def]
    """Find who of the running has to make room: by kind of GPU, those outside of the first in order that fit by number.

    Whoever is before the whole line keeps its GPUs.
    """
    s, jobs, order, queue, kinds = st.s, st.jobs, st.order, st.queue, st.free.shape[0]
    if kinds == 1 and s.wanted <= s.free:
        return  # by number all fit
    losers = np.int64(0)
    for kind in range(kinds):
        budget = st.free[kind, len(st.units) - 2]
        behind = losers
        for i in range(s.heap):
            j = st.heap[i]
            if jobs[j].status == memory.RUNNING and st.devs[jobs[j].head].kind == kind:
                placing.settle(st, j)
                waiting.weigh(st, j)
                if waiting.ahead(jobs, queue[s.head], j):
                    order[behind] = j
                    behind += 1
                    budget += jobs[j].gpus
        waiting.sort(jobs, order, losers, behind, st.merged)
        # walk the waiting line and the running together in order; who stands after the GPUs are dealt out has none
        at = s.head
        for i in range(losers, behind):
            j = order[i]
            while at < s.tail and budget > 0 and waiting.ahead(jobs, queue[at], j):
                wanted = jobs[queue[at]].gpus
                if _competes(st, queue[at], kind):
                    if wanted <= budget:
                        budget -= wanted
                    elif s.admit == memory.BLOCK:
                        budget = 0
                at += 1
            if jobs[j].gpus <= budget:
                budget -= jobs[j].gpus
            else:
                order[losers] = j
                losers += 1
    for i in range(losers):
        _release_reclaimable(st, order[i])


@inner
def _release_reclaimable(st, j):  # type: ignore[no-untyped-def]
    """Release the GPUs of a job and queue it again; unless another job takes them, it may reclaim them."""
    job = st.jobs[j]
    placing.settle(st, j)
    placing.release(st, j)
    waiting.unschedule(st, j)
    job.reclaims = 1
    gpu = job.head
    while gpu >= 0:
        st.devs[gpu].reclaimer = j
        gpu = st.devs[gpu].nxt
    if st.s.preempt == memory.LEASE:
        job.last = st.s.now  # starvation counts from the end of a lease, also of one that is renewed (Dally)
    waiting.wait(st, j, memory.C_OUTRANKED)


@inner
def _reserve(st, j):  # type: ignore[no-untyped-def]
    """Find when by stated run times a kind of GPU has enough free ones for the job, which kind, and how many more."""
    s, order, blocked, root = st.s, st.order, st.jobs[j], len(st.units) - 2
    n = _running(st)
    for i in range(n):
        job = st.jobs[order[i]]
        job.k1 = max(job.stretch + job.stretch_dead + job.estimate / job.rate, float(s.now))
        job.k2 = 0.0
    waiting.sort(st.jobs, order, 0, n, st.merged)
    s.shadow = memory.NEVER
    s.spare = 0
    for kind in range(st.free.shape[0]):
        if st.allowed[blocked.demand, kind] == 0:
            continue
        free = st.free[kind, root]
        for i in range(n):
            job = st.jobs[order[i]]
            if st.devs[job.head].kind == kind:
                free += job.gpus
                if free >= blocked.gpus:
                    if job.k1 < s.shadow:
                        s.shadow = np.int64(np.ceil(job.k1))
                        s.spare = free - blocked.gpus
                        s.reserved = kind
                    break


@inner
def _delays(st, j):  # type: ignore[no-untyped-def]
    """Return whether the job may take GPUs of the reserved kind, and would still run when they are needed."""
    s, job = st.s, st.jobs[j]
    return s.now + job.estimate > s.shadow and st.allowed[job.demand, s.reserved] == 1


@inner
def _line_up(st):  # type: ignore[no-untyped-def]
    """Prepare a pass before the first job is looked at."""
    s, queue = st.s, st.queue
    if s.order == memory.BY_FAIRNESS:
        # the worst treated part first, largest first among them; then all others
        front = np.int64(np.ceil(s.share * (s.tail - s.head) / 1e6))
        if front > 1:
            for i in range(front):
                job = st.jobs[queue[s.head + i]]
                job.k1 = -float(job.gpus)
                job.k2 = float(i)
            waiting.sort(st.jobs, queue, s.head, s.head + front, st.merged)
    for i in range(len(st.demands)):
        st.demands[i].memo = -1
        st.demands[i].unfit = -1
    s.at = s.head
    s.kept = 0
    s.shadow = memory.NEVER
    s.spare = 0
    s.blocked = 0


@inner
def _open(st):  # type: ignore[no-untyped-def]
    """Return whether any class of waiting jobs may still find room."""
    for i in range(len(st.demands)):
        group = st.demands[i]
        if group.waiting > 0 and group.unfit < 0 and group.gpus <= st.s.free:
            return True
    return False


@inner
def _pass(st):  # type: ignore[no-untyped-def]
    """Offer what is free to the waiting in their order; False where a speed is missing, and it continues from there."""
    s, jobs, queue = st.s, st.jobs, st.queue
    changed = True
    while s.at < s.tail:
        # jobs alike fare alike in one decision where `final` says so
        if s.free == 0 or (s.final == 1 and changed and not _open(st)):
            break
        changed = False
        j = queue[s.at]
        job, group = jobs[j], st.demands[jobs[j].demand]
        placed = 0
        if job.gpus > s.free:
            waiting.refuse(st, j, memory.C_FULL, 0, s.free)
        elif group.unfit >= 0:
            waiting.refuse(
                st, j, group.unfit, group.widest if group.unfit == memory.C_SCATTERED else np.int64(0), s.free
            )
        elif _delays(st, j) and job.gpus > s.spare:
            waiting.refuse(st, j, memory.C_RESERVED, 0, 0)
        else:
            placed = _try(st, j)
            if placed < 0:
                return False
            if placed == 0:
                if s.final == 1:
                    group.unfit = job.cause
                    changed = True
            elif _delays(st, j) and st.devs[job.head].kind == s.reserved:
                s.spare -= job.gpus
        s.at += 1
        if placed == 1:
            changed = True
            continue
        if s.admit == memory.BACKFILL and s.blocked == 0 and not _over_quota(st, j):
            s.blocked = 1
            _reserve(st, j)
        queue[s.head + s.kept] = j
        s.kept += 1
        if s.admit == memory.BLOCK:
            break
    if (
        s.admit == memory.BLOCK and s.kept == 0 and s.at < s.tail
    ):  # the first in line was not looked at: nothing is free
        waiting.refuse(st, queue[s.at], memory.C_FULL, 0, s.free)
    for i in range(s.kept - 1, -1, -1):  # those who were kept stand before those who were not looked at
        queue[s.at - s.kept + i] = queue[s.head + i]
    s.head = s.at - s.kept
    return True


@inner
def _tighten(st):  # type: ignore[no-untyped-def]
    """Move running jobs to a tighter unit where one is free and they finish sooner; False where a speed is missing."""
    s, jobs, order = st.s, st.jobs, st.order
    n = _running(st)
    for i in range(n):
        jobs[order[i]].k1 = 0.0
        jobs[order[i]].k2 = 0.0
    waiting.sort(jobs, order, 0, n, st.merged)
    for i in range(n):
        j = order[i]
        job = jobs[j]
        if j < s.resume or job.level == 0:
            continue  # looked at before a speed was missing, or as tight as can be
        s.resume = j
        kind = st.devs[job.head].kind
        found = np.int64(-1)
        for level in range(job.level):
            if st.capacity[job.demand, level] >= job.gpus:
                found = placing.best(st, kind, level, job.gpus)
                if found >= 0:
                    break
        if found < 0:
            continue
        placing.settle(st, j)
        old, old_level = job.head, job.level
        placing.fill(st, j, kind, level, found)
        row = placing.speed(st, j)
        taken, tight = job.head, job.level
        job.head, job.level = old, old_level
        better = False
        if row >= 0:
            ends = max(s.now, job.ready) + job.restart + job.remaining / st.table[row].progress
            better = ends < job.finish_at
        if better:
            placing.close(st, j)
            placing.release(st, j)
            job.head, job.level = taken, tight
            job.cause_since = s.now
            placing.go(st, j, row)
            waiting.note(st, j, memory.L_MIGRATE, tight, old_level)
        else:
            placing.untake(st, taken)
            if row < 0:
                return False
    return True


@inner
def _name_causes(st):  # type: ignore[no-untyped-def]
    """Name causes for jobs that the pass did not reach; those that could reclaim GPUs no longer can."""
    s = st.s
    for i in range(s.fresh):
        j = st.newly[i]
        job = st.jobs[j]
        if job.status != memory.WAITING:
            continue
        if job.reclaims == 1:
            placing.lose(st, j)
        if job.cause == memory.C_UNDECIDED and s.now == job.cause_since:
            if s.admit == memory.BLOCK:
                waiting.refuse(st, j, memory.C_BEHIND, 0, 0)
            else:
                waiting.refuse(st, j, memory.C_FULL, 0, s.free)


@inner
def _decide(st):  # type: ignore[no-untyped-def]
    """Offer what is free to everybody who waits; False where a speed is missing, and it continues from there."""
    s = st.s
    if s.pending == 1:
        s.resume = -1
        if s.tail > s.head:
            if s.order == memory.BY_FAIRNESS or (
                s.stale == 1 and (s.order == memory.BY_LAST or s.order == memory.BY_NETWORK)
            ):
                waiting.resort(st)
            s.stale = 0
            if s.preempt == memory.ALWAYS:
                _outrank(st)
            _line_up(st)
            s.pending = 2
        else:
            s.pending = 3
    if s.pending == 2:
        if not _pass(st):
            return False
        _name_causes(st)
        s.pending = 3
    s.fresh = 0
    return s.migrate == 0 or _tighten(st)


@inner
def _happen(st):  # type: ignore[no-untyped-def]
    """Handle all events of one moment: ends, failures and repairs, ends of leases and bands, submissions."""
    s, jobs, order, devs = st.s, st.jobs, st.order, st.devs
    expired = np.int64(0)
    while s.heap > 0 and jobs[st.heap[0]].when == s.now:
        j = st.heap[0]
        job = jobs[j]
        waiting.unschedule(st, j)
        s.events += 1
        if job.status != memory.RUNNING:
            continue  # a timer of a waiting job: the decision below looks at it again
        placing.settle(st, j)
        if job.finish_at == s.now:
            placing.finish(st, j)
            continue
        if s.order == memory.BY_QUEUE and job.band < len(st.thresholds):
            # half a nanosecond of service: the event was scheduled at a whole one
            if job.gpu_ns >= st.thresholds[job.band] - 0.5 * job.gpus:
                job.band += 1
        if s.preempt == memory.LEASE and job.lease_end == s.now:
            order[expired] = j
            expired += 1
        else:
            placing.review(st, j)
    while s.next_failure < len(st.fails) and st.fails[s.next_failure].at == s.now:
        failure = st.fails[s.next_failure]
        s.next_failure += 1
        s.events += 1
        for gpu in range(st.units[failure.unit].lo, st.units[failure.unit].hi):
            if failure.up == 1:
                if devs[gpu].owner == -2:
                    devs[gpu].owner = -1
                    placing.change(st, gpu, 1)
            else:
                if devs[gpu].owner >= 0:
                    placing.fail(st, devs[gpu].owner)
                if devs[gpu].owner == -1:
                    devs[gpu].owner = -2
                    placing.change(st, gpu, -1)
    while s.next < len(jobs) and jobs[s.next].submit == s.now:
        j = s.next
        s.next += 1
        s.events += 1
        if jobs[j].status == memory.FUTURE:
            jobs[j].last = s.now
            waiting.wait(st, j, memory.C_UNDECIDED)
    bidding = s.tail > s.head
    for i in range(expired):
        j = order[i]
        if jobs[j].status != memory.RUNNING:
            continue
        if bidding:
            _release_reclaimable(st, j)
        else:
            jobs[j].lease_end = s.now + s.lease
            placing.review(st, j)


@inner
def _next(st):  # type: ignore[no-untyped-def]
    """Return when the next event is due; memory.NEVER where there is none."""
    s = st.s
    now = memory.NEVER
    if s.heap > 0:
        now = st.jobs[st.heap[0]].when
    if s.next < len(st.jobs):
        now = min(now, st.jobs[s.next].submit)
    # failures and repairs matter while somebody runs, waits or comes
    busy = s.heap > 0 or s.next < len(st.jobs) or s.tail > s.head
    if busy and s.next_failure < len(st.fails):
        now = min(now, st.fails[s.next_failure].at)
    return now


@inner
def _room(st, now):  # type: ignore[no-untyped-def]
    """Return whether the logs have room for all that can happen at one moment."""
    s = st.s
    active = s.heap + s.tail - s.head
    coming = s.next
    while coming < len(st.jobs) and st.jobs[coming].submit == now:
        coming += 1
    coming -= s.next
    return not (
        (s.keep > 0 and s.segments + 2 * active + 8 > len(st.seg))
        or (s.keep > 1 and s.devices + 2 * len(st.devs) > len(st.devices))
        or (s.track > memory.UNWATCHED and s.log + 6 * active + 3 * coming + 64 > len(st.log))
        or (s.auto == 1 and s.samples + active + coming + 8 > len(st.samples))
    )


@njit(error_model="numpy", _nrt=False)
def _run(table, until):  # type: ignore[no-untyped-def]
    st = read(table)
    s = st.s
    while True:
        if s.pending == 0:
            now = _next(st)
            if now == memory.NEVER:
                return memory.FINISHED
            if now > until or s.events >= s.limit:
                return memory.STOPPED
            if not _room(st, now):
                return memory.NEED_ROOM
            s.now = now
            _happen(st)
            s.pending = 1
        if not _decide(st):
            return memory.NEED_SPEED
        s.pending = 0


def run(state: EngineState, until: int) -> int:
    """Play events up to and including `until`; the return value says why it stopped."""
    why: int = _run(state.addresses(), until)
    return why
