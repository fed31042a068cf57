"""The loops of `engine` in plain Python: the readable definition of each, equal to it bit for bit."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import combinations, product


def finish(
    ready: Sequence[int],
    cut: Sequence[int],
    ends: Sequence[int],
    chunks: Sequence[int],
    times: Sequence[int],
    latency: int,
    slots: int,
) -> tuple[int, int]:
    """(compute added by boundaries, end of the last transfer) of buckets sent in the order of their readiness."""
    free = [0] * slots
    added, end, wire = 0, 0, 0
    for last, count, time in zip(ends, chunks, times, strict=True):
        for _ in range(count):
            begin = max(heapq.heappop(free), ready[last] + added, wire)
            wire = begin + max(time - latency, 0)
            heapq.heappush(free, begin + time)
            end = max(end, begin + time)
        if last < len(ready) - 1:
            added += cut[last]
    return added, end


def best_end(
    ready: Sequence[int],
    cut: Sequence[int],
    table: Sequence[Sequence[Sequence[int]]],
    counts: Sequence[int],
    latency: int,
    slots: int,
    last: int,
) -> int:
    """The earliest end of the exchange by trying all buckets and chunks: for small numbers of tensors."""
    n = len(ready)
    best = 2**62
    for size in range(n):
        for inner in combinations(range(n - 1), size):
            ends = [*inner, n - 1]
            begins = [0, *(end + 1 for end in inner)]
            for kinds in product(range(len(counts)), repeat=len(ends)):
                times = [table[c][i][j] for c, i, j in zip(kinds, begins, ends, strict=True)]
                added, end = finish(ready, cut, ends, [counts[c] for c in kinds], times, latency, slots)
                best = min(best, max(end, ready[-1] + added + last))
    return best


def across_steps(
    first: int,
    forward: Sequence[int],
    order: Sequence[int],
    backward: Sequence[int],
    last: int,
    update: Sequence[int],
    rest: int,
    cut: Sequence[int],
    ends: Sequence[int],
    chunks: Sequence[int],
    times: Sequence[int],
    priority: Sequence[int],
    latency: int,
    slots: int,
    steps: int,
) -> list[int]:
    """Begins of the steps (steps + 1), by a clock that visits every moment at which something can happen."""
    n = len(forward)
    bucket = [sum(end < i for end in ends) for i in range(n)]
    work: list[tuple[int, int, int]] = []  # duration, bucket waited for or −1, bucket released or −1
    marked: list[int] = []
    for step in range(steps):
        work.append((first, -1, -1))
        for i in order:
            work.append((forward[i] + (update[i] if step else 0), bucket[i] if step else -1, -1))
        for i in range(n):
            dur = backward[i] + (cut[i - 1] if i and bucket[i] != bucket[i - 1] else 0)
            work.append((dur, -1, bucket[i] if ends[bucket[i]] == i else -1))
        work.append((last + rest, -1, -1))
        marked.append(len(work))
    marks, sending, waiting = [0], list[int](), list[tuple[int, int, int, int]]()
    finished = [0] * len(ends)
    left = [0] * len(ends)
    running: int | None = None  # end of the group that runs
    at, now, wire = 0, 0, 0
    while at < len(work) or running is not None:
        progressed = True
        while progressed:
            progressed = False
            if running is not None and running <= now:
                _, _, released = work[at]
                if released >= 0:
                    left[released] = chunks[released]
                    waiting.append((priority[released], running, released, chunks[released]))
                at += 1
                if at in marked:
                    marks.append(running)
                running, progressed = None, True
            if running is None and at < len(work):
                dur, needed, _ = work[at]
                if needed < 0 or (left[needed] == 0 and finished[needed] <= now):
                    running, progressed = now + dur, True
        sending = [end for end in sending if end > now]
        while waiting and len(sending) < slots and wire <= now:
            waiting.sort()
            order_key, since, b, count = waiting.pop(0)
            done = now + times[b]
            wire = now + max(times[b] - latency, 0)
            if done > now:
                sending.append(done)
            finished[b] = max(finished[b], done)
            left[b] -= 1
            if count > 1:
                waiting.append((order_key, since, b, count - 1))
        moments = [*sending, *([wire] if waiting and wire > now else []), *([running] if running is not None else [])]
        if not moments and at >= len(work):
            break
        if moments:
            now = min(moments)
    return marks
