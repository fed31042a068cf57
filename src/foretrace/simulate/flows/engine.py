"""Compiled loops of `flows`; `tests/simulate/flow_twins.py` says in plain Python what each of them computes."""

# An index of compiled code changes between signed and unsigned, which mypy takes for a change of type.
# mypy: disable-error-code="assignment,arg-type,misc,type-var"

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

import numpy as np

from foretrace.arrays import Float64, Int32, Int64, UInt8
from foretrace.compiled import njit
from foretrace.graph.taskgraph import NO_RELEASE
from foretrace.simulate.flows.shares import Shares, join, leave, repair

Heap = list[tuple[Any, Any, Any]]

NEVER = -NO_RELEASE
AT_ONCE, WORK_ENDS, FLOW_JOINS, LANE_FREE = -(2**31) - 3, -(2**31) - 2, -(2**31) - 1, 2**31  # beside tasks' priorities


@njit()
def _empty() -> Heap:
    heap = [(np.int64(0), np.int64(0), np.int64(0))]
    heap.pop()
    return heap


@njit()
def _filled(count: int, value: int) -> list[int]:
    return [np.int64(value) for _ in range(count)]


@njit(_nrt=False)
def move(fair: Shares, come: Int64, gone: Int64) -> int:
    """Let flows join and leave at one time; how many rates changed (`shares.repair`)."""
    for f in gone:
        leave(fair, f)
    for f in come:
        join(fair, f)
    return repair(fair)


@njit()
def run(
    ready: Int64, dur: Int64, delay: Int64, missing: Int64, lane: Int32, rank: Int32, priority: Int32,
    out_ptr: Int64, out_task: Int32, out_lag: Int64, out_from_start: UInt8, ordered: UInt8, slots: Int64,
    holds: UInt8, arrivals: Int32, flow: Int32, slowed: UInt8, slows: UInt8, factor: float, member_ptr: Int64,
    member: Int32, nbytes: Float64, latency: Int64, fair: Shares, unit: float, start: Int64, end: Int64, decided: UInt8,
) -> None:  # fmt: skip
    """Fill `start`, `end` and `decided` (n each).

    `ready` (n, release times) and `missing` (n, edges into every task) are used up. `out_ptr` (n + 1) gives the edges
    that hold in every order by source. `rank` counts from 0 without gaps. `flow` (n) is −1 for tasks that are no
    flow, `member_ptr` (flows + 1) gives the tasks of every flow. Rates of `fair` times `unit` are in bytes per ns.
    """
    n, n_lanes, n_flows = len(dur), len(ordered), len(nbytes)
    clock, changed, next_finish = NO_RELEASE, False, NEVER
    events = _empty()  # (time, priority or what happens, row, lane or flow)
    queue = [_empty() for _ in range(n_lanes)]  # (priority, ready, row) of the tasks that wait for a slot
    free = [_filled(slots[i], NO_RELEASE) for i in range(n_lanes)]  # when the slots that nobody holds are free
    arrived = _filled(0, 0)  # nothing is missing any more
    begun = _filled(0, 0)  # 2 row: its start is known and its successors are to be told, 2 row + 1: its end
    touched = _filled(0, 0)  # ranks where a transfer began or ended

    active, finish = np.empty(n_flows, dtype=np.int64), np.empty(n_flows, dtype=np.int64)  # who moves bytes, until when
    n_active, position = 0, np.zeros(n_flows, dtype=np.int64)  # of a flow in `active`
    absent = member_ptr[1:] - member_ptr[:-1]  # members that have not begun
    began = np.full(n_flows, NO_RELEASE, dtype=np.int64)
    remaining, settled = nbytes.copy(), np.zeros(n_flows, dtype=np.int64)

    n_ranks = rank.max() + 1 if n > 0 else 0
    transfers = np.zeros(n_ranks, dtype=np.int64)  # of the rank, under way
    stretched = np.zeros(n_ranks, dtype=np.uint8)
    work, since, until = np.zeros(n), np.zeros(n, dtype=np.int64), np.full(n, NEVER, dtype=np.int64)
    head = np.full(n_ranks, -1, dtype=np.int64)  # slowed tasks that run, as a linked list per rank
    after, before = np.full(n, -1, dtype=np.int64), np.full(n, -1, dtype=np.int64)

    for v in range(n):
        if missing[v] == 0:
            arrived.append(v)
    while True:
        while len(arrived) > 0:
            v = arrived.pop()
            ready[v] += delay[v]
            timed = flow[v] >= 0 or slowed[v] or slows[v]
            at_once = ordered[lane[v]] or arrivals[v] > 0  # no slot to wait for
            if timed or not at_once:
                heappush(events, (ready[v], np.int64(AT_ONCE if at_once else priority[v]), v))
            else:
                start[v], end[v] = ready[v], ready[v] + dur[v]
                begun.append(2 * v)
                begun.append(2 * v + 1)
        if len(begun) > 0:
            code = begun.pop()
            u, ends = code >> 1, code & 1
            anchor = end[u] if ends else start[u]
            for p in range(out_ptr[u], out_ptr[u + 1]):
                if out_from_start[p] != ends:
                    v = np.int64(out_task[p])
                    ready[v] = max(ready[v], anchor + out_lag[p])
                    missing[v] -= 1
                    if missing[v] == 0:
                        arrived.append(v)
            if ends:
                decided[u] = 1
                i = np.int64(lane[u])
                gives = np.int64(arrivals[u])
                timed = flow[u] >= 0 or slowed[u] or slows[u]
                if gives == 0 and timed and not ordered[i]:
                    gives = 1
                for _ in range(gives):
                    heappush(free[i], anchor)
                if gives > 0 and len(queue[i]) > 0:
                    heappush(events, (free[i][0], LANE_FREE, i))
            continue
        while len(touched) > 0:
            r = touched.pop()
            if stretched[r] != (transfers[r] > 0):
                was, now_is = (factor, 1.0) if stretched[r] else (1.0, factor)
                stretched[r] = 1 - stretched[r]
                v = head[r]
                while v >= 0:
                    work[v] = max(0.0, work[v] - (clock - since[v]) / was)
                    since[v] = clock
                    until[v] = clock + np.int64(np.rint(work[v] * now_is))
                    heappush(events, (until[v], WORK_ENDS, v))
                    v = after[v]
        top = events[0][0] if len(events) > 0 else NEVER
        if changed and top > clock:  # time is about to pass
            for k in range(repair(fair)):
                f = fair.changed[k]
                now_rate, old_rate = fair.flows[f].rate, fair.flows[f].before
                if now_rate != old_rate:
                    remaining[f] = max(0.0, remaining[f] - old_rate * unit * (clock - settled[f]))
                    settled[f] = clock
                    finish[position[f]] = clock + np.int64(np.rint(remaining[f] / (now_rate * unit)))
            next_finish = NEVER
            for k in range(n_active):
                next_finish = min(next_finish, finish[k])
            changed = False
        if next_finish <= top and next_finish < NEVER:
            clock = next_finish
            k = 0
            while k < n_active:
                if finish[k] > clock:
                    k += 1
                    continue
                f = active[k]
                leave(fair, f)
                n_active -= 1
                active[k], finish[k] = active[n_active], finish[n_active]
                position[active[k]] = k
                for p in range(member_ptr[f], member_ptr[f + 1]):
                    u = np.int64(member[p])
                    end[u] = clock
                    begun.append(2 * u + 1)
                    transfers[rank[u]] -= 1
                    touched.append(np.int64(rank[u]))
            changed, next_finish = True, NEVER
            continue
        if len(events) == 0:
            break

        now, what, v = heappop(events)
        clock = max(clock, now)  # negative lags may bring events from the past
        begins = NEVER
        if what == WORK_ENDS:
            if until[v] != now:  # it was slowed or sped up meanwhile
                continue
            until[v], end[v] = NEVER, now
            begun.append(2 * v + 1)
            if slowed[v]:
                if before[v] >= 0:
                    after[before[v]] = after[v]
                else:
                    head[rank[v]] = after[v]
                if after[v] >= 0:
                    before[after[v]] = before[v]
            else:
                transfers[rank[v]] -= 1
                touched.append(np.int64(rank[v]))
        elif what == FLOW_JOINS:
            if nbytes[v] > 0 and fair.flows[v].last > fair.flows[v].first:
                join(fair, v)
                active[n_active], finish[n_active], position[v], settled[v], changed = v, NEVER, n_active, clock, True
                n_active += 1
                continue
            for p in range(member_ptr[v], member_ptr[v + 1]):
                u = np.int64(member[p])
                end[u] = now
                begun.append(2 * u + 1)
                transfers[rank[u]] -= 1
                touched.append(np.int64(rank[u]))
        elif what == LANE_FREE:
            i = v
            if len(queue[i]) > 0 and len(free[i]) > 0 and free[i][0] <= now:
                _, _, v = heappop(queue[i])
                begins = max(heappop(free[i]), ready[v])
        elif ordered[lane[v]] or arrivals[v] > 0:
            i, begins = np.int64(lane[v]), now
        else:
            i = np.int64(lane[v])
            if len(queue[i]) == 0 and len(free[i]) > 0 and free[i][0] <= now:
                heappop(free[i])
                begins = now
            else:
                if len(queue[i]) == 0 and len(free[i]) > 0:
                    heappush(events, (free[i][0], LANE_FREE, i))
                heappush(queue[i], (np.int64(priority[v]), ready[v], v))
        if begins == NEVER:
            continue

        start[v] = begins
        begun.append(2 * v)
        f, r = np.int64(flow[v]), np.int64(rank[v])
        if f >= 0:
            began[f] = max(began[f], begins)
            absent[f] -= 1
            if absent[f] == 0:
                heappush(events, (began[f] + latency[f], FLOW_JOINS, f))
                for p in range(member_ptr[f], member_ptr[f + 1]):
                    transfers[rank[member[p]]] += 1
                    touched.append(np.int64(rank[member[p]]))
        elif slowed[v]:
            work[v], since[v] = dur[v], begins
            until[v] = begins + np.int64(np.rint(work[v] * (factor if stretched[r] else 1.0)))
            heappush(events, (until[v], WORK_ENDS, v))
            before[v], after[v] = -1, head[r]
            if head[r] >= 0:
                before[head[r]] = v
            head[r] = v
        elif slows[v]:
            until[v] = begins + dur[v]
            heappush(events, (until[v], WORK_ENDS, v))
            transfers[r] += 1
            touched.append(r)
        else:
            end[v] = begins + dur[v]
            begun.append(2 * v + 1)
            if not holds[v]:
                heappush(free[i], end[v])
        if what == LANE_FREE and len(queue[i]) > 0 and len(free[i]) > 0:
            heappush(events, (free[i][0], LANE_FREE, i))
