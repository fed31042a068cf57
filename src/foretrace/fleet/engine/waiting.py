"""Who waits, in which order, why, and what is next: the heap of events, the line, the books of causes."""

# The compiler takes plain loops and nested conditions as they are.
# mypy: disable-error-code="no-untyped-call,no-any-return,misc"

from __future__ import annotations

from foretrace.compiled import inner
from foretrace.fleet.engine import memory


# ---------------------------------------------------------------- heap of jobs by (when, job)
@inner
def _before(jobs, a, b):  # type: ignore[no-untyped-def]
    return jobs[a].when < jobs[b].when or (jobs[a].when == jobs[b].when and a < b)


@inner
def _sift(st, at):  # type: ignore[no-untyped-def]
    jobs, heap, size = st.jobs, st.heap, st.s.heap
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


@inner
def schedule(st, j, when):  # type: ignore[no-untyped-def]
    """Set the job's next event; it has one at most."""
    job, s = st.jobs[j], st.s
    job.when = when
    if job.pos < 0:
        st.heap[s.heap] = j
        job.pos = s.heap
        s.heap += 1
    _sift(st, job.pos)


@inner
def unschedule(st, j):  # type: ignore[no-untyped-def]
    """Remove the job's event."""
    job, s = st.jobs[j], st.s
    at = job.pos
    if at < 0:
        return
    s.heap -= 1
    job.pos = -1
    if at < s.heap:
        st.heap[at] = st.heap[s.heap]
        st.jobs[st.heap[at]].pos = at
        _sift(st, at)


# ---------------------------------------------------------------- the waiting line, sorted by (k1, k2, job)
@inner
def ahead(jobs, a, b):  # type: ignore[no-untyped-def]
    """Return whether job `a` is served before job `b`."""
    one, other = jobs[a], jobs[b]
    if one.k1 != other.k1:
        return one.k1 < other.k1
    if one.k2 != other.k2:
        return one.k2 < other.k2
    return a < b


@inner
def sort(jobs, members, lo, hi, merged):  # type: ignore[no-untyped-def]
    """Order members[lo:hi] by (k1, k2, job): runs are merged, and those that follow each other as they are stay."""
    width = 1
    while width < hi - lo:
        for begin in range(lo, hi - width, 2 * width):
            middle = begin + width
            end = min(middle + width, hi)
            if not ahead(jobs, members[middle], members[middle - 1]):
                continue
            for i in range(begin, middle):
                merged[i] = members[i]
            left, right, at = begin, middle, begin
            while left < middle:
                if right < end and ahead(jobs, members[right], merged[left]):
                    members[at] = members[right]
                    right += 1
                else:
                    members[at] = merged[left]
                    left += 1
                at += 1
        width *= 2


@inner
def _value(index, attained):  # type: ignore[no-untyped-def]
    """Return the value of the index table at an attained service: that of the last grid point not above it."""
    lo, hi = 0, len(index)
    while lo < hi:
        mid = (lo + hi) >> 1
        if index[mid].service <= attained:
            lo = mid + 1
        else:
            hi = mid
    return index[max(lo - 1, 0)].value


@inner
def weigh(st, j):  # type: ignore[no-untyped-def]
    """Set what a job is served by, k1 and k2."""
    job, rule = st.jobs[j], st.s.order
    a = 0.0
    b = 0.0
    if rule == memory.BY_KEY:
        a = job.key
    elif rule == memory.BY_REMAINING:
        a = job.remaining
    elif rule == memory.BY_SERVICE:
        a = job.gpu_ns
    elif rule == memory.BY_QUEUE:
        a = float(job.band)
        if len(st.index) > 0 and job.band < len(st.thresholds):
            b = -_value(st.index, job.gpu_ns)
    elif rule == memory.BY_NETWORK:
        # W / (R / ideal): the share of the work that is done over the share of the ideal time that it took
        a = (1.0 - job.remaining / job.work) / (job.held / job.work) if job.held > 0 else 0.0
        b = float(job.last)
    elif rule == memory.BY_LAST:
        a = float(job.last)
    else:
        a = -(st.s.now - job.submit + job.remaining) / job.work
    job.k1 = a
    job.k2 = b


@inner
def _enqueue(st, j):  # type: ignore[no-untyped-def]
    weigh(st, j)
    s, jobs, queue = st.s, st.jobs, st.queue
    head, tail = s.head, s.tail
    lo, hi = head, tail
    if hi > lo and not ahead(jobs, j, queue[hi - 1]):
        lo = hi
    while lo < hi:
        mid = (lo + hi) >> 1
        if ahead(jobs, j, queue[mid]):
            hi = mid
        else:
            lo = mid + 1
    if head > 0 and (lo - head <= tail - lo or tail == len(queue)):
        for i in range(head, lo):
            queue[i - 1] = queue[i]
        queue[lo - 1] = j
        s.head = head - 1
    else:
        for i in range(tail, lo, -1):
            queue[i] = queue[i - 1]
        queue[lo] = j
        s.tail = tail + 1


@inner
def resort(st):  # type: ignore[no-untyped-def]
    """Sort the whole queue by what its jobs are served by now."""
    head, tail = st.s.head, st.s.tail
    for i in range(head, tail):
        weigh(st, st.queue[i])
    sort(st.jobs, st.queue, head, tail, st.merged)


@inner
def wait(st, j, cause):  # type: ignore[no-untyped-def]
    """Make the job a waiting one."""
    job, s = st.jobs[j], st.s
    job.status = memory.WAITING
    st.newly[s.fresh] = j
    s.fresh += 1
    s.wanted += job.gpus
    st.demands[job.demand].waiting += 1
    job.cause = cause
    job.cause_since = s.now
    _enqueue(st, j)


# ---------------------------------------------------------------- books
@inner
def note(st, j, what, a, b):  # type: ignore[no-untyped-def]
    """Write down a decision about a job that is watched."""
    s = st.s
    if s.track == -1 or s.track == j:  # noqa: PLR1714
        event = st.log[s.log]
        event.time = s.now
        event.job = j
        event.what = what
        event.a = a
        event.b = b
        event.last = st.jobs[j].last
        s.log += 1


@inner
def refuse(st, j, cause, a, b):  # type: ignore[no-untyped-def]
    """Let the job wait for this reason from now on; it is written down if that is news."""
    job, now = st.jobs[j], st.s.now
    if job.cause != cause:
        st.waited[j, job.cause] += now - job.cause_since
        job.cause_since = now
        job.cause = cause
        note(st, j, memory.L_WAIT, cause * 1_000_000 + a, b)
