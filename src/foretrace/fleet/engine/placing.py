"""Which GPUs a job gets, when it may spread wider, how fast it runs there, and what becomes of a stretch."""

# mypy: disable-error-code="assignment,arg-type,no-untyped-call,no-any-return,misc"

from __future__ import annotations

import numpy as np

from foretrace.compiled import inner
from foretrace.fleet.engine import memory
from foretrace.fleet.engine.waiting import note, schedule, unschedule, wait


# ---------------------------------------------------------------- GPUs
@inner
def change(st, gpu, by):  # type: ignore[no-untyped-def]
    """Count one GPU more or less as free in all units around it."""
    device = st.devs[gpu]
    unit = device.unit
    while unit >= 0:
        st.free[device.kind, unit] += by
        unit = st.units[unit].parent
    st.s.free += by


@inner
def close(st, j):  # type: ignore[no-untyped-def]
    """Write down the stretch that ends; the list of its GPUs is still whole."""
    s = st.s
    if s.keep > 0:
        job, segment = st.jobs[j], st.seg[s.segments]
        segment.job = j
        segment.start = job.stretch
        segment.end = s.now
        segment.gpus = job.gpus
        segment.level = job.level
        segment.dead = min(job.stretch_dead, s.now - job.stretch)
        segment.device = s.devices
        if s.keep > 1:
            gpu = job.head
            while gpu >= 0:
                st.devices[s.devices] = gpu
                s.devices += 1
                gpu = st.devs[gpu].nxt
        s.segments += 1


@inner
def lose(st, j):  # type: ignore[no-untyped-def]
    """End the stretch of a job that can no longer reclaim its GPUs."""
    close(st, j)
    job = st.jobs[j]
    gpu = job.head
    while gpu >= 0:
        if st.devs[gpu].reclaimer == j:
            st.devs[gpu].reclaimer = -1  # else it would lose its next GPUs when somebody takes these
        gpu = st.devs[gpu].nxt
    if st.s.preempt == memory.ALWAYS:
        st.s.stale = 1  # it stands in line as of when it held them
    job.reclaims = 0
    job.preempted += 1
    job.last = st.s.now
    note(st, j, memory.L_PREEMPT, job.gpus, 0)


@inner
def _take(st, gpu, j):  # type: ignore[no-untyped-def]
    device = st.devs[gpu]
    other = device.reclaimer
    if other >= 0 and other != j and st.jobs[other].reclaims == 1:
        lose(st, other)
    device.reclaimer = -1
    device.owner = j
    device.nxt = st.jobs[j].head
    st.jobs[j].head = gpu
    change(st, gpu, -1)


@inner
def untake(st, gpu):  # type: ignore[no-untyped-def]
    """Free these GPUs, `gpu` and those after it in its job's list; the list stays until somebody takes one."""
    while gpu >= 0:
        st.devs[gpu].owner = -1
        change(st, gpu, 1)
        gpu = st.devs[gpu].nxt


@inner
def release(st, j):  # type: ignore[no-untyped-def]
    """Stop the job."""
    job = st.jobs[j]
    untake(st, job.head)
    st.tenants[job.tenant].used -= job.gpus


@inner
def best(st, kind, level, wanted):  # type: ignore[no-untyped-def]
    """Return the unit with the fewest free GPUs that are enough; the first of several."""
    found = np.int64(-1)
    least = memory.NEVER
    free = st.free
    for unit in range(st.levels[level].at, st.levels[level + 1].at):
        have = free[kind, unit]
        if wanted <= have < least:
            least = have
            found = unit
            if have == wanted:
                break
    return found


@inner
def fill(st, j, kind, level, unit):  # type: ignore[no-untyped-def]
    """Take the job's GPUs inside a unit: whole children with the most free ones first, the rest where it just fits."""
    units, devs = st.units, st.devs
    need = st.jobs[j].gpus
    st.jobs[j].head = -1
    while True:
        most = np.int64(-1)
        while level > 0:
            fits = np.int64(-1)
            least = memory.NEVER
            most = np.int64(-1)
            top = np.int64(0)
            for child in range(units[unit].child, units[unit + 1].child):
                free = st.free[kind, child]
                if need <= free < least:
                    least = free
                    fits = child
                if free > top:
                    top = free
                    most = child
            if fits < 0:
                break
            unit = fits
            level -= 1
        taken = most if level > 0 else unit
        for gpu in range(units[taken].lo, units[taken].hi):
            if need > 0 and devs[gpu].owner == -1 and devs[gpu].kind == kind:
                _take(st, gpu, j)
                need -= 1
        if need == 0 or level == 0:
            return


@inner
def speed(st, j):  # type: ignore[no-untyped-def]
    """Return the row of the speed table for where the job's GPUs are; −1 where it is unknown (`ask` says what)."""
    job, ask, units, levels = st.jobs[j], st.ask, st.units, len(st.levels) - 1
    ask[0] = job.kind
    ask[1] = job.gpus
    ask[2] = 1
    ask[3] = st.devs[job.head].kind
    ask[4 + levels] = j
    seen = np.int64(0)
    gpu = job.head
    while gpu >= 0:
        unit = st.devs[gpu].unit
        while unit >= 0:
            if units[unit].count == 0:
                units[seen].touched = unit
                seen += 1
            units[unit].count += 1
            unit = units[unit].parent
        gpu = st.devs[gpu].nxt
    for level in range(levels):
        held = np.int64(0)
        each = np.int64(-1)
        for i in range(seen):
            unit = units[i].touched
            if st.levels[level].at <= unit < st.levels[level + 1].at:
                held += 1
                if each == -1:
                    each = units[unit].count
                elif each != units[unit].count:
                    ask[2] = 0
        ask[4 + level] = held
    for i in range(seen):
        units[units[i].touched].count = 0
    job.level = 0
    while ask[4 + job.level] > 1:
        job.level += 1
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
@inner
def settle(st, j):  # type: ignore[no-untyped-def]
    """Count what a running job did up to now."""
    job, now = st.jobs[j], st.s.now
    mark = job.mark
    if now <= mark:
        return
    begun = max(mark, job.ready)
    if now > begun:
        job.remaining -= (now - begun) * job.rate
        job.talk += (now - begun) * job.talking
        job.dead += begun - mark
    else:
        job.dead += now - mark
    job.held += now - mark
    job.gpu_ns += float(now - mark) * job.gpus
    job.mark = now


@inner
def review(st, j):  # type: ignore[no-untyped-def]
    """Set when the engine has to look at a running job again."""
    job, s = st.jobs[j], st.s
    at = job.finish_at
    if s.preempt == memory.LEASE:
        at = min(at, job.lease_end)
    if s.order == memory.BY_QUEUE and job.band < len(st.thresholds):
        left = st.thresholds[job.band] - job.gpu_ns
        at = min(at, job.mark + max(np.int64(np.ceil(left / job.gpus)), np.int64(1)))
    schedule(st, j, at)


@inner
def go(st, j, row):  # type: ignore[no-untyped-def]
    """Start the job on its GPUs; `row` of the speed table says how fast (−1: those of a moment ago)."""
    job, s = st.jobs[j], st.s
    now = s.now
    job.status = memory.RUNNING
    st.tenants[job.tenant].used += job.gpus
    st.waited[j, job.cause] += now - job.cause_since
    job.mark = now
    if s.preempt == memory.LEASE:
        job.lease_end = now + s.lease
    if row < 0:
        job.reclaims = 0
        job.ready = max(job.ready, now)
    else:
        job.stretch_dead = job.restart if job.starts > 0 or s.first_cost == 1 else np.int64(0)
        job.starts += 1
        job.stretch = now
        job.ready = now + job.stretch_dead
        job.fresh = job.ready
        job.last = now
        job.rate = st.table[row].progress
        job.talking = st.table[row].communication
        if job.first < 0:
            job.first = now
    job.finish_at = job.ready + max(np.int64(np.ceil(job.remaining / job.rate)), np.int64(0))
    review(st, j)


@inner
def finish(st, j):  # type: ignore[no-untyped-def]
    """End the job: all its work is done."""
    job = st.jobs[j]
    job.remaining = 0.0
    job.status = memory.DONE
    job.ended = st.s.now
    close(st, j)
    release(st, j)
    note(st, j, memory.L_FINISH, 0, 0)


@inner
def fail(st, j):  # type: ignore[no-untyped-def]
    """Fail the job, as a machine under it broke: what it did since its last checkpoint is lost."""
    settle(st, j)
    job, s = st.jobs[j], st.s
    lost = max(s.now - job.fresh, np.int64(0))
    if s.checkpoint > 0:
        lost = lost % s.checkpoint
    job.remaining = min(job.remaining + lost * job.rate, job.work)
    job.dead += lost
    job.failed += 1
    close(st, j)
    release(st, j)
    unschedule(st, j)
    job.last = s.now
    note(st, j, memory.L_FAIL, lost, 0)
    wait(st, j, memory.C_UNDECIDED)


# ---------------------------------------------------------------- delay timers and their tuner
@inner
def _patience(st, j, level):  # type: ignore[no-untyped-def]
    """Return how long the job has to wait before it may spread over a unit of this level (ns; memory.NEVER)."""
    s, bounds = st.s, st.levels[level]
    if s.auto == 0:
        return bounds.wait
    window = st.windows[st.jobs[j].size * (len(st.levels) - 1) + level - 1]
    if window.asked == s.now:
        return window.patience
    oldest = s.now - s.lease * s.history
    while window.head >= 0 and st.samples[window.head].at < oldest:
        sample = st.samples[window.head]
        window.n -= 1
        window.sum -= sample.leases
        window.sq -= sample.leases * sample.leases
        window.head = sample.next
    waits = 1.0
    if window.n > 0:
        mean = window.sum / window.n
        waits = mean + 2 * np.sqrt(max(window.sq / window.n - mean * mean, 0.0))
    else:
        window.tail = -1
        window.sum = 0.0
        window.sq = 0.0
    leases = min(bounds.cap, max(bounds.floor, np.ceil(waits)))
    window.asked = s.now
    window.patience = np.int64(leases * s.lease)
    return window.patience


@inner
def remember(st, j, level):  # type: ignore[no-untyped-def]
    """Remember how many leases a job starved before a unit of this level took it (at least one)."""
    s = st.s
    leases = (s.now - st.jobs[j].last) / s.lease
    if leases < 1.0:
        return
    window = st.windows[st.jobs[j].size * (len(st.levels) - 1) + max(level, s.machine)]
    sample = st.samples[s.samples]
    window.asked = -1
    sample.at = s.now
    sample.leases = leases
    sample.next = -1
    if window.n > 0:
        st.samples[window.tail].next = s.samples
    else:
        window.head = s.samples
    window.tail = s.samples
    window.n += 1
    window.sum += leases
    window.sq += leases * leases
    s.samples += 1


@inner
def widest(st, j):  # type: ignore[no-untyped-def]
    """Return the widest level that the job may spread over now, and when the next wider one opens."""
    job, s, levels = st.jobs[j], st.s, len(st.levels) - 1
    widest_ = s.machine
    opens = memory.NEVER
    for level in range(s.machine + 1, levels):
        if job.gpus > st.capacity[job.demand, level - 1] or job.eager == 1:
            widest_ = level
            continue
        patience = _patience(st, j, level)
        if patience < memory.NEVER:
            if s.now - job.last >= patience:
                widest_ = level
            else:
                opens = min(opens, job.last + patience)
            if s.timers < len(st.timer_log):
                window = st.windows[job.size * levels + level]
                if window.said != patience:
                    window.said = patience
                    timer = st.timer_log[s.timers]
                    timer.time = s.now
                    timer.gpus = job.gpus
                    timer.level = level
                    timer.wait = patience
                    s.timers += 1
    return widest_, opens
