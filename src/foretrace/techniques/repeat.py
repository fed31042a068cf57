"""Tasks that run once more: copies of a part of a step, put elsewhere into the order of threads and streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.arrays import Int64, Mask
from foretrace.graph.insert import edge_columns, extend
from foretrace.graph.taskgraph import EDGE_COLUMNS, NO_RELEASE, TASK_COLUMNS, Change, EdgeKind, Phase, TaskGraph

_ORDER = (EdgeKind.PROGRAM, EdgeKind.STREAM)
_NOT_AGAIN = (EdgeKind.QUEUE, EdgeKind.CONTENTION)  # how full a queue is, and who meets whom, is another matter


@dataclass(frozen=True, kw_only=True, eq=False)
class Copy:
    """Tasks to run once more.

    `after` says, for every lane of these tasks, behind which row the copies of that lane come at the earliest, in their
    order; the row may be on another lane of the same kind. Several copies behind one row follow each other.
    """

    rows: Int64  # ascending
    after: Mapping[int, int]


def repeat(graph: TaskGraph, copies: Sequence[Copy], *, change: Change, phase: Phase | None = None) -> TaskGraph:
    """Return the graph with these copies, in `phase` where one is given.

    What a copied task waited for, its copy waits for as well: for the copy of a task that is copied too, else for the
    task itself, which the copies then come behind on every lane. Nothing but the order of lanes waits for copies. A
    call that waits for the device waits for the copies launched before it.
    """
    copies = [_behind(graph, copy) for copy in copies]
    old = edge_columns(graph)
    tails: dict[int, int] = {}  # anchor -> last new row behind it
    launched: dict[int, int] = {}  # anchor on a stream -> host task behind which its copies are launched
    tasks: dict[str, list[npt.NDArray[Any]]] = {key: [] for key in TASK_COLUMNS}
    edges: dict[str, list[npt.NDArray[Any]]] = {key: [] for key in (*EDGE_COLUMNS, "dst")}
    along = np.isin(graph.edge_kind, _ORDER) & (graph.lane[graph.src] == graph.lane[old["dst"]]) & ~graph.from_start
    gap = np.zeros(len(graph), dtype=np.int64)  # to the task before on the lane
    gap[old["dst"][along]] = np.maximum(graph.lag[along], 0)
    usual = np.zeros(len(graph), dtype=np.int64)
    usual[old["dst"][along]] = np.maximum(graph.typical[along], 0)
    placed = len(graph)
    for copy in copies:
        rows = copy.rows
        place = np.full(len(graph), -1, dtype=np.int64)
        place[rows] = placed + np.arange(len(rows))
        placed += len(rows)
        anchor = np.array([copy.after[lane] for lane in graph.lane[rows].tolist()], dtype=np.int64)
        given = {
            "lane": graph.lane[anchor],
            "recorded": graph.recorded[anchor] + graph.dur[anchor],
            "release": np.full(len(rows), NO_RELEASE),
        }
        if phase is not None:
            given["phase"] = np.full(len(rows), int(phase))
        for key in TASK_COLUMNS:
            tasks[key].append(given.get(key, getattr(graph, key)[rows]))
        mine = np.flatnonzero((place[old["dst"]] >= 0) & ~along & ~np.isin(graph.edge_kind, _NOT_AGAIN))
        _copied(graph, old, edges, mine, place)
        _chained(graph, edges, copy, place, tails, gap, usual)
        host = [row for row in copy.after.values() if not graph.on_device[row]]
        launched |= {row: max(host, default=len(graph)) for row in copy.after.values() if graph.on_device[row]}
    _rerouted(graph, old, along, tails, launched)
    result, _ = extend(
        graph,
        {key: np.concatenate(parts) for key, parts in tasks.items()},
        {key: np.concatenate(parts) for key, parts in edges.items()},
        old_edges=old,
        change=change,
    )
    return result


def before(graph: TaskGraph, rows: Int64) -> dict[int, int] | None:
    """Return per lane of these rows the task ahead of the first of them there; None where one of them begins
    its lane.
    """
    found: dict[int, int] = {}
    for lane in np.unique(graph.lane[rows]).tolist():
        there = np.flatnonzero(graph.lane == lane)
        place = int(np.searchsorted(there, rows[graph.lane[rows] == lane].min()))
        if place == 0:
            return None
        found[lane] = int(there[place - 1])
    return found


def _behind(graph: TaskGraph, copy: Copy) -> Copy:
    """Return the copies behind all that they wait for: on no lane ahead of a task that is not repeated and feeds one
    that is.

    A batch is copied to the device once, in the middle of the forward pass that is repeated. What comes ahead of the
    copies is closed: with a task come those that it waits for, with a call what it launched, because a stream takes
    its tasks in the order of their launches.
    """
    from foretrace.graph.kernels import mark_ancestors

    repeated = graph.mask(copy.rows)
    dst = graph.dst
    ahead = graph.mask(list(copy.after.values()))
    ahead[graph.src[repeated[dst] & ~repeated[graph.src] & ~np.isin(graph.edge_kind, _NOT_AGAIN + _ORDER)]] = True
    launch = np.flatnonzero(graph.edge_kind == EdgeKind.LAUNCH)
    count = -1
    while count != (count := int(ahead.sum())):
        ahead[dst[launch][ahead[graph.src[launch]]]] = True
        mark_ancestors(graph.in_ptr, graph.src, ahead)
    after = {}
    for lane, row in copy.after.items():
        there = np.flatnonzero(ahead & (graph.lane == graph.lane[row]))
        after[lane] = int(there[-1])
    return Copy(rows=copy.rows, after=after)


def _copied(
    graph: TaskGraph,
    old: Mapping[str, npt.NDArray[Any]],
    edges: dict[str, list[npt.NDArray[Any]]],
    mine: Int64,
    place: Int64,
) -> None:
    """Copy edges into copies, those along a lane apart."""
    src = old["src"][mine].astype(np.int64)
    edges["src"].append(np.where(place[src] >= 0, place[src], src))
    edges["dst"].append(place[old["dst"][mine].astype(np.int64)])
    for key in EDGE_COLUMNS:
        if key != "src":
            edges[key].append(old[key][mine])


def _chained(
    graph: TaskGraph,
    edges: dict[str, list[npt.NDArray[Any]]],
    copy: Copy,
    place: Int64,
    tails: dict[int, int],
    gap: Int64,
    usual: Int64,
) -> None:
    """Chain the copies in the order of the copies on their lanes."""
    for lane, anchor in copy.after.items():
        rows = copy.rows[graph.lane[copy.rows] == lane]
        if not len(rows):
            continue
        new = place[rows]
        kind = EdgeKind.STREAM if graph.on_device[rows[0]] else EdgeKind.PROGRAM
        edges["src"].append(np.concatenate([[tails.get(anchor, anchor)], new[:-1]]))
        edges["dst"].append(new)
        edges["edge_kind"].append(np.full(len(new), int(kind)))
        edges["lag"].append(gap[rows])
        edges["typical"].append(usual[rows])
        edges["from_start"].append(np.zeros(len(new), dtype=np.bool_))
        edges["inferred"].append(np.zeros(len(new), dtype=np.bool_))
        tails[anchor] = int(new[-1])


def _rerouted(
    graph: TaskGraph,
    old: dict[str, npt.NDArray[Any]],
    along: Mask,
    tails: Mapping[int, int],
    launched: Mapping[int, int],
) -> None:
    """Let what followed an anchor follow the last copy behind it, and so a call that waits for the device then."""
    last = np.arange(len(graph), dtype=np.int64)
    since = np.full(len(graph), len(graph), dtype=np.int64)
    for anchor, tail in tails.items():
        last[anchor] = tail
        since[anchor] = launched.get(anchor, len(graph))
    moved = along | ((graph.edge_kind == EdgeKind.SYNC) & (old["dst"] > since[graph.src]))
    moved &= last[graph.src] != graph.src
    old["src"][moved] = last[graph.src[moved]].astype(np.int32)
    for key in ("lag", "typical"):
        old[key][moved & along] = np.maximum(old[key][moved & along], 0)
