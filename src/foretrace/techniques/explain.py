"""What bounds a step, in words: coarse parts of the critical path, and why a change did not gain more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.arrays import Int64
from foretrace.graph.taskgraph import EdgeKind, Phase, TaskKind
from foretrace.simulate.breakdown import over_ranks
from foretrace.simulate.timeline import Timeline
from foretrace.trace.trace import LaneKind

_SHOWN = 0.1  # parts below this share of the step are left out
_WAITS = {
    EdgeKind.LAUNCH: "launch latency",
    EdgeKind.STREAM: "gaps between kernels",
    EdgeKind.DATA: "waiting for data",
    EdgeKind.COLLECTIVE: "communication",
    EdgeKind.CONTENTION: "waiting for another stream",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPart:
    """Time of the critical path in one kind of work, per step, waits for it included, seconds."""

    name: str
    time_s: float


def path_parts(timeline: Timeline) -> tuple[PathPart, ...]:
    """Return the critical path by kind of work, in the order of first appearance in a step; sums to the mean step."""
    path, graph = timeline.critical_path(), timeline.graph
    rows = path.task.astype(np.int64)
    names: dict[str, int] = {}
    waited = path.lag_ns + path.delay_ns
    link = np.array([lane.kind == LaneKind.LINK for lane in graph.lanes])[graph.lane[rows]]
    work = _numbered(names, _label, graph.kind[rows], graph.phase[rows], link)
    reason = np.where((path.reason < len(EdgeKind)) & (waited > 0), path.reason.astype(np.int64), -1)
    wait = _numbered(names, partial(_wait, list(names)), reason, work, link)
    part, spent = np.stack([wait, work], axis=1).ravel(), np.stack([waited, path.work_ns], axis=1).ravel()
    time = np.zeros(len(names), dtype=np.int64)
    np.add.at(time, part, spent)
    begin = int(timeline.end[graph.marks[0]])
    length = np.diff(timeline.end[graph.marks])
    middle = begin + int(length[: len(length) // 2].sum())  # order as in a step from the middle of the window
    inside = (spent > 0) & np.repeat(timeline.start[rows] >= middle, 2)
    found, at = np.unique(part[inside], return_index=True)
    seen = np.full(len(names), len(part))
    seen[found] = at
    per_step = 1e-9 / graph.n_steps
    texts = list(names)
    order = sorted(np.flatnonzero(time).tolist(), key=lambda i: (seen[i], -time[i], texts[i]))
    return tuple(PathPart(name=texts[i], time_s=int(time[i]) * per_step) for i in order)


def _numbered(names: dict[str, int], text: Callable[..., str], *columns: npt.NDArray[Any]) -> Int64:
    """Return the number of the text of every row; each different row is put into words once, new ones go into
    `names`.
    """
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        key = 1024 * key + column  # few kinds, phases, reasons and parts, all of them below
    _, first, place = np.unique(key, return_index=True, return_inverse=True)
    different = zip(*(column[first].tolist() for column in columns), strict=True)
    return np.array([names.setdefault(text(*each), len(names)) for each in different], dtype=np.int64)[place]


def main_parts(parts: tuple[PathPart, ...]) -> tuple[str, ...]:
    """Return names of the parts that matter, in their order."""
    total = sum(part.time_s for part in parts)
    return tuple(part.name for part in parts if part.time_s >= _SHOWN * total)


def why_not_more(timeline: Timeline) -> str:
    """Return one sentence: what holds the step now."""
    parts = sorted(path_parts(timeline), key=lambda part: -part.time_s)
    total = sum(part.time_s for part in parts)
    if not parts:
        return "nothing in the step takes any time"
    first = parts[0]
    said = f"{_share(first, total)} of the step {'are' if first.name.endswith('s') else 'is'} {first.name} now"
    if len(parts) > 1 and parts[1].time_s >= _SHOWN * total:
        said += f", {_share(parts[1], total)} {parts[1].name}"
    graph = timeline.graph
    if not graph.on_device.any():
        return said
    waits = over_ranks(graph, timeline.start, timeline.end).mean_s()["launch_bound"]
    if waits >= _SHOWN * total:
        said += f"; the device waits {1e3 * waits:.3g} ms per step for launches"
    return said


def _wait(labels: list[str], reason: int, work: int, link: int) -> str:
    """Return what a task waited for, beyond the end of its predecessor; its own label where it did not."""
    if reason < 0:
        return labels[work]
    if link:  # a message: for the link, or for those it is sent to
        return "communication" if reason == EdgeKind.STREAM else "waiting for other workers"
    return _WAITS.get(EdgeKind(reason), labels[work])


def _label(number: int, of_phase: int, link: int) -> str:
    kind, phase = TaskKind(number), Phase(of_phase)
    if kind == TaskKind.DATA or phase == Phase.DATA:
        return "data loading"
    if kind == TaskKind.COLLECTIVE or link:
        return "communication"
    if kind in (TaskKind.COPY, TaskKind.MEMSET):
        return "copies"
    if kind == TaskKind.PYTHON:
        return "Python"
    what = {TaskKind.KERNEL: "kernels", TaskKind.OPERATOR: "operators"}.get(kind, "host work")
    return what if phase == Phase.NONE else f"{phase.name.lower()} {what}"


def _share(part: PathPart, total: float) -> str:
    return f"{100 * part.time_s / total:.0f} %" if total else "0 %"
