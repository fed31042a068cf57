"""Copies: one run of many copies of a graph that meet in some collectives, without a graph of them all.

The graph holds the ranks that were recorded. A run of N ranks is ceil(N / recorded ranks) copies of it: everything is
as recorded inside a copy, and through the edges of collectives that grow with the job (`meets`) a task waits for
its source in all copies. `replay_copies` keeps copies side by side, as `replay_variants` keeps variants, so the
memory it takes does not grow with the graph. `unfolded` is the same run as one graph with all tasks: N times
as large, for validation and for questions about single tasks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.graph.assemble import assemble
from foretrace.graph.sound import fixed
from foretrace.graph.taskgraph import EDGE_COLUMNS, TASK_COLUMNS, TaskGraph
from foretrace.simulate.replay import LANES_OF_A_VECTOR, effective, structure
from foretrace.simulate.unwritten import unwritten, written

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def replay_copies(graph: TaskGraph, meets: Mask, group: Int32, scale: Float64, rows: Int32) -> Int64:
    """Ends (ns) of some tasks in one run of K copies of the graph (len(rows) x K).

    Args:
        graph: all lanes ordered.
        meets: edges (m) through which a task waits for its source in every copy. Nothing of a removed task meets.
        group: label below G of every task (n), −1 for none.
        scale: factor of the durations of a group in a copy (G x K), finite, 0 or more.
        rows: the tasks that are asked for.

    Equal to the replay of `unfolded`, bit for bit.

    """
    n_groups, copies = scale.shape
    if group.shape != (len(graph),) or (len(group) and group.max() >= n_groups):
        raise ValueError(f"group: want {len(graph)} labels below {n_groups}")
    if meets.shape != (graph.edges,) or copies < 1:
        raise ValueError(f"meets: want {graph.edges} edges, and at least one copy")
    if not np.all(np.isfinite(scale)) or np.any(scale < 0):
        raise ValueError("scale: want finite factors, 0 or more")
    from foretrace.simulate import engine

    columns = effective(graph)
    width = -(-copies // LANES_OF_A_VECTOR) * LANES_OF_A_VECTOR
    factors = np.ones((n_groups + 1, width))
    factors[1:, :copies] = scale
    factors[1:, copies:] = scale[:, :1]  # what fills the last vector arrives with the first copy
    into_gone = np.repeat(graph.gone, np.diff(graph.in_ptr))
    in_ptr, src, from_start = structure(graph)
    read, slot, used = engine.value_slots(in_ptr, src, from_start)
    in_order = np.argsort(rows, kind="stable")
    out = unwritten((len(rows), width))
    engine.replay_copies(
        in_ptr, read, slot, unwritten((used, width)), fixed(meets & ~into_gone).view(np.uint8), fixed(columns.lag),
        fixed(columns.dur), fixed(columns.delay), fixed(graph.release), fixed(group), factors, rows[in_order], out,
    )  # fmt: skip
    ends = unwritten((len(rows), copies))
    ends[in_order] = out[:, :copies]
    written(ends)
    return ends


def unfolded(graph: TaskGraph, meets: Mask, copies: int) -> tuple[TaskGraph, Int64]:
    """The run of K copies as one graph, and the row of every task in every copy (n x K).

    Copy k of rank r is rank r + k · (highest rank + 1). The marks are those of copy 0.
    """
    n, m = len(graph), graph.edges
    block = max((lane.rank for lane in graph.lanes), default=0) + 1
    lanes = tuple(replace(lane, rank=lane.rank + k * block) for k in range(copies) for lane in graph.lanes)
    tasks: dict[str, npt.NDArray[Any]] = {key: np.tile(getattr(graph, key), copies) for key in TASK_COLUMNS}
    tasks["lane"] = tasks["lane"] + np.repeat(np.arange(copies), n) * len(graph.lanes)
    tasks["probes"] = np.arange(n * copies)  # carries the number of a task through the sort by `assemble`
    # Every edge inside its own copy; those that meet between all pairs of different copies as well.
    meeting = np.flatnonzero(meets & ~graph.gone[graph.dst])
    from_copy, to_copy = np.nonzero(~np.eye(copies, dtype=np.bool_))
    edge = np.concatenate([np.tile(np.arange(m), copies), np.repeat(meeting, len(from_copy))])
    own = np.repeat(np.arange(copies), m)
    edges: dict[str, npt.NDArray[Any]] = {key: getattr(graph, key)[edge] for key in EDGE_COLUMNS}
    edges["src"] = graph.src[edge] + n * np.concatenate([own, np.tile(from_copy, len(meeting))])
    edges["dst"] = graph.dst[edge] + n * np.concatenate([own, np.tile(to_copy, len(meeting))])
    result = assemble(
        tasks,
        edges,
        marks=graph.marks,
        names=graph.names,
        layers=graph.layers,
        lanes=lanes,
        info=graph.info,
        shapes=graph.shapes,
        changes=graph.changes,
        assumptions=graph.assumptions,
    )
    number = result.probes.astype(np.int64)
    row = np.empty(n * copies, dtype=np.int64)
    row[number] = np.arange(n * copies)
    return result.with_columns(probes=np.tile(graph.probes, copies)[number]), row.reshape(copies, n).T
