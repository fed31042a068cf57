"""Compiled loops of the graph room, and `at`.

No compiled function calls one of another file: numba's cache would not see edits there. What every reading of a
recording needs allocates nothing: that would take as long to compile as the loop itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foretrace.arrays import Array, Int32, Int64, Mask
from foretrace.compiled import njit


@njit()
def topological_order(place: Int64, out_ptr: Int64, out_dst: Int32) -> Int64:
    """Return Kahn's algorithm, ready tasks in order of `place` (a permutation of 0..n-1); shorter than n on a cycle."""
    n = len(place)
    waiting = np.zeros(n, dtype=np.int64)
    for e in range(len(out_dst)):
        waiting[out_dst[e]] += 1
    row = np.empty(n, dtype=np.int64)
    for v in range(n):
        row[place[v]] = v
    ready = np.empty(n, dtype=np.int64)  # a binary heap: heapq's, on a list, takes twice as long
    size = 0
    for p in range(n):
        if waiting[row[p]] == 0:
            ready[size] = p  # ascending, so already a heap
            size += 1
    order = np.empty(n, dtype=np.int64)
    done = 0
    while size > 0:
        v = row[ready[0]]
        order[done] = v
        done += 1
        size -= 1
        last = ready[size]
        at, below = 0, 1
        while below < size:
            if below + 1 < size and ready[below + 1] < ready[below]:
                below += 1
            if ready[below] >= last:
                break
            ready[at] = ready[below]
            at, below = below, 2 * below + 1
        ready[at] = last
        for e in range(out_ptr[v], out_ptr[v + 1]):
            d = out_dst[e]
            waiting[d] -= 1
            if waiting[d] == 0:
                at = size
                size += 1
                while at > 0 and ready[(at - 1) // 2] > place[d]:
                    ready[at] = ready[(at - 1) // 2]
                    at = (at - 1) // 2
                ready[at] = place[d]
    return order[:done]


def nest(lane: Int32, start: Int64, end: Int64) -> Int64:
    """Return the row of the innermost enclosing span of the same lane, −1 at the top.

    Rows are ordered by (lane, start, longest first). Spans may cross: a step mark that begins inside the optimizer's
    range is not part of it. A span counts as enclosed if it ends at most 2 us later, which rounding can do.
    """
    parent = np.full(len(start), -1)
    _nest(lane, start, end, parent, np.empty_like(parent))
    return parent


@njit(_nrt=False)
def _nest(lane: Int32, start: Int64, end: Int64, parent: Int64, stack: Int64) -> None:
    top = 0
    for i in range(len(start)):
        if i > 0 and lane[i] != lane[i - 1]:
            top = 0
        while top > 0 and end[stack[top - 1]] <= start[i]:
            top -= 1
        below = top - 1
        while below >= 0 and (end[stack[below]] <= start[i] or end[stack[below]] + 2_000 < end[i]):
            below -= 1
        if below >= 0:
            parent[i] = stack[below]
        stack[top] = i
        top += 1


def nearest(parent: Int64, own: Int64) -> Int64:
    """Return `own` where it is not −1, else that of the nearest ancestor that has one. Parents precede children."""
    out = own.copy()
    _inherit(parent, out, False)
    return out


def farthest(parent: Int64, own: Int64) -> Int64:
    """Return the value of the outermost span, itself included, that has one (not −1)."""
    out = own.copy()
    _inherit(parent, out, True)
    return out


@njit(_nrt=False)
def _inherit(parent: Int64, out: Int64, always: bool) -> None:
    for i in range(len(out)):
        if parent[i] >= 0 and out[parent[i]] >= 0 and (always or out[i] < 0):
            out[i] = out[parent[i]]


def innermost_at(start: Int64, end: Int64, times: Int64) -> Int64:
    """Return the row of the innermost span of a lane around each of ascending `times` (start <= t < end), or −1."""
    out = np.full(len(times), -1)
    _innermost_at(start, end, times, out, np.empty(len(start) + 1, dtype=np.int64))
    return out


@njit(_nrt=False)
def _innermost_at(start: Int64, end: Int64, times: Int64, out: Int64, stack: Int64) -> None:
    top = 0
    nxt = 0
    for k in range(len(times)):
        t = times[k]
        while nxt < len(start) and start[nxt] <= t:
            while top > 0 and end[stack[top - 1]] <= start[nxt]:
                top -= 1
            stack[top] = nxt
            top += 1
            nxt += 1
        while top > 0 and end[stack[top - 1]] <= t:  # ended spans are popped for good: later times are not smaller
            top -= 1
        if top > 0:
            out[k] = stack[top - 1]


@njit()
def longest_common(a: Int64, b: Int64, most_edits: int) -> Int64:
    """Return positions (k x 2) of a longest common subsequence of two integer sequences, ascending.

    Greedy shortest edit script (Myers 1986, "An O(ND) difference algorithm", section 3): time and memory grow with
    the number of edits D as n * D and D^2. Sequences more than `most_edits` apart are aligned as far as that reaches.
    """
    n, m = len(a), len(b)
    limit = min(n + m, most_edits)
    offset = limit + 1
    best = np.zeros(2 * limit + 3, dtype=np.int32)
    trail = np.zeros((limit + 1) * (limit + 2) // 2, dtype=np.int32)  # row d holds diagonals -d, -d + 2 .. d
    found = -1
    end_k = 0
    reach, reach_d, reach_k = -1, 0, 0
    for d in range(limit + 1):
        for k in range(-d, d + 1, 2):
            if k == -d or (k != d and best[offset + k - 1] < best[offset + k + 1]):
                x = best[offset + k + 1]
            else:
                x = best[offset + k - 1] + 1
            y = x - k
            while x < n and y < m and y >= 0 and a[x] == b[y]:
                x += 1
                y += 1
            best[offset + k] = x
            trail[d * (d + 1) // 2 + (k + d) // 2] = x
            if x <= n and y <= m and x + y > reach:
                reach, reach_d, reach_k = x + y, d, k
            if x >= n and y >= m:
                found, end_k = d, k
                break
        if found >= 0:
            break
    if found < 0:
        found, end_k = reach_d, reach_k
    pairs = np.empty((min(n, m), 2), dtype=np.int64)
    count = 0
    k = end_k
    for d in range(found, -1, -1):
        x = trail[d * (d + 1) // 2 + (k + d) // 2]
        if d == 0:
            start = 0
            before = 0
        else:
            row = (d - 1) * d // 2
            down = -1 if k == -d else (trail[row + (k - 1 + d - 1) // 2] if k - 1 >= -(d - 1) else -1)
            right = trail[row + (k + 1 + d - 1) // 2] if k + 1 <= d - 1 else -1
            if k == -d or (k != d and down < right):
                before = k + 1
                start = right
            else:
                before = k - 1
                start = down + 1
        while x > start:
            x -= 1
            pairs[count, 0] = x
            pairs[count, 1] = x - k
            count += 1
        k = before
    return pairs[:count][::-1].copy()


@njit(_nrt=False)
def mark_ancestors(in_ptr: Int64, src: Int32, marked: Mask) -> None:
    """Mark every row that a marked row waits for, directly or not; rows are in topological order."""
    for v in range(len(marked) - 1, -1, -1):
        if marked[v]:
            for e in range(in_ptr[v], in_ptr[v + 1]):
                marked[src[e]] = True


def at(table: Array, index: Array, default: Any) -> Array:
    """Return `table[index]`, `default` where the index is below 0."""
    if not len(table):
        return np.full(len(index), default, dtype=table.dtype)
    found: Array = np.where(index >= 0, table[np.maximum(index, 0)], default)
    return found
