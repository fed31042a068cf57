"""Schedule: an event-driven run in which the order on a lane is decided as it goes.

- A task becomes *ready* when everything that it waits for is known: max(release, anchors + lags) + delay.
- On an ordered lane it starts when it is ready; its edges keep the order. If all lanes are ordered, the
  result equals `replay`.
- On an unordered lane (`Lane.ordered` False) PROGRAM and STREAM edges between tasks of that lane are ignored and
  the lane runs as many tasks at a time as it has `slots`. A lane with a free slot starts the next task that becomes
  ready; a slot that becomes free at time t starts, among the tasks ready at t or before, the one with the smallest
  (priority, ready time, row).
- A collective of several ranks is a *group*: an ARRIVAL on an unordered lane takes a slot and holds it until its own
  COLLECTIVE has ended. That is the first row of this kind on the same lane to which a COLLECTIVE edge leads from the
  ARRIVAL, directly or through one JOIN. It needs no slot of its own and starts when it is ready: when every rank has
  arrived. If either of the two is removed they are no group; each is then a task like any other. A COLLECTIVE
  without an ARRIVAL of its own is a task like any other, too.
- Two ranks that enter two collectives in opposite orders wait for each other forever if the slots do not suffice
  for both, here as with NCCL. That is a GraphError.
- Decisions are taken in the order of (time, priority, row); at equal times tasks become ready before lanes become
  free. A task that turns out to have been ready in the past (negative lags) competes from then on.
- Removed tasks follow the rule of `replay`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from foretrace.arrays import Array, Int32, Int64, Mask, UInt8
from foretrace.errors import GraphError
from foretrace.graph.assemble import pointers
from foretrace.graph.sound import fixed
from foretrace.graph.taskgraph import EDGE_COLUMNS, NO_RELEASE, TASK_COLUMNS, EdgeKind, TaskGraph
from foretrace.simulate.groups import deadlock, groups
from foretrace.simulate.replay import effective, structure
from foretrace.simulate.unwritten import unwritten, written
from foretrace.trace.trace import LaneKind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """Start and end of every task (n, ns) and the rows in the order in which they were decided (n)."""

    start: Int64
    end: Int64
    order: Int32


def schedule(graph: TaskGraph) -> tuple[Int64, Int64]:
    """Start and end of every task (n each, ns).

    Raises GraphError if collectives wait for each other, or a lane has no slot.
    """
    result = schedule_in_order(graph)
    return result.start, result.end


def schedule_in_order(graph: TaskGraph) -> Schedule:
    """Return `schedule` with the order of decisions, a topological order that has this run's order of lanes."""
    from foretrace.simulate import schedule_engine

    n, n_lanes = len(graph), len(graph.lanes)
    need_slots(graph)
    columns = effective(graph)
    in_ptr, src, from_start = structure(graph)
    lanes, group = lane_table(graph), groups(graph)
    start, end, order = unwritten(n), unwritten(n), unwritten(n, np.int32)
    task, out = unwritten((n, 8)), unwritten((graph.edges, 2))
    kept = schedule_engine.successors(
        in_ptr, src, fixed(graph.edge_kind), from_start, fixed(columns.lag), fixed(columns.dur),
        fixed(columns.delay), fixed(graph.release), fixed(graph.lane), fixed(graph.priority), lanes.ordered, task, out,
    )  # fmt: skip
    spare = np.full(6 * n, NO_RELEASE) if lanes.slots.max(initial=0) > 1 else None
    queue, events = unwritten(3 * n), unwritten(3 * (n + group.collectives + n_lanes))
    done = schedule_engine.schedule(
        task, out[:kept], lanes.ptr, lanes.ordered, lanes.slots, spare, group.holds, group.arrivals,
        queue, events, start, end, order,
    )  # fmt: skip
    if done < n:
        stuck(graph, order[:done])
    written(start, end)
    return Schedule(start=start, end=end, order=order)


def as_run(graph: TaskGraph, order: Int32) -> TaskGraph:
    """Return the graph whose replay is the schedule decided in this `order`; row i is row order[i] of `graph`.

    All lanes are ordered: edges that were decided as the graph ran are replaced by edges from the task that gave its
    slot to the one that took it (the end of a COLLECTIVE gives the slot that its ARRIVAL took). A delay there comes
    before the lane is taken, so it moves into lags and release times.
    """
    n = len(graph)
    place = np.empty(n, dtype=np.int32)
    place[order] = np.arange(n, dtype=np.int32)
    free = ~np.array([lane.ordered for lane in graph.lanes], dtype=np.bool_)[graph.lane]
    dst = graph.dst
    kept = np.flatnonzero(edges_that_hold(graph))
    early = np.where(free & ~graph.gone, graph.delay, 0)
    giver = _slot_givers(graph, order)
    after = np.flatnonzero(giver >= 0)
    before = giver[after]
    host = graph.lane_kinds[graph.lane[after]] == LaneKind.CPU
    zeros, new_dst = np.zeros(len(after), dtype=np.int64), np.concatenate([place[dst[kept]], place[after]])
    edges: dict[str, Array] = {
        "src": np.concatenate([place[graph.src[kept]], place[before]]),
        "edge_kind": np.concatenate([graph.edge_kind[kept], np.where(host, EdgeKind.PROGRAM, EdgeKind.STREAM)]),
        "lag": np.concatenate([graph.lag[kept] + early[dst[kept]], zeros]),
        "typical": np.concatenate([graph.typical[kept] + early[dst[kept]], zeros]),
        "from_start": np.concatenate([graph.from_start[kept], zeros]),
        "inferred": np.concatenate([graph.inferred[kept], zeros]),
    }
    by_dst = np.lexsort((edges["edge_kind"], edges["src"], new_dst))
    columns: dict[str, Any] = {key: getattr(graph, key)[order] for key in TASK_COLUMNS}
    columns["delay"] = (graph.delay - early)[order]
    columns["release"] = (graph.release + early)[order]
    columns |= {key: edges[key][by_dst].astype(dtype) for key, dtype in EDGE_COLUMNS.items()}
    return replace(
        graph,
        **columns,
        in_ptr=pointers(new_dst, n),
        marks=place[graph.marks],
        lanes=tuple(replace(lane, ordered=True) for lane in graph.lanes),
    )


def edges_that_hold(graph: TaskGraph) -> Mask:
    """Return edges (m) that a run respects: all but those that it decides itself."""
    dst = graph.dst
    unordered = ~np.array([lane.ordered for lane in graph.lanes], dtype=np.bool_)[graph.lane[dst]]
    inside = np.isin(graph.edge_kind, (EdgeKind.PROGRAM, EdgeKind.STREAM)) & (graph.lane[graph.src] == graph.lane[dst])
    holds: Mask = ~(inside & unordered)
    return holds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaneArrays:
    """Lanes as the loops read them: which have an order, how many slots each can use, where its tasks begin."""

    ordered: UInt8
    slots: Int64
    ptr: Int64


def lane_table(graph: TaskGraph) -> LaneArrays:
    """Return the lanes of a graph as the loops read them; `slots` counts at most the tasks of a lane."""
    count = np.bincount(graph.lane, minlength=len(graph.lanes))
    slots = [0 if lane.ordered else min(lane.slots, int(c)) for lane, c in zip(graph.lanes, count, strict=True)]
    ptr = np.zeros(len(graph.lanes) + 1, dtype=np.int64)
    np.cumsum(count, out=ptr[1:])
    ordered = np.array([lane.ordered for lane in graph.lanes], dtype=np.uint8)
    return LaneArrays(ordered=ordered, slots=np.array(slots, dtype=np.int64), ptr=ptr)


def _slot_givers(graph: TaskGraph, order: Int32) -> Int32:
    """Return row whose end gave each task (n) its slot in the run that was decided in this order, −1 for none."""
    from foretrace.simulate import schedule_engine

    columns = effective(graph)
    lanes, group = lane_table(graph), groups(graph)
    in_ptr, src, from_start = structure(graph)
    start, end = unwritten(len(graph)), unwritten(len(graph))
    giver: Int32 = schedule_engine.slot_givers(
        in_ptr, src, fixed(graph.edge_kind), from_start, fixed(columns.lag), fixed(columns.dur), fixed(columns.delay),
        fixed(graph.release), fixed(graph.lane), lanes.ordered, lanes.slots, lanes.ptr, group.holds,
        group.arrivals, fixed(order), start, end,
    )  # fmt: skip
    written(start, end)
    return giver


def need_slots(graph: TaskGraph) -> None:
    """Refuse a graph with a lane that can run nothing."""
    for lane in graph.lanes:
        if not lane.ordered and lane.slots < 1:
            raise GraphError(
                f"lane {lane.label or lane.stream} of rank {lane.rank} has {lane.slots} slots and can run nothing; "
                "give it 1 or more."
            )


def stuck(graph: TaskGraph, decided: Int32, what: str = "tasks") -> NoReturn:
    """Say why a run got no further than these rows."""
    deadlocked = deadlock(graph, edges_that_hold(graph), decided)
    if deadlocked:
        raise GraphError(deadlocked)
    left = np.setdiff1d(np.arange(len(graph)), decided)[:2]
    tasks = " and ".join(f"task {row} ({graph.names[graph.name[row]]})" for row in left)
    raise GraphError(f"the {what} form a cycle through {tasks}: a call waits for work that itself waits for the call.")
