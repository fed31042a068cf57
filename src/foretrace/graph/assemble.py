"""Put tasks and edges in any order together into a `TaskGraph`: topological order, CSR, index tables.

The only place that orders tasks; the builder and the edits that insert tasks both end here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.errors import GraphError
from foretrace.graph.taskgraph import (
    EDGE_COLUMNS,
    NO_RELEASE,
    TASK_COLUMNS,
    Assumption,
    Change,
    GraphInfo,
    Lane,
    TaskGraph,
)

TASK_DEFAULTS: dict[str, Any] = {
    "phase": 0,
    "layer": -1,
    "step": -1,
    "delay": 0,
    "release": NO_RELEASE,
    "recorded": 0,
    "nbytes": -1,
    "flops": 0.0,
    "priority": 0,
    "op": -1,
    "shape": -1,
    "probes": 0,
    "doubt": -1,
    "gone": False,
}
EDGE_DEFAULTS: dict[str, Any] = {"from_start": False, "inferred": False}


def assemble(
    tasks: Mapping[str, npt.NDArray[Any]],
    edges: Mapping[str, npt.NDArray[Any]],
    *,
    marks: npt.NDArray[Any],
    names: tuple[str, ...],
    layers: tuple[str, ...],
    lanes: tuple[Lane, ...],
    info: GraphInfo,
    shapes: tuple[str, ...] = (),
    changes: tuple[Change, ...] = (),
    assumptions: tuple[Assumption, ...] = (),
) -> TaskGraph:
    """Build a graph from task columns and edge columns given in any order.

    `tasks` needs kind, lane, name and dur (n rows); the other columns have defaults. `edges` needs src and dst
    (row numbers of `tasks`), edge_kind and lag (m rows); `typical` defaults to `lag`. `marks` are row numbers of
    `tasks`. Rows are renumbered in topological order, ties by `recorded`, then by the given order, so that the
    result does not depend on the order of the edges. Raises GraphError naming two tasks where edges form a cycle.
    """
    n, m = len(tasks["kind"]), len(edges["src"])
    columns: dict[str, npt.NDArray[Any]] = {
        key: np.ascontiguousarray(tasks[key], dtype=dtype)
        if key in tasks
        else np.full(n, TASK_DEFAULTS[key], dtype=dtype)
        for key, dtype in TASK_COLUMNS.items()
    }
    dst = np.ascontiguousarray(edges["dst"], dtype=np.int32)
    given = dict(edges)
    given.setdefault("typical", edges["lag"])
    edge_columns: dict[str, npt.NDArray[Any]] = {
        key: np.ascontiguousarray(given[key], dtype=dtype)
        if key in given
        else np.full(m, EDGE_DEFAULTS[key], dtype=dtype)
        for key, dtype in EDGE_COLUMNS.items()
    }
    src = edge_columns["src"]
    if m and (min(src.min(), dst.min()) < 0 or max(src.max(), dst.max()) >= n):
        raise GraphError(f"an edge points outside the {n} tasks of the graph.")
    order = _topological_order(columns["recorded"], src, dst, columns["name"], names)
    rank = np.empty(n, dtype=np.int32)
    rank[order] = np.arange(n, dtype=np.int32)
    new_src, new_dst = rank[src], rank[dst]
    by_dst = np.lexsort((edge_columns["edge_kind"], new_src, new_dst))
    in_ptr = np.zeros(n + 1, dtype=np.int64)
    np.cumsum(np.bincount(new_dst, minlength=n), out=in_ptr[1:])
    edge_columns["src"] = new_src
    return TaskGraph(
        **{key: column[order] for key, column in columns.items()},
        **{key: column[by_dst] for key, column in edge_columns.items()},
        in_ptr=in_ptr,
        marks=rank[np.asarray(marks, dtype=np.int64)].astype(np.int32),
        names=names,
        layers=layers,
        lanes=lanes,
        info=info,
        shapes=shapes,
        changes=changes,
        assumptions=assumptions,
    )


def _topological_order(
    recorded: npt.NDArray[np.int64],
    src: npt.NDArray[np.int32],
    dst: npt.NDArray[np.int32],
    name: npt.NDArray[np.int32],
    names: tuple[str, ...],
) -> npt.NDArray[np.int64]:
    """Rows in topological order, earliest recorded start first among the ready ones."""
    by_time = np.argsort(recorded, kind="stable")
    place = np.empty(len(recorded), dtype=np.int64)
    place[by_time] = np.arange(len(recorded))
    if np.all(place[src] < place[dst]):  # nearly always: recorded time already respects every edge
        return by_time
    from foretrace.graph.kernels import topological_order

    out_ptr = np.zeros(len(recorded) + 1, dtype=np.int64)
    np.cumsum(np.bincount(src, minlength=len(recorded)), out=out_ptr[1:])
    out_dst = dst[np.argsort(src, kind="stable")]
    order = topological_order(place, out_ptr, out_dst)
    if len(order) < len(recorded):
        stuck = np.setdiff1d(np.arange(len(recorded)), order)[:2]
        raise GraphError(
            "the edges form a cycle through " + " and ".join(f"task {i} ({names[name[i]]})" for i in stuck) + "."
        )
    return order
