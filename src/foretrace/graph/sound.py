"""Soundness: what every graph must satisfy before anything replays it, and the one place that restores it.

The engines run over the rows once and trust what they read: an edge from a later row would give them a time that
nobody has written yet, an index outside a table memory of somebody else. So they take no graph that `verify` has not
passed. What was passed is noted as the very arrays that were looked at, which become read-only, in a record that all
graphs made from each other share (`TaskGraph.passed`): a graph with new durations has only these looked at, whichever
of its relatives was replayed before. `sound` ends the edits that can put rows out of order: it sorts them again where
an edge goes backward, and refuses what has no order.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple, TypeVar
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from foretrace.arrays import Array, Int64
from foretrace.errors import GraphError
from foretrace.graph.taskgraph import EDGE_COLUMNS, TASK_COLUMNS, EdgeKind, Phase, TaskGraph, TaskKind

Scalar = TypeVar("Scalar", bound=np.generic)

LATEST = 1 << 61  # ns, 73 years: recorded stamps and releases lie within ± this
LONGEST = 1 << 60  # ns: all durations together, all delays, all lags
END = LATEST + 3 * LONGEST  # no time of a replay is later, so none overflows
_INT32 = (1 << 31) - 1
_INT64 = (1 << 63) - 1


class Fault(NamedTuple):
    """The first thing that is wrong: in words, and whether another order of the rows can mend it."""

    says: str
    backward: bool = False


def verify(graph: TaskGraph) -> TaskGraph:
    """Return the same graph, proven sound. Raises GraphError naming the task or edge that is not.

    Checked: lengths and types of all columns, indices into the tables, CSR pointers, edges that go forward, times and
    counts in range, no negative durations or delays.
    """
    if graph not in _proven:
        fault = first_fault(graph)
        if fault is not None:
            raise GraphError(f"the graph is not sound: {fault.says}.")
    return graph


def sound(graph: TaskGraph) -> TaskGraph:
    """Return the same graph if it is sound, else with its rows in an order in which all edges go forward.

    Raises GraphError naming the tasks of a cycle where there is no such order, and whatever else `verify` finds.
    """
    return sound_rows(graph)[0]


def sound_rows(graph: TaskGraph) -> tuple[TaskGraph, Int64]:
    """Return what `sound` returns, and the new row number of every row."""
    rows = np.arange(len(graph))
    if graph in _proven:
        return graph, rows
    fault = first_fault(graph)
    if fault is not None and fault.backward:
        from foretrace.graph.assemble import reordered

        graph, rows = reordered(graph)
        fault = first_fault(graph)
    if fault is not None:
        raise GraphError(f"the graph is not sound: {fault.says}.")
    return graph, rows


def first_fault(graph: TaskGraph) -> Fault | None:
    """Return the first thing that is wrong with what has not passed of a graph, None if nothing is."""
    wanted = _wanted(graph)
    new = [key for key, want in wanted.items() if not _passed(graph, key, want, getattr(graph, key))]
    fault = _columns(graph, new, wanted) or _tables(graph)
    if fault is None:
        for key in new:
            _fix(graph, key)
        fault = _ranges(graph, new, wanted) or _steps(graph) or _edges(graph)
    if fault is None:
        _proven.add(graph)
    return fault


def fixed(column: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """Return a read-only view: memory-mapped and computed columns then have one type, and one compiled version."""
    view = np.ascontiguousarray(column).view(np.ndarray)
    view.flags.writeable = False
    return view


# Graphs whose every column has passed: they are frozen, and what they hold is read-only.
_proven: WeakSet[TaskGraph] = WeakSet()


def _passed(graph: TaskGraph, what: str, want: object, one: Array, other: Array | None = None) -> bool:
    """Return whether these very arrays passed the same check, and nobody can have written to them since."""
    known = graph.passed.get(what)
    if known is None or known[1] is not one or known[0] != want or one.flags.writeable:
        return False
    return other is None or (known[2] is other and not other.flags.writeable)


def _fix(graph: TaskGraph, key: str) -> None:
    """Make a column read-only, in place; a copy of it where somebody else could still write to its memory."""
    column = getattr(graph, key)
    shared = isinstance(column.base, np.ndarray) and (column.flags.writeable or column.base.flags.writeable)
    if shared:
        column = column.copy()
        object.__setattr__(graph, key, column)
    column.flags.writeable = False


# -- what is checked -------------------------------------------------------------------------------------------


def _wanted(graph: TaskGraph) -> dict[str, tuple[int, float, float]]:
    """Return length, smallest and largest value of every column, which bound indices and sums."""
    n, m, names, most = len(graph.kind), len(graph.src), len(graph.names) - 1, np.iinfo(np.int64).max
    return {
        "kind": (n, 0, len(TaskKind) - 1),
        "phase": (n, 0, len(Phase) - 1),
        "lane": (n, 0, len(graph.lanes) - 1),
        "name": (n, 0, names),
        "layer": (n, -1, len(graph.layers) - 1),
        "step": (n, -1, graph.n_steps or _INT32),  # the last mark is of the step that follows
        "dur": (n, 0, LONGEST),
        "delay": (n, 0, LONGEST),
        "release": (n, -LATEST, LATEST),
        "recorded": (n, -LATEST, LATEST),
        "nbytes": (n, -1, most),
        "flops": (n, 0.0, _FLOAT_MAX),
        "priority": (n, -_INT32 - 1, _INT32),
        "op": (n, -1, names),
        "shape": (n, -1, len(graph.shapes) - 1),
        "probes": (n, 0, _INT32),
        "doubt": (n, -1, len(graph.info.doubts) - 1),
        "gone": (n, 0, 1),
        "in_ptr": (n + 1, 0, m),
        "src": (m, 0, n - 1),
        "edge_kind": (m, 0, len(EdgeKind) - 1),
        "lag": (m, -LATEST, LONGEST),
        "typical": (m, -LATEST, LONGEST),
        "from_start": (m, 0, 1),
        "inferred": (m, 0, 1),
        "marks": (len(graph.marks), 0, n - 1),
    }


def _columns(graph: TaskGraph, new: list[str], wanted: dict[str, tuple[int, float, float]]) -> Fault | None:
    """Return lengths and types: nothing is indexed before these agree."""
    for key in new:
        column, length, dtype = getattr(graph, key), wanted[key][0], _TYPES[key]
        if column.ndim != 1 or column.dtype != dtype or len(column) != length:
            return Fault(f"column {key} must hold {length} × {np.dtype(dtype)}, got {column.shape} × {column.dtype}")
    return None


def _tables(graph: TaskGraph) -> Fault | None:
    for i, lane in enumerate(graph.lanes):
        for key, most in (
            ("rank", _INT32),
            ("device", _INT32),
            ("stream", _INT64),
        ):  # a stream may be a thread's address
            value = getattr(lane, key)
            if not -most <= value <= most:
                return Fault(f"lane {i} has {key} {value}, which is out of range")
    for i, doubt in enumerate(graph.info.doubts):
        if not (0 <= doubt.low < inf and 0 <= doubt.high < inf):
            return Fault(f"doubt {i} has the range {doubt.low} to {doubt.high}, which is none of factors")
    return None


def _ranges(graph: TaskGraph, new: list[str], wanted: dict[str, tuple[int, float, float]]) -> Fault | None:
    """Return every column within its bounds, and all work and all waits below what a sum of nanoseconds can hold."""
    for key in new:
        column, (length, low, high) = getattr(graph, key), wanted[key]
        values = column.view(np.uint8) if column.dtype == np.bool_ else column
        least, most = (values.min(), values.max()) if length else (low, low)
        if not (low <= least and most <= high):  # nor is NaN
            at = int(np.flatnonzero(~((values >= low) & (values <= high)))[0])
            return Fault(_beyond(graph, key, at, values[at], low, high))
        if key in _PLURAL and int(most) * length > LONGEST:  # else no sum can exceed it
            total = float(np.maximum(column, 0).sum(dtype=np.float64))
            if total > LONGEST:
                return Fault(
                    f"its {_PLURAL[key]} add up to {total / 1e9:.3g} s, which must be below {LONGEST / 1e9:.3g} s"
                )
        graph.passed[key] = (wanted[key], column)
    return None


def _beyond(graph: TaskGraph, key: str, at: int, value: object, low: float, high: float) -> str:
    """Return a value of a column that lies outside its bounds, in words."""
    if key == "in_ptr":
        return f"in_ptr must rise from 0 to the {graph.edges} edges"
    if key == "src":
        return f"edge {at} comes from row {value} of {len(graph)}"
    what = f"edge {at}" if key in EDGE_COLUMNS else f"mark {at}" if key == "marks" else _task(graph, at)
    meant = "be 0 or more and finite" if key == "flops" else f"lie between {low} and {high}"
    return f"{what} has {key} {value}, which must {meant}"


def _steps(graph: TaskGraph) -> Fault | None:
    """Check that only marks are of the step behind the last one."""
    if not graph.n_steps or _passed(graph, "steps", graph.n_steps, graph.step, graph.kind):
        return None
    late = np.flatnonzero((graph.step == graph.n_steps) & (graph.kind != TaskKind.MARK))
    if len(late):
        return Fault(f"{_task(graph, int(late[0]))} is of step {graph.n_steps}, but there are {graph.n_steps}")
    graph.passed["steps"] = (graph.n_steps, graph.step, graph.kind)
    return None


def _edges(graph: TaskGraph) -> Fault | None:
    """Return CSR pointers ascend from 0 to the number of edges; all edges go forward."""
    ptr, src = graph.in_ptr, graph.src
    if _passed(graph, "edges", graph.edges, ptr, src):
        return None
    if ptr[0] != 0 or ptr[-1] != graph.edges or np.any(ptr[1:] < ptr[:-1]):
        return Fault(f"in_ptr must rise from 0 to the {graph.edges} edges")
    dst = graph.dst
    backward = src >= dst
    if backward.any():
        at = int(backward.argmax())
        kind = EdgeKind(int(graph.edge_kind[at])).name.lower()
        says = f"the {kind} edge from {_task(graph, int(src[at]))} to {_task(graph, int(dst[at]))} goes backward"
        return Fault(says, backward=True)
    graph.passed["edges"] = (graph.edges, ptr, src)
    return None


_FLOAT_MAX = float(np.finfo(np.float64).max)
_TYPES = {**TASK_COLUMNS, **EDGE_COLUMNS, "in_ptr": np.int64, "marks": np.int32}
_PLURAL = {"dur": "durations", "delay": "delays", "lag": "lags", "typical": "typical lags"}


def _task(graph: TaskGraph, row: int) -> str:
    name = int(graph.name[row])
    return f"task {row} ({graph.names[name][:60]})" if 0 <= name < len(graph.names) else f"task {row}"
