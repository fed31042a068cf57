"""Compiled loops of the simulate room; `twins` says in plain Python what each of them computes.

All of them live in this file because numba's cache does not see edits across files. They take bare columns: the
callers (`replay`, `schedule`, `slack`) prepare them, and pass them read-only so that one version per loop is
compiled whether a graph is in memory or memory-mapped. Indices are unsigned where it matters: a signed one costs
a test for negative indexing at every access.
"""

# An index of compiled code changes between signed and unsigned, which mypy takes for a change of type.
# mypy: disable-error-code="assignment,arg-type"

from __future__ import annotations

import numba as nb
import numpy as np
import numpy.typing as npt

from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
UInt32 = npt.NDArray[np.uint32]
UInt8 = npt.NDArray[np.uint8]
Float64 = npt.NDArray[np.float64]

ONE = np.uint64(1)
TWO = np.uint64(2)
THREE = np.uint64(3)
UNREACHED = NO_RELEASE // 2  # tails below this lead nowhere, whatever was added to them
LANE_FREE = 2**31  # as a priority, above all of them: tasks become ready before lanes become free
PROGRAM, STREAM, LAUNCH, SYNC = map(int, (EdgeKind.PROGRAM, EdgeKind.STREAM, EdgeKind.LAUNCH, EdgeKind.SYNC))


@nb.njit(cache=True, error_model="numpy")
def replay(
    in_ptr: Int64, src: UInt32, from_start: UInt8, lag: Int64, dur: Int64, delay: Int64, release: Int64,
    start: Int64, end: Int64,
) -> None:  # fmt: skip
    """Fill `start` and `end` (n) in one pass over the rows."""
    e = np.uint64(0)
    for v in range(len(dur)):
        at = release[v]
        stop = np.uint64(in_ptr[v + 1])
        while e < stop:
            u = np.uint64(src[e])
            at = max(at, (start[u] if from_start[e] else end[u]) + lag[e])
            e += ONE
        at += delay[v]
        start[v] = at
        end[v] = at + dur[v]


@nb.njit(cache=True, error_model="numpy")
def value_slots(in_ptr: Int64, src: UInt32, from_start: UInt8) -> tuple[UInt32, Int32, int]:
    """Where a replay of many variants keeps starts and ends while an edge still needs them.

    Value 2u is the end of task u, 2u + 1 its start. A value keeps its slot until the last edge that reads it, so
    the slots in use at one time are few and stay in the cache, however long the graph. Returns the slot read by
    every edge (m), the slot of every value (2n, 0 = nobody reads it) and the number of slots.
    """
    n, m = len(in_ptr) - 1, len(src)
    last_use = np.full(2 * n, -1, dtype=np.int32)
    for e in range(m):
        last_use[np.uint64(src[e]) * TWO + np.uint64(from_start[e])] = e
    slot = np.zeros(2 * n, dtype=np.int32)
    read = np.empty(m, dtype=np.uint32)
    free = np.empty(2 * n + 1, dtype=np.int32)
    n_free, used = 0, 1
    e = np.uint64(0)
    for v in range(n):
        for value in range(2 * v, 2 * v + 2):
            if last_use[value] >= 0:  # taken before those of the predecessors are given back: never shared
                if n_free > 0:
                    n_free -= 1
                    slot[value] = free[n_free]
                else:
                    slot[value] = used
                    used += 1
        stop = np.uint64(in_ptr[v + 1])
        while e < stop:
            value_read = np.uint64(src[e]) * TWO + np.uint64(from_start[e])
            read[e] = slot[value_read]
            free[n_free] = slot[value_read]
            n_free += np.int64(last_use[value_read] == np.int64(e))
            e += ONE
    return read, slot, used


@nb.njit(cache=True, error_model="numpy")
def replay_variants(
    in_ptr: Int64, read: UInt32, slot: Int32, used: int, edge_kind: UInt8, lag: Int64, dur: Int64, delay: Int64,
    release: Int64, group: Int32, scale: Float64, stays: Int64, any_gone: UInt8, ceiling: Int64, rows: Int32,
    out: Int64,
) -> None:  # fmt: skip
    """Replay blocks of variants side by side; `out` (rows x variants) gets the end of each of `rows` (ascending).

    `scale` and `stays` are (blocks, groups + 1, width), row 0 for tasks of no group; `stays` is −1 where a task
    stays and 0 where it is gone; `any_gone` (blocks, groups + 1) tells the groups where any variant removes
    something; `ceiling` bounds the lags into a removed task, by kind of edge. The width is a run-time number, a
    multiple of 8: a constant one would be unrolled before LLVM looks for vectors.
    """
    width = scale.shape[2]
    values = np.empty((used, width), dtype=np.int64)
    for block in range(scale.shape[0]):
        next_row = 0
        e = np.uint64(0)
        for v in range(len(dur)):
            stop = np.uint64(in_ptr[v + 1])
            free, wait, length = release[v], delay[v], np.float64(dur[v])
            g = np.uint64(group[v] + 1)
            factor = scale[block, g]
            end = values[np.uint64(slot[2 * v])]
            start_slot = np.uint64(slot[2 * v + 1])
            fused = start_slot == 0 and not any_gone[block, g]
            if fused and stop == e + ONE:
                anchor, here = values[np.uint64(read[e])], lag[e]
                for k in range(width):
                    end[k] = max(free, anchor[k] + here) + wait + np.int64(np.rint(length * factor[k]))
            elif fused and stop == e + TWO:
                anchor, here = values[np.uint64(read[e])], lag[e]
                other, there = values[np.uint64(read[e + ONE])], lag[e + ONE]
                for k in range(width):
                    at = max(free, anchor[k] + here, other[k] + there) + wait
                    end[k] = at + np.int64(np.rint(length * factor[k]))
            else:
                for k in range(width):
                    end[k] = free
                if any_gone[block, g]:
                    keep = stays[block, g]
                    while e < stop:
                        anchor, here = values[np.uint64(read[e])], lag[e]
                        gone = min(here, ceiling[edge_kind[e]])
                        for k in range(width):
                            end[k] = max(end[k], anchor[k] + (gone + ((here - gone) & keep[k])))
                        e += ONE
                    for k in range(width):
                        end[k] += wait & keep[k]
                else:
                    while e < stop:
                        anchor, here = values[np.uint64(read[e])], lag[e]
                        for k in range(width):
                            end[k] = max(end[k], anchor[k] + here)
                        e += ONE
                    for k in range(width):
                        end[k] += wait
                if start_slot != 0:
                    start = values[start_slot]
                    for k in range(width):
                        start[k] = end[k]
                for k in range(width):
                    end[k] += np.int64(np.rint(length * factor[k]))
            e = stop
            while next_row < len(rows) and rows[next_row] == v:
                out_row = out[next_row, block * width : (block + 1) * width]
                for k in range(width):
                    out_row[k] = end[k]
                next_row += 1


@nb.njit(cache=True, error_model="numpy")
def tails(
    in_ptr: Int64, src: UInt32, from_start: UInt8, lag: Int64, dur: Int64, delay: Int64, target: int
) -> tuple[Int64, Int64]:
    """Longest path to the end of `target` from the start and from the end of every task (n each).

    Below UNREACHED where there is none. The path that leaves a start includes what follows the start only: the
    delay of a task belongs to its arrival.
    """
    n = len(dur)
    from_a_start = np.full(n, NO_RELEASE, dtype=np.int64)
    from_an_end = np.full(n, NO_RELEASE, dtype=np.int64)
    from_an_end[target] = 0
    for v in range(target, -1, -1):
        if from_an_end[v] > UNREACHED:
            from_a_start[v] = max(from_a_start[v], from_an_end[v] + dur[v])
        if from_a_start[v] > UNREACHED:
            arrival = from_a_start[v] + delay[v]
            for e in range(in_ptr[v], in_ptr[v + 1]):
                u = np.uint64(src[e])
                if from_start[e]:
                    from_a_start[u] = max(from_a_start[u], arrival + lag[e])
                else:
                    from_an_end[u] = max(from_an_end[u], arrival + lag[e])
    return from_a_start, from_an_end


@nb.njit(cache=True, error_model="numpy")
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


@nb.njit(cache=True, error_model="numpy")
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


@nb.njit(cache=True, error_model="numpy")
def _pop(heap: Int64, base: int, size: int) -> tuple[int, int, int]:
    """Take the first row out of the heap that holds rows base : base + size."""
    last = THREE * np.uint64(base + size - 1)
    return _replace(heap, base, size - 1, heap[last], heap[last + ONE], heap[last + TWO])


@nb.njit(cache=True, inline="always")
def _replaced(kind: int, same_lane: bool, ordered: bool, resolves: bool) -> bool:
    """Whether the run itself decides what an edge of the recording says."""
    return bool((same_lane and not ordered and kind in (PROGRAM, STREAM)) or (resolves and kind == SYNC))


# Columns of the table of tasks in `schedule`: one cache line per task, as tasks are visited out of order.
READY, DUR, DELAY, MISSING, FIRST_OUT, LAST_OUT, LANE, PRIORITY = range(8)  # READY becomes the start


@nb.njit(cache=True, error_model="numpy")
def successors(
    in_ptr: Int64, src: UInt32, edge_kind: UInt8, from_start: UInt8, lag: Int64, dur: Int64, delay: Int64,
    release: Int64, lane: Int32, priority: Int32, ordered: UInt8, wait_ptr: Int64, task: Int64, out: Int64,
) -> int:  # fmt: skip
    """Fill the tables of `schedule` and return the number of edges in them.

    `task` (n, 8) has the columns above; `out` has the edges that hold in every order, grouped by source: (successor
    · 4 + launches it · 2 + leaves from the start, lag).
    """
    n = len(dur)
    waiting = len(wait_ptr) > 0
    for v in range(n):
        task[v, READY], task[v, DUR], task[v, DELAY], task[v, MISSING] = release[v], dur[v], delay[v], 0
        task[v, LANE], task[v, PRIORITY] = lane[v], priority[v]
    out_ptr = np.zeros(n + 2, dtype=np.int32)
    for v in range(n):
        resolves = waiting and wait_ptr[v + 1] > wait_ptr[v]
        for e in range(in_ptr[v], in_ptr[v + 1]):
            u = np.int64(src[e])
            if not _replaced(edge_kind[e], lane[u] == lane[v], ordered[lane[v]] != 0, resolves):
                out_ptr[u + 2] += 1
                task[v, MISSING] += 1
    for v in range(n):
        out_ptr[v + 2] += out_ptr[v + 1]
    for v in range(n):
        resolves = waiting and wait_ptr[v + 1] > wait_ptr[v]
        by_call = False
        for e in range(in_ptr[v], in_ptr[v + 1]):
            by_call |= edge_kind[e] == LAUNCH
        for e in range(in_ptr[v], in_ptr[v + 1]):
            u = np.int64(src[e])
            if not _replaced(edge_kind[e], lane[u] == lane[v], ordered[lane[v]] != 0, resolves):
                launches = edge_kind[e] == LAUNCH if by_call else lane[u] != lane[v]
                place = out_ptr[u + 1]
                out[place, 0] = v * 4 + np.int64(launches) * 2 + np.int64(from_start[e] != 0)
                out[place, 1] = lag[e]
                out_ptr[u + 1] = place + 1
    for v in range(n):
        task[v, FIRST_OUT], task[v, LAST_OUT] = out_ptr[v], out_ptr[v + 1]
    return int(out_ptr[n])


@nb.njit(cache=True, error_model="numpy")
def schedule(
    task: Int64, out: Int64, lane_ptr: Int64, ordered: UInt8, gone: UInt8, waited: UInt8, wait_ptr: Int64,
    wait_lane: Int32, wait_lag: Int64, queue: Int64, events: Int64, start: Int64, end: Int64, order: Int32,
) -> int:  # fmt: skip
    """Fill `start`, `end` and `order` (rows as they were decided); return how many tasks could be decided.

    `lane_ptr` (lanes + 1) counts the tasks of the lanes. `wait_ptr` (n + 1) assigns rows of `wait_lane`, `wait_lag`
    to tasks; it is empty where nothing waits at run time. `queue` (3 n) and `events` (3 (n + lanes)) are scratch space
    for heaps with three keys a row. The caller allocates the large arrays because numpy asks for huge pages, without
    which most of the time goes into address translation.
    """
    n, n_out, n_lanes = len(task), len(out), len(ordered)
    waiting = len(wait_ptr) > 0

    # Tasks that wait for an unordered lane: one heap (priority, ready, row) per lane, each in a slice of `queue`.
    # Events: one heap (time, priority or LANE_FREE, row or lane).
    queued = np.zeros(n_lanes, dtype=np.int64)
    free = np.full(n_lanes, NO_RELEASE, dtype=np.int64)
    n_events = 0
    arrived = np.empty(n, dtype=np.int32)  # nothing is missing any more
    begun = np.empty(n, dtype=np.int32)  # start decided, successors not told yet
    n_arrived, n_begun, n_order, clock = 0, 0, 0, NO_RELEASE

    # Run-time waits: per lane a heap (time of launch, row) and the tasks launched so far whose end is not known.
    size = n if waiting else 0
    launched = np.empty(3 * size, dtype=np.int64)
    n_launched = np.zeros(n_lanes, dtype=np.int64)
    unlaunched = np.zeros(size, dtype=np.int32)
    launch_time = np.full(size, NO_RELEASE, dtype=np.int64)
    running = np.empty(size, dtype=np.int32)
    n_running = np.zeros(n_lanes, dtype=np.int64)
    n_ended = np.zeros(n_lanes, dtype=np.int64)  # launched tasks whose end is known, and the last of their ends
    last_end = np.full(n_lanes, NO_RELEASE, dtype=np.int64)
    decided = np.zeros(size, dtype=np.uint8)
    resolved = np.zeros(size, dtype=np.uint8)
    first_waiter = np.full(size, -1, dtype=np.int64)
    waiter = np.empty((16 if waiting else 0, 3), dtype=np.int64)  # linked lists of (task, lag, next)
    n_waiters = 0
    if waiting:
        for p in range(n_out):
            unlaunched[out[p, 0] >> 2] += (out[p, 0] >> 1) & 1
        for v in range(n):
            if unlaunched[v] == 0 and not gone[v]:
                i = task[v, LANE]
                _push(launched, lane_ptr[i], n_launched[i], NO_RELEASE, v, 0)
                n_launched[i] += 1

    for v in range(n):
        if task[v, MISSING] == 0:
            arrived[n_arrived] = v
            n_arrived += 1
    while True:
        while n_arrived > 0:
            n_arrived -= 1
            v = np.int64(arrived[n_arrived])
            if waiting and wait_ptr[v + 1] > wait_ptr[v] and not resolved[v]:
                _push(events, 0, n_events, task[v, READY], task[v, PRIORITY], v)
                n_events += 1
                continue
            task[v, READY] += task[v, DELAY]
            if ordered[task[v, LANE]]:
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
            for p in range(task[u, FIRST_OUT], task[u, LAST_OUT]):
                v = out[p, 0] >> 2
                anchor = begin if out[p, 0] & 1 else finish
                task[v, READY] = max(task[v, READY], anchor + out[p, 1])
                task[v, MISSING] -= 1
                if task[v, MISSING] == 0:
                    arrived[n_arrived] = v
                    n_arrived += 1
                if waiting and out[p, 0] & 2:
                    i = task[v, LANE]
                    launch_time[v] = max(launch_time[v], anchor)
                    unlaunched[v] -= 1
                    if unlaunched[v] == 0 and waited[i] and not gone[v]:
                        _push(launched, lane_ptr[i], n_launched[i], launch_time[v], v, 0)
                        n_launched[i] += 1
            if waiting:
                decided[u] = 1
                w = first_waiter[u]
                while w >= 0:
                    v = waiter[w, 0]
                    task[v, READY] = max(task[v, READY], finish + waiter[w, 1])
                    task[v, MISSING] -= 1
                    if task[v, MISSING] == 0:
                        arrived[n_arrived] = v
                        n_arrived += 1
                    w = waiter[w, 2]
            continue
        if n_events == 0:
            break
        if events[1] == LANE_FREE:  # the best task in the lane's queue starts
            i = events[2]
            _, _, v = _pop(queue, lane_ptr[i], queued[i])
            queued[i] -= 1
            task[v, READY] = max(free[i], task[v, READY])
            free[i] = task[v, READY] + task[v, DUR]
            if queued[i] > 0:
                now, _, _ = _replace(events, 0, n_events, free[i], LANE_FREE, i)
            else:
                now, _, _ = _pop(events, 0, n_events)
                n_events -= 1
            clock = max(clock, now)  # negative lags may bring events from the past
            begun[n_begun] = v
            n_begun += 1
            continue
        now, _, v = _pop(events, 0, n_events)
        n_events -= 1
        clock = max(clock, now)
        if waiting and wait_ptr[v + 1] > wait_ptr[v] and not resolved[v]:
            resolved[v] = 1
            for w in range(wait_ptr[v], wait_ptr[v + 1]):
                i = np.int64(wait_lane[w])
                base = lane_ptr[i]
                while n_launched[i] > 0 and launched[3 * base] <= clock:
                    _, u, _ = _pop(launched, base, n_launched[i])
                    n_launched[i] -= 1
                    running[base + n_running[i]] = u
                    n_running[i] += 1
                kept = 0
                for p in range(base, base + n_running[i]):
                    u = np.int64(running[p])
                    if decided[u]:
                        n_ended[i] += 1
                        last_end[i] = max(last_end[i], task[u, READY] + task[u, DUR])
                        continue
                    running[base + kept] = u
                    kept += 1
                    if u != v:
                        if n_waiters == len(waiter):
                            grown = np.empty((2 * n_waiters, 3), dtype=np.int64)
                            grown[:n_waiters] = waiter
                            waiter = grown
                        waiter[n_waiters, 0], waiter[n_waiters, 1] = v, wait_lag[w]
                        waiter[n_waiters, 2] = first_waiter[u]
                        first_waiter[u] = n_waiters
                        n_waiters += 1
                        task[v, MISSING] += 1
                n_running[i] = kept
                if n_ended[i] > 0:
                    task[v, READY] = max(task[v, READY], last_end[i] + wait_lag[w])
            if task[v, MISSING] == 0:
                arrived[n_arrived] = v
                n_arrived += 1
        else:  # ready: it starts if its lane is idle, and waits otherwise
            i = task[v, LANE]
            if queued[i] == 0 and free[i] <= now:
                free[i] = now + task[v, DUR]
                begun[n_begun] = v
                n_begun += 1
            else:
                if queued[i] == 0:
                    _push(events, 0, n_events, free[i], LANE_FREE, i)
                    n_events += 1
                _push(queue, lane_ptr[i], queued[i], task[v, PRIORITY], task[v, READY], v)
                queued[i] += 1
    for v in range(n):
        start[v] = task[v, READY]
        end[v] = task[v, READY] + task[v, DUR]
    return n_order
