"""Compiled loops of the fleet room; `stepping` says in plain Python what they compute, for any policy.

All of them live in this file because numba's cache does not see edits across files. Times are int64 nanoseconds, work
is float64 nanoseconds at speed 1. The loop can stop at any event and be called again: whatever it needs from outside
(a speed it has not met, room in a log) it asks for by its return value.
"""

# The compiler takes plain loops and nested conditions as they are.
# ruff: noqa: SIM102, SIM103, SIM110, PLR1714
# mypy: disable-error-code="assignment,arg-type,no-untyped-call,no-any-return,misc"

from __future__ import annotations

from typing import Any, NamedTuple

import numba as nb
import numpy as np

from foretrace.compiled import njit

NEVER = np.int64(2**62)
# Only `run` is called from Python: the others need no wrappers, which would take most of the time to compile.
_inner: Any = nb.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy")  # type: ignore[call-overload]
# what `run` returns
FINISHED, STOPPED, NEED_SPEED, NEED_ROOM = 0, 1, 2, 3
# status of a job
FUTURE, WAITING, RUNNING, DONE = 0, 1, 2, 3
# order rules
BY_KEY, BY_REMAINING, BY_SERVICE, BY_QUEUE, BY_NETWORK, BY_LAST, BY_FAIRNESS = 0, 1, 2, 3, 4, 5, 6
# admission rules
BLOCK, SKIP, BACKFILL = 0, 1, 2
# preemption rules
KEEP, LEASE, ALWAYS = 0, 1, 2
# causes of waiting, as result.Cause
(C_UNDECIDED, C_BEHIND, C_FULL, C_SCATTERED, C_TIMER, C_QUOTA, C_TYPE, C_RESERVED, C_OUTRANKED) = range(9)
CAUSES = 10
# what happened, in the log of decisions
L_START, L_WAIT, L_PREEMPT, L_MIGRATE, L_FINISH, L_FAIL = 0, 1, 2, 3, 4, 5
# places of numbers in State.s
(NOW, NEXT, HEAP, HEAD, TAIL, PENDING, FREE, SEGMENTS, DEVICES, LOG, EVENTS, NEXT_FAILURE, ORDER, ADMIT, PREEMPT,
 LEASE_NS, MACHINE, AUTO, HISTORY, SAMPLES, TIMERS, MIGRATE, TRACK, KEEP_SEGMENTS, CHECKPOINT_NS, SHARE, FILLED, FRESH,
 FIRST_COST, LIMIT, WANTED, AT, KEPT, BLOCKED, SHADOW, SPARE, STALE, RESUME, FINAL) = range(39)  # fmt: skip
NUMBERS = 39


def _record(integers: str, floats: str = "") -> np.dtype[Any]:
    return np.dtype([(name, np.int64) for name in integers.split()] + [(name, np.float64) for name in floats.split()])


# What a job is (asked for) and how it stands. Times in ns; `work`, `remaining` ns at speed 1; `gpu_ns` is service had.
# demand: class of (GPUs, kinds allowed); size: class of GPUs alone, for the tuner; eager: no delay timer holds it;
# fresh: when this stretch began to make progress, what a failure can lose; ghost: it lost its GPUs in this decision and
# gets them back for nothing if they stay free; band: queue of a discretised order; head: first of its GPUs.
JOB = _record(
    "submit gpus kind demand size tenant restart eager status mark ready fresh first ended held dead starts preempted "
    "failed last lease_end finish_at cause cause_since band head level ghost stretch stretch_dead pos when",
    "work remaining estimate key talk gpu_ns rate talking k1 k2",
)
DEVICE = _record("owner nxt haunted kind unit")  # nxt: the next GPU of its job; unit: the innermost one
UNIT = _record("lo hi parent child count touched")  # GPUs lo ... hi - 1, units child ... child of the next - 1
LEVEL = _record("at wait", "floor cap")  # first unit; wait before spreading (ns); tuner's floor and cap in leases
TENANT = _record("quota used")
WINDOW = _record("head tail n said", "sum sq")  # samples by (size, level) in a linked list
SAMPLE = _record("at next", "leases")
RATE = _record("filled", "progress communication")  # speeds, open addressing beside `rows`
FAILURE = _record("at unit up")
INDEX = _record("", "service value")


class State(NamedTuple):
    """Everything that is known at one moment. n jobs, G GPUs, U units, L levels, T kinds of GPU."""

    s: Any  # (NUMBERS,) int64, the numbers above
    jobs: Any  # (n,) JOB
    waited: Any  # (n, CAUSES) ns
    heap: Any  # (n,) jobs by their next event
    queue: Any  # (n,) the waiting line, between s[HEAD] and s[TAIL]
    order: Any  # (n,) scratch
    newly: Any  # (2 n,) who came to wait since the last decision
    devs: Any  # (G,) DEVICE
    units: Any  # (U + 1,) UNIT, innermost level first
    free: Any  # (T, U)
    levels: Any  # (L + 1,) LEVEL
    capacity: Any  # (demands, L) largest unit of a level for such a job
    allowed: Any  # (demands, T)
    memo: Any  # (demands,) the widest level at which such a job did not fit in this decision
    line: Any  # (demands, 4) GPUs of such a job, how many wait, why none fits in this decision (-1: one may), how wide
    thresholds: Any  # bands of service, GPU-ns
    index: Any  # INDEX
    tenants: Any  # TENANT
    windows: Any  # (sizes * L,) WINDOW
    samples: Any  # SAMPLE
    timer_log: Any  # (k, 4) time, GPUs, level, wait in ns
    rows: Any  # (slots, 4 + L) kind of job, GPUs, even, kind of GPU, units per level
    table: Any  # (slots,) RATE
    ask: Any  # (6 + L,) such a row, the job, the slot
    fails: Any  # FAILURE by time
    seg: Any  # (k, 7) job, start, end, GPUs, level, dead, first device
    devices: Any  # GPUs of the stretches one after the other
    log: Any  # (k, 6) time, job, what, a, b, when it last gained or lost GPUs


@_inner
def _column(jobs, members, which):  # type: ignore[no-untyped-def]
    """One number of each of these jobs: 0 first key, 1 second key, 2 GPUs, many first."""
    out = np.empty(len(members))
    for i in range(len(members)):
        j = members[i]
        out[i] = jobs[j].k1 if which == 0 else jobs[j].k2 if which == 1 else -float(jobs[j].gpus)
    return out


# ---------------------------------------------------------------- heap of jobs by (when, job)
@_inner
def _before(jobs, a, b):  # type: ignore[no-untyped-def]
    return jobs[a].when < jobs[b].when or (jobs[a].when == jobs[b].when and a < b)


@_inner
def _sift(s, jobs, heap, at):  # type: ignore[no-untyped-def]
    size = s[HEAP]
    job = heap[at]
    while at > 0:
        up = (at - 1) >> 1
        if not _before(jobs, job, heap[up]):
            break
        heap[at] = heap[up]
        jobs[heap[at]].pos = at
        at = up
    while True:
        down = 2 * at + 1
        if down >= size:
            break
        if down + 1 < size and _before(jobs, heap[down + 1], heap[down]):
            down += 1
        if not _before(jobs, heap[down], job):
            break
        heap[at] = heap[down]
        jobs[heap[at]].pos = at
        at = down
    heap[at] = job
    jobs[job].pos = at


@_inner
def _schedule(s, jobs, heap, job, when):  # type: ignore[no-untyped-def]
    jobs[job].when = when
    if jobs[job].pos < 0:
        heap[s[HEAP]] = job
        jobs[job].pos = s[HEAP]
        s[HEAP] += 1
    _sift(s, jobs, heap, jobs[job].pos)


@_inner
def _unschedule(s, jobs, heap, job):  # type: ignore[no-untyped-def]
    at = jobs[job].pos
    if at < 0:
        return
    s[HEAP] -= 1
    size = s[HEAP]
    jobs[job].pos = -1
    if at < size:
        heap[at] = heap[size]
        jobs[heap[at]].pos = at
        _sift(s, jobs, heap, at)


# ---------------------------------------------------------------- the waiting line, sorted by (k1, k2, job)
@_inner
def _ahead(jobs, a, b):  # type: ignore[no-untyped-def]
    if jobs[a].k1 != jobs[b].k1:
        return jobs[a].k1 < jobs[b].k1
    if jobs[a].k2 != jobs[b].k2:
        return jobs[a].k2 < jobs[b].k2
    return a < b


@_inner
def _index(st, attained):  # type: ignore[no-untyped-def]
    """Value of the index table at an attained service: that of the last grid point not above it."""
    lo, hi = 0, len(st.index)
    while lo < hi:
        mid = (lo + hi) >> 1
        if st.index[mid].service <= attained:
            lo = mid + 1
        else:
            hi = mid
    return st.index[max(lo - 1, 0)].value


@_inner
def _keys(st, j, now):  # type: ignore[no-untyped-def]
    rule = st.s[ORDER]
    a = 0.0
    b = 0.0
    if rule == BY_KEY:
        a = st.jobs[j].key
    elif rule == BY_REMAINING:
        a = st.jobs[j].remaining
    elif rule == BY_SERVICE:
        a = st.jobs[j].gpu_ns
    elif rule == BY_QUEUE:
        a = float(st.jobs[j].band)
        if len(st.index) > 0 and st.jobs[j].band < len(st.thresholds):
            b = -_index(st, st.jobs[j].gpu_ns)
    elif rule == BY_NETWORK:
        # W / (R / ideal): the share of the work that is done over the share of the ideal time that it took
        done = 1.0 - st.jobs[j].remaining / st.jobs[j].work
        a = done / (st.jobs[j].held / st.jobs[j].work) if st.jobs[j].held > 0 else 0.0
        b = float(st.jobs[j].last)
    elif rule == BY_LAST:
        a = float(st.jobs[j].last)
    else:
        a = -(now - st.jobs[j].submit + st.jobs[j].remaining) / st.jobs[j].work
    st.jobs[j].k1 = a
    st.jobs[j].k2 = b


@_inner
def _enqueue(st, j, now):  # type: ignore[no-untyped-def]
    _keys(st, j, now)
    s, jobs, queue = st.s, st.jobs, st.queue
    head, tail = s[HEAD], s[TAIL]
    lo, hi = head, tail
    if hi > lo and not _ahead(jobs, j, queue[hi - 1]):
        lo = hi
    while lo < hi:
        mid = (lo + hi) >> 1
        if _ahead(jobs, j, queue[mid]):
            hi = mid
        else:
            lo = mid + 1
    if head > 0 and (lo - head <= tail - lo or tail == len(queue)):
        for i in range(head, lo):
            queue[i - 1] = queue[i]
        queue[lo - 1] = j
        s[HEAD] = head - 1
    else:
        for i in range(tail, lo, -1):
            queue[i] = queue[i - 1]
        queue[lo] = j
        s[TAIL] = tail + 1


@_inner
def _because(jobs, waited, j, cause, now):  # type: ignore[no-untyped-def]
    """The job waits for this reason from now on; whether that is news."""
    if jobs[j].cause != cause:
        waited[j, jobs[j].cause] += now - jobs[j].cause_since
        jobs[j].cause_since = now
        jobs[j].cause = cause
        return True
    return False


@_inner
def _note(st, j, what, a, b):  # type: ignore[no-untyped-def]
    track = st.s[TRACK]
    if track == -1 or track == j:
        at = st.s[LOG]
        st.log[at, 0] = st.s[NOW]
        st.log[at, 1] = j
        st.log[at, 2] = what
        st.log[at, 3] = a
        st.log[at, 4] = b
        st.log[at, 5] = st.jobs[j].last
        st.s[LOG] = at + 1


@_inner
def _wait(st, j, cause, now):  # type: ignore[no-untyped-def]
    """The job becomes a waiting one."""
    st.jobs[j].status = WAITING
    st.newly[st.s[FRESH]] = j
    st.s[FRESH] += 1
    st.s[WANTED] += st.jobs[j].gpus
    st.line[st.jobs[j].demand, 1] += 1
    st.jobs[j].cause = cause
    st.jobs[j].cause_since = now
    _enqueue(st, j, now)


# ---------------------------------------------------------------- GPUs
@_inner
def _change(s, devs, units, free, gpu, by):  # type: ignore[no-untyped-def]
    kind = devs[gpu].kind
    unit = devs[gpu].unit
    while unit >= 0:
        free[kind, unit] += by
        unit = units[unit].parent
    s[FREE] += by


@_inner
def _close(st, j, now):  # type: ignore[no-untyped-def]
    """Write down the stretch that ends; the list of its GPUs is still whole."""
    if st.s[KEEP_SEGMENTS] > 0:
        at = st.s[SEGMENTS]
        first = st.s[DEVICES]
        st.seg[at, 0] = j
        st.seg[at, 1] = st.jobs[j].stretch
        st.seg[at, 2] = now
        st.seg[at, 3] = st.jobs[j].gpus
        st.seg[at, 4] = st.jobs[j].level
        st.seg[at, 5] = min(st.jobs[j].stretch_dead, now - st.jobs[j].stretch)
        st.seg[at, 6] = first
        if st.s[KEEP_SEGMENTS] > 1:
            gpu = st.jobs[j].head
            while gpu >= 0:
                st.devices[first] = gpu
                first += 1
                gpu = st.devs[gpu].nxt
            st.s[DEVICES] = first
        st.s[SEGMENTS] = at + 1


@_inner
def _lose(st, j, now):  # type: ignore[no-untyped-def]
    """A ghost cannot have its GPUs back: its stretch is over."""
    _close(st, j, now)
    gpu = st.jobs[j].head
    while gpu >= 0:
        if st.devs[gpu].haunted == j:
            st.devs[gpu].haunted = -1  # else it would lose its next GPUs when somebody takes these
        gpu = st.devs[gpu].nxt
    if st.s[PREEMPT] == ALWAYS:
        st.s[STALE] = 1  # it stands in line as of when it held them
    st.jobs[j].ghost = 0
    st.jobs[j].preempted += 1
    st.jobs[j].last = now
    _note(st, j, L_PREEMPT, st.jobs[j].gpus, 0)


@_inner
def _take(st, gpu, j, now):  # type: ignore[no-untyped-def]
    other = st.devs[gpu].haunted
    if other >= 0 and other != j and st.jobs[other].ghost == 1:
        _lose(st, other, now)
    st.devs[gpu].haunted = -1
    st.devs[gpu].owner = j
    st.devs[gpu].nxt = st.jobs[j].head
    st.jobs[j].head = gpu
    _change(st.s, st.devs, st.units, st.free, gpu, -1)


@_inner
def _release(st, j):  # type: ignore[no-untyped-def]
    """Its GPUs are free; the list stays until somebody takes one of them."""
    gpu = st.jobs[j].head
    while gpu >= 0:
        st.devs[gpu].owner = -1
        _change(st.s, st.devs, st.units, st.free, gpu, 1)
        gpu = st.devs[gpu].nxt
    st.tenants[st.jobs[j].tenant].used -= st.jobs[j].gpus


@_inner
def _best(levels, free, kind, level, wanted):  # type: ignore[no-untyped-def]
    """The unit with the fewest free GPUs that are enough; the first of several."""
    best = np.int64(-1)
    least = NEVER
    for unit in range(levels[level].at, levels[level + 1].at):
        have = free[kind, unit]
        if wanted <= have < least:
            least = have
            best = unit
            if have == wanted:
                break
    return best


@_inner
def _fill(st, j, kind, level, unit, now):  # type: ignore[no-untyped-def]
    """Take the job's GPUs inside a unit: whole children with the most free ones first, the rest where it just fits."""
    need = st.jobs[j].gpus
    st.jobs[j].head = -1
    while True:
        if level == 0:
            for gpu in range(st.units[unit].lo, st.units[unit].hi):
                if need == 0:
                    break
                if st.devs[gpu].owner == -1:
                    _take(st, gpu, j, now)
                    need -= 1
            return
        while True:
            best = np.int64(-1)
            least = NEVER
            most = np.int64(-1)
            top = np.int64(0)
            for child in range(st.units[unit].child, st.units[unit + 1].child):
                free = st.free[kind, child]
                if need <= free < least:
                    least = free
                    best = child
                if free > top:
                    top = free
                    most = child
            if best >= 0:
                unit = best
                level -= 1
                break
            for gpu in range(st.units[most].lo, st.units[most].hi):
                if st.devs[gpu].owner == -1 and st.devs[gpu].kind == kind:
                    _take(st, gpu, j, now)
                    need -= 1
            if need == 0:
                return


@_inner
def _speed(st, j):  # type: ignore[no-untyped-def]
    """Row of the speed table for where the job's GPUs are; −1 where it is not known yet (`ask` then says what)."""
    ask, levels = st.ask, len(st.levels) - 1
    ask[0] = st.jobs[j].kind
    ask[1] = st.jobs[j].gpus
    ask[2] = 1
    ask[3] = st.devs[st.jobs[j].head].kind
    ask[4 + levels] = j
    seen = np.int64(0)
    gpu = st.jobs[j].head
    while gpu >= 0:
        unit = st.devs[gpu].unit
        while unit >= 0:
            if st.units[unit].count == 0:
                st.units[seen].touched = unit
                seen += 1
            st.units[unit].count += 1
            unit = st.units[unit].parent
        gpu = st.devs[gpu].nxt
    for level in range(levels):
        units = np.int64(0)
        each = np.int64(-1)
        for i in range(seen):
            unit = st.units[i].touched
            if st.levels[level].at <= unit < st.levels[level + 1].at:
                units += 1
                if each == -1:
                    each = st.units[unit].count
                elif each != st.units[unit].count:
                    ask[2] = 0
        ask[4 + level] = units
    for i in range(seen):
        st.units[st.units[i].touched].count = 0
    tight = np.int64(0)
    while ask[4 + tight] > 1:
        tight += 1
    st.jobs[j].level = tight
    width = 4 + levels
    code = np.int64(1469598103934665603)
    for i in range(width):
        code = (code ^ ask[i]) * np.int64(1099511628211)
    mask = len(st.table) - 1
    at = (code ^ (code >> 29)) & mask
    while st.table[at].filled == 1:
        same = True
        for i in range(width):
            if st.rows[at, i] != ask[i]:
                same = False
                break
        if same:
            return at
        at = (at + 1) & mask
    ask[5 + levels] = at
    return np.int64(-1)


# ---------------------------------------------------------------- progress
@_inner
def _settle(jobs, j, now):  # type: ignore[no-untyped-def]
    mark = jobs[j].mark
    if now <= mark:
        return
    begun = max(mark, jobs[j].ready)
    if now > begun:
        jobs[j].remaining -= (now - begun) * jobs[j].rate
        jobs[j].talk += (now - begun) * jobs[j].talking
        jobs[j].dead += begun - mark
    else:
        jobs[j].dead += now - mark
    jobs[j].held += now - mark
    jobs[j].gpu_ns += float(now - mark) * jobs[j].gpus
    jobs[j].mark = now


@_inner
def _review(st, j):  # type: ignore[no-untyped-def]
    """When the engine has to look at a running job again."""
    at = st.jobs[j].finish_at
    if st.s[PREEMPT] == LEASE:
        at = min(at, st.jobs[j].lease_end)
    if st.s[ORDER] == BY_QUEUE and st.jobs[j].band < len(st.thresholds):
        left = st.thresholds[st.jobs[j].band] - st.jobs[j].gpu_ns
        at = min(at, st.jobs[j].mark + max(np.int64(np.ceil(left / st.jobs[j].gpus)), np.int64(1)))
    _schedule(st.s, st.jobs, st.heap, j, at)


@_inner
def _go(st, j, row, same, now):  # type: ignore[no-untyped-def]
    """The job holds its GPUs from now on; `same` are those that it held a moment ago."""
    st.jobs[j].status = RUNNING
    st.tenants[st.jobs[j].tenant].used += st.jobs[j].gpus
    st.waited[j, st.jobs[j].cause] += now - st.jobs[j].cause_since
    st.jobs[j].mark = now
    if st.s[PREEMPT] == LEASE:
        st.jobs[j].lease_end = now + st.s[LEASE_NS]
    if same:
        st.jobs[j].ghost = 0
        st.jobs[j].ready = max(st.jobs[j].ready, now)
    else:
        cost = st.jobs[j].restart if st.jobs[j].starts > 0 or st.s[FIRST_COST] == 1 else np.int64(0)
        st.jobs[j].starts += 1
        st.jobs[j].stretch = now
        st.jobs[j].stretch_dead = cost
        st.jobs[j].ready = now + cost
        st.jobs[j].fresh = now + cost
        st.jobs[j].last = now
        st.jobs[j].rate = st.table[row].progress
        st.jobs[j].talking = st.table[row].communication
        if st.jobs[j].first < 0:
            st.jobs[j].first = now
    st.jobs[j].finish_at = st.jobs[j].ready + max(
        np.int64(np.ceil(st.jobs[j].remaining / st.jobs[j].rate)), np.int64(0)
    )
    _review(st, j)


@_inner
def _finish(st, j, now):  # type: ignore[no-untyped-def]
    st.jobs[j].remaining = 0.0
    st.jobs[j].status = DONE
    st.jobs[j].ended = now
    _close(st, j, now)
    _release(st, j)
    _note(st, j, L_FINISH, 0, 0)


@_inner
def _fail(st, j, now):  # type: ignore[no-untyped-def]
    """A machine under the job broke: what it did since its last checkpoint is lost."""
    _settle(st.jobs, j, now)
    lost = max(now - st.jobs[j].fresh, np.int64(0))
    if st.s[CHECKPOINT_NS] > 0:
        lost = lost % st.s[CHECKPOINT_NS]
    st.jobs[j].remaining = min(st.jobs[j].remaining + lost * st.jobs[j].rate, st.jobs[j].work)
    st.jobs[j].dead += lost
    st.jobs[j].failed += 1
    _close(st, j, now)
    _release(st, j)
    _unschedule(st.s, st.jobs, st.heap, j)
    st.jobs[j].last = now
    _note(st, j, L_FAIL, lost, 0)
    _wait(st, j, C_UNDECIDED, now)


# ---------------------------------------------------------------- delay timers and their tuner
@_inner
def _patience(st, j, level, now):  # type: ignore[no-untyped-def]
    """How long the job has to wait before it may spread over a unit of this level (ns; NEVER)."""
    if st.s[AUTO] == 0:
        return st.levels[level].wait
    window = st.jobs[j].size * (len(st.levels) - 1) + level - 1
    oldest = now - st.s[LEASE_NS] * st.s[HISTORY]
    at = st.windows[window].head
    while at >= 0 and st.samples[at].at < oldest:
        st.windows[window].n -= 1
        st.windows[window].sum -= st.samples[at].leases
        st.windows[window].sq -= st.samples[at].leases * st.samples[at].leases
        at = st.samples[at].next
    st.windows[window].head = at
    wait = 1.0
    n = st.windows[window].n
    if n > 0:
        mean = st.windows[window].sum / n
        wait = mean + 2 * np.sqrt(max(st.windows[window].sq / n - mean * mean, 0.0))
    else:
        st.windows[window].tail = -1
        st.windows[window].sum = 0.0
        st.windows[window].sq = 0.0
    leases = min(st.levels[level].cap, max(st.levels[level].floor, np.ceil(wait)))
    return np.int64(leases * st.s[LEASE_NS])


@_inner
def _log_wait(st, j, level, now):  # type: ignore[no-untyped-def]
    """Remember how many leases a job starved before a unit of this level took it (at least one)."""
    leases = (now - st.jobs[j].last) / st.s[LEASE_NS]
    if leases < 1.0:
        return
    window = st.jobs[j].size * (len(st.levels) - 1) + max(level, st.s[MACHINE])
    at = st.s[SAMPLES]
    st.s[SAMPLES] = at + 1
    st.samples[at].at = now
    st.samples[at].leases = leases
    st.samples[at].next = -1
    if st.windows[window].n > 0:
        st.samples[st.windows[window].tail].next = at
    else:
        st.windows[window].head = at
    st.windows[window].tail = at
    st.windows[window].n += 1
    st.windows[window].sum += leases
    st.windows[window].sq += leases * leases


@_inner
def _widest(st, j, now):  # type: ignore[no-untyped-def]
    """The widest level that the job may spread over now, and when the next wider one opens."""
    levels = len(st.levels) - 1
    widest = st.s[MACHINE]
    opens = NEVER
    for level in range(st.s[MACHINE] + 1, levels):
        if st.jobs[j].gpus > st.capacity[st.jobs[j].demand, level - 1] or st.jobs[j].eager == 1:
            widest = level
            continue
        patience = _patience(st, j, level, now)
        if patience < NEVER:
            if now - st.jobs[j].last >= patience:
                widest = level
            else:
                opens = min(opens, st.jobs[j].last + patience)
            if st.s[TIMERS] < len(st.timer_log):
                window = st.jobs[j].size * levels + level
                if st.windows[window].said != patience:
                    st.windows[window].said = patience
                    at = st.s[TIMERS]
                    st.timer_log[at, 0] = now
                    st.timer_log[at, 1] = st.jobs[j].gpus
                    st.timer_log[at, 2] = level
                    st.timer_log[at, 3] = patience
                    st.s[TIMERS] = at + 1
    return widest, opens


# ---------------------------------------------------------------- one decision
@_inner
def _refuse(st, j, cause, a, b, now):  # type: ignore[no-untyped-def]
    if _because(st.jobs, st.waited, j, cause, now):
        _note(st, j, L_WAIT, cause * 1_000_000 + a, b)


@_inner
def _try(st, j, now):  # type: ignore[no-untyped-def]
    """Place the job if its rules allow: 1 placed, 0 it waits, −1 a speed is missing (and nothing changed)."""
    wanted = st.jobs[j].gpus
    tenant = st.jobs[j].tenant
    if st.tenants[tenant].used + wanted > st.tenants[tenant].quota:
        _refuse(st, j, C_QUOTA, 0, 0, now)
        return 0
    demand = st.jobs[j].demand
    kinds = st.free.shape[0]
    root = len(st.units) - 2
    usable = False
    for kind in range(kinds):
        if st.allowed[demand, kind] and st.free[kind, root] >= wanted:
            usable = True
    if not usable:
        cause = C_TYPE if st.s[FREE] >= wanted and kinds > 1 else C_FULL
        _refuse(st, j, cause, 0, st.s[FREE], now)
        return 0
    widest, opens = _widest(st, j, now)
    st.line[demand, 3] = widest
    found = np.int64(-1)
    at_level = np.int64(0)
    of_kind = np.int64(0)
    if st.memo[demand] < widest:
        for level in range(widest + 1):
            if st.capacity[demand, level] < wanted or level <= st.memo[demand]:
                continue
            for kind in range(kinds):
                if st.allowed[demand, kind]:
                    found = _best(st.levels, st.free, kind, level, wanted)
                    if found >= 0:
                        of_kind = kind
                        break
            if found >= 0:
                at_level = level
                break
            st.memo[demand] = level
    if st.jobs[j].ghost == 1 and st.jobs[j].level <= widest and (found < 0 or st.jobs[j].level <= at_level):
        gpu = st.jobs[j].head
        while gpu >= 0:
            st.devs[gpu].haunted = -1
            st.devs[gpu].owner = j
            _change(st.s, st.devs, st.units, st.free, gpu, -1)
            gpu = st.devs[gpu].nxt
        st.s[WANTED] -= wanted
        st.line[demand, 1] -= 1
        _go(st, j, 0, True, now)
        return 1
    if found < 0:
        if opens < NEVER:
            _refuse(st, j, C_TIMER, widest, opens, now)
            if st.jobs[j].pos < 0 or st.jobs[j].when != opens:
                _schedule(st.s, st.jobs, st.heap, j, opens)
        else:
            _refuse(st, j, C_SCATTERED, widest, st.s[FREE], now)
        return 0
    # the old list must be whole when its stretch is closed, so a ghost that moves loses it before it takes others
    moved = st.jobs[j].ghost == 1
    if moved:
        _lose(st, j, now)
    before = st.jobs[j].level
    _fill(st, j, of_kind, at_level, found, now)
    row = _speed(st, j)
    if row < 0:
        gpu = st.jobs[j].head
        while gpu >= 0:
            st.devs[gpu].owner = -1
            _change(st.s, st.devs, st.units, st.free, gpu, 1)
            gpu = st.devs[gpu].nxt
        st.jobs[j].head = -1
        st.jobs[j].level = before
        return -1
    if st.s[AUTO] == 1:
        _log_wait(st, j, st.jobs[j].level, now)
    _unschedule(st.s, st.jobs, st.heap, j)
    _note(st, j, L_START, st.jobs[j].level, st.devs[st.jobs[j].head].nxt if wanted > 1 else st.jobs[j].head)
    st.s[WANTED] -= wanted
    st.line[demand, 1] -= 1
    _go(st, j, row, False, now)
    return 1


@_inner
def _outrank(st, now):  # type: ignore[no-untyped-def]
    """Who of the running has to make room: those outside of the first in order that fit by number."""
    if st.s[WANTED] <= st.s[FREE]:
        return  # by number all fit
    head, tail = st.s[HEAD], st.s[TAIL]
    n = np.int64(0)
    worst = np.int64(-1)
    for i in range(st.s[HEAP]):
        j = st.heap[i]
        if st.jobs[j].status == RUNNING:
            _settle(st.jobs, j, now)
            _keys(st, j, now)
            st.order[n] = j
            n += 1
            if worst < 0 or _ahead(st.jobs, worst, j):
                worst = j
    if n == 0 or not _ahead(st.jobs, st.queue[head], worst):
        return
    members = np.sort(st.order[:n])
    by_second = members[np.argsort(_column(st.jobs, members, 1), kind="mergesort")]
    members = by_second[np.argsort(_column(st.jobs, by_second, 0), kind="mergesort")]
    budget = st.s[FREE]
    for j in members:
        budget += st.jobs[j].gpus
    # walk the waiting line and the running together in order; who stands after the GPUs are dealt out has none
    waiting = head
    losers = np.int64(0)
    for j in members:
        while waiting < tail and budget > 0 and _ahead(st.jobs, st.queue[waiting], j):
            wanted = st.jobs[st.queue[waiting]].gpus
            if wanted <= budget:
                budget -= wanted
            elif st.s[ADMIT] == BLOCK:
                budget = 0
            waiting += 1
        if st.jobs[j].gpus <= budget:
            budget -= st.jobs[j].gpus
        else:
            st.order[losers] = j
            losers += 1
    for j in st.order[:losers].copy():
        _haunt(st, j, now)


@_inner
def _haunt(st, j, now):  # type: ignore[no-untyped-def]
    """The job lets go of its GPUs and stands in line again; unless somebody takes them, it gets them back."""
    _settle(st.jobs, j, now)
    _release(st, j)
    _unschedule(st.s, st.jobs, st.heap, j)
    st.jobs[j].ghost = 1
    gpu = st.jobs[j].head
    while gpu >= 0:
        st.devs[gpu].haunted = j
        gpu = st.devs[gpu].nxt
    if st.s[PREEMPT] == LEASE:
        st.jobs[j].last = now  # starvation counts from the end of a lease, also of one that is renewed (Dally)
    _wait(st, j, C_OUTRANKED, now)


@_inner
def _shadow(st, wanted, now):  # type: ignore[no-untyped-def]
    """When by stated run times so many GPUs will be free, and how many more then."""
    n = np.int64(0)
    for i in range(st.s[HEAP]):
        j = st.heap[i]
        if st.jobs[j].status == RUNNING:
            st.order[n] = j
            n += 1
    members = np.sort(st.order[:n])
    ends = np.empty(n)
    for i in range(n):
        j = members[i]
        ends[i] = max(st.jobs[j].stretch + st.jobs[j].stretch_dead + st.jobs[j].estimate / st.jobs[j].rate, float(now))
    free = st.s[FREE]
    for i in np.argsort(ends, kind="mergesort"):
        free += st.jobs[members[i]].gpus
        if free >= wanted:
            return np.int64(np.ceil(ends[i])), free - wanted
    return NEVER, np.int64(0)


@_inner
def _resort(st, now):  # type: ignore[no-untyped-def]
    """The whole line by what its jobs are served by now."""
    head, tail = st.s[HEAD], st.s[TAIL]
    for i in range(head, tail):
        _keys(st, st.queue[i], now)
    members = np.sort(st.queue[head:tail])
    members = members[np.argsort(_column(st.jobs, members, 1), kind="mergesort")]
    st.queue[head:tail] = members[np.argsort(_column(st.jobs, members, 0), kind="mergesort")]


@_inner
def _line_up(st):  # type: ignore[no-untyped-def]
    """Before the first job is looked at."""
    head, tail = st.s[HEAD], st.s[TAIL]
    if st.s[ORDER] == BY_FAIRNESS:
        # the worst treated part first, tightest placements among them first by size; then all others
        front = np.int64(np.ceil(st.s[SHARE] * (tail - head) / 1e6))
        if front > 1:
            first = st.queue[head : head + front].copy()
            st.queue[head : head + front] = first[np.argsort(_column(st.jobs, first, 2), kind="mergesort")]
    st.memo[:] = -1
    st.line[:, 2] = -1
    st.s[AT], st.s[KEPT], st.s[SHADOW], st.s[SPARE], st.s[BLOCKED] = head, 0, NEVER, 0, 0


@_inner
def _open(line, free):  # type: ignore[no-untyped-def]
    """Whether any class of waiting jobs may still find room."""
    for i in range(len(line)):
        if line[i, 1] > 0 and line[i, 2] < 0 and line[i, 0] <= free:
            return True
    return False


@_inner
def _pass(st, now):  # type: ignore[no-untyped-def]
    """Offer what is free to the waiting in their order; False where a speed is missing, and it goes on from there."""
    at, tail, kept = st.s[AT], st.s[TAIL], st.s[KEPT]
    shadow, spare, blocked = st.s[SHADOW], st.s[SPARE], st.s[BLOCKED] == 1
    final = st.s[FINAL] == 1  # jobs alike fare alike in one decision
    changed = True
    while at < tail:
        if st.s[FREE] == 0 or (final and changed and not _open(st.line, st.s[FREE])):
            break
        changed = False
        j = st.queue[at]
        demand = st.jobs[j].demand
        placed = 0
        tried = False
        if st.jobs[j].gpus > st.s[FREE]:
            if _because(st.jobs, st.waited, j, C_FULL, now) and st.s[TRACK] >= -1:
                _note(st, j, L_WAIT, C_FULL * 1_000_000, st.s[FREE])
        elif st.line[demand, 2] >= 0:
            cause = st.line[demand, 2]
            if _because(st.jobs, st.waited, j, cause, now) and st.s[TRACK] >= -1:
                wide = st.line[demand, 3] if cause == C_SCATTERED else np.int64(0)
                _note(st, j, L_WAIT, cause * 1_000_000 + wide, st.s[FREE])
        elif blocked:
            if not (now + st.jobs[j].estimate <= shadow or st.jobs[j].gpus <= spare):
                if _because(st.jobs, st.waited, j, C_RESERVED, now) and st.s[TRACK] >= -1:
                    _note(st, j, L_WAIT, C_RESERVED * 1_000_000, 0)
            else:
                placed = _try(st, j, now)
                tried = True
                if placed == 1 and now + st.jobs[j].estimate > shadow:
                    spare -= st.jobs[j].gpus
        else:
            placed = _try(st, j, now)
            tried = True
        if placed < 0:
            st.s[AT], st.s[KEPT], st.s[SHADOW], st.s[SPARE], st.s[BLOCKED] = at, kept, shadow, spare, blocked
            return False
        at += 1
        changed = placed == 1
        if placed == 0:
            if final and tried:
                st.line[demand, 2] = st.jobs[j].cause
                changed = True
            st.order[kept] = j
            kept += 1
            if st.s[ADMIT] == BLOCK:
                break
            if st.s[ADMIT] == BACKFILL and not blocked:
                blocked = True
                shadow, spare = _shadow(st, st.jobs[j].gpus, now)
                # _shadow writes over the list of those who were kept; there is one of them
                st.order[0] = j
    for i in range(kept):
        st.queue[at - kept + i] = st.order[i]
    st.s[HEAD] = at - kept
    return True


@_inner
def _tighten(st, now):  # type: ignore[no-untyped-def]
    """Move running jobs to a tighter unit where one is free and they finish sooner; False where a speed is missing."""
    n = np.int64(0)
    for i in range(st.s[HEAP]):
        j = st.heap[i]
        if (
            st.jobs[j].status == RUNNING
            and st.jobs[j].level > 0
            and st.jobs[j].gpus <= st.capacity[st.jobs[j].demand, st.jobs[j].level - 1]
        ):
            st.order[n] = j
            n += 1
    members = np.sort(st.order[:n])
    for j in members:
        if j < st.s[RESUME]:
            continue  # looked at before a speed was missing
        st.s[RESUME] = j
        for level in range(st.jobs[j].level):
            if st.capacity[st.jobs[j].demand, level] < st.jobs[j].gpus:
                continue
            found = np.int64(-1)
            kind = st.devs[st.jobs[j].head].kind
            found = _best(st.levels, st.free, kind, level, st.jobs[j].gpus)
            if found < 0:
                continue
            _settle(st.jobs, j, now)
            old, old_level = st.jobs[j].head, st.jobs[j].level
            _fill(st, j, kind, level, found, now)
            row = _speed(st, j)
            taken, tight = st.jobs[j].head, st.jobs[j].level
            better = False
            if row >= 0:
                ends = max(now, st.jobs[j].ready) + st.jobs[j].restart + st.jobs[j].remaining / st.table[row].progress
                better = ends < st.jobs[j].finish_at
            gpu = old if better else taken
            if better:
                st.jobs[j].head, st.jobs[j].level = old, old_level
                _close(st, j, now)
            while gpu >= 0:
                st.devs[gpu].owner = -1
                _change(st.s, st.devs, st.units, st.free, gpu, 1)
                gpu = st.devs[gpu].nxt
            st.jobs[j].head, st.jobs[j].level = (taken, tight) if better else (old, old_level)
            if row < 0:
                return False
            if better:
                st.tenants[st.jobs[j].tenant].used -= st.jobs[j].gpus
                st.jobs[j].cause_since = now
                _go(st, j, row, False, now)
                _note(st, j, L_MIGRATE, tight, old_level)
            break
    return True


@_inner
def _decide(st):  # type: ignore[no-untyped-def]
    now = st.s[NOW]
    if st.s[PENDING] == 1:
        st.s[RESUME] = -1
        if st.s[TAIL] > st.s[HEAD]:
            if st.s[ORDER] == BY_FAIRNESS or (
                st.s[STALE] == 1 and (st.s[ORDER] == BY_LAST or st.s[ORDER] == BY_NETWORK)
            ):
                _resort(st, now)
            st.s[STALE] = 0
            if st.s[PREEMPT] == ALWAYS:
                _outrank(st, now)
            _line_up(st)
            st.s[PENDING] = 2
        else:
            st.s[PENDING] = 3
    if st.s[PENDING] == 2:
        if not _pass(st, now):
            return False
        if st.s[FRESH] > 0:
            _name_causes(st, now)
        st.s[PENDING] = 3
    st.s[FRESH] = 0
    if st.s[MIGRATE] == 1 and not _tighten(st, now):
        return False
    return True


@_inner
def _name_causes(st, now):  # type: ignore[no-untyped-def]
    """Those whom the pass did not reach: ghosts have lost, new ones learn why they wait."""
    for i in range(st.s[FRESH]):
        j = st.newly[i]
        if st.jobs[j].status != WAITING:
            continue
        if st.jobs[j].ghost == 1:
            _lose(st, j, now)
        if st.jobs[j].cause == C_UNDECIDED and now == st.jobs[j].cause_since:
            if st.s[ADMIT] == BLOCK:
                _refuse(st, j, C_BEHIND, 0, 0, now)
            else:
                _refuse(st, j, C_FULL, 0, st.s[FREE], now)


# ---------------------------------------------------------------- the loop
@_inner
def _happen(st, now):  # type: ignore[no-untyped-def]
    """All events of one moment: ends, failures and repairs, ends of leases and bands, submissions."""
    s = st.s
    expired = np.int64(0)
    while s[HEAP] > 0 and st.jobs[st.heap[0]].when == now:
        j = st.heap[0]
        _unschedule(st.s, st.jobs, st.heap, j)
        s[EVENTS] += 1
        if st.jobs[j].status != RUNNING:
            continue  # a timer of a waiting job: the decision below looks at it again
        _settle(st.jobs, j, now)
        if st.jobs[j].finish_at == now:
            _finish(st, j, now)
            continue
        if s[ORDER] == BY_QUEUE and st.jobs[j].band < len(st.thresholds):
            # half a nanosecond of service: the event was scheduled at a whole one
            if st.jobs[j].gpu_ns >= st.thresholds[st.jobs[j].band] - 0.5 * st.jobs[j].gpus:
                st.jobs[j].band += 1
        if s[PREEMPT] == LEASE and st.jobs[j].lease_end == now:
            st.order[expired] = j
            expired += 1
        else:
            _review(st, j)
    expired_jobs = st.order[:expired].copy()
    while s[NEXT_FAILURE] < len(st.fails) and st.fails[s[NEXT_FAILURE]].at == now:
        k = s[NEXT_FAILURE]
        s[NEXT_FAILURE] = k + 1
        s[EVENTS] += 1
        unit = st.fails[k].unit
        for gpu in range(st.units[unit].lo, st.units[unit].hi):
            if st.fails[k].up == 1:
                if st.devs[gpu].owner == -2:
                    st.devs[gpu].owner = -1
                    _change(st.s, st.devs, st.units, st.free, gpu, 1)
            else:
                if st.devs[gpu].owner >= 0:
                    _fail(st, st.devs[gpu].owner, now)
                if st.devs[gpu].owner == -1:
                    st.devs[gpu].owner = -2
                    _change(st.s, st.devs, st.units, st.free, gpu, -1)
    while s[NEXT] < len(st.jobs) and st.jobs[s[NEXT]].submit == now:
        j = s[NEXT]
        s[NEXT] = j + 1
        s[EVENTS] += 1
        if st.jobs[j].status == FUTURE:
            st.jobs[j].last = now
            _wait(st, j, C_UNDECIDED, now)
    bidding = s[TAIL] > s[HEAD]
    for j in expired_jobs:
        if st.jobs[j].status != RUNNING:
            continue
        if bidding:
            _haunt(st, j, now)
        else:
            st.jobs[j].lease_end = now + s[LEASE_NS]
            _review(st, j)


@njit(error_model="numpy")
def run(st, until):  # type: ignore[no-untyped-def]
    """Play events up to and including `until`; the return value says why it stopped."""
    s = st.s
    while True:
        if s[PENDING] == 0:
            now = NEVER
            if s[HEAP] > 0:
                now = st.jobs[st.heap[0]].when
            if s[NEXT] < len(st.jobs):
                now = min(now, st.jobs[s[NEXT]].submit)
            # failures and repairs matter while somebody runs, waits or comes
            busy = s[HEAP] > 0 or s[NEXT] < len(st.jobs) or s[TAIL] > s[HEAD]
            if busy and s[NEXT_FAILURE] < len(st.fails):
                now = min(now, st.fails[s[NEXT_FAILURE]].at)
            if now == NEVER:
                return FINISHED
            if now > until or s[EVENTS] >= s[LIMIT]:
                return STOPPED
            active = s[HEAP] + s[TAIL] - s[HEAD]
            coming = s[NEXT]
            while coming < len(st.jobs) and st.jobs[coming].submit == now:
                coming += 1
            coming -= s[NEXT]
            if s[KEEP_SEGMENTS] > 0 and s[SEGMENTS] + 2 * active + 8 > len(st.seg):
                return NEED_ROOM
            if s[KEEP_SEGMENTS] > 1 and s[DEVICES] + 2 * len(st.devs) > len(st.devices):
                return NEED_ROOM
            if s[TRACK] >= -1 and s[LOG] + 6 * active + 3 * coming + 64 > len(st.log):
                return NEED_ROOM
            if s[AUTO] == 1 and s[SAMPLES] + active + coming + 8 > len(st.samples):
                return NEED_ROOM
            s[NOW] = now
            _happen(st, now)
            s[PENDING] = 1
        if not _decide(st):
            return NEED_SPEED
        s[PENDING] = 0
