"""Where the steps of a recording begin and end, on the host's clock."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from foretrace.arrays import Int64
from foretrace.graph.host import HostSpans

_PROFILER_STEP = re.compile(r"^ProfilerStep#([0-9]{1,18})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Boundaries of n steps (n + 1 times, ns), their numbers, where they were found and on which host lane."""

    bounds: Int64
    numbers: tuple[int, ...]
    source: str
    lane: int  # host lane in the trace, −1 for a recording without host events
    notes: tuple[str, ...] = ()
    cut_off: int = 0  # launches of the only step whose work the recording lacks


def main_lane(host: HostSpans) -> int:
    """Return the thread that drives the step.

    The one with step annotations, else with optimizer or loader annotations, else the one without autograd nodes
    that spends most time in operators, annotations and calls; −1 for a recording without host events.
    """
    if not len(host.event):
        return -1
    step = host.is_annotation & host.named(_PROFILER_STEP.search)
    for marked in (step, host.is_optimizer | host.is_data):
        if marked.any():
            return int(np.bincount(host.lane[marked]).argmax())
    top = host.parent < 0
    busy = np.bincount(host.lane[top], weights=(host.end - host.start)[top].astype(np.float64))
    others = busy.copy()
    others[host.autograd_lanes[host.autograd_lanes < len(others)]] = 0
    return int(others.argmax() if others.any() else busy.argmax())


def find_steps(host: HostSpans, first: int, last: int) -> Steps:
    """Find step boundaries from ProfilerStep annotations, else the ends of optimizer steps, else the whole recording.

    `first` and `last` (ns) bound the recording and are used where nothing marks a step. A recorder that knows which
    steps are whole says so in `recording["whole_steps"]`; a trailing ProfilerStep without the optimizer step that
    all others have was cut off by the profiler's end and is dropped.
    """
    lane = main_lane(host)
    marked = np.flatnonzero(host.is_annotation & host.named(_PROFILER_STEP.search))
    marked = marked[host.lane[marked] == lane]
    marked = marked[np.argsort(host.start[marked], kind="stable")]
    if len(marked):
        return _profiler_steps(host, marked, lane)
    optimizer = np.flatnonzero(host.is_annotation & host.named(lambda name: name.startswith("Optimizer.step#")))
    if len(optimizer):
        # Several optimizers (a GAN) make one step: the first that ever stepped counts.
        optimizer = optimizer[host.name[optimizer] == host.name[optimizer[np.argmin(host.start[optimizer])]]]
        optimizer = optimizer[np.argsort(host.end[optimizer], kind="stable")]
    if len(optimizer) >= 2:
        return Steps(
            bounds=host.end[optimizer],
            numbers=tuple(range(1, len(optimizer))),
            source="Optimizer.step",
            lane=int(host.lane[optimizer[0]]),
        )
    return Steps(bounds=np.array([first, last]), numbers=(0,), source="whole trace", lane=lane)


def whole_steps(steps: Steps, cut_off: Int64) -> Steps:
    """Return the steps before the first that launched work which the recording lacks; all where no step would be left.

    `cut_off` holds the times (ns) of these launches, see `foretrace.graph.device.without_work`.
    """
    if not len(cut_off):
        return steps
    said = f"{len(cut_off):,} launches at the end have no work in the recording, which was over before it ran"
    whole = int(np.searchsorted(steps.bounds[1:], cut_off.min(), side="right"))
    left_out = ", ".join(map(str, steps.numbers[whole:]))
    if whole == len(steps.numbers):
        return steps
    if not whole:
        said += ": the step takes longer than this shows."
        return replace(steps, cut_off=len(cut_off), notes=(*steps.notes, said))
    return replace(
        steps,
        bounds=steps.bounds[: whole + 1],
        numbers=steps.numbers[:whole],
        notes=(*steps.notes, f"{said}: step {left_out} was left out."),
    )


def _profiler_steps(host: HostSpans, marked: Int64, lane: int) -> Steps:
    numbers = []
    for row in marked.tolist():
        match = _PROFILER_STEP.search(host.trace.names[host.name[row]])
        assert match is not None
        numbers.append(int(match.group(1)))
    start, end = host.start[marked], host.end[marked]
    keep = np.ones(len(marked), dtype=np.bool_)
    notes: list[str] = []
    recording = host.trace.ranks[0].recording if host.trace.ranks else {}
    whole = recording.get("whole_steps")
    optimizer = np.sort(host.start[host.is_annotation & host.named(lambda name: name.startswith("Optimizer.step#"))])
    has_optimizer = np.searchsorted(optimizer, end) > np.searchsorted(optimizer, start)
    if whole and set(numbers) & set(whole):
        keep = np.isin(numbers, whole)
    elif len(marked) > 1 and has_optimizer[:-1].all() and not has_optimizer[-1]:
        keep[-1] = False
        notes.append(f"ProfilerStep#{numbers[-1]} has no optimizer step and was left out: it was cut off.")
    kept = np.flatnonzero(keep)
    kept = kept[: 1 + int(np.argmax(np.diff(kept) > 1))] if np.any(np.diff(kept) > 1) else kept
    bounds = np.concatenate([start[kept], end[kept[-1:]]])
    return Steps(
        bounds=bounds,
        numbers=tuple(numbers[i] for i in kept),
        source="ProfilerStep",
        lane=lane,
        notes=tuple(notes),
    )
