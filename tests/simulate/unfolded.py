"""The run of many copies of a graph written out, which `replay_copies` must equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.graph.assemble import assemble
from foretrace.graph.taskgraph import EDGE_COLUMNS, TASK_COLUMNS, TaskGraph

Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


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
