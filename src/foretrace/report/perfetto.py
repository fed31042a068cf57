"""Recorded and predicted runs as one Chrome trace, for ui.perfetto.dev and chrome://tracing.

Every run is a process of its own, recorded first, all aligned at the first step; lanes are threads. Each process
begins with a row of steps and a row that is its critical path.

Of several ranks, every rank is a process; the steps, which all share, are one of their own. A row shows what a rank
waits for the others in each collective, and arrows lead from the last rank to arrive to the transfers of all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.files import write_bytes
from foretrace.graph.taskgraph import EdgeKind, Phase, TaskKind
from foretrace.plaintext import encoded
from foretrace.report.names import short_names
from foretrace.report.tracks import NO_EDGE, Track, binding_edges, lane_word
from foretrace.report.tracks import track as track_of
from foretrace.report.units import between, unit_for
from foretrace.report.whatif import whatif
from foretrace.simulate.ranks import Parts, parts
from foretrace.simulate.timeline import Timeline
from foretrace.techniques.whatif import WhatIf

Event = dict[str, Any]
STEPS, CRITICAL, WAITS, FIRST_LANE = 1, 2, 3, 10
KINDS, PHASES, EDGES = ([each.name.lower() for each in words] for words in (TaskKind, Phase, EdgeKind))
SPILL = 100_000  # thread ids of the extra rows for tasks that overlap on their lane


def export(tracks: Sequence[Track], *, arrows: bool = True) -> bytes:
    """Return Chrome trace JSON of these runs; `arrows` draws the critical path as flow arrows between lanes.

    Times are microseconds from the start of the earliest task. Raises ValueError without tracks.
    """
    if not tracks:
        raise ValueError("export needs at least one track")
    heads = [int(track.end[track.graph.marks[0]]) if len(track.graph.marks) else 0 for track in tracks]
    before = max(head - int(track.start.min(initial=head)) for track, head in zip(tracks, heads, strict=True))
    events: list[Event] = []
    pid = 0
    for track, head in zip(tracks, heads, strict=True):
        ranks = sorted({lane.rank for lane in track.graph.lanes if lane.rank >= 0})
        shift = before - head
        if len(ranks) > 1:
            pid += 1
            events += _named_process(pid, f"{track.name} · all ranks")
            events += _steps(track, pid, shift)
        pids = {rank: pid + 1 + i for i, rank in enumerate(ranks)}
        pid += len(ranks)
        run = _Run(track, pids, shift)
        for rank in ranks:
            events += _process(run, rank, arrows)
        if len(ranks) > 1:
            found = parts(Timeline(graph=track.graph, start=track.start, end=track.end))
            events += _waits(found, pids, shift)
            events += _meetings(track, found, pids, shift) if arrows else ()
    other = {"producer": "foretrace", "runs": [_told(track) for track in tracks]}
    return encoded({"displayTimeUnit": "ms", "otherData": other, "traceEvents": events})


def _told(track: Track) -> dict[str, Any]:
    """Return what a run's step takes, and where it lies as far as that is known, seconds."""
    marks = track.end[track.graph.marks]
    step_s = float(np.median(np.diff(marks))) / 1e9 if len(marks) > 1 else None
    told: dict[str, Any] = {"name": track.name, "step_s": step_s}
    if track.step is not None:
        told |= {
            "interval_s": [track.step.low_s, track.step.high_s],
            "interval_level": track.step.level,
            "interval_source": track.step.source,
        }
    return told


def write(tracks: Sequence[Track], path: Path, *, arrows: bool = True) -> None:
    """Write what `export` makes into a file; a name that ends in .gz is compressed, as Perfetto reads it."""
    write_bytes(path, export(tracks, arrows=arrows), compress=path.suffix == ".gz")


def write_runs(path: Path, recorded: Timeline, found: WhatIf | None = None) -> None:
    """Write a recorded run and, below its lanes, those of a prediction."""
    tracks = [track_of("recorded", recorded, recorded.interval_s())]
    if found is not None:
        low_s, high_s = found.interval_s
        view = whatif(found)
        step = replace(found.noise, low_s=low_s, high_s=high_s, source=view.interval_source)
        tracks.append(track_of(view.name, found.after, step))
    write(tracks, path)


def _named_process(pid: int, name: str) -> Iterator[Event]:
    yield _meta(pid, 0, "process_name", name=name)
    yield _meta(pid, 0, "process_sort_index", sort_index=pid)


def _steps(track: Track, pid: int, shift: int) -> Iterator[Event]:
    marks, steps = track.graph.marks, track.graph.info.steps
    if len(marks) > 1:
        yield from _named(pid, STEPS, "steps")
        for i, (a, b) in enumerate(pairwise(marks)):
            at, until = int(track.end[a]), int(track.end[b])
            yield _slice(pid, STEPS, f"step {steps[i] if i < len(steps) else i}", at + shift, until - at)


def _process(run: _Run, rank: int, arrows: bool) -> Iterator[Event]:
    track, graph, shift, pid = run.track, run.graph, run.shift, run.pids[rank]
    yield from _named_process(pid, track.name + (f" · rank {rank}" if len(run.pids) > 1 else ""))
    if track.step is not None:
        unit = unit_for(track.step.high_s)
        lies = f"step {between(track.step.low_s, track.step.high_s, unit)} {unit.name}"
        yield _meta(pid, 0, "process_labels", labels=lies)
    if len(run.pids) == 1:
        yield from _steps(track, pid, shift)
    on_rank = graph.rank == rank
    if (run.critical & on_rank).any():
        yield from _named(pid, CRITICAL, "critical path")
        path = track.critical[(run.long & on_rank)[track.critical]]
        ends = np.minimum(track.end[path], np.append(track.start[path[1:]], track.end[path[-1:]]))
        for v, until in zip(path.tolist(), ends.tolist(), strict=True):  # a call continues while its kernel runs
            at = int(track.start[v])
            if until > at:
                yield _slice(pid, CRITICAL, run.labels[graph.name[v]], at + shift, until - at)
    for index, lane in enumerate(graph.lanes):
        rows = np.flatnonzero((graph.lane == index) & run.long)
        if lane.rank != rank or not len(rows):
            continue
        rows = rows[np.argsort(track.start[rows], kind="stable")]
        tid = FIRST_LANE + index
        yield from _named(pid, tid, lane_word(lane))
        rows_of = _rows(track.start[rows], track.end[rows])
        for extra in range(1, int(rows_of.max()) + 1):
            yield from _named(pid, extra * SPILL + tid, lane_word(lane) + " (overlapping)", sort=tid)
        starts, durations = (track.start[rows] + shift).tolist(), (track.end[rows] - track.start[rows]).tolist()
        for v, row, at, dur in zip(rows.tolist(), rows_of.tolist(), starts, durations, strict=True):
            event = _slice(pid, row * SPILL + tid, run.labels[run.name[v]], at, dur)
            yield event | {"cat": KINDS[run.kind[v]], "args": run.facts(v)}
    if arrows:
        yield from _arrows(run, rank)


def _waits(found: Parts, pids: dict[int, int], shift: int) -> Iterator[Event]:
    """Yield what every rank waits for others in collectives, on rows of its own."""
    last = found.rank[found.last_arriver]
    for rank, pid in pids.items():
        mine = np.flatnonzero((found.rank == rank) & (found.wait_ns > 0))
        if not len(mine):
            continue
        mine = mine[np.argsort(found.arrived[mine], kind="stable")]
        rows = _rows(found.arrived[mine], found.began[mine])
        for row in range(int(rows.max()) + 1):
            yield from _named(pid, row * SPILL + WAITS, "waits for other ranks", sort=WAITS)
        for part, row in zip(mine.tolist(), rows.tolist(), strict=True):
            name = f"waits for rank {last[found.collective[part]]}"
            event = _slice(pid, row * SPILL + WAITS, name, int(found.arrived[part]) + shift, int(found.wait_ns[part]))
            event["cat"] = "wait"
            yield event


def _meetings(track: Track, found: Parts, pids: dict[int, int], shift: int) -> Iterator[Event]:
    """Yield flow arrows of every collective, from the transfer of the last rank to arrive to those of all others."""
    lane = track.graph.lane
    shown = found.ended > found.began
    for part in np.flatnonzero(shown).tolist():
        first = int(found.last_arriver[found.collective[part]])
        if first == part or not shown[first]:
            continue
        ends = [
            (pids[int(found.rank[at])], int(lane[found.transfer[at]]), int(found.began[at]) + shift)
            for at in (first, part)
        ]
        yield from _arrow("collective", f"c{pids[int(found.rank[part])]}.{int(found.transfer[part])}", *ends)


class _Run:
    """A track as a viewer shows it; columns as lists, because reading single items of arrays is slow."""

    def __init__(self, track: Track, pids: dict[int, int], shift: int) -> None:
        graph = track.graph
        self.track, self.graph, self.pids, self.shift = track, graph, pids, shift
        self.source, why = binding_edges(graph, track.start, track.end)
        on_path = np.zeros(len(graph), dtype=np.bool_)
        on_path[track.critical] = True
        self.long = track.end > track.start
        self.critical = on_path & self.long
        self.labels = short_names(graph.names)
        self.name, self.kind = graph.name.tolist(), graph.kind.tolist()
        self._layer, self._op, self._phase = graph.layer.tolist(), graph.op.tolist(), graph.phase.tolist()
        self._nbytes, self._why, self._critical = graph.nbytes.tolist(), why.tolist(), on_path.tolist()

    def facts(self, v: int) -> Event:
        """Return what is said of a task beside its name and time."""
        graph = self.graph
        facts: Event = {"name": graph.names[self.name[v]], "critical": self._critical[v]}
        if self._layer[v] >= 0:
            facts["layer"] = graph.layers[self._layer[v]]
        if self._op[v] >= 0:
            facts["operator"] = graph.names[self._op[v]]
        if self._phase[v]:
            facts["phase"] = PHASES[self._phase[v]]
        if self._nbytes[v] >= 0:
            facts["bytes"] = self._nbytes[v]
        if self._why[v] != NO_EDGE:
            facts["waited_for"] = EDGES[self._why[v]]
        return facts


def _arrows(run: _Run, rank: int) -> Iterator[Event]:
    """Yield flow arrows from lane to lane along the critical path into a rank, through zero-length tasks on the way."""
    track, graph, critical, pid = run.track, run.graph, run.critical, run.pids[rank]
    for v in np.flatnonzero(critical & (graph.rank == rank)).tolist():
        u = int(run.source[v])
        while u >= 0 and not critical[u] and track.end[u] == track.start[u]:
            u = int(run.source[u])
        if u < 0 or not critical[u] or graph.lane[u] == graph.lane[v]:
            continue
        if (left := run.pids.get(graph.lanes[graph.lane[u]].rank)) is None:  # on a lane of no rank: it is not drawn
            continue
        # An arrow binds to the slice around its time stamp: one nanosecond before the end is inside.
        leave = max(min(int(track.end[u]), int(track.start[v])) - 1, int(track.start[u]))
        start = (left, int(graph.lane[u]), leave + run.shift)
        end = (pid, int(graph.lane[v]), int(track.start[v]) + run.shift)
        yield from _arrow("critical path", f"{pid}.{v}", start, end)


def _arrow(name: str, id: str, start: tuple[int, int, int], end: tuple[int, int, int]) -> Iterator[Event]:
    """Yield both ends of a flow arrow; each is a process, a lane and a time (ns)."""
    for phase, (pid, lane, at) in (("s", start), ("f", end)):
        where = {"pid": pid, "tid": FIRST_LANE + lane, "ts": at / 1000}
        yield {"cat": name, "name": name, "id": id, "ph": phase} | where | ({"bp": "e"} if phase == "f" else {})


def _rows(start: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the first row that is free when each task (by start) begins: slices of a row may not cross."""
    rows = np.zeros(len(start), dtype=np.int64)
    if not (start[1:] < np.maximum.accumulate(end)[:-1]).any():
        return rows
    busy: list[int] = []
    for i, (a, b) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        row = next((r for r, until in enumerate(busy) if until <= a), len(busy))
        busy[row : row + 1] = [b]
        rows[i] = row
    return rows


def _slice(pid: int, tid: int, name: str, at: int, dur: int) -> Event:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": at / 1000, "dur": dur / 1000}


def _named(pid: int, tid: int, name: str, sort: int | None = None) -> Iterator[Event]:
    yield _meta(pid, tid, "thread_name", name=name)
    yield _meta(pid, tid, "thread_sort_index", sort_index=tid if sort is None else sort)


def _meta(pid: int, tid: int, what: str, **args: Any) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "ts": 0, "args": args}
