"""The cost of recording: what a step takes when nobody watches.

A recording made by `foretrace.record` holds the times of unprofiled neighbouring steps of the same process. Profiling
costs a roughly constant time per recorded event, and that time falls into whatever ran around the event's start and
end. Where steps never wait, the constant is what the shortest profiled
step took more than the shortest plain one; else it is found so that the replay takes as long as the unprofiled steps
did. What is then left of the difference is spread over all work where one thread does everything.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import NO_RELEASE, Change, TaskGraph, TaskKind
from foretrace.simulate.own_step import alone
from foretrace.simulate.replay import replay
from foretrace.trace.trace import LaneKind

Clock = Literal["cpu", "wall"]

MOST_PER_PROBE_NS = 2_500.0  # a start or an end of an event; five times what was measured on the slowest machine
DISTURBED = 1.10  # wall over CPU time of a one-thread step beyond which something else used the core
_QUANTILE = 0.25  # of a task's time over identical steps: preemption only ever adds
_LEAST_STEPS = 4
_PHASES = {"profiled": ("active",), "unprofiled": ("before", "after")}
_SO_CPU = ", so CPU time is used."
_TIMES = ("dur", "delay", "lag", "typical")
_LEAST_LISTED = 3  # steps of either kind whose shortest says something


def unprofiled(graph: TaskGraph, clock: Clock | None = None) -> TaskGraph:
    """Return the graph with the cost of recording removed, so that its step takes as long as unprofiled steps did.

    What else is not the step's is left out first, see `own_step`, which says when it raises GraphError. A recording
    without unprofiled neighbours is then returned as it is. What was measured and removed is kept in `info.overhead`
    (times in seconds) and as a Change. Where other work disturbed a step that never waits, the process's CPU time
    stands for its time: it leaves out what the others took. `clock`, else the recording's own fact of this name,
    chooses one of the two, where the recording tells it.
    """
    if graph.changes:
        return graph
    graph = alone(graph)
    said = disturbance(graph)
    asked = clock or graph.info.recording.get("clock")
    on_cpu = asked == "cpu" and has_cpu_time(graph) if asked else bool(said)
    times = _neighbours(graph, "cpu_ns" if on_cpu else "wall_ns")
    if not len(times) or not graph.n_steps:
        return graph
    target = float(np.median(times))
    recorded = float(np.median(_steps(graph)))
    typical = graph if graph.on_device.any() else _typical_steps(graph)
    if on_cpu:
        own = max(_stretched(graph, "profiled"), 1.0)
        typical = typical.with_columns(dur=np.rint(typical.dur / own).astype(np.int64))
    known = _observed_per_probe(graph)
    per_probe = _per_probe(typical, target) if known is None else known
    lighter = _without_probes(typical, per_probe)
    reached = float(np.median(_steps(lighter)))
    scale = 1.0
    if not graph.on_device.any() and reached > 0:
        # One thread does everything: what is left of the difference is spread over all work.
        scale = target / reached
        lighter = _scaled(lighter, scale, graph, times)
    corrected = float(np.median(_steps(lighter)))
    overhead = {
        "recorded_s": recorded / 1e9,
        "unprofiled_s": target / 1e9,
        "per_event_s": 2 * per_probe / 1e9,
        "scale": scale,
        "corrected_s": corrected / 1e9,
        "cpu_clock": float(on_cpu),
    }
    source = "CPU time of unprofiled steps" if on_cpu else "unprofiled steps"
    cost = f"took out the cost of recording, {2 * per_probe / 1e3:.2f} µs per event" if per_probe else "set the step"
    what = f"{cost}: {recorded / 1e6:.3g} → {corrected / 1e6:.3g} ms per step ({source}: {target / 1e6:.3g} ms)"
    touched = int(np.count_nonzero(lighter.dur != graph.dur))
    if not on_cpu:
        said = tuple(each.replace(_SO_CPU, "; they are taken on the wall clock, as it was asked for.") for each in said)
    info = replace(graph.info, overhead=overhead, notes=graph.info.notes + said)
    return replace(lighter, info=info).noted(Change(technique="", what=what, tasks=touched))


def clock_of(graph: TaskGraph) -> Clock:
    """Return the clock that a graph's times are on: "cpu" where CPU time stands for them, else "wall"."""
    return "cpu" if graph.info.overhead.get("cpu_clock") else "wall"


def has_cpu_time(graph: TaskGraph) -> bool:
    """Return whether CPU time can stand for a step's time: one thread does everything, never waits, and was timed."""
    threads = (graph.info.recording.get("threads") or {}).get("intra_op", 1)
    return threads == 1 and not _waits(graph) and bool(len(_neighbours(graph, "cpu_ns")))


def one_clock(before: TaskGraph, after: TaskGraph) -> tuple[TaskGraph, TaskGraph, str]:
    """Return both graphs with their times on one clock, and a sentence where one of them had to change; "" if none had.

    The one in wall time goes over to CPU time, by the ratio that its unprofiled steps show; where its steps wait or run
    on several threads, the other one goes back to wall time, with what others took. Raises ForetraceError where a
    recording does not tell both.
    """
    clocks = clock_of(before), clock_of(after)
    if clocks[0] == clocks[1]:
        return before, after, ""
    sides = [before, after]
    wall = clocks.index("wall")
    to: Clock = "cpu" if has_cpu_time(sides[wall]) else "wall"
    moved = wall if to == "cpu" else 1 - wall
    sides[moved] = _on(sides[moved], to)
    which, other = ("BEFORE", "AFTER") if moved == 0 else ("AFTER", "BEFORE")
    because = (
        f"{other} was disturbed by other work and is in CPU time, so {which} is, too"
        if to == "cpu"
        else f"the steps of {other} wait or have several threads, so {which} is in wall time, too, with what other "
        "work took of it"
    )
    return sides[0], sides[1], f"one clock: {because}."


def _on(graph: TaskGraph, clock: Clock) -> TaskGraph:
    """Return the graph with all times scaled by what its unprofiled steps took on the other clock."""
    cpu, wall = (_neighbours(graph, f"{name}_ns") for name in ("cpu", "wall"))
    if not len(cpu) or not len(wall):
        raise ForetraceError(
            f"{graph.info.source or 'one of the two'} does not tell its CPU time beside its wall time, and the other "
            "is on another clock; record both with foretrace record, on a machine that nothing else uses."
        )
    factor = float(np.median(cpu) / np.median(wall)) if clock == "cpu" else float(np.median(wall) / np.median(cpu))
    released = graph.release != NO_RELEASE
    release = graph.release.copy()
    release[released] = np.rint(release[released] * factor).astype(np.int64)
    scaled = {name: np.rint(getattr(graph, name) * factor).astype(np.int64) for name in _TIMES}
    info = replace(graph.info, overhead={**graph.info.overhead, "cpu_clock": float(clock == "cpu")})
    return replace(graph.with_columns(**scaled, release=release), info=info)


def disturbance(graph: TaskGraph) -> tuple[str, ...]:
    """Return a sentence when something else used the core while a one-thread step that never waits was recorded."""
    threads = (graph.info.recording.get("threads") or {}).get("intra_op", 1)
    if threads != 1 or _waits(graph):
        return ()
    stretched = max(_stretched(graph, key) for key in _PHASES)
    if stretched <= DISTURBED:
        return ()
    return (f"other work disturbed this recording: steps took {stretched:.2f} times their CPU time{_SO_CPU}",)


def stored_ns(step: dict[str, Any]) -> int:
    """Return a step's loader time neither on a core nor waiting for one: for storage. 0 where not recorded."""
    if "loader_queued_ns" not in step:
        return 0
    return max(int(step["loader_wall_ns"] - step["loader_cpu_ns"] - step["loader_queued_ns"]), 0)


def _stretched(graph: TaskGraph, kind: str) -> float:
    """Return wall time of "profiled" or "unprofiled" steps over CPU time and storage waits; 1 where unknown."""
    spent = (graph.info.recording.get("overhead") or {}).get(kind) or {}
    if not spent.get("wall_ns") or not spent.get("cpu_ns"):
        return 1.0
    stored = [stored_ns(s) for s in graph.info.recording.get("steps") or [] if s.get("phase") in _PHASES[kind]]
    return float(spent["wall_ns"] / (spent["cpu_ns"] + (np.median(stored) if stored else 0.0)))


def _waits(graph: TaskGraph) -> bool:
    """Return whether a step can wait for a device, process, network or clock: CPU time is not its time then."""
    if graph.info.recording.get("emulated"):  # its layers sleep, see foretrace.experiment.links.emulate
        return True
    loads = np.unique(graph.name[graph.kind == TaskKind.DATA])
    workers = any("_MultiProcessing" in graph.names[name] for name in loads.tolist())
    others = any(lane.kind == LaneKind.MODEL for lane in graph.lanes)  # of a prediction: loader workers, links
    return workers or others or bool(graph.on_device.any()) or bool(np.any(graph.kind == TaskKind.COLLECTIVE))


def _neighbours(graph: TaskGraph, key: str) -> Int64:
    """Return times of the unprofiled steps before and after the recorded ones, ns, ascending."""
    steps: list[dict[str, Any]] = graph.info.recording.get("steps") or []
    waited = key == "cpu_ns"  # for storage: not CPU time, but the step's own
    times = [s[key] + waited * stored_ns(s) for s in steps if s.get("phase") in _PHASES["unprofiled"] and s.get(key)]
    if not times:
        spent = (graph.info.recording.get("overhead") or {}).get("unprofiled") or {}
        times = [spent[key]] if spent.get(key) else []
    return np.sort(np.array(times, dtype=np.int64))


def _steps(graph: TaskGraph) -> Float64:
    _, end = replay(graph)
    return np.diff(end[graph.marks]).astype(np.float64)


def _typical_steps(graph: TaskGraph) -> TaskGraph:
    """Return it with every task's lower quartile over all steps, if all steps do the same in the same order."""
    rows = [np.flatnonzero(graph.step == s) for s in range(graph.n_steps)]
    alike = len(rows) >= _LEAST_STEPS and len({len(r) for r in rows}) == 1
    if not alike or any(np.any(graph.name[r] != graph.name[rows[0]]) for r in rows):
        return graph
    quartile = np.quantile(np.stack([graph.dur[r] for r in rows]), _QUANTILE, axis=0).astype(np.int64)
    dur = graph.dur.copy()
    for r in rows:
        dur[r] = quartile
    return graph.with_columns(dur=dur)


def _without_probes(graph: TaskGraph, per_probe_ns: float) -> TaskGraph:
    cost = np.rint(graph.probes * per_probe_ns).astype(np.int64)
    return graph.with_columns(dur=np.maximum(graph.dur - cost, 0))


def _observed_per_probe(graph: TaskGraph) -> float | None:
    """Return the cost of a probe (ns): what the least disturbed profiled step took more than the plain one.

    None where the recording does not list its steps, or where steps wait: then a probe may cost nothing. Others only
    ever add time, so the shortest steps compare best; balancing sums over all steps would book a disturbance of the
    plain steps, or typical times below the mean, as free probes.
    """
    recording = graph.info.recording
    probes = float(graph.probes[graph.step >= 0].sum()) / max(graph.n_steps, 1)
    if _waits(graph) or not probes:
        return None
    key = "cpu_ns" if (recording.get("threads") or {}).get("intra_op", 1) == 1 else "wall_ns"
    steps: list[dict[str, Any]] = recording.get("steps") or []
    profiled = [s[key] for s in steps if s.get("phase") == "active" and s.get(key)]
    plain = [s[key] for s in steps if s.get("phase") in ("before", "after") and s.get(key)]
    if len(profiled) < _LEAST_LISTED or len(plain) < _LEAST_LISTED:
        return None
    return float(min(max((min(profiled) - min(plain)) / probes, 0.0), MOST_PER_PROBE_NS))


def _per_probe(graph: TaskGraph, target_ns: float) -> float:
    """Return cost of one probe (ns) with which the median step takes `target_ns`; 0 if it is shorter already."""
    low, high = 0.0, MOST_PER_PROBE_NS
    if np.median(_steps(graph)) <= target_ns or not graph.probes.any():
        return 0.0
    if np.median(_steps(_without_probes(graph, high))) >= target_ns:
        return high
    for _ in range(24):  # to a fraction of a nanosecond per event
        middle = (low + high) / 2
        if np.median(_steps(_without_probes(graph, middle))) > target_ns:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _scaled(graph: TaskGraph, scale: float, recorded: TaskGraph, times: Int64) -> TaskGraph:
    """Scale all tasks; step i also takes the i-th quantile of the unprofiled steps, so that their spread stays."""
    factor = np.full(len(graph), scale)
    if len(times) >= 2:
        order = np.argsort(np.argsort(_steps(recorded), kind="stable"))
        quantiles = np.quantile(times, (order + 0.5) / len(order)) / np.median(times)
        inside = graph.step >= 0
        factor[inside] *= quantiles[graph.step[inside]]
    return graph.with_columns(dur=np.rint(graph.dur * factor).astype(np.int64))
