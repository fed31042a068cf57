"""What of a one-step recording is not the step's: work of other steps, and work that is done once.

Between recorded steps the median sorts this out; a single step takes it all. Three kinds are distinguished, and none of
them is part of the next step: device work that was launched before the step, waits for work of earlier steps that the
recording does not show, and what a process does once (modules loaded at a first launch, memory taken from
the driver, the device opened). `alone` takes them out, so that the step is as long as on a device that has nothing
else to do.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from foretrace.arrays import Float64, Int64, Mask
from foretrace.errors import GraphError
from foretrace.graph.calls import RuntimeCall, call_classes
from foretrace.graph.taskgraph import NO_RELEASE, Change, EdgeKind, NotOfStep, TaskGraph, TaskKind
from foretrace.simulate.doubt import doubted
from foretrace.simulate.replay import replay
from foretrace.trace.trace import LaneKind

# Recordings of several steps say what belongs to a step, as it comes back in others, and those that begin with their
# process what does not. Chosen on the recordings of HTA and PARAM, held against those of Kineto and TraceLens.
MOST = 0.75  # of what was recorded: what is left says nothing of the next step. No share lies between 70 and 85 %
_ONCE = (RuntimeCall.LAUNCH, RuntimeCall.ALLOC, RuntimeCall.LOAD)
_ONCE_NS = 3_000_000  # the longest that came back while the device was idle took 2.7 ms, of the others 0.5 ms
_UNSURE_NS = 300_000  # from here on such a call may be either: it stays, with a range
_UNLIKE = 20  # times the median of the calls of that name
_OPENING_NS = 1_000_000  # opening the device takes milliseconds
_OPENING = 5  # times the longest other work of the host between calls: then the first was for opening the device
_TYPICAL_NS = 20_000  # a call without one of its name to compare with takes at most this


def alone(graph: TaskGraph) -> TaskGraph:
    """Return the graph of a one-step recording without what is not the step's; any other graph as it is.

    What was taken out is listed in `info.not_of_step` and as a Change. Raises GraphError where it is more than `MOST`
    of the device's time or of the step.
    """
    if graph.n_steps != 1 or graph.changes or not graph.on_device.any():
        return graph
    before, unseen = _launched_before(graph), _held_up(graph)
    once, unsure = _done_once(graph, opens_device=not before.any() and not unseen.any())
    either_ns = int((graph.dur - _typical(graph, once | unsure))[once | unsure].sum())
    if unsure.any() and not before.any() and either_ns > MOST * _step_ns(graph):
        raise _refused(graph, either_ns / _step_ns(graph), f"one-time work of the process ({_names(graph, unsure)})")
    graph = _unsure(graph, unsure)
    if not (before.any() or unseen.any() or once.any()):
        return graph
    with_waits = graph.with_columns(dur=_typical(graph, once))
    result = with_waits.with_columns(
        gone=graph.gone | before, release=np.where(unseen, np.int64(NO_RELEASE), graph.release)
    )
    window, without_once, left = (_step_ns(each) for each in (graph, with_waits, result))
    device_ns, once_ns = int(graph.dur[graph.on_device].sum()), int((graph.dur - with_waits.dur).sum())
    spent, waited = int(graph.dur[before].sum()), max(without_once - left, 0)
    earlier = _found("device work launched before the step", before, spent, spent / max(device_ns, 1))
    process = _found(
        f"one-time work of the process ({_names(graph, once)})", once, once_ns, once_ns / max(once_ns + left, 1)
    )
    held = _found(
        "wait for work of earlier steps, which is not in the recording", unseen, waited, waited / max(window, 1)
    )
    for each in (earlier, process):  # a wait is no work: without it the step is whole
        if each.share > MOST:
            raise _refused(graph, each.share, each.reason)
    found = [each for each in (earlier, process, held) if each.tasks]
    said = "; ".join(
        f"{each.reason}: {each.tasks:,} task{'s' * (each.tasks > 1)}, {each.time_s * 1e3:.4g} ms, "
        f"{100 * each.share:.0f} %"
        for each in found
    )
    what = f"left out what is not the step's, {window / 1e6:.4g} → {left / 1e6:.4g} ms ({said})"
    touched = int(np.count_nonzero(before | unseen | once))
    info = replace(graph.info, not_of_step=tuple(found))
    return replace(result, info=info).noted(Change(technique="", what=what, tasks=touched))


def _refused(graph: TaskGraph, share: float, reason: str) -> GraphError:
    return GraphError(
        f"{100 * share:.0f} % of the only step in {graph.info.source or 'this recording'} is not the step's but "
        f"{reason}, and at most {100 * MOST:.0f} % can be left out; record a step after a few others, "
        "as `foretrace record` does."
    )


def _unsure(graph: TaskGraph, rows: Mask) -> TaskGraph:
    """Return the graph with what may have been done once in as little time as such calls take, or in all of theirs."""
    at = np.flatnonzero(rows)
    if not len(at):
        return graph
    low = _typical(graph, rows)[at] / graph.dur[at]
    why = f"{_names(graph, rows)} took longer than such calls do, maybe this once"
    return doubted(graph, at, "long calls", low, np.ones(len(at)), why, recorded=True)


def _found(reason: str, rows: Mask, time_ns: int, share: float) -> NotOfStep:
    return NotOfStep(reason=reason, tasks=int(np.count_nonzero(rows)), time_s=time_ns / 1e9, share=share)


def _step_ns(graph: TaskGraph) -> int:
    _, end = replay(graph)
    return int(end[graph.marks[-1]] - end[graph.marks[0]])


def _launched_before(graph: TaskGraph) -> Mask:
    """Return device tasks of no step that began before the step was over."""
    over = graph.recorded[graph.marks[-1]] + graph.dur[graph.marks[-1]]
    return np.asarray(graph.on_device & (graph.step < 0) & (graph.recorded < over) & ~graph.gone)


def _held_up(graph: TaskGraph) -> Mask:
    """Return the first tasks of a stream that started long after their launch, and nothing recorded says why."""
    return np.asarray(graph.on_device & (graph.step >= 0) & (graph.release != NO_RELEASE))


def _done_once(graph: TaskGraph, *, opens_device: bool) -> tuple[Mask, Mask]:
    """Return calls that took a thousand times as long as usual while the device was idle; those that may have.

    With `opens_device` also the operator that first needed the device, which opens it before its first call.
    """
    host = graph.lane_kinds[graph.lane] == LaneKind.CPU
    call = host & (graph.kind == TaskKind.CALL)
    classes = call_classes(graph.names, graph.name[call])
    able = call & np.isin(classes[graph.name], _ONCE) & (graph.step >= 0)
    long = able & (graph.dur > np.maximum(_UNSURE_NS, _UNLIKE * _median_by_name(graph, able)))
    long[long] = _device_idle(graph, np.flatnonzero(long))
    once = long & (graph.dur > _ONCE_NS)
    first = np.flatnonzero(call)
    if opens_device and len(first):
        at = first[np.argmin(graph.recorded[first])]
        into = slice(int(graph.in_ptr[at]), int(graph.in_ptr[at + 1]))
        previous = graph.src[into][graph.edge_kind[into] == EdgeKind.PROGRAM]
        opening = previous[(graph.kind[previous] == TaskKind.CPU) & (graph.op[previous] >= 0)]
        others = host & (graph.kind == TaskKind.CPU)
        others[opening] = False
        least = max(_OPENING_NS, _OPENING * int(graph.dur[others].max(initial=0)))
        opening = opening[(graph.dur[opening] > least) & (graph.step[opening] >= 0)]
        once[[row for row in opening.tolist() if graph.names[graph.op[row]].startswith("aten::")]] = True
    return np.asarray(once), np.asarray(long & ~once)


def _median_by_name(graph: TaskGraph, rows: Mask) -> Float64:
    """Return median duration (n) of the chosen tasks of the same name, a task's own left out where it has no like."""
    typical = np.zeros(len(graph))
    for name in np.unique(graph.name[rows]).tolist():
        mine = np.flatnonzero(rows & (graph.name == name))
        middle = float(np.median(graph.dur[mine]))
        typical[mine] = middle if len(mine) > 2 and middle < _UNSURE_NS else 0.0
    return typical


def _device_idle(graph: TaskGraph, rows: Int64) -> Mask:
    """Return whether the device did nothing for most of each task, as recorded: the host did not wait for it."""
    device = np.flatnonzero(graph.on_device)
    begin, end = graph.recorded[device], graph.recorded[device] + graph.dur[device]
    low, high = graph.recorded[rows, None], (graph.recorded + graph.dur)[rows, None]
    overlap = np.clip(np.minimum(end, high) - np.maximum(begin, low), 0, None).sum(axis=1)
    return np.asarray(overlap < graph.dur[rows] / 2)


def _typical(graph: TaskGraph, once: Mask) -> Int64:
    """Return durations (n) with those of one-time work replaced by what such a call takes."""
    typical = _median_by_name(graph, (graph.kind == TaskKind.CALL) & np.isin(graph.name, graph.name[once]))
    typical = np.where(typical > 0, np.minimum(typical, _UNSURE_NS), _TYPICAL_NS)
    return np.where(once, np.minimum(np.rint(typical), graph.dur), graph.dur).astype(np.int64)


def _names(graph: TaskGraph, rows: Mask) -> str:
    """Return the longest of these tasks by name."""
    longest = np.flatnonzero(rows)[np.argsort(-graph.dur[rows], kind="stable")]
    names = dict.fromkeys(graph.names[graph.name[row]] for row in longest.tolist())
    return ", ".join(list(names)[:3]) + (", ..." if len(names) > 3 else "")
