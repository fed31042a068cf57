"""Compiled loops of the plan room; `tests/plan/twins.py` says in plain Python what each of them computes.

All of them live in this file because numba's cache does not see edits across files. Times are int64 nanoseconds.
"""

# mypy: disable-error-code="assignment,arg-type"

from __future__ import annotations

import numpy as np

from foretrace.arrays import Int64
from foretrace.compiled import inner, njit

NEVER = np.int64(2**62)


@inner
def _send(free: Int64, at: int, time: int, latency: int, count: int) -> None:
    """Send `count` chunks that are ready `at`, each as soon as a slot and the wire are free; `free` as in `finish`."""
    slots = len(free) - 1
    for _ in range(count):
        begin = max(free[0], free[slots], at)
        end = begin + time
        free[slots] = begin + max(time - latency, 0)
        place = 0
        while place + 1 < slots and free[place + 1] < end:
            free[place] = free[place + 1]
            place += 1
        free[place] = end


@njit()
def finish(
    ready: Int64,
    cut: Int64,
    ends: Int64,
    chunks: Int64,
    times: Int64,
    latency: int,
    first: int,
    extra: int,
    free: Int64,
) -> int:
    """Send the buckets `first` ... in their order; returns the compute that boundaries added so far.

    `free` (slots + 1) holds when each slot is free, ascending, and last when the wire is, before and after; `extra` is
    the compute that boundaries before bucket `first` added. `times` is what one chunk of each bucket takes; it holds
    the wire for `latency` less.
    """
    n = len(ready)
    for b in range(first, len(ends)):
        _send(free, ready[ends[b]] + extra, times[b], latency, chunks[b])
        if ends[b] < n - 1:
            extra += cut[ends[b]]
    return extra


@njit()
def all_finish(
    ready: Int64, cut: Int64, ends: Int64, bounds: Int64, chunks: Int64, times: Int64, latency: int, slots: int,
    last: int, out: Int64,
) -> None:  # fmt: skip
    """Compute `finish` of many plans: plan p has buckets bounds[p] ... bounds[p + 1] − 1; out[p] is when its exchange
    ends.

    `last` is the compute after the last gradient: the exchange does not end before that.
    """
    free = np.empty(slots + 1, dtype=np.int64)
    for p in range(len(out)):
        free[:] = 0
        lo, hi = bounds[p], bounds[p + 1]
        extra = finish(ready, cut, ends[lo:hi], chunks[lo:hi], times[lo:hi], latency, 0, 0, free)
        out[p] = max(free[slots - 1], ready[len(ready) - 1] + extra + last)


@njit()
def least_work(table: Int64, counts: Int64, latency: int) -> Int64:
    """Return the least time (n + 1) for which the tensors from each on hold the wire, whatever the buckets."""
    kinds, n, _ = table.shape
    left = np.zeros(n + 1, dtype=np.int64)
    for i in range(n - 1, -1, -1):
        best = NEVER
        for j in range(i, n):
            for c in range(kinds):
                best = min(best, counts[c] * max(table[c, i, j] - latency, 0) + left[j + 1])
        left[i] = best
    return left


@njit()
def best_buckets(
    ready: Int64, cut: Int64, table: Int64, counts: Int64, latency: int, slots: int, last: int, bound: int,
    most: int,
) -> tuple[int, Int64, Int64, int, bool]:  # fmt: skip
    """Return buckets and chunks with the earliest end of the exchange, transfers in the order of their readiness.

    Dynamic programming over the tensors sent; a state is (compute added by boundaries, when each slot and
    the wire are free), and a
    state that is nowhere better than another is dropped. States that cannot end by `bound` are dropped, too. At most
    `most` states are kept per tensor. Returns the end (NEVER if nothing ends by `bound`), the last tensors of the
    buckets, their chunk kinds, the number of states made and whether none was dropped for want of room.
    """
    kinds, n, _ = table.shape
    left = least_work(table, counts, latency)
    width = slots + 1
    plain = True
    for i in range(n - 1):
        plain = plain and cut[i] == 0
    capacity = 4 * n + 16
    extra = np.zeros(capacity, dtype=np.int64)
    free = np.zeros((capacity, width), dtype=np.int64)
    before = np.full(capacity, -1, dtype=np.int64)
    kind = np.zeros(capacity, dtype=np.int64)
    tensor = np.zeros(capacity, dtype=np.int64)  # how many are sent
    first = np.zeros(n + 2, dtype=np.int64)
    first[1] = 1
    total, made, complete = 1, 0, True
    now = np.empty(width, dtype=np.int64)
    for j in range(1, n + 1):
        begin = total
        for i in range(j - 1, -1, -1):
            idle = False
            for state in range(first[i], first[i + 1]):
                added = extra[state] + (cut[i - 1] if i > 0 else 0)
                at = ready[j - 1] + added
                idle = idle or free[state, slots - 1] <= at
                compute = ready[n - 1] + last + added
                if compute > bound:
                    continue
                for c in range(kinds):
                    now[:] = free[state]
                    _send(now, at, table[c, i, j - 1], latency, counts[c])
                    made += 1
                    if max(now[slots - 1], now[slots] + left[j]) > bound:
                        continue
                    # dominated by a state that is there already?
                    worse = False
                    for other in range(begin, total):
                        if extra[other] <= added:
                            better = True
                            for s in range(width):
                                better = better and free[other, s] <= now[s]
                            if better:
                                worse = True
                                break
                    if worse:
                        continue
                    kept = begin
                    for other in range(begin, total):
                        beaten = added <= extra[other]
                        for s in range(width):
                            beaten = beaten and now[s] <= free[other, s]
                        if not beaten:
                            if kept != other:
                                extra[kept], before[kept], kind[kept] = extra[other], before[other], kind[other]
                                free[kept] = free[other]
                            kept += 1
                    total = kept
                    if total - begin >= most:
                        complete = False
                        continue
                    if total == capacity:
                        capacity *= 2
                        extra, before, kind = _grown(extra), _grown(before), _grown(kind)
                        tensor = _grown(tensor)
                        wider = np.zeros((capacity, width), dtype=np.int64)
                        wider[:total] = free
                        free = wider
                    extra[total], before[total], kind[total], tensor[total] = added, state, c, j
                    free[total] = now
                    total += 1
            # dPRO, Theorem 2, as pruning: with a link that is idle when the bucket is ready, a larger one ends later.
            if plain and idle:
                break
        first[j + 1] = total
        for state in range(begin, total):
            tensor[state] = j
    best, chosen = NEVER, -1
    for state in range(first[n], first[n + 1]):
        end = max(free[state, slots - 1], ready[n - 1] + last + extra[state])
        if end < best:
            best, chosen = end, state
    count, state = 0, chosen
    while state > 0:
        count, state = count + 1, before[state]
    ends, kinds_of = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    state = chosen
    while state > 0:
        count -= 1
        ends[count], kinds_of[count] = tensor[state] - 1, kind[state]
        state = before[state]
    return int(best), ends, kinds_of, made, complete


@njit()
def _grown(column: Int64) -> Int64:
    wider = np.zeros(2 * len(column), dtype=np.int64)
    wider[: len(column)] = column
    return wider


@njit()
def across_steps(
    first: int, forward: Int64, order: Int64, backward: Int64, last: int, update: Int64, rest: int, cut: Int64,
    ends: Int64, chunks: Int64, times: Int64, priority: Int64, latency: int, slots: int, steps: int,
    marks: Int64, waited: Int64,
) -> None:  # fmt: skip
    """Simulate steps in which a forward group waits for its own weights alone; fills `marks` (steps + 1), the steps'
    begins, and `waited` (buckets), how long the compute of the last step waited for each bucket.

    `order` lists the tensors as the forward pass needs them; `priority` (per bucket) decides which of the chunks that
    are ready goes first, ties by readiness, then by bucket. A weight is updated just before its forward group.
    Chunks are not interrupted; slots and wire as in `finish`.
    """
    n, buckets = len(forward), len(ends)
    bucket = np.empty(n, dtype=np.int64)
    wire = np.int64(0)
    b = 0
    for i in range(n):
        bucket[i] = b
        if i == ends[b]:
            b += 1
    free = np.zeros(slots, dtype=np.int64)
    since = np.zeros(buckets, dtype=np.int64)  # when a bucket became ready
    left = np.zeros(buckets, dtype=np.int64)  # chunks still to send, 0 if not ready
    end = np.zeros(buckets, dtype=np.int64)  # of the last chunk sent
    queued = 0
    groups = 2 * n + 2  # first, forward, backward, last with rest
    clock, group, step = np.int64(0), 0, 0
    marks[0] = 0
    waited[:] = 0
    while step < steps:
        # The next group of compute, if what it waits for is known to have been sent.
        start, runs, dur, wait = clock, True, np.int64(0), np.int64(0)
        if group == 0:
            dur = first
        elif group <= n:
            i = order[group - 1]
            dur = forward[i]
            if step > 0:
                b = bucket[i]
                runs = left[b] == 0
                start = max(clock, end[b])
                if runs and step == steps - 1:
                    wait = start - clock
                dur += update[i]
        elif group <= 2 * n:
            i = group - n - 1
            dur = backward[i]
            if i > 0 and bucket[i] != bucket[i - 1]:
                dur += cut[i - 1]
        else:
            dur = last + rest
        # The next transfer: when a slot and a chunk are there.
        send = NEVER
        if queued > 0:
            earliest = NEVER
            for b in range(buckets):
                if left[b] > 0:
                    earliest = min(earliest, since[b])
            send = max(free[0], wire, earliest)
        if runs and clock <= send:
            if wait > 0:
                waited[bucket[order[group - 1]]] += wait
            clock = start + dur
            if n < group <= 2 * n:
                i = group - n - 1
                b = bucket[i]
                if ends[b] == i:
                    since[b], left[b] = clock, chunks[b]
                    queued += 1
            group += 1
            if group == groups:
                group = 0
                step += 1
                marks[step] = clock
            continue
        chosen = -1
        for b in range(buckets):
            if (
                left[b] > 0
                and since[b] <= send
                and (
                    chosen < 0
                    or priority[b] < priority[chosen]
                    or (priority[b] == priority[chosen] and since[b] < since[chosen])
                )
            ):
                chosen = b
        done = send + times[chosen]
        wire = send + max(times[chosen] - latency, 0)
        place = 0
        while place + 1 < slots and free[place + 1] < done:
            free[place] = free[place + 1]
            place += 1
        free[place] = done
        end[chosen] = max(end[chosen], done)
        left[chosen] -= 1
        if left[chosen] == 0:
            queued -= 1
