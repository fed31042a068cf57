"""Schedule: an event-driven run in which the order on a lane, and what a call waits for, are decided as it goes.

- A task becomes *ready* when everything that it waits for is known: max(release, anchors + lags) + delay.
- On an ordered lane it starts when it is ready; its edges keep the order. If all lanes are ordered (and nothing
  waits at run time) the result equals `replay`.
- On an unordered lane (`Lane.ordered` False) PROGRAM and STREAM edges between tasks of that lane are ignored and
  the lane runs one task at a time. An idle lane starts the next task that becomes ready; a lane that becomes free at
  time t starts, among the tasks ready at t or before, the one with the smallest (priority, ready time, row).
- Decisions are taken in the order of (time, priority, row); at equal times tasks become ready before lanes become
  free. A task that turns out to have been ready in the past (negative lags) competes from then on.
- Removed tasks follow the rule of `replay`.

Run-time waits (Lumos, MLSys 2025, section on run-time dependencies): a synchronising call waits for what has been
launched before it in *this* run, which the edges of a recording cannot know once the launch order changes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.errors import GraphError
from foretrace.graph.taskgraph import EDGE_COLUMNS, TASK_COLUMNS, EdgeKind, TaskGraph
from foretrace.simulate import twins
from foretrace.simulate.replay import compiled, effective, fixed, structure
from foretrace.trace.trace import LaneKind

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waits:
    """Rows (task, lane, lag): the task waits until everything launched on the lane before it has ended, plus lag ns.

    Launched before it: when the task has met its other dependencies, all LAUNCH edges into the waited-for task have
    left their source (for a task without LAUNCH edges: all its edges from other lanes); removed tasks do not count.
    SYNC edges into the tasks listed here are ignored. A task may have several rows, one per lane.
    """

    task: Int32
    lane: Int32
    lag: Int64

    def __len__(self) -> int:
        return len(self.task)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """Start and end of every task (n, ns) and the rows in the order in which they were decided (n)."""

    start: Int64
    end: Int64
    order: Int32


def schedule(graph: TaskGraph, *, waits: Waits | None = None) -> tuple[Int64, Int64]:
    """Start and end of every task (n each, ns). Raises GraphError if run-time waits wait for each other."""
    result = schedule_in_order(graph, waits=waits)
    return result.start, result.end


def schedule_in_order(graph: TaskGraph, *, waits: Waits | None = None) -> Schedule:
    """`schedule`, with the order of decisions: a topological order of the graph with the lane order of this run."""
    n, n_lanes = len(graph), len(graph.lanes)
    engine = compiled()
    if engine is None:
        rows = () if waits is None else zip(*(c.tolist() for c in (waits.task, waits.lane, waits.lag)), strict=True)
        starts, ends, decided = twins.schedule(graph, rows)
        if len(decided) < n:
            _stuck(graph, np.array(decided, dtype=np.int32))
        return Schedule(
            start=np.array(starts, dtype=np.int64),
            end=np.array(ends, dtype=np.int64),
            order=np.array(decided, dtype=np.int32),
        )
    waited = np.zeros(n_lanes, dtype=np.uint8)
    wait_ptr = wait_lag = np.zeros(0, dtype=np.int64)
    wait_lane = np.zeros(0, dtype=np.int32)
    if waits is not None and len(waits):
        by_task = np.argsort(waits.task, kind="stable")
        wait_lane, wait_lag = waits.lane[by_task], waits.lag[by_task]
        wait_ptr = np.zeros(n + 1, dtype=np.int64)
        np.cumsum(np.bincount(waits.task, minlength=n), out=wait_ptr[1:])
        waited[wait_lane] = 1
    columns = effective(graph)
    in_ptr, src, from_start = structure(graph)
    ordered = np.array([lane.ordered for lane in graph.lanes], dtype=np.uint8)
    start, end = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    order = np.empty(n, dtype=np.int32)
    task, out = np.empty((n, 8), dtype=np.int64), np.empty((graph.edges, 2), dtype=np.int64)
    kept = engine.successors(
        in_ptr, src, fixed(graph.edge_kind), from_start, fixed(columns.lag), fixed(columns.dur),
        fixed(columns.delay), fixed(graph.release), fixed(graph.lane), fixed(graph.priority), ordered, wait_ptr,
        task, out,
    )  # fmt: skip
    lane_ptr = np.zeros(n_lanes + 1, dtype=np.int64)
    np.cumsum(np.bincount(graph.lane, minlength=n_lanes), out=lane_ptr[1:])
    queue, events = np.empty(3 * n, dtype=np.int64), np.empty(3 * (n + n_lanes), dtype=np.int64)
    done = engine.schedule(
        task, out[:kept], lane_ptr, ordered, fixed(graph.gone).view(np.uint8), waited, wait_ptr, fixed(wait_lane),
        fixed(wait_lag), queue, events, start, end, order,
    )  # fmt: skip
    if done < n:
        _stuck(graph, order[:done])
    return Schedule(start=start, end=end, order=order)


def as_run(graph: TaskGraph, order: Int32) -> TaskGraph:
    """The graph whose replay is the schedule that took its decisions in this `order`; row i is row order[i] of `graph`.

    All lanes are ordered: edges that were decided as the graph ran are replaced by the order in which the tasks of
    a lane did run. A delay there comes before the lane is taken, so it moves into lags and release times.
    """
    n = len(graph)
    place = np.empty(n, dtype=np.int32)
    place[order] = np.arange(n, dtype=np.int32)
    free = ~np.array([lane.ordered for lane in graph.lanes], dtype=np.bool_)[graph.lane]
    dst = graph.dst
    inside = np.isin(graph.edge_kind, (EdgeKind.PROGRAM, EdgeKind.STREAM)) & (graph.lane[graph.src] == graph.lane[dst])
    kept = np.flatnonzero(~(inside & free[dst]))
    early = np.where(free & ~graph.gone, graph.delay, 0)
    by_lane = order[np.argsort(graph.lane[order], kind="stable")]
    follows = (graph.lane[by_lane[1:]] == graph.lane[by_lane[:-1]]) & free[by_lane[1:]]
    before, after = by_lane[:-1][follows], by_lane[1:][follows]
    host = graph.lane_kinds[graph.lane[after]] == LaneKind.CPU
    zeros, new_dst = np.zeros(len(after), dtype=np.int64), np.concatenate([place[dst[kept]], place[after]])
    edges: dict[str, npt.NDArray[Any]] = {
        "src": np.concatenate([place[graph.src[kept]], place[before]]),
        "edge_kind": np.concatenate([graph.edge_kind[kept], np.where(host, EdgeKind.PROGRAM, EdgeKind.STREAM)]),
        "lag": np.concatenate([graph.lag[kept] + early[dst[kept]], zeros]),
        "typical": np.concatenate([graph.typical[kept] + early[dst[kept]], zeros]),
        "from_start": np.concatenate([graph.from_start[kept], zeros]),
        "inferred": np.concatenate([graph.inferred[kept], zeros]),
    }
    by_dst = np.lexsort((edges["edge_kind"], edges["src"], new_dst))
    in_ptr = np.zeros(n + 1, dtype=np.int64)
    np.cumsum(np.bincount(new_dst, minlength=n), out=in_ptr[1:])
    columns: dict[str, Any] = {key: getattr(graph, key)[order] for key in TASK_COLUMNS}
    columns["delay"] = (graph.delay - early)[order]
    columns["release"] = (graph.release + early)[order]
    columns |= {key: edges[key][by_dst].astype(dtype) for key, dtype in EDGE_COLUMNS.items()}
    return replace(
        graph,
        **columns,
        in_ptr=in_ptr,
        marks=place[graph.marks],
        lanes=tuple(replace(lane, ordered=True) for lane in graph.lanes),
    )


def _stuck(graph: TaskGraph, decided: Int32) -> None:
    left = np.setdiff1d(np.arange(len(graph)), decided)[:2]
    tasks = " and ".join(f"task {row} ({graph.names[graph.name[row]]})" for row in left)
    raise GraphError(
        f"the run-time waits form a cycle through {tasks}: a call waits for work that itself waits for the call."
    )
