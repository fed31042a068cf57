"""Measure steps where they are finished: on the device, once the host no longer waits for it."""

from __future__ import annotations

import numpy as np

from foretrace.arrays import Int64, Mask
from foretrace.graph.insert import edge_columns, extend
from foretrace.graph.select import launching_call
from foretrace.graph.taskgraph import Change, EdgeKind, Lane, TaskGraph, TaskKind
from foretrace.trace.trace import LaneKind

AHEAD = 1.05  # the device needs this much longer than the host's steps: the host runs ahead


def joint_rows(graph: TaskGraph) -> Mask:
    """Return tasks (n rows) that belong to no rank alone: marks of all ranks, and tasks in which large groups meet."""
    if len({lane.rank for lane in graph.lanes}) < 2:
        return np.zeros(len(graph), dtype=np.bool_)
    marks = (graph.kind == TaskKind.MARK) & (graph.lane_kinds[graph.lane] == LaneKind.MODEL)
    return np.asarray((graph.rank < 0) | marks)


def own_marks(graph: TaskGraph, rank: int) -> Int64:
    """Return a rank's own step marks, which those of a joined graph wait for; none where it has no steps.

    The first one is where this rank enters the first step, whichever rank enters it first.
    """
    joint = joint_rows(graph)
    mine = (graph.rank == rank) & ~joint & (graph.kind == TaskKind.MARK)
    first = np.flatnonzero(mine & (graph.step == 0))
    if not len(first) or not graph.n_steps:
        return np.empty(0, dtype=np.int64)
    found = [int(first[0])]
    for mark in graph.marks[1:].tolist():
        row = int(mark)
        while joint[row]:  # steps that are measured on the device wait for the marks of all ranks, these for the ranks'
            into = slice(int(graph.in_ptr[row]), int(graph.in_ptr[row + 1]))
            before = graph.src[into][graph.edge_kind[into] == EdgeKind.THREAD]
            own = before[mine[before]]
            if not len(own) and not joint[before].any():
                return np.empty(0, dtype=np.int64)
            row = int(own[0]) if len(own) else int(before[joint[before]][0])
        found.append(row)
    return np.array(found, dtype=np.int64)


def last_launched(graph: TaskGraph) -> Int64:
    """Return per stream (rows) and mark (columns) the last device task launched before the mark; −1 where none is.

    Of several ranks, before the rank's own mark. Their first step begins when the first rank enters it: the others'
    streams have nothing before it.
    """
    call = launching_call(graph)
    found = []
    joint = bool(joint_rows(graph).any())
    begins = int(graph.lanes[graph.lane[graph.marks[0]]].rank) if len(graph.marks) else 0
    marks = {0: graph.marks.astype(np.int64)} if not joint else {}
    for lane in np.unique(graph.lane[graph.on_device]):
        rows = np.flatnonzero((graph.lane == lane) & ~graph.gone)
        rank = graph.lanes[lane].rank if joint else 0
        if rank not in marks:
            marks[rank] = own_marks(graph, rank)
        if len(rows) and len(marks[rank]):
            place = np.searchsorted(np.maximum.accumulate(call[rows]), marks[rank], side="left") - 1
            last = np.where(place >= 0, rows[np.maximum(place, 0)], -1)
            if joint and rank != begins:
                last[0] = -1
            found.append(last)
    return np.array(found, dtype=np.int64).reshape(-1, len(graph.marks))


def host_runs_ahead(graph: TaskGraph, end: Int64) -> bool:
    """Return whether steps measured at the marks are too short, because device work piles up behind the host.

    `end` are the ends of all tasks of a replay. A host that no longer waits finishes its steps early, and
    only the end of the device's work shows how long a step takes.
    """
    last = last_launched(graph)
    if not len(last) or len(graph.marks) < 2:
        return False
    done = np.where(last >= 0, end[np.maximum(last, 0)], np.iinfo(np.int64).min).max(axis=0)
    marks = end[graph.marks]
    finished = np.maximum(marks, done)
    first = 1 if len(marks) > 2 else 0  # work from before the first mark is unknown, so it would look early
    return bool(finished[-1] - finished[first] > AHEAD * (marks[-1] - marks[first]))


def measure_on_device(graph: TaskGraph) -> TaskGraph:
    """Return marks that also wait for the device work launched before them, on a lane of their own.

    The host's own order is untouched: nothing waits for the new marks.
    """
    last = last_launched(graph)
    marks, count = graph.marks.astype(np.int64), len(graph.marks)
    new = len(graph) + np.arange(count)
    stream, mark = np.nonzero(last >= 0)
    result, rows = extend(
        graph,
        {
            "kind": np.full(count, TaskKind.MARK),
            "lane": np.full(count, len(graph.lanes)),
            "name": graph.name[marks],
            "step": graph.step[marks],
            "dur": np.zeros(count),
            "recorded": np.maximum(graph.recorded[marks], graph.recorded[np.maximum(last, 0)].max(axis=0)),
        },
        {
            "src": np.concatenate([marks, new[:-1], last[stream, mark]]),
            "dst": np.concatenate([new, new[1:], new[mark]]),
            "edge_kind": np.repeat(
                [int(EdgeKind.THREAD), int(EdgeKind.PROGRAM), int(EdgeKind.SYNC)], [count, count - 1, len(mark)]
            ),
            "lag": np.zeros(2 * count - 1 + len(mark)),
        },
        lanes=[Lane(rank=graph.lanes[graph.lane[marks[0]]].rank, kind=LaneKind.MODEL, label="steps on the device")],
        old_edges=edge_columns(graph),
        change=Change(technique="", what="the host runs ahead now: steps are measured on the device", tasks=count),
    )
    return result.with_columns(marks=rows[new].astype(np.int32))
