"""Measure steps where they are finished: on the device, once the host no longer waits for it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foretrace.graph.insert import edge_columns, extend
from foretrace.graph.taskgraph import Change, EdgeKind, Lane, TaskGraph, TaskKind
from foretrace.trace.trace import LaneKind

Int64 = npt.NDArray[np.int64]

AHEAD = 1.05  # the device needs this much longer than the host's steps: the host runs ahead


def last_launched(graph: TaskGraph) -> Int64:
    """Per stream (rows) and mark (columns) the last device task launched before the mark; −1 where none is."""
    call = np.full(len(graph), -1, dtype=np.int64)
    launch = graph.edge_kind == EdgeKind.LAUNCH
    call[graph.dst[launch]] = graph.src[launch]
    found = []
    for lane in np.unique(graph.lane[graph.on_device]):
        rows = np.flatnonzero((graph.lane == lane) & ~graph.gone)
        if len(rows):
            place = np.searchsorted(np.maximum.accumulate(call[rows]), graph.marks, side="left") - 1
            found.append(np.where(place >= 0, rows[np.maximum(place, 0)], -1))
    return np.array(found, dtype=np.int64).reshape(-1, len(graph.marks))


def host_runs_ahead(graph: TaskGraph, end: Int64) -> bool:
    """Whether steps measured at the marks are too short, because device work piles up behind the host.

    `end` are the ends of all tasks of a replay. A host that no longer waits finishes its steps early, and
    only the end of the device's work tells how long a step takes.
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
    """Marks that also wait for the device work launched before them, on a lane of their own.

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
