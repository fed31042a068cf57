"""Host tasks: every CPU thread cut into calls and the work between them, and the edges between threads.

On a GPU recording a thread is a chain of calls and of the work between them. On a CPU-only recording it is a chain of
operator self times, bookkeeping operators merged into their callers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Int32, Int64, Mask, UInt8
from foretrace.graph.calls import RuntimeCall
from foretrace.graph.device import DeviceTasks
from foretrace.graph.host import BOOKKEEPING, HostSpans
from foretrace.graph.kernels import innermost_at
from foretrace.graph.links import Links
from foretrace.graph.steps import Steps
from foretrace.graph.taskgraph import Phase, TaskKind
from foretrace.graph.waits import Blocking
from foretrace.trace.trace import Category

_APART_NS = 100_000  # a helper thread that is silent for longer has gone idle
_KEPT_ALLOC_NS = 5_000  # shorter allocator and module calls stay inside the host work around them


@dataclass(frozen=True, eq=False)
class HostTasks:
    """Tasks of all CPU threads; rows of one lane are consecutive and in program order."""

    lane: Int32
    kind: UInt8
    start: Int64
    dur: Int64
    span: Int64  # row in Host that names the task: the call, or the innermost span around host work; −1 if none
    task_of_call: dict[int, int]  # row in Host -> CALL task
    return_of_call: dict[int, int]  # row in Host -> RETURN task
    marks: Int64  # tasks at the step boundaries
    thread_src: Int64  # fork and join edges between threads
    thread_dst: Int64
    joins: dict[int, int]  # time at which the main thread was let go -> its JOIN task
    parallel: int  # bursts of helper threads that ran beside the main thread


@dataclass(frozen=True, eq=False)
class _Burst:
    """One stretch of work of a helper thread; `blocks` if the main thread was silent meanwhile."""

    lane: int
    start: int
    end: int
    blocks: bool


def kept_calls(host: HostSpans, device: DeviceTasks, blocking: Blocking) -> Int64:
    """Return calls that become tasks: launches with device work, calls that may wait, long allocations and loads."""
    keep = np.zeros(len(host.event), dtype=np.bool_)
    keep[device.call[device.call >= 0]] = True
    keep[blocking.call] = True
    keep |= np.isin(
        host.call, [RuntimeCall.SYNC_DEVICE, RuntimeCall.SYNC_STREAM, RuntimeCall.SYNC_EVENT, RuntimeCall.GRAPH]
    )
    keep |= np.isin(host.call, [RuntimeCall.ALLOC, RuntimeCall.LOAD]) & (host.end - host.start >= _KEPT_ALLOC_NS)
    rows = np.flatnonzero(keep)
    # Only the outermost of nested calls is a task.
    inside = host.parent[rows]
    nested = np.zeros(len(rows), dtype=np.bool_)
    for _ in range(4):
        nested |= (inside >= 0) & keep[inside]
        inside = np.where(inside >= 0, host.parent[inside], -1)
    return rows[~nested]


def host_tasks(host: HostSpans, device: DeviceTasks, blocking: Blocking, steps: Steps, links: Links) -> HostTasks:
    """Cut every working thread into tasks in program order and find forks and joins (R2).

    Where the main thread stood still for a host collective it has no work, only a JOIN at the collective's end.
    """
    calls = kept_calls(host, device, blocking)
    bursts = _bursts(host, steps.lane, calls)
    cpu_only = not len(device)
    own = dict(zip(blocking.call.tolist(), blocking.own.tolist(), strict=True))
    waits = set(blocking.call.tolist())

    columns: list[tuple[Int32, UInt8, Int64, Int64, Int64]] = []
    task_of_call: dict[int, int] = {}
    return_of_call: dict[int, int] = {}
    marks = np.empty(0, dtype=np.int64)
    first_of: dict[tuple[int, int], int] = {}  # (lane, burst start) -> first task
    last_of: dict[tuple[int, int], int] = {}
    fork_join: dict[tuple[int, bool], int] = {}  # (time, is join) -> task on the main lane
    offset = 0
    lanes = [steps.lane, *sorted({b.lane for b in bursts})] if steps.lane >= 0 else []
    for lane in lanes:
        main = lane == steps.lane
        held = [(b.start, b.end) for b in bursts if b.blocks]
        held += list(zip(links.held_from[links.held].tolist(), links.end[links.held].tolist(), strict=True))
        mine = [(b.start, b.end) for b in bursts if b.lane == lane]
        chain = _chain(host, lane, calls, own, waits, steps, sorted(held if main else mine), main, cpu_only)
        kind, start, dur, span = chain
        rows = offset + np.arange(len(kind))
        is_call = kind == TaskKind.CALL
        task_of_call.update(zip(span[is_call].tolist(), rows[is_call].tolist(), strict=True))
        is_return = kind == TaskKind.RETURN
        return_of_call.update(zip(span[is_return].tolist(), rows[is_return].tolist(), strict=True))
        if main:
            marks = rows[kind == TaskKind.MARK]
            joins = np.flatnonzero(kind == TaskKind.JOIN)
            for i in joins.tolist():
                fork_join[int(start[i]), bool(span[i] == _JOIN)] = offset + i
        else:
            for burst in bursts:
                if burst.lane == lane:
                    low, high = np.searchsorted(start, [burst.start, burst.end])
                    if high > low:
                        first_of[lane, burst.start] = offset + int(low)
                        last_of[lane, burst.start] = offset + int(high) - 1
        span = np.where(kind == TaskKind.JOIN, -1, span)
        columns.append((np.full(len(kind), lane, np.int32), kind, start, dur, span))
        offset += len(kind)

    src, dst, parallel = [], [], 0
    main_start = columns[0][2] if columns else np.empty(0, np.int64)
    for burst in bursts:
        first = first_of.get((burst.lane, burst.start))
        if first is None:
            continue
        if burst.blocks:
            src += [fork_join[burst.start, False], last_of[burst.lane, burst.start]]
            dst += [first, fork_join[burst.end, True]]
        else:
            parallel += 1
            before = int(np.searchsorted(main_start, burst.start, side="right")) - 1
            if before >= 0 and main_start[before] + columns[0][3][before] <= burst.start:
                src.append(before)
                dst.append(first)
            elif before >= 1:
                src.append(before - 1)
                dst.append(first)
    stacked = [np.concatenate(parts) for parts in zip(*columns, strict=True)] if columns else [np.empty(0)] * 5
    return HostTasks(
        lane=stacked[0].astype(np.int32),
        kind=stacked[1].astype(np.uint8),
        start=stacked[2].astype(np.int64),
        dur=stacked[3].astype(np.int64),
        span=stacked[4].astype(np.int64),
        task_of_call=task_of_call,
        return_of_call=return_of_call,
        marks=marks,
        thread_src=np.array(src, dtype=np.int64),
        thread_dst=np.array(dst, dtype=np.int64),
        joins={time: task for (time, is_join), task in fork_join.items() if is_join},
        parallel=parallel,
    )


_FORK, _JOIN = -2, -3  # in `span` of a JOIN task until the edges are made


def _bursts(host: HostSpans, main: int, calls: Int64) -> list[_Burst]:
    """Return stretches of work of the other threads; threads that only poll are left out."""
    active = np.isin(host.category, [Category.OPERATOR, Category.RUNTIME])
    around = np.where(host.parent >= 0, active[host.parent], False)
    top = active & ~around
    working = np.unique(np.concatenate([host.lane[host.is_operator], host.lane[calls]]))
    rows = np.flatnonzero(top & (host.lane == main))
    main_start, main_end = (
        host.start[rows],
        np.maximum.accumulate(host.end[rows]) if len(rows) else host.end[rows],
    )
    bursts: list[_Burst] = []
    for lane in working.tolist():
        if lane == main:
            continue
        rows = np.flatnonzero(top & (host.lane == lane))
        start, end = host.start[rows], np.maximum.accumulate(host.end[rows])
        gap = np.searchsorted(main_start, start, side="right")
        between = (gap > 0) & (gap < len(main_start))  # only there the main thread can have waited
        at = gap[between]
        blocks = np.zeros(len(rows), dtype=np.bool_)
        blocks[between] = (main_end[at - 1] <= start[between]) & (main_start[at] >= end[between])
        blocks &= lane in host.autograd_lanes
        new = np.ones(len(rows), dtype=np.bool_)
        apart = start[1:] - end[:-1] > _APART_NS
        new[1:] = (blocks[1:] != blocks[:-1]) | (blocks[1:] & (gap[1:] != gap[:-1])) | (~blocks[1:] & apart)
        first = np.flatnonzero(new)
        last = np.append(first[1:], len(rows)) - 1
        bursts += [_Burst(lane, int(start[a]), int(end[b]), bool(blocks[a])) for a, b in zip(first, last, strict=True)]
    return _one_join_each(bursts)


def _one_join_each(bursts: list[_Burst]) -> list[_Burst]:
    """Return bursts of two helpers that overlap cannot both hold the main thread: later ones run in parallel."""
    bursts = sorted(bursts, key=lambda b: (b.start, b.lane))
    held_until = -(2**62)
    out = []
    for burst in bursts:
        blocks = burst.blocks and burst.start >= held_until and burst.end > burst.start
        if blocks:
            held_until = burst.end
        out.append(_Burst(burst.lane, burst.start, burst.end, blocks))
    return out


def _chain(
    host: HostSpans,
    lane: int,
    calls: Int64,
    own: dict[int, int],
    waits: set[int],
    steps: Steps,
    stretches: list[tuple[int, int]],
    main: bool,
    cpu_only: bool,
) -> tuple[UInt8, Int64, Int64, Int64]:
    """Return tasks of one thread in program order: (kind, start, own duration, span in Host).

    `stretches` are when the main thread was held, or when a helper thread worked; ascending and disjoint.
    """
    part = host.lane_slice(lane)
    mine = calls[(calls >= part.start) & (calls < part.stop)]
    call_start, call_end = host.start[mine], host.end[mine]
    cuts = [call_start, call_end]
    for mask in (host.is_data, host.is_optimizer):
        rows = np.flatnonzero(mask[part]) + part.start
        cuts += [host.start[rows], host.end[rows]]
    if cpu_only:
        # What a loader does to hand over a batch is one task, whatever operators it uses.
        working = host.is_operator[part] & (host.phase[part] != Phase.DATA)
        rows = np.flatnonzero(working & ~host.named(BOOKKEEPING.__contains__)[part]) + part.start
        outermost = np.flatnonzero(working & (host.top_operator[part] == np.arange(part.start, part.stop))) + part.start
        cuts += [host.start[rows], host.end[rows], host.start[outermost], host.end[outermost]]
    if main:
        low, high = int(host.start[part].min()), int(host.end[part].max())
        cuts += [np.array([low, high]), np.clip(steps.bounds, low, high)]
    starts, ends = np.array(stretches, dtype=np.int64).reshape(-1, 2).T
    cuts += [starts, ends]
    points = np.unique(np.concatenate(cuts))
    begin, end = points[:-1], points[1:]
    keep = ~_covered(begin, call_start, call_end)
    keep &= _covered(begin, starts, ends) != main
    begin, end = begin[keep], end[keep]
    local = innermost_at(host.start[part], host.end[part], (begin + end) // 2)
    span = np.where(local >= 0, local + part.start, -1)
    data = np.where(span >= 0, host.phase[span] == Phase.DATA, False)
    if cpu_only:
        in_operator = (span >= 0) & (host.named_operator[np.maximum(span, 0)] >= 0)
        work_kind = np.where(in_operator, TaskKind.OPERATOR, TaskKind.PYTHON)
    else:
        work_kind = np.full(len(begin), TaskKind.CPU)
    work_kind = np.where(data, TaskKind.DATA, work_kind)

    own_cost = np.array([own.get(c, -1) for c in mine.tolist()], dtype=np.int64)
    own_cost = np.where(own_cost < 0, call_end - call_start, own_cost)
    waiting = np.array([c in waits for c in mine.tolist()], dtype=np.bool_)
    returning = mine[waiting]
    # Rank among tasks at one instant: what ends there comes before what begins there, and a call without duration
    # comes, with its RETURN, before the work that follows.
    instant = (call_end == call_start)[waiting]
    groups = [
        (work_kind, begin, end - begin, span, np.full(len(begin), 9)),
        (
            np.full(len(mine), TaskKind.CALL),
            call_start,
            own_cost,
            mine,
            np.where(call_end > call_start, 9, 5),
        ),
        (
            np.full(len(returning), TaskKind.RETURN),
            host.end[returning],
            np.zeros(len(returning), np.int64),
            returning,
            np.where(instant, 6, 0),
        ),
    ]
    if main:
        bounds = steps.bounds
        zero = np.zeros(len(bounds), np.int64)
        groups.append((np.full(len(bounds), TaskKind.MARK), bounds, zero, zero - 1, zero + 2))
        for times, tag, place in ((starts, _FORK, 3), (ends, _JOIN, 1)):
            zero = np.zeros(len(times), np.int64)
            groups.append((np.full(len(times), TaskKind.JOIN), times, zero, zero + tag, zero + place))
    kind, start, dur, spans, rank = (np.concatenate(parts) for parts in zip(*groups, strict=True))
    # Calls without duration keep their recorded order among themselves.
    order = np.lexsort((spans, rank, start))
    return kind[order].astype(np.uint8), start[order], dur[order], spans[order]


def _covered(times: Int64, starts: Int64, ends: Int64) -> Mask:
    """Return whether each time lies in one of the disjoint ascending intervals [start, end)."""
    if not len(starts):
        return np.zeros(len(times), dtype=np.bool_)
    index = np.searchsorted(starts, times, side="right") - 1
    return (index >= 0) & (times < ends[np.maximum(index, 0)])
