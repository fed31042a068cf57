"""Put tasks and edges in any order together into a `TaskGraph`: topological order, CSR, index tables.

The only place that orders tasks; the builder and the edits that insert tasks both end here, and so does every edit
whose edges go backward (`foretrace.graph.sound`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from foretrace.arrays import Array, Int32, Int64, Mask
from foretrace.errors import CycleError, GraphError
from foretrace.graph.taskgraph import (
    EDGE_COLUMNS,
    NO_RELEASE,
    TASK_COLUMNS,
    Assumption,
    Change,
    EdgeKind,
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
Columns = dict[str, Array]
_MOST_NAMED = 6  # tasks of a cycle


def assemble(
    tasks: Mapping[str, Array],
    edges: Mapping[str, Array],
    *,
    marks: Array,
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
    result does not depend on the order of the edges. Raises GraphError naming the tasks where edges form a cycle.
    """
    n, columns, edge_columns = len(tasks["kind"]), task_columns(tasks), edges_with_dst(edges)
    src, dst = edge_columns["src"], edge_columns.pop("dst")
    if len(src) and (min(src.min(), dst.min()) < 0 or max(src.max(), dst.max()) >= n):
        raise GraphError(f"an edge points outside the {n} tasks of the graph.")
    by_time = np.argsort(columns["recorded"], kind="stable")
    order = _topological_order(by_time, src, dst, columns["name"], names)
    return TaskGraph(
        **_in_order(columns, edge_columns, dst, np.asarray(marks, dtype=np.int64), order),
        names=names,
        layers=layers,
        lanes=lanes,
        info=info,
        shapes=shapes,
        changes=changes,
        assumptions=assumptions,
    )


def task_columns(given: Mapping[str, Any]) -> Columns:
    """Return all task columns, defaults where one is not given; `kind` gives the rows, a number is that of all.

    Of `kind`, `lane`, `name` and `dur` the default is 0.
    """
    n = len(given["kind"])
    return {key: _column(given.get(key, TASK_DEFAULTS.get(key, 0)), n, dtype) for key, dtype in TASK_COLUMNS.items()}


def edges_with_dst(given: Mapping[str, Any]) -> Columns:
    """Return all edge columns and `dst`, as `task_columns`; `typical` and `lag` (0) are each other's default."""
    lag = given.get("lag", given.get("typical", 0))
    full = {"from_start": False, "inferred": False, "typical": lag, "lag": lag, **given}
    return {
        key: _column(full[key], len(given["src"]), dtype) for key, dtype in {**EDGE_COLUMNS, "dst": np.int32}.items()
    }


def _column(values: Any, length: int, dtype: type) -> Array:
    return np.full(length, values, dtype=dtype) if np.ndim(values) == 0 else np.ascontiguousarray(values, dtype=dtype)


def reordered(graph: TaskGraph) -> tuple[TaskGraph, Int64]:
    """Return the graph in topological order, rows moved no further than edges ask, and every row's new number.

    Raises GraphError naming the tasks where edges form a cycle.
    """
    n, dst = len(graph), graph.dst
    order = _topological_order(np.arange(n), graph.src, dst, graph.name, graph.names)
    tasks = {key: getattr(graph, key) for key in TASK_COLUMNS}
    edges = {key: getattr(graph, key) for key in EDGE_COLUMNS}
    rows = np.empty(n, dtype=np.int64)
    rows[order] = np.arange(n)
    columns: dict[str, Any] = _in_order(tasks, edges, dst, graph.marks, order)
    return replace(graph, **columns), rows


def part_of(graph: TaskGraph, tasks: Mask, lanes: Mask) -> TaskGraph:
    """Return the chosen tasks (a mask) with the edges and marks among them, on the chosen lanes, all that they use."""
    place, number, dst = np.cumsum(tasks) - 1, np.cumsum(lanes) - 1, graph.dst
    edges = tasks[graph.src] & tasks[dst]
    columns: dict[str, Any] = {key: getattr(graph, key)[tasks] for key in TASK_COLUMNS}
    columns |= {key: getattr(graph, key)[edges] for key in EDGE_COLUMNS}
    columns["lane"] = number[columns["lane"]].astype(np.int32)
    columns["src"] = place[columns["src"]].astype(np.int32)
    return replace(
        graph,
        **columns,
        in_ptr=pointers(place[dst[edges]], len(columns["kind"])),
        marks=place[graph.marks[tasks[graph.marks]]].astype(np.int32),
        lanes=tuple(graph.lanes[i] for i in np.flatnonzero(lanes).tolist()),
    )


def pointers(group: Array, count: int) -> Int64:
    """Return where the rows of each of `count` groups begin, once they are sorted by `group` (count + 1)."""
    found = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(group, minlength=count), out=found[1:])
    return found


def _in_order(
    tasks: Mapping[str, Array],
    edges: Mapping[str, Array],
    dst: Int32,
    marks: Array,
    order: Int64,
) -> dict[str, Any]:
    """Return all columns of a graph whose row i is row order[i] of these tasks, edges grouped by successor."""
    n = len(order)
    rank = np.empty(n, dtype=np.int32)
    rank[order] = np.arange(n, dtype=np.int32)
    new_src, new_dst = rank[edges["src"]], rank[dst]
    # As lexsort by successor, source and kind; one key is sorted several times as fast.
    key = (new_dst.astype(np.int64) * n + new_src) * len(EdgeKind) + edges["edge_kind"]
    by_dst = np.argsort(key, kind="stable")
    return {
        **{key: column[order] for key, column in tasks.items()},
        **{key: (new_src if key == "src" else column)[by_dst] for key, column in edges.items()},
        "in_ptr": pointers(new_dst, n),
        "marks": rank[marks].astype(np.int32),
    }


def _topological_order(
    wish: Int64,
    src: Int32,
    dst: Int32,
    name: Int32,
    names: tuple[str, ...],
) -> Int64:
    """Return rows in topological order, among the ready ones the first of `wish` (a permutation of the rows) first."""
    place = np.empty(len(wish), dtype=np.int64)
    place[wish] = np.arange(len(wish))
    if np.all(place[src] < place[dst]):  # nearly always: recorded time already respects every edge
        return wish
    from foretrace.graph.kernels import topological_order

    order = topological_order(place, pointers(src, len(wish)), dst[np.argsort(src, kind="stable")])
    if len(order) < len(wish):
        cycle = _cycle(np.setdiff1d(np.arange(len(wish)), order), src, dst)
        tasks = [f"task {row} ({names[name[row]][:60]})" for row in cycle[:_MOST_NAMED]]
        more = [f"{len(cycle) - _MOST_NAMED} more"] if len(cycle) > _MOST_NAMED else []
        raise CycleError("the edges form a cycle through " + " and ".join(tasks + more) + ".")
    return order


def _cycle(stuck: Int64, src: Int32, dst: Int32) -> list[int]:
    """Return rows of one cycle, each waiting for the next: every stuck row has a predecessor that is stuck, too."""
    inside = np.isin(src, stuck) & np.isin(dst, stuck)
    waits_for = dict(zip(dst[inside].tolist(), src[inside].tolist(), strict=True))
    path, seen, row = list[int](), dict[int, int](), int(stuck[0])
    while row not in seen:
        seen[row] = len(path)
        path.append(row)
        row = waits_for[row]
    return path[seen[row] :]
