"""Compiled loops of `schedule`; `tests/simulate/twins.py` says in plain Python what each of them computes.

They stand apart from `engine` because that file is long, and call nothing of it: numba's cache does not see edits
across files.
"""

# An index of compiled code changes between signed and unsigned, which mypy takes for a change of type.
# mypy: disable-error-code="assignment,arg-type"

from __future__ import annotations

import numpy as np

from foretrace.arrays import Array, Int32, Int64, UInt8, UInt32
from foretrace.compiled import njit
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind

ONE = np.uint64(1)
TWO = np.uint64(2)
THREE = np.uint64(3)
HELD = -NO_RELEASE  # when a slot becomes free that is held for a collective whose end is not known
LANE_FREE = 2**31  # as a priority, above all of them: tasks become ready before lanes become free
PROGRAM, STREAM = int(EdgeKind.PROGRAM), int(EdgeKind.STREAM)


@njit()
def _push(heap: Int64, base: int, size: int, first: int, second: int, third: int) -> None:
    """Add a row of three keys to the heap that holds rows base : base + size (binary, smallest first)."""
    root, i = THREE * np.uint64(base), np.uint64(size)
    while i > 0:
        parent = (i - ONE) >> ONE
        at = root + THREE * parent
        a, b, c = heap[at], heap[at + ONE], heap[at + TWO]
        if a < first or (a == first and (b < second or (b == second and c < third))):
            break
        to = root + THREE * i
        heap[to], heap[to + ONE], heap[to + TWO] = a, b, c
        i = parent
    to = root + THREE * i
    heap[to], heap[to + ONE], heap[to + TWO] = first, second, third


@njit()
def _replace(heap: Int64, base: int, size: int, first: int, second: int, third: int) -> tuple[int, int, int]:
    """Take the first row out and put another one in: the hole sinks to a leaf, the new row rises from there."""
    root, stop = THREE * np.uint64(base), np.uint64(size)
    smallest = (heap[root], heap[root + ONE], heap[root + TWO])
    hole, child = np.uint64(0), ONE
    while child < stop:
        at = root + THREE * child
        a, b, c = heap[at], heap[at + ONE], heap[at + TWO]
        if child + ONE < stop:
            at += THREE
            x, y, z = heap[at], heap[at + ONE], heap[at + TWO]
            if x < a or (x == a and (y < b or (y == b and z < c))):
                a, b, c = x, y, z
                child += ONE
        to = root + THREE * hole
        heap[to], heap[to + ONE], heap[to + TWO] = a, b, c
        hole, child = child, TWO * child + ONE
    _push(heap, base, np.int64(hole), first, second, third)
    return smallest


@njit()
def _pop(heap: Int64, base: int, size: int) -> tuple[int, int, int]:
    """Take the first row out of the heap that holds rows base : base + size."""
    last = THREE * np.uint64(base + size - 1)
    return _replace(heap, base, size - 1, heap[last], heap[last + ONE], heap[last + TWO])


@njit(inline="always")
def _replaced(kind: int, same_lane: bool, ordered: bool) -> bool:
    """Return whether the run itself decides what an edge of the recording says."""
    return bool(same_lane and not ordered and kind in (PROGRAM, STREAM))


# Columns of the table of tasks in `schedule`: one cache line per task, as tasks are visited out of order.
READY, DUR, DELAY, MISSING, FIRST_OUT, LAST_OUT, LANE, PRIORITY = range(8)  # READY becomes the start


@njit()
def successors(
    in_ptr: Int64, src: UInt32, edge_kind: UInt8, from_start: UInt8, lag: Int64, dur: Int64, delay: Int64,
    release: Int64, lane: Int32, priority: Int32, ordered: UInt8, task: Int64, out: Int64,
) -> int:  # fmt: skip
    """Fill the tables of `schedule` and return the number of edges in them.

    `task` (n, 8) has the columns above; `out` has the edges that hold in every order, grouped by source: (successor
    · 2 + leaves from the start, lag).
    """
    n = len(dur)
    for v in range(n):
        task[v, READY], task[v, DUR], task[v, DELAY], task[v, MISSING] = release[v], dur[v], delay[v], 0
        task[v, LANE], task[v, PRIORITY] = lane[v], priority[v]
    out_ptr = np.zeros(n + 2, dtype=np.int32)
    for v in range(n):
        for e in range(in_ptr[v], in_ptr[v + 1]):
            u = np.int64(src[e])
            if not _replaced(edge_kind[e], lane[u] == lane[v], ordered[lane[v]] != 0):
                out_ptr[u + 2] += 1
                task[v, MISSING] += 1
    for v in range(n):
        out_ptr[v + 2] += out_ptr[v + 1]
    for v in range(n):
        for e in range(in_ptr[v], in_ptr[v + 1]):
            u = np.int64(src[e])
            if not _replaced(edge_kind[e], lane[u] == lane[v], ordered[lane[v]] != 0):
                place = out_ptr[u + 1]
                out[place, 0] = v * 2 + np.int64(from_start[e] != 0)
                out[place, 1] = lag[e]
                out_ptr[u + 1] = place + 1
    for v in range(n):
        task[v, FIRST_OUT], task[v, LAST_OUT] = out_ptr[v], out_ptr[v + 1]
    return int(out_ptr[n])


@njit()
def _of(column: Array | None, v: int) -> int:
    """Return the value of row v, 0 without such a column: a version compiled without one has no code for it."""
    return 0 if column is None else column[v]


@njit()
def _next_free(spare: Int64 | None, base: int, size: int, until: int) -> int:
    """Return when a lane's next slot is free, as one is taken `until` then; `spare` holds the others as a heap."""
    if spare is None or size == 0 or until <= spare[3 * base]:
        return until
    following, _, _ = _replace(spare, base, size, until, 0, 0)
    return following


@njit()
def schedule(
    task: Int64, out: Int64, lane_ptr: Int64, ordered: UInt8, slots: Int64, spare: Int64 | None, holds: UInt8 | None,
    arrivals: Int32 | None, queue: Int64, events: Int64, start: Int64, end: Int64, order: Int32,
) -> int:  # fmt: skip
    """Fill `start`, `end` and `order` (rows as they were decided); return how many tasks could be decided.

    `lane_ptr` (lanes + 1) counts the tasks of the lanes. `holds` (n) marks the ARRIVALs that keep their slot and
    `arrivals` (n) counts the slots that a COLLECTIVE frees; both are None where there are none. `queue` (3 n),
    `events` (3 (n + collectives + lanes)) and `spare` (6 n of NO_RELEASE, None where no lane has two slots) are
    scratch space for heaps with three keys a row. The caller allocates the large arrays because numpy requests huge
    pages, without which most of the time goes into address translation.
    """
    n, n_lanes = len(task), len(ordered)
    grouped = holds is not None

    # Tasks that wait for an unordered lane: one heap (priority, ready, row) per lane, each in a slice of `queue`.
    # Events: one heap (time, priority or LANE_FREE, row or lane).
    # Slots: when the first one of a lane is free, and heaps with the other ones in slices of `spare`, where a slot
    # that is given back by a collective leaves its HELD behind.
    queued = np.zeros(n_lanes, dtype=np.int64)
    free = np.full(n_lanes, NO_RELEASE, dtype=np.int64)
    spares = np.maximum(slots - 1, 0)
    n_events = 0
    arrived = np.empty(n, dtype=np.int32)  # nothing is missing any more
    begun = np.empty(n, dtype=np.int32)  # start decided, successors not told yet
    n_arrived, n_begun, n_order = 0, 0, 0

    for v in range(n):
        if task[v, MISSING] == 0:
            arrived[n_arrived] = v
            n_arrived += 1
    while True:
        while n_arrived > 0:
            n_arrived -= 1
            v = np.int64(arrived[n_arrived])
            task[v, READY] += task[v, DELAY]
            if ordered[task[v, LANE]] or _of(arrivals, v) > 0:
                begun[n_begun] = v
                n_begun += 1
            else:
                _push(events, 0, n_events, task[v, READY], task[v, PRIORITY], v)
                n_events += 1
        if n_begun > 0:
            n_begun -= 1
            u = np.int64(begun[n_begun])
            order[n_order] = u
            n_order += 1
            begin, finish = task[u, READY], task[u, READY] + task[u, DUR]
            if _of(arrivals, u) > 0:
                i = task[u, LANE]
                if queued[i] > 0 and finish < free[i]:
                    _push(events, 0, n_events, finish, LANE_FREE, i)
                    n_events += 1
                for _ in range(_of(arrivals, u)):
                    if free[i] == HELD:
                        free[i] = finish
                    elif spare is not None:
                        _push(spare, 2 * lane_ptr[i], spares[i], max(finish, free[i]), 0, 0)
                        spares[i] += 1
                        free[i] = min(finish, free[i])
            for p in range(task[u, FIRST_OUT], task[u, LAST_OUT]):
                v = out[p, 0] >> 1
                anchor = begin if out[p, 0] & 1 else finish
                task[v, READY] = max(task[v, READY], anchor + out[p, 1])
                task[v, MISSING] -= 1
                if task[v, MISSING] == 0:
                    arrived[n_arrived] = v
                    n_arrived += 1
            continue
        if n_events == 0:
            break
        if events[1] == LANE_FREE:  # the best task in the lane's queue starts
            i = events[2]
            if grouped and (queued[i] == 0 or free[i] > events[0]):  # a collective freed a slot earlier than this one
                _pop(events, 0, n_events)
                n_events -= 1
                continue
            _, _, v = _pop(queue, lane_ptr[i], queued[i])
            queued[i] -= 1
            task[v, READY] = max(free[i], task[v, READY])
            until = HELD if _of(holds, v) else task[v, READY] + task[v, DUR]
            free[i] = _next_free(spare, 2 * lane_ptr[i], spares[i], until)
            if queued[i] > 0 and free[i] != HELD:
                _replace(events, 0, n_events, free[i], LANE_FREE, i)
            else:
                _pop(events, 0, n_events)
                n_events -= 1
            begun[n_begun] = v
            n_begun += 1
            continue
        now, _, v = _pop(events, 0, n_events)
        n_events -= 1
        # Ready: it starts if its lane is idle, and waits otherwise.
        i = task[v, LANE]
        if queued[i] == 0 and free[i] <= now:
            until = HELD if _of(holds, v) else now + task[v, DUR]
            free[i] = _next_free(spare, 2 * lane_ptr[i], spares[i], until)
            begun[n_begun] = v
            n_begun += 1
        else:
            if queued[i] == 0 and free[i] != HELD:
                _push(events, 0, n_events, free[i], LANE_FREE, i)
                n_events += 1
            _push(queue, lane_ptr[i], queued[i], task[v, PRIORITY], task[v, READY], v)
            queued[i] += 1
    for v in range(n):
        start[v] = task[v, READY]
        end[v] = task[v, READY] + task[v, DUR]
    return n_order


@njit()
def slot_givers(
    in_ptr: Int64, src: UInt32, edge_kind: UInt8, from_start: UInt8, lag: Int64, dur: Int64, delay: Int64,
    release: Int64, lane: Int32, ordered: UInt8, slots: Int64, lane_ptr: Int64, holds: UInt8 | None,
    arrivals: Int32 | None, order: Int32, start: Int64, end: Int64,
) -> Int32:  # fmt: skip
    """Return the row whose end gave each task (n) its slot, −1 for none: a replay in a schedule's order.

    `slots` counts at most the tasks of a lane, so that heaps (free from, giver) fit into slices of `lane_ptr`.
    """
    n = len(dur)
    giver = np.full(n, -1, dtype=np.int32)
    heap = np.full(3 * n, -1, dtype=np.int64)
    heap[::3] = NO_RELEASE
    free = slots.copy()
    for p in range(n):
        v = np.int64(order[p])
        i = np.int64(lane[v])
        at = release[v]
        for e in range(in_ptr[v], in_ptr[v + 1]):
            u = np.int64(src[e])
            if not _replaced(edge_kind[e], lane[u] == i, ordered[i] != 0):
                at = max(at, (start[u] if from_start[e] else end[u]) + lag[e])
        at += delay[v]
        gives = 0 if ordered[i] else 1
        if gives and _of(arrivals, v) > 0:
            gives = _of(arrivals, v)
        elif gives:
            since, giver[v], _ = _pop(heap, lane_ptr[i], free[i])
            free[i] -= 1
            at = max(at, since)
            if _of(holds, v):
                gives = 0
        start[v], end[v] = at, at + dur[v]
        for _ in range(gives):
            _push(heap, lane_ptr[i], free[i], end[v], v, 0)
            free[i] += 1
    return giver
