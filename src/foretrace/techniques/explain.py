"""What bounds a step, in words: coarse parts of the critical path, and why a change did not gain more."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.graph.taskgraph import EdgeKind, Phase, TaskGraph, TaskKind
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
    """Time of the critical path in one kind of work or wait, per step."""

    name: str
    time_s: float


def path_parts(timeline: Timeline) -> tuple[PathPart, ...]:
    """The critical path by kind of work, in the order of first appearance in a step; sums to the mean step."""
    path, graph = timeline.critical_path(), timeline.graph
    labels = [_label(graph, int(row)) for row in path.task.tolist()]
    time: dict[str, int] = {}
    begin = int(timeline.end[graph.marks[0]])
    length = np.diff(timeline.end[graph.marks])
    middle = begin + int(length[: len(length) // 2].sum())  # order as in a step from the middle of the window
    seen: dict[str, int] = {}
    for i, label in enumerate(labels):
        waited = int(path.lag_ns[i] + path.delay_ns[i])
        name = label
        if path.reason[i] < len(EdgeKind) and waited > 0:
            name = _wait(graph, int(path.task[i]), EdgeKind(int(path.reason[i])), label)
        for part, spent in ((name, waited), (label, int(path.work_ns[i]))):
            time[part] = time.get(part, 0) + spent
            if spent > 0 and timeline.start[path.task[i]] >= middle:
                seen.setdefault(part, len(seen))
    order = sorted(time, key=lambda part: (seen.get(part, len(time)), -time[part]))
    per_step = 1e-9 / graph.n_steps
    return tuple(PathPart(name=part, time_s=time[part] * per_step) for part in order if time[part])


def main_parts(parts: tuple[PathPart, ...]) -> tuple[str, ...]:
    """Names of the parts that matter, in their order."""
    total = sum(part.time_s for part in parts)
    return tuple(part.name for part in parts if part.time_s >= _SHOWN * total)


def why_not_more(timeline: Timeline) -> str:
    """One sentence: what holds the step now."""
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
        said += f"; the device waits {_milli(waits)} per step for launches"
    return said


def _wait(graph: TaskGraph, row: int, why: EdgeKind, label: str) -> str:
    """What a task waited for, beyond the end of its predecessor."""
    if graph.lanes[graph.lane[row]].kind == LaneKind.LINK:  # a message: for the link, or for those it is sent to
        return "communication" if why == EdgeKind.STREAM else "waiting for other workers"
    return _WAITS.get(why, label)


def _label(graph: TaskGraph, row: int) -> str:
    kind, phase = TaskKind(int(graph.kind[row])), Phase(int(graph.phase[row]))
    if kind == TaskKind.DATA or phase == Phase.DATA:
        return "data loading"
    if kind == TaskKind.COLLECTIVE or graph.lanes[graph.lane[row]].kind == LaneKind.LINK:
        return "communication"
    if kind in (TaskKind.COPY, TaskKind.MEMSET):
        return "copies"
    if kind == TaskKind.PYTHON:
        return "Python"
    what = {TaskKind.KERNEL: "kernels", TaskKind.OPERATOR: "operators"}.get(kind, "host work")
    return what if phase == Phase.NONE else f"{phase.name.lower()} {what}"


def _share(part: PathPart, total: float) -> str:
    return f"{100 * part.time_s / total:.0f} %" if total else "0 %"


def _milli(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
