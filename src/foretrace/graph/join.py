"""`join`: the graphs of several ranks as one, on one clock, their collectives tied together.

A matched collective becomes two tasks on every rank: an ARRIVAL (zero length) where the recorded kernel began, with
everything that the kernel waited for, and a COLLECTIVE, the transfer alone, with everything that waited for the
kernel. COLLECTIVE edges lead from the arrival of every member to the transfer on every member; the transfer takes from
the latest arrival to the rank's own end. So a rank's wait is start(COLLECTIVE) − start(ARRIVAL), and a faster
straggler shortens the wait of all others. (Lumos and dPRO, MLSys 2025 and 2022, tie ranks together likewise.)

Clock offsets enter only through recorded times and release times, never through edges.

**Steps.** The first mark is that of the rank which entered first; every later one is a new task that waits for that
mark of all ranks. So the window lasts from the first entry to the last end, and a step from the last end to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from foretrace.arrays import Array, Int32, Int64, Mask
from foretrace.errors import GraphError, spelled
from foretrace.graph.alignment import ClockOffsets, rooted
from foretrace.graph.assemble import Columns, assemble, edges_with_dst, task_columns
from foretrace.graph.collectives import collective_calls
from foretrace.graph.insert import edge_columns
from foretrace.graph.matching import Matching, listed
from foretrace.graph.one_run import match_and_align
from foretrace.graph.taskgraph import (
    NO_RELEASE,
    TASK_COLUMNS,
    Doubt,
    EdgeKind,
    GraphInfo,
    Lane,
    NotOfStep,
    TaskGraph,
    TaskKind,
)
from foretrace.trace.trace import LaneKind

ALL_PAIRS = 16  # more members meet in one JOIN task: k + k edges instead of k · k
_MOST_NOTES = 6
NO_RANK = -1  # rank of lanes that belong to all ranks


def join(
    graphs: Sequence[TaskGraph], *, matching: Matching | None = None, clock: ClockOffsets | None = None
) -> TaskGraph:
    """Return one graph of all ranks; its replay reproduces the recordings on the aligned clock to the nanosecond.

    `graphs` are recorded graphs of one rank each, as `foretrace.graph.builder.build` makes them. `matching` and `clock`
    are what `foretrace.graph.alignment.match_and_align` found; without them they are found here, from what the graphs
    alone tell. Raises GraphError where there is no graph, a rank comes twice or the ranks cannot be of one job.
    """
    if not graphs:
        raise GraphError("no graph was given to join; give one per rank.")
    for graph in graphs:
        if len({lane.rank for lane in graph.lanes}) > 1:
            raise GraphError(f"{graph.info.source or 'a graph'} holds several ranks already; join graphs of one rank.")
    if matching is None or clock is None:
        found, aligned = match_and_align([collective_calls(graph) for graph in graphs])
        matching = matching or found
        clock = clock or aligned
    return _Joint(graphs, matching, clock).graph()


class _Joint:
    """Collects the tasks and edges of the joined graph; row numbers are those of the graphs, one after the other."""

    def __init__(self, graphs: Sequence[TaskGraph], matching: Matching, clock: ClockOffsets) -> None:
        self.graphs, self.matching, self.clock = graphs, matching, clock
        self.first = np.cumsum([0, *(len(graph) for graph in graphs)])
        self.names = _Table([graph.names for graph in graphs])
        self.layers = _Table([graph.layers for graph in graphs])
        self.shapes = _Table([graph.shapes for graph in graphs])
        self.steps, self.step_tables = _common_steps(graphs)
        self.lanes: list[Lane] = [
            replace(lane, label=f"rank {lane.rank} {lane.label}".strip()) for graph in graphs for lane in graph.lanes
        ]
        self.edges: list[Columns] = []
        self.more: list[Columns] = []
        self.n = int(self.first[-1])

    def graph(self) -> TaskGraph:
        """Put everything together."""
        tasks = self._tasks()
        self._recorded_edges(tasks)
        self._split(tasks)
        marks = self._marks(tasks)
        tasks = {key: np.concatenate([tasks[key], *(each[key] for each in self.more)]) for key in tasks}
        edges = {key: np.concatenate([each[key] for each in self.edges]) for key in self.edges[0]}
        infos = [graph.info for graph in self.graphs]
        window = tasks["recorded"][marks[[0, -1]]]
        return assemble(
            tasks,
            edges,
            marks=marks,
            names=self.names.texts,
            layers=self.layers.texts,
            lanes=tuple(self.lanes),
            info=_info(infos, self, (int(window[0]), int(window[1])) if len(window) == 2 else (0, 0)),
            shapes=self.shapes.texts,
            changes=tuple(dict.fromkeys(change for graph in self.graphs for change in graph.changes)),
            assumptions=tuple(dict.fromkeys(each for graph in self.graphs for each in graph.assumptions)),
        )

    # -- tasks and edges as recorded ---------------------------------------------------------------------------

    def _tasks(self) -> Columns:
        parts: dict[str, list[Array]] = {key: [] for key in TASK_COLUMNS}
        lanes = doubts = 0
        for i, graph in enumerate(self.graphs):
            for key in TASK_COLUMNS:
                column: Array = getattr(graph, key)
                if key in ("name", "op"):
                    column = self.names.number(i, column)
                elif key == "layer":
                    column = self.layers.number(i, column)
                elif key == "shape":
                    column = self.shapes.number(i, column)
                elif key == "lane":
                    column = column + np.int32(lanes)
                elif key == "doubt":
                    column = np.where(column >= 0, column + np.int32(doubts), column)
                elif key == "step":
                    column = self.step_tables[i][column]
                elif key == "recorded":
                    column = self.clock.aligned(i, column)
                elif key == "release":
                    column = np.where(column > NO_RELEASE // 2, self.clock.aligned(i, column), NO_RELEASE)
                parts[key].append(column)
            lanes += len(graph.lanes)
            doubts += len(graph.info.doubts)
        return {key: np.concatenate(each) for key, each in parts.items()}

    def _recorded_edges(self, tasks: Columns) -> None:
        parts = [edge_columns(graph) for graph in self.graphs]
        for first, part in zip(self.first.tolist(), parts, strict=False):
            part["src"], part["dst"] = part["src"] + first, part["dst"] + first
        edges = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        if self.clock.drift.any():
            _follow_drift(tasks, edges, np.repeat(self.clock.drift != 0, np.diff(self.first)))
        self.edges.append(edges)

    # -- collectives ------------------------------------------------------------------------------------------

    def _split(self, tasks: Columns) -> None:
        """Cut every matched collective into arrival and transfer, and tie the ranks together."""
        which, rank, call = self.matching.flat
        if not len(which):
            return
        rows = self._rows(rank, call)
        arrival = tasks["recorded"][rows]
        end = arrival + tasks["dur"][rows]
        src, dst, many = self._pairs(which, rank, arrival, end)
        latest = arrival.copy()  # of those that a member waits for, itself among them
        np.maximum.at(latest, dst, arrival[src])
        count = len(self.matching.matches)
        group_latest = np.full(count, np.iinfo(np.int64).min)
        np.maximum.at(group_latest, which, arrival)
        latest = np.where(many[which], group_latest[which], latest)
        start = np.minimum(latest, end)  # clocks that are a little off must not make time run backwards
        new = np.arange(len(rows)) + self.n
        self.n += len(rows)
        transfers = {key: tasks[key][rows].copy() for key in TASK_COLUMNS}
        transfers["kind"][:] = TaskKind.COLLECTIVE
        transfers["dur"] = end - start
        transfers["recorded"] = start
        transfers["delay"][:] = 0
        transfers["release"][:] = NO_RELEASE
        nbytes = np.array([match.what.nbytes for match in self.matching.matches], dtype=np.int64)[which]
        transfers["nbytes"] = np.where(transfers["nbytes"] < 0, nbytes, transfers["nbytes"])
        self.more.append(transfers)
        tasks["kind"][rows] = TaskKind.ARRIVAL
        tasks["dur"][rows] = 0
        tasks["nbytes"][rows] = -1
        tasks["flops"][rows] = 0.0
        # What waited for the end of the kernel waits for the transfer.
        moved = np.arange(self.n, dtype=np.int64)
        moved[rows] = new
        recorded = self.edges[0]
        after = ~recorded["from_start"]
        recorded["src"] = np.where(after, moved[recorded["src"]], recorded["src"])
        self._add(rows[src], new[dst], np.minimum(end[dst] - arrival[src], 0))
        if many.any():
            self._meet(rows, new, which, many, group_latest, end)

    def _rows(self, rank: Int64, call: Int64) -> Int64:
        """Return rows of the calls of the matching."""
        begins = np.cumsum([0, *(len(each) for each in self.matching.calls)])
        offsets = [each.row + self.first[i] for i, each in enumerate(self.matching.calls)]
        return np.concatenate([*offsets, np.empty(0, np.int64)])[begins[rank] + call].astype(np.int64)

    def _pairs(self, which: Int64, rank: Int64, arrival: Int64, end: Int64) -> tuple[Int64, Int64, Mask]:
        """Return (member that must have arrived, member whose transfer waits for it), and which matches are
        too large.
        """
        size = np.bincount(which, minlength=len(self.matching.matches))
        begin = np.cumsum(size) - size
        many = size > ALL_PAIRS
        src, dst = [], []
        loose = np.zeros(len(size), dtype=np.bool_)
        one_way: list[tuple[int, int]] = []  # match, member that sends
        for i, each in enumerate(self.matching.matches):
            if rooted(each.what.kind, each.what.channel):
                loose[i] = True
                if each.what.peers:
                    sender = next(
                        k for k, m in enumerate(each.members) if self.matching.ranks[m.rank] == each.what.peers[0]
                    )
                    one_way.append((i, int(begin[i]) + sender))
        for k in np.unique(size[~many]).tolist():
            at = np.flatnonzero((size == k) & ~many)
            members = begin[at][:, None] + np.arange(k)
            src.append(np.repeat(members, k, axis=1).ravel())
            dst.append(np.tile(members, (1, k)).ravel())
        for i in np.flatnonzero(many).tolist():  # each follows its own arrival; the others meet in one task
            members = np.arange(begin[i], begin[i] + size[i])
            src.append(members)
            dst.append(members)
        a = np.concatenate([*src, np.empty(0, np.int64)]).astype(np.int64)
        b = np.concatenate([*dst, np.empty(0, np.int64)]).astype(np.int64)
        # Where ranks may leave early, the recording says who waited for whom.
        keep = ~(loose[which[a]] & (arrival[a] > end[b]))
        if one_way:
            sends = np.full(len(size), -1, dtype=np.int64)
            sends[[i for i, _ in one_way]] = [member for _, member in one_way]
            keep &= (a == b) | (sends[which[a]] < 0) | (sends[which[a]] == a)
        return a[keep], b[keep], many

    def _meet(self, rows: Int64, new: Int64, which: Int64, many: Mask, latest: Int64, end: Int64) -> None:
        """Let members of large groups meet in a task of no length."""
        self.lanes.append(Lane(rank=NO_RANK, kind=LaneKind.LINK, label="collectives of all ranks"))
        at = np.flatnonzero(many)
        meet = np.full(len(many), -1, dtype=np.int64)
        meet[at] = self._append(
            kind=np.full(len(at), TaskKind.JOIN),
            lane=len(self.lanes) - 1,
            name=self.names.add("collective"),
            recorded=latest[at],
        )
        members = np.flatnonzero(many[which])
        self._add(rows[members], meet[which[members]], 0)
        self._add(meet[which[members]], new[members], np.minimum(end[members] - latest[which[members]], 0))

    def _append(self, **columns: Any) -> Int64:
        self.more.append(task_columns(columns))
        self.n += len(columns["kind"])
        return np.arange(self.n - len(columns["kind"]), self.n)

    def _add(self, src: Int64, dst: Int64, lag: Int64 | int, kind: EdgeKind = EdgeKind.COLLECTIVE) -> None:
        self.edges.append(edges_with_dst({"src": src, "dst": dst, "lag": lag, "typical": 0, "edge_kind": kind}))

    # -- steps --------------------------------------------------------------------------------------------------

    def _marks(self, tasks: Columns) -> Int64:
        """Return the mark of the first to enter, then marks that wait for all ranks."""
        use = [(i, marks) for i, graph in enumerate(self.graphs) if len(marks := self._common_marks(i, graph)) > 1]
        if not use:
            return np.empty(0, dtype=np.int64)
        table = np.array([marks + self.first[i] for i, marks in use])
        time = tasks["recorded"][table] + tasks["dur"][table]
        self.lanes.append(Lane(rank=self.graphs[use[int(time[:, -1].argmax())][0]].lanes[0].rank, kind=LaneKind.MODEL,
                               label="steps of all ranks"))  # fmt: skip
        count = table.shape[1] - 1
        new = self._append(
            kind=np.full(count, TaskKind.MARK),
            lane=len(self.lanes) - 1,
            name=self.names.add("step"),
            step=np.append(np.arange(1, count), -1),
            recorded=time[:, 1:].max(axis=0),
        )
        self._add(table[:, 1:].ravel(), np.tile(new, len(use)), 0, EdgeKind.THREAD)
        self._add(new[:-1], new[1:], 0, EdgeKind.PROGRAM)
        return np.concatenate([table[[int(time[:, 0].argmin())], 0], new])

    def _common_marks(self, index: int, graph: TaskGraph) -> Int64:
        """Return the marks of a rank that bound the common steps."""
        if not graph.n_steps:
            return np.empty(0, dtype=np.int64)
        if self.steps is None:
            return graph.marks[[0, -1]].astype(np.int64)
        places = [graph.info.steps.index(number) for number in self.steps]
        return graph.marks[[*places, places[-1] + 1]].astype(np.int64)


class _Table:
    """One table of texts out of those of several graphs; equal texts share a number."""

    def __init__(self, tables: Sequence[tuple[str, ...]]) -> None:
        self._numbers: dict[str, int] = {}
        self._of: list[Int32 | None] = []
        for table in tables:
            self._of.append(self._merge(table))

    def _merge(self, table: tuple[str, ...]) -> Int32 | None:
        if not self._numbers:
            self._numbers = {text: i for i, text in enumerate(table)}
            if len(self._numbers) == len(table):
                self._first = table
                return None  # the numbers stay
            self._numbers = {}
        elif table is self._first:
            return None
        add = self._numbers.setdefault
        return np.array([add(text, len(self._numbers)) for text in table] + [-1], dtype=np.int32)

    _first: tuple[str, ...] = ()

    def number(self, table: int, column: Int32) -> Int32:
        """Return a column of the graph with this index in numbers of the common table; −1 stays."""
        numbers = self._of[table]
        return column if numbers is None else numbers[column]

    def add(self, text: str) -> int:
        """Return the number of a text, added if it is new."""
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def texts(self) -> tuple[str, ...]:
        """The common table."""
        return tuple(self._numbers)


def _common_steps(graphs: Sequence[TaskGraph]) -> tuple[tuple[int, ...] | None, list[Int32]]:
    """Return numbers of consecutive steps that all ranks recorded; None: the whole windows count as one.

    With it, per rank, the index among them of each of its own steps; −1 comes last, for tasks outside.
    """
    with_steps = [graph for graph in graphs if graph.n_steps]
    numbered = bool(with_steps) and all(graph.info.step_source == "ProfilerStep" for graph in with_steps)
    common: list[int] = []
    if numbered:
        shared = set.intersection(*(set(_numbers(graph)) for graph in with_steps))
        common = [number for number in _numbers(with_steps[0]) if number in shared]
        for graph in with_steps:  # neighbours must be neighbours everywhere: their marks bound them
            places = [graph.info.steps.index(number) for number in common]
            breaks = np.flatnonzero(np.diff(places) != 1)
            common = common[: int(breaks[0]) + 1] if len(breaks) else common
    elif with_steps and len({(graph.info.step_source, graph.info.steps) for graph in with_steps}) == 1:
        common = list(with_steps[0].info.steps)
    tables = []
    for graph in graphs:
        numbers = _numbers(graph)
        index = (
            [common.index(number) if number in common else -1 for number in numbers] if common else [0] * len(numbers)
        )
        tables.append(np.array([*index, -1], dtype=np.int32))
    return (tuple(common) if common else None), tables


def _numbers(graph: TaskGraph) -> tuple[int, ...]:
    """Return numbers of the steps between a graph's marks."""
    return graph.info.steps[: graph.n_steps]


def _follow_drift(tasks: Columns, edges: Columns, drifting: Mask) -> None:
    """Put lags on the common clock, for ranks whose own clock runs at another pace; durations and delays stay.

    What held a task in the recording holds it again, at its aligned time.
    """
    base = tasks["recorded"] - tasks["delay"]
    anchor = tasks["recorded"][edges["src"]] + np.where(edges["from_start"], 0, tasks["dur"][edges["src"]])
    room = base[edges["dst"]] - anchor
    mine = drifting[edges["dst"]]
    edges["lag"] = np.where(mine, np.minimum(edges["lag"], room), edges["lag"])
    reached = np.where(tasks["release"] > NO_RELEASE // 2, tasks["release"], NO_RELEASE)
    np.maximum.at(reached, edges["dst"], anchor + edges["lag"])
    # A nanosecond or two that no lag may take: a removable delay, or an edge that binds a little later.
    tasks["release"] = np.where(
        drifting & (tasks["release"] > NO_RELEASE // 2), np.minimum(tasks["release"], base), tasks["release"]
    )
    short = np.where(drifting, base - reached, 0)
    tasks["delay"] = tasks["delay"] + np.maximum(short, 0)


def _info(infos: Sequence[GraphInfo], joint: _Joint, window: tuple[int, int]) -> GraphInfo:
    """Return what is known of the set: facts of the first rank, and the worst or the mean where ranks differ."""
    matching, clock = joint.matching, joint.clock
    ranks = len(infos)
    steps = joint.steps if joint.steps is not None else (0,)
    notes = [
        f"{ranks} ranks in one graph; a step ends when the last of them ends it, and the first one begins when the "
        "first rank enters it."
    ]
    notes += clock.notes
    if any(info.recording.get("overhead") for info in infos):
        notes.append(spelled("times include the cost of recording; `rank=` looks at one rank without it."))
    if unsure := [str(rank) for rank, known in zip(clock.ranks, clock.known.tolist(), strict=True) if not known]:
        notes.append(f"the clock of rank {', '.join(unsure)} could not be compared with that of rank {clock.ranks[0]}.")
    said: dict[str, list[int]] = {}
    for rank, info in zip(clock.ranks, infos, strict=True):
        for note in info.notes:
            if not note.startswith(f"rank {rank} of "):
                said.setdefault(note, []).append(rank)
    notes += [f"{_who(of, ranks)}{note}" for note, of in list(said.items())[:_MOST_NOTES]]

    def share(key: str) -> float:
        return float(np.mean([getattr(info, key) for info in infos]))

    return replace(
        infos[0],
        devices=tuple(dict.fromkeys(device for info in infos for device in info.devices)),
        world_size=max(ranks, *(info.world_size for info in infos)),
        steps=tuple(steps),
        step_source=infos[0].step_source if joint.steps is not None else "whole trace",
        window_ns=window,
        linked_share=share("linked_share"),
        attributed_share=share("attributed_share"),
        unexplained_share=max(info.unexplained_share for info in infos),
        contention_share=share("contention_share"),
        overlap_share=share("overlap_share"),
        notes=tuple(notes),
        doubts=_doubts(infos),
        carried=tuple(each for info in infos for each in info.carried),
        not_of_step=_not_of_step(infos),
        collectives=_summary(matching, clock),
    )


def _doubts(infos: Sequence[GraphInfo]) -> tuple[Doubt, ...]:
    """Return the tables of all ranks one after the other."""
    found: list[Doubt] = []
    for info in infos:
        first = len(found)
        found += [replace(each, beside=each.beside + first) if each.beside >= 0 else each for each in info.doubts]
    return tuple(found)


def _not_of_step(infos: Sequence[GraphInfo]) -> tuple[NotOfStep, ...]:
    """Return what was left out of the ranks' only step, by reason: all tasks, the time of the rank that had most."""
    found: dict[str, list[NotOfStep]] = {}
    for each in (each for info in infos for each in info.not_of_step):
        found.setdefault(each.reason, []).append(each)
    return tuple(
        replace(max(same, key=lambda each: each.time_s), tasks=sum(each.tasks for each in same))
        for same in found.values()
    )


def _who(of: Sequence[int], ranks: int) -> str:
    if len(of) == ranks:
        return ""
    return f"rank {of[0]}: " if len(of) == 1 else f"ranks {listed(of)}: "


def _summary(matching: Matching, clock: ClockOffsets) -> dict[str, Any]:
    """Return what was found about the set, for the file and for reports: JSON, times in ns.

    `what` has kind, group and bytes of every collective, in the order in which they begin on the aligned clock.
    """
    which, rank, _ = matching.flat
    starts = matching.starts.copy()
    for i in range(len(clock.ranks)):
        starts[rank == i] = clock.aligned(i, starts[rank == i])
    begins = np.full(len(matching.matches), np.iinfo(np.int64).max)
    np.minimum.at(begins, which, starts)
    order = np.argsort(begins, kind="stable").tolist()
    ordered = [matching.matches[i] for i in order]
    return {
        "matched": matching.matched,
        "unmatched": list(matching.unmatched()),
        "missing": list(matching.missing),
        "what": [[match.what.kind, match.what.group_name, match.what.nbytes] for match in ordered],
        "ranks": list(clock.ranks),
        "offset_ns": [
            float(offset) if known else None
            for offset, known in zip(clock.offset_ns.tolist(), clock.known.tolist(), strict=True)
        ],
        "drift": clock.drift.tolist(),
        "uncertainty_ns": clock.worst_ns,
    }
