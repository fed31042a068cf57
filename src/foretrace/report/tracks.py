"""Timelines packed for the page: columns of tasks per track, delta-coded, byte planes, deflate, base64.

A track is one run of the graph: the recorded one or a predicted one. Lanes that are the same thread, stream
or link in several tracks share one row number, so that the page can draw predicted below recorded. A task
takes three to five bytes of the page.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.graph.taskgraph import EdgeKind, Lane, Phase, TaskGraph, TaskKind
from foretrace.report.names import short_names
from foretrace.simulate.critical import binding
from foretrace.simulate.noise import Interval
from foretrace.simulate.schedule import as_run
from foretrace.simulate.timeline import Timeline
from foretrace.trace.trace import LaneKind

Int64 = npt.NDArray[np.int64]
NO_EDGE = 255
MAX_TASKS = 200_000  # per track; beyond it the page draws whole steps around the median one

COLUMNS: tuple[tuple[str, type], ...] = (
    ("gap", np.uint32),  # start − previous start of its lane (of the track's first mark for the first), ticks
    ("dur", np.uint32),  # ticks
    ("name", np.uint16),
    ("layer", np.uint16),  # 0 = unknown
    ("op", np.uint16),  # 0 = none
    ("kind", np.uint8),
    ("phase", np.uint8),
    ("critical", np.uint8),
    ("why", np.uint8),  # EdgeKind of the dependency that was ready last
    ("cause", np.int32),  # own position − position of the task waited for; 0 = none
    ("nbytes", np.float32),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Track:
    """One run of a graph: start and end per task (ns) and the rows on its critical path; where its step may lie."""

    name: str
    graph: TaskGraph
    start: Int64
    end: Int64
    critical: npt.NDArray[np.int64]
    step: Interval | None = None

    @property
    def marks(self) -> Int64:
        """Boundaries of the steps; the whole run where a graph has none."""
        if len(self.graph.marks):
            return self.end[self.graph.marks]
        return np.array([self.start.min(initial=0), self.end.max(initial=0)], dtype=np.int64)


def track(name: str, timeline: Timeline, step: Interval | None = None) -> Track:
    """Return a run as the page and the export draw it, with its lanes in the order in which they ran.

    `step` is where its step lies; the page has that from its views.
    """
    path = timeline.critical_path().task.astype(np.int64)
    if timeline.order is None:
        graph, start, end = timeline.graph, timeline.start, timeline.end
    else:
        order = timeline.order
        graph, start, end = as_run(timeline.graph, order), timeline.start[order], timeline.end[order]
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        path = place[path]
    return Track(name=name, graph=graph, start=start, end=end, critical=path, step=step)


def binding_edges(graph: TaskGraph, start: Int64, end: Int64) -> tuple[Int64, npt.NDArray[np.uint8]]:
    """Return the predecessor of every task (n) that was ready last, −1 if none, and the kind of that edge."""
    edge = binding(graph, start, end)
    bound = edge >= 0
    source, kind = np.full(len(graph), -1, dtype=np.int64), np.full(len(graph), NO_EDGE, dtype=np.uint8)
    source[bound] = graph.src[edge[bound]]
    kind[bound] = graph.edge_kind[edge[bound]]
    return source, kind


def pack(tracks: Sequence[Track], *, focus_step: int = 0, max_tasks: int = MAX_TASKS) -> tuple[dict[str, Any], str]:
    """Return `(meta, data)`: JSON-able description of all tracks and the base64 text of their columns.

    `focus_step` is the step that must be drawn if not all can be. Raises ValueError without tracks.
    """
    if not tracks:
        raise ValueError("pack needs at least one track")
    names, layers = _Table(), _Table()
    layers.add("")
    names.add("")
    lanes = _lanes(tracks)
    metas, blobs, size = [], [], 0
    for track in tracks:
        meta, columns = _columns(track, lanes, names, layers, _window(track, focus_step, max_tasks))
        meta["offset"] = size
        for key, dtype in COLUMNS:
            plane: npt.NDArray[Any] = np.ascontiguousarray(columns[key], dtype=dtype)
            blob = plane.view(np.uint8).reshape(len(plane), plane.itemsize).T.tobytes()
            blobs.append(blob)
            size += len(blob)
        metas.append(meta)
    meta = {
        "columns": [[key, np.dtype(dtype).name] for key, dtype in COLUMNS],
        "tracks": metas,
        "lanes": [lane for _, lane in sorted(lanes.values(), key=lambda pair: pair[0])],
        "names": names.texts,
        "shorts": ["", *short_names(names.texts[1:], 56)],
        "layers": layers.texts,
        "kinds": [kind.name.lower() for kind in TaskKind],
        "phases": [phase.name.lower() for phase in Phase],
        "edges": [kind.name.lower() for kind in EdgeKind],
    }
    return meta, base64.b64encode(zlib.compress(b"".join(blobs), 9)).decode("ascii")


class _Table:
    """Texts numbered in the order they are first seen."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._index: dict[str, int] = {}

    def add(self, text: str) -> int:
        at = self._index.get(text)
        if at is None:
            at = self._index[text] = len(self.texts)
            self.texts.append(text)
        return at

    def renumber(self, column: npt.NDArray[np.int32], texts: tuple[str, ...], missing: int) -> Int64:
        """Return rows of a graph's own table (−1 = unknown) as rows of this one."""
        used, inverse = np.unique(column, return_inverse=True)
        mapped = [missing if i < 0 else self.add(texts[i]) for i in used.tolist()]
        return np.asarray(mapped, dtype=np.int64)[inverse]


LaneTable = dict[Lane, tuple[int, dict[str, Any]]]


def _lanes(tracks: Sequence[Track]) -> LaneTable:
    """Return rows of the page, rank by rank: host threads, streams, links, modelled lanes, each by busy time."""
    busy: dict[Lane, float] = {}
    share: dict[Lane, float] = {}
    for track in tracks:
        graph = track.graph
        total = np.bincount(graph.lane, weights=track.end - track.start, minlength=len(graph.lanes))
        span = max(float(track.end.max(initial=0) - track.start.min(initial=0)), 1.0)
        for lane, time in zip(map(_same, graph.lanes), total.tolist(), strict=True):
            busy[lane] = max(busy.get(lane, 0.0), time)
            share[lane] = max(share.get(lane, 0.0), time / span)
    ranks = {lane.rank for lane in busy}
    devices = {lane.device for lane in busy if lane.kind == LaneKind.GPU}
    first = tracks[0].graph
    main = {_same(first.lanes[lane]) for lane in first.lane[first.marks]}  # where the steps begin
    shown = sorted(
        (lane for lane in busy if busy[lane] > 0),
        key=lambda each: (each.rank, each.kind, each not in main, -busy[each], each.device, each.stream, each.label),
    )
    table = {}
    for at, lane in enumerate(shown):
        prefix = f"rank {lane.rank} · " if len(ranks) > 1 and lane.rank >= 0 else ""
        word = lane_word(lane).removeprefix(f"rank {lane.rank} ")  # as lanes of a joined graph are called
        if lane.device >= 0 and len(devices) > 1 and len(ranks) == 1:
            prefix = f"GPU {lane.device} · "
        about = {"label": prefix + word, "kind": lane.kind.name.lower(), "quiet": share[lane] < 0.002}
        table[lane] = (at, about)
    return table


def _same(lane: Lane) -> Lane:
    """Return the lane whatever order it keeps: a prediction may reorder what a recording does not."""
    return replace(lane, ordered=True, slots=1)


def lane_word(lane: Lane) -> str:
    """Return how a lane is called: its label, else "thread 7", "stream 7"."""
    words = {LaneKind.CPU: "thread", LaneKind.GPU: "stream"}
    return lane.label or f"{words.get(lane.kind, 'lane')} {lane.stream}"


def _columns(
    track: Track, lanes: LaneTable, names: _Table, layers: _Table, window: tuple[int, int]
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    graph = track.graph
    lane_row = np.array([lanes.get(_same(lane), (-1, {}))[0] for lane in graph.lanes], dtype=np.int64)
    marks = track.marks
    first, last = window
    drawn = lane_row[graph.lane] >= 0
    if (first, last) != (0, len(marks) - 1):
        drawn &= (track.end >= marks[first]) & (track.start <= marks[last])
    rows = np.flatnonzero(drawn)
    rows = rows[np.lexsort((rows, track.start[rows], lane_row[graph.lane[rows]]))]
    lane = lane_row[graph.lane[rows]]
    origin = int(min(marks[first], track.start[rows].min(initial=marks[first])))
    head = np.flatnonzero(np.diff(lane, prepend=-1))
    gap = np.diff(track.start[rows], prepend=0)
    gap[head] = track.start[rows[head]] - origin
    dur = track.end[rows] - track.start[rows]
    tick = 1
    while max(int(gap.max(initial=0)), int(dur.max(initial=0))) // tick >= 2**32:
        tick *= 10
    if tick > 1:  # differences of rounded starts, so that rounding does not add up
        at = (track.start[rows] - origin) // tick
        gap = np.diff(at, prepend=0)
        gap[head] = at[head]
        dur = dur // tick
    source, why = binding_edges(graph, track.start, track.end)
    position = np.full(len(graph) + 1, -1, dtype=np.int64)
    position[rows] = np.arange(len(rows))
    cause = position[source[rows]]  # row −1 is the spare last entry
    critical = np.zeros(len(graph), dtype=np.uint8)
    critical[track.critical] = 1
    name = names.renumber(graph.name[rows], graph.names, 0)
    op = names.renumber(graph.op[rows], graph.names, 0)
    columns: dict[str, npt.NDArray[Any]] = {
        "gap": gap,
        "dur": dur,
        "name": np.minimum(name, 65535),
        "layer": np.minimum(layers.renumber(graph.layer[rows], graph.layers, 0), 65535),
        "op": np.minimum(op, 65535),
        "kind": graph.kind[rows],
        "phase": graph.phase[rows],
        "critical": critical[rows],
        "why": why[rows],
        "cause": np.where(cause >= 0, np.arange(len(rows)) - cause, 0),
        "nbytes": graph.nbytes[rows],
    }
    steps = graph.info.steps or tuple(range(len(marks) - 1))
    meta = {
        "name": track.name,
        "n": len(rows),
        "tick": tick,
        "lanes": [[int(lane[i]), int(i)] for i in head],
        "marks": [int(m) - origin for m in marks[first : last + 1]],
        "steps": [str(steps[i]) if i < len(steps) else str(i) for i in range(first, last)],
        "first_step": first,
        "all_steps": len(marks) - 1,
    }
    return meta, columns


def _window(track: Track, focus_step: int, max_tasks: int) -> tuple[int, int]:
    """Return the first and last mark to draw: as many whole steps around `focus_step` as `max_tasks` allows."""
    steps = len(track.marks) - 1
    if len(track.graph) <= max_tasks or steps <= 1:
        return 0, steps
    inside = np.bincount(track.graph.step[track.graph.step >= 0], minlength=steps)[:steps]
    first = min(max(focus_step, 0), steps - 1)
    last = first + 1
    while first > 0 or last < steps:
        left_is_nearer = focus_step - first < last - focus_step
        low, high = (first - 1, last) if first > 0 and (last == steps or left_is_nearer) else (first, last + 1)
        if inside[low:high].sum() > max_tasks:
            break
        first, last = low, high
    return first, last
