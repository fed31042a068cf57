"""A change to every rank of a joined graph: each rank's own graph is taken out, changed, and tied to the others again.

Most techniques reckon with one training process: its main thread, its step marks, its optimizer. On the joined graph
of several ranks (`foretrace.graph.join`) they are applied to one rank after the other. What ties the ranks together
(arrivals, transfers, marks) has to survive the change unaltered in number; where it does not, the change is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.arrays import Int64, Mask
from foretrace.errors import NotApplicableError
from foretrace.graph.assemble import assemble, part_of
from foretrace.graph.clock import joint_rows, own_marks
from foretrace.graph.taskgraph import EDGE_COLUMNS, TASK_COLUMNS, Assumption, Change, EdgeKind, TaskGraph, TaskKind
from foretrace.simulate.replay import replay

_TIES = (TaskKind.ARRIVAL, TaskKind.COLLECTIVE, TaskKind.MARK)


def on_each_rank(graph: TaskGraph, change: Callable[[TaskGraph], TaskGraph]) -> TaskGraph:
    """Return `change` on every rank's own graph, the ranks tied together again as before.

    Raises NotApplicableError, naming the rank, where the change does not fit one of them or adds or drops tasks that
    tie ranks together.
    """
    start, _ = replay(graph)
    parts = [_part(graph, rank, start) for rank in graph.ranks]
    changed = []
    for part in parts:
        try:
            changed.append(change(part.graph))
        except NotApplicableError as error:
            raise NotApplicableError(f"on rank {part.rank}: {error}") from error
    return _together(graph, parts, changed)


def first_rank(graph: TaskGraph) -> TaskGraph:
    """Return the lowest rank's own graph, as `on_each_rank` shows it to a change."""
    start, _ = replay(graph)
    return _part(graph, graph.ranks[0], start).graph


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """One rank's own graph, and the rows that it has in the joined one."""

    rank: int
    rows: Int64
    inside: Mask  # edges of the joined graph
    graph: TaskGraph


def _part(graph: TaskGraph, rank: int, start: Int64) -> _Part:
    """Return a rank alone: its transfers begin when they did among the others, its steps are those between its own
    marks.
    """
    joint = joint_rows(graph)
    mine = (graph.rank == rank) & ~joint
    rows = np.flatnonzero(mine)
    lanes = np.array([lane.rank == rank for lane in graph.lanes], dtype=np.bool_)
    lanes &= ~np.isin(np.arange(len(lanes)), np.setdiff1d(graph.lane[joint], graph.lane[~joint]))
    dst = graph.dst
    inside = mine[graph.src] & mine[dst]
    tied = graph.mask(dst[(graph.edge_kind == EdgeKind.COLLECTIVE) & ~inside]) & (graph.kind == TaskKind.COLLECTIVE)
    marks = own_marks(graph, rank)
    if not len(marks):
        raise NotApplicableError(
            f"rank {rank} has no steps of its own in this graph; look at another one with `rank=`."
        )
    recorded = graph.recorded[marks[[0, -1]]]
    alone = replace(
        part_of(graph, mine, lanes),
        release=np.where(tied, start, graph.release)[rows],
        marks=np.searchsorted(rows, marks).astype(np.int32),
        info=replace(graph.info, window_ns=(int(recorded[0]), int(recorded[1])), collectives={}),
    )
    return _Part(rank=rank, rows=rows, inside=inside, graph=alone)


def _together(graph: TaskGraph, parts: Sequence[_Part], changed: Sequence[TaskGraph]) -> TaskGraph:
    """Return the changed ranks in one graph, with the edges between ranks and the marks of all ranks as in `graph`."""
    tables = {key: _Table(getattr(graph, key)) for key in ("names", "layers", "shapes")}
    tasks: dict[str, list[npt.NDArray[Any]]] = {key: [] for key in TASK_COLUMNS}
    edges: dict[str, list[npt.NDArray[Any]]] = {key: [] for key in (*EDGE_COLUMNS, "dst")}
    lanes: list[Any] = []
    row = np.full(len(graph), -1, dtype=np.int64)  # where the rows that tie ranks together are now
    between = np.ones(graph.edges, dtype=np.bool_)
    n = 0
    for part, after in zip(parts, changed, strict=True):
        before, now = _ties(part.graph), _ties(after)
        columns = ("kind", "lane", "recorded")
        pairs = ((getattr(part.graph, key)[before], getattr(after, key)[now]) for key in columns)
        if not all(np.array_equal(was, new) for was, new in pairs):
            raise NotApplicableError(
                f"it changes which collectives rank {part.rank} takes part in, which all ranks share; look at one rank "
                "with `rank=`."
            )
        row[part.rows[before]] = now + n
        between &= ~part.inside
        for key in TASK_COLUMNS:
            column: npt.NDArray[Any] = getattr(after, key)
            if table := tables.get(_TABLE.get(key, "")):
                column = table.renumber(column, getattr(after, _TABLE[key]))
            elif key == "lane":
                column = column + len(lanes)
            elif key == "release":  # in the joined graph a transfer waits for the others, not for a time
                column = column.copy()
                column[now] = graph.release[part.rows[before]]
            tasks[key].append(column)
        for key in EDGE_COLUMNS:
            edges[key].append(after.src + n if key == "src" else getattr(after, key))
        edges["dst"].append(after.dst + n)
        lanes += after.lanes
        n += len(after)
    joint = np.flatnonzero(joint_rows(graph))
    row[joint] = np.arange(len(joint)) + n
    used = np.unique(graph.lane[joint])
    lane_place = np.zeros(len(graph.lanes), dtype=np.int64)
    lane_place[used] = np.arange(len(used)) + len(lanes)
    for key in TASK_COLUMNS:
        tasks[key].append(lane_place[graph.lane[joint]] if key == "lane" else getattr(graph, key)[joint])
    for key in EDGE_COLUMNS:
        edges[key].append(row[graph.src[between]] if key == "src" else getattr(graph, key)[between])
    edges["dst"].append(row[graph.dst[between]])
    first, alone = changed[0].info, parts[0].graph.info
    told = {f.name: getattr(first, f.name) for f in fields(first) if getattr(first, f.name) != getattr(alone, f.name)}
    known = len(graph.changes), len(graph.assumptions)
    return assemble(
        {key: np.concatenate(each) for key, each in tasks.items()},
        {key: np.concatenate(each) for key, each in edges.items()},
        marks=row[graph.marks],
        names=tables["names"].texts,
        layers=tables["layers"].texts,
        shapes=tables["shapes"].texts,
        lanes=tuple(lanes) + tuple(graph.lanes[i] for i in used.tolist()),
        info=replace(graph.info, **told),
        changes=graph.changes + _changes([part.rank for part in parts], [g.changes[known[0] :] for g in changed]),
        assumptions=graph.assumptions + _assumptions([g.assumptions[known[1] :] for g in changed]),
    )


def _ties(graph: TaskGraph) -> Int64:
    """Return rows that may tie ranks together, in an order that a change keeps: by kind, lane, recorded start
    and name.
    """
    rows = np.flatnonzero(np.isin(graph.kind, _TIES))
    return rows[np.lexsort((rows, graph.recorded[rows], graph.lane[rows], graph.kind[rows]))]


_TABLE = {"name": "names", "op": "names", "layer": "layers", "shape": "shapes"}


class _Table:
    """A table of texts to which each rank's change may have added some."""

    def __init__(self, base: tuple[str, ...]) -> None:
        self._base = base
        self._more: dict[str, int] = {}

    def renumber(self, column: npt.NDArray[np.int32], texts: tuple[str, ...]) -> npt.NDArray[np.int32]:
        """Return a column of a changed graph in numbers of this table; −1 stays. Changes add texts at the end."""
        base = len(self._base)
        assert texts[:base] == self._base
        more = [self._more.setdefault(text, base + len(self._more)) for text in texts[base:]]
        return np.array([*range(base), *more, -1], dtype=np.int32)[column]

    @property
    def texts(self) -> tuple[str, ...]:
        return self._base + tuple(self._more)


def _changes(ranks: Sequence[int], made: Sequence[Sequence[Change]]) -> tuple[Change, ...]:
    """Return what was done, one line for all ranks."""
    lines = []
    for each in zip_longest(*made):
        at = next(i for i, change in enumerate(each) if change is not None)
        first, tasks = each[at], sum(change.tasks for change in each if change is not None)
        if len({change and change.what for change in each}) == 1:
            what = f"on each of {len(ranks)} ranks: {first.what}"
        else:
            others = sum(change is not None for change in each) - 1
            what = f"on rank {ranks[at]}: {first.what}" + (
                f"; the like on {others} other{'s' if others > 1 else ''}" if others else ""
            )
        lines.append(replace(first, what=what, tasks=tasks))
    return tuple(lines)


def _assumptions(made: Sequence[Sequence[Assumption]]) -> tuple[Assumption, ...]:
    """Return what was assumed; where ranks differ, the lowest rank's is told."""
    told: dict[tuple[str, str], Assumption] = {}
    for each in made:
        for assumption in each:
            told.setdefault((assumption.technique, assumption.name), assumption)
    return tuple(told.values())
