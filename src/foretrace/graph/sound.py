"""Soundness: what every graph must satisfy before anything replays it, and the one place that restores it.

The engines run over the rows once and trust what they read: an edge from a later row would give them a time that
nobody has written yet, an index outside a table memory of somebody else. So they take no graph that `verify` has not
passed. The proof is kept with the graph, whose columns become read-only; a graph made from it is verified again when
it is first replayed, after `with_columns` in those columns alone. `sound` ends the edits that can put rows out of
order: it orders them anew where an edge goes backward, and refuses what has no order.
"""

from __future__ import annotations

import os
from math import inf
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from foretrace.errors import GraphError
from foretrace.graph.taskgraph import EDGE_COLUMNS, TASK_COLUMNS, EdgeKind, Phase, TaskGraph, TaskKind

Int64 = npt.NDArray[np.int64]
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
    """The same graph, proven sound. Raises GraphError naming the task or edge that is not.

    Checked: lengths and types of all columns, indices into the tables, CSR pointers, edges that go forward, times and
    counts in range, no negative durations or delays.
    """
    if graph.unproven:
        fault = first_fault(graph)
        if fault is not None:
            raise GraphError(f"the graph is not sound: {fault.says}.")
        _prove(graph)
    return graph


def sound(graph: TaskGraph) -> TaskGraph:
    """The same graph if it is sound, else with its rows in an order in which all edges go forward.

    Raises GraphError naming the tasks of a cycle where there is no such order, and whatever else `verify` finds.
    """
    return sound_rows(graph)[0]


def sound_rows(graph: TaskGraph) -> tuple[TaskGraph, Int64]:
    """As `sound`, and the new row number of every row."""
    rows = np.arange(len(graph))
    if not graph.unproven:
        return graph, rows
    fault = first_fault(graph)
    if fault is not None and fault.backward:
        from foretrace.graph.assemble import reordered

        graph, rows = reordered(graph)
        fault = first_fault(graph)
    if fault is not None:
        raise GraphError(f"the graph is not sound: {fault.says}.")
    return _prove(graph), rows


def first_fault(graph: TaskGraph) -> Fault | None:
    """The first thing that is wrong with the unproven columns of a graph, None if nothing is."""
    return _columns(graph) or _tables(graph) or _ranges(graph) or _edges(graph) or _times(graph)


def fixed(column: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """A read-only view: memory-mapped and computed columns then have one type, and one compiled version."""
    view = np.ascontiguousarray(column).view(np.ndarray)
    view.flags.writeable = False
    return view


def _prove(graph: TaskGraph) -> TaskGraph:
    for key in graph.unproven:
        column = getattr(graph, key).view()
        column.flags.writeable = False
        object.__setattr__(graph, key, column)
    object.__setattr__(graph, "unproven", frozenset())
    return graph


# -- what is checked -------------------------------------------------------------------------------------------


def _columns(graph: TaskGraph) -> Fault | None:
    """Lengths and types: nothing is indexed before these agree."""
    n, m = len(graph.kind), len(graph.src)
    want: dict[str, tuple[int | None, type]] = {key: (n, dtype) for key, dtype in TASK_COLUMNS.items()}
    want |= {key: (m, dtype) for key, dtype in EDGE_COLUMNS.items()}
    want |= {"in_ptr": (n + 1, np.int64), "marks": (None, np.int32)}
    for key, (length, dtype) in want.items():
        column = getattr(graph, key)
        if column.ndim != 1 or column.dtype != dtype or (length is not None and len(column) != length):
            shape = "any" if length is None else str(length)
            return Fault(f"column {key} must hold {shape} × {np.dtype(dtype)}, got {column.shape} × {column.dtype}")
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


def _ranges(graph: TaskGraph) -> Fault | None:
    """Every column within its bounds, so that neither an index nor a sum leaves what it is meant for."""
    names, shapes, many = len(graph.names) - 1, len(graph.shapes) - 1, np.iinfo(np.int64).max
    ranges: dict[str, tuple[int, int]] = {
        "kind": (0, len(TaskKind) - 1),
        "phase": (0, len(Phase) - 1),
        "lane": (0, len(graph.lanes) - 1),
        "name": (0, names),
        "layer": (-1, len(graph.layers) - 1),
        "step": (-1, graph.n_steps or _INT32),  # the last mark is of the step that follows
        "dur": (0, LONGEST),
        "delay": (0, LONGEST),
        "release": (-LATEST, LATEST),
        "recorded": (-LATEST, LATEST),
        "nbytes": (-1, many),
        "op": (-1, names),
        "shape": (-1, shapes),
        "doubt": (-1, len(graph.info.doubts) - 1),
        "probes": (0, _INT32),
        "gone": (0, 1),
        "marks": (0, len(graph) - 1),
        "edge_kind": (0, len(EdgeKind) - 1),
        "lag": (-LATEST, LONGEST),
        "typical": (-LATEST, LONGEST),
        "from_start": (0, 1),
        "inferred": (0, 1),
    }
    for key, (low, high) in ranges.items():
        if key not in graph.unproven:
            continue
        column = fixed(getattr(graph, key))
        column = column.view(np.uint8) if column.dtype == np.bool_ else column
        at = _loops().outside(column, low, high)
        if at >= 0:
            what = f"edge {at}" if key in EDGE_COLUMNS else f"mark {at}" if key == "marks" else _task(graph, at)
            return Fault(f"{what} has {key} {column[at]}, which must lie between {low} and {high}")
    if graph.n_steps and "step" in graph.unproven:
        late = np.flatnonzero((graph.step == graph.n_steps) & (graph.kind != TaskKind.MARK))
        if len(late):
            return Fault(f"{_task(graph, int(late[0]))} is of step {graph.n_steps}, but there are {graph.n_steps}")
    at = _loops().outside(fixed(graph.flops), 0.0, np.finfo(np.float64).max) if "flops" in graph.unproven else -1
    if at >= 0:
        return Fault(f"{_task(graph, at)} has flops {graph.flops[at]}, which must be 0 or more and finite")
    return None


def _edges(graph: TaskGraph) -> Fault | None:
    """CSR pointers ascend from 0 to the number of edges; sources are tasks; all edges go forward."""
    if not graph.unproven & {"in_ptr", "src"}:
        return None
    ptr, m = graph.in_ptr, graph.edges
    if ptr[0] != 0 or ptr[-1] != m or _loops().falling(fixed(ptr)) >= 0:
        return Fault(f"in_ptr must rise from 0 to the {m} edges")
    at = _loops().outside(fixed(graph.src), 0, len(graph) - 1)
    if at >= 0:
        return Fault(f"edge {at} comes from row {graph.src[at]} of {len(graph)}")
    at = _loops().backward(fixed(ptr), fixed(graph.src))
    if at >= 0:
        dst = int(np.searchsorted(ptr, at, side="right")) - 1
        kind = EdgeKind(int(graph.edge_kind[at])).name.lower()
        says = f"the {kind} edge from {_task(graph, int(graph.src[at]))} to {_task(graph, dst)} goes backward"
        return Fault(says, backward=True)
    return None


def _times(graph: TaskGraph) -> Fault | None:
    """All work and all waits stay below what a sum of nanoseconds can hold."""
    for key in ("dur", "delay", "lag", "typical"):
        column = getattr(graph, key)
        if key not in graph.unproven or int(column.max(initial=0)) * len(column) <= LONGEST:
            continue  # no sum can exceed it
        total = float(np.maximum(column, 0).sum(dtype=np.float64))
        if total > LONGEST:
            return Fault(f"its {_PLURAL[key]} add up to {total / 1e9:.3g} s, which must be below {LONGEST / 1e9:.3g} s")
    return None


_PLURAL = {"dur": "durations", "delay": "delays", "lag": "lags", "typical": "typical lags"}


def _task(graph: TaskGraph, row: int) -> str:
    name = int(graph.name[row])
    return f"task {row} ({graph.names[name][:60]})" if 0 <= name < len(graph.names) else f"task {row}"


def _loops() -> Any:
    """The loops over the columns, compiled unless FORETRACE_ENGINE=python."""
    if os.environ.get("FORETRACE_ENGINE") == "python":
        return _Plain
    from foretrace.graph import kernels

    return kernels


class _Plain:
    """The loops in plain numpy: what the compiled ones compute."""

    @staticmethod
    def outside(column: npt.NDArray[Any], low: float, high: float) -> int:
        """First row that is not within low..high (NaN is not), −1 for none."""
        found = np.flatnonzero(~((column >= low) & (column <= high)))
        return int(found[0]) if len(found) else -1

    @staticmethod
    def falling(column: Int64) -> int:
        """First row after which the column falls, −1 for none."""
        found = np.flatnonzero(column[1:] < column[:-1])
        return int(found[0]) if len(found) else -1

    @staticmethod
    def backward(in_ptr: Int64, src: npt.NDArray[np.int32]) -> int:
        """First edge whose source is not an earlier row than its successor, −1 for none."""
        found = np.flatnonzero(src >= np.repeat(np.arange(len(in_ptr) - 1), np.diff(in_ptr)))
        return int(found[0]) if len(found) else -1
