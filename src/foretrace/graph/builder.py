"""Build a `TaskGraph` from a `Trace`: which tasks there are, and what each one waits for.

Read `build` top to bottom. The rules and why they are needed: each module named here; how they are tested: check.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from foretrace.errors import CycleError, GraphError
from foretrace.graph.collectives import with_collectives
from foretrace.graph.device import DeviceTasks, device_tasks, share_without_work, without_work
from foretrace.graph.draft import Draft
from foretrace.graph.events import LATENCY_NS, stream_events
from foretrace.graph.host import HostSpans, host_spans
from foretrace.graph.layers import WAYS
from foretrace.graph.links import host_collectives
from foretrace.graph.settle import Settled
from foretrace.graph.steps import Steps, find_steps, whole_steps
from foretrace.graph.streams import Streams
from foretrace.graph.taskgraph import (
    Carried,
    EdgeClass,
    EdgeKind,
    GraphInfo,
    TaskGraph,
    TaskKind,
)
from foretrace.graph.threads import host_tasks
from foretrace.graph.waits import blocking_calls
from foretrace.trace.trace import Category, Trace

# Operators that launch work in one call and none in another, in whole recordings: up to 15 % (copies, mostly).
_MOST_LACKING = 0.2


def build(trace: Trace, rank: int | None = None) -> TaskGraph:
    """Return task graph of one rank of a recording; of its lowest rank if none is named.

    Raises GraphError when the rank is not in the recording or nothing in it can become a task.
    """
    one, notes = _one_rank(trace, rank)
    host = host_spans(one)
    platform = one.ranks[0].platform if one.ranks else "cpu"
    device = device_tasks(one, host, platform if platform in ("cuda", "rocm") else "cuda")
    if not len(host.event) and not len(device):
        known = ~np.isin(one.category, (Category.OTHER, Category.OVERHEAD, Category.MEMORY))
        what = "" if known.any() else ", as traces of other programs (JAX, Chrome) do not"
        raise GraphError(
            f"{_source(one)} holds no operators, calls or kernels of PyTorch's profiler{what}; record with CPU or GPU "
            "activities on."
        )
    notes += _without_the_end(host, device)
    steps = _steps(host, device)
    streams = Streams(host, device)
    blocking = blocking_calls(host, device, streams)
    links = host_collectives(host, steps.lane)
    threads = host_tasks(host, device, blocking, steps, links)
    draft = Draft(one, host, device, steps, blocking, threads, links)

    draft.add_host()
    draft.add_device()
    draft.program_order()
    draft.thread_order()
    draft.launches()
    draft.stream_order()
    events = stream_events(host, device, streams)
    draft.edges(events.src + draft.first_device, events.dst + draft.first_device, EdgeKind.EVENT,
                np.full(len(events.src), LATENCY_NS[device.platform]), inferred=events.inferred)  # fmt: skip
    draft.returns()
    draft.host_collectives()
    draft.step_marks()
    try:
        settled = draft.settled()
        info = describe(draft, settled, events.classes, notes + list(steps.notes))
        return with_collectives(draft.finish(settled, info), one)
    except CycleError as error:
        raise GraphError(
            f"{_source(one)} has work of the device before the call that launched it, or after the one that waited for "
            f"it, so its clocks disagree; record again, or keep other steps with `steps=` ({str(error)[:-1]})."
        ) from None


def _one_rank(trace: Trace, rank: int | None) -> tuple[Trace, list[str]]:
    ranks = [info.rank for info in trace.ranks]
    if rank is None and len(ranks) <= 1:
        return trace, []
    chosen = min(ranks) if rank is None else rank
    if chosen not in ranks:
        raise GraphError(f"{_source(trace)} has no rank {chosen}; it holds {', '.join(map(str, ranks))}.")
    notes = (
        [] if len(ranks) == 1 else [f"rank {chosen} of {len(ranks)} recorded ranks; other ranks are not in this graph."]
    )
    return trace.of_rank(chosen), notes


def _source(trace: Trace) -> str:
    return trace.ranks[0].source if trace.ranks else "the trace"


def _steps(host: HostSpans, device: DeviceTasks) -> Steps:
    ends = [array.max() for array in (host.end, device.end) if len(array)]
    starts = host.start if len(host.start) else device.start
    captured, cut_off = without_work(host, device)
    steps = whole_steps(find_steps(host, int(starts.min()), int(max(ends))), host.start[cut_off])
    if not len(captured):
        return steps
    note = f"{len(captured):,} launches were captured into a graph: what they launch did not run then."
    return replace(steps, notes=(*steps.notes, note))


def _without_the_end(host: HostSpans, device: DeviceTasks) -> list[str]:
    """Return what the lost end of a file may have held: profilers write the device's work behind the host's.

    Raises GraphError where too much of it is missing.
    """
    trace = host.trace
    if not trace.cut_short or not any(rank.devices for rank in trace.ranks):
        return []
    lacking = share_without_work(host, device)
    if lacking > _MOST_LACKING:
        raise GraphError(
            f"{_source(trace)} lost its end, and with it the device's work of {100 * lacking:.0f} % of the operators "
            "that launch any, so it does not say what the device did; copy it again."
        )
    return ["the end of the file is lost: work of the device may be missing from any step."]


def describe(draft: Draft, settled: Settled, classes: tuple[EdgeClass, ...], notes: list[str]) -> GraphInfo:
    """Collect the facts of the recording for `TaskGraph.info`."""
    device = draft.device
    window = draft.columns()["recorded"][draft.marks]  # ns, of the step boundaries
    rank = draft.trace.ranks[0] if draft.trace.ranks else None
    share: dict[str, float] = {}
    linked = 1.0
    busy = int(device.dur.sum())
    if busy:
        time = np.bincount(draft.way, weights=device.dur, minlength=len(WAYS)) / busy
        share = {name: float(value) for name, value in zip(WAYS, time, strict=True) if value > 0}
        linked = float(device.dur[device.call >= 0].sum() / busy)
    elif len(draft.host.event):
        _, way = draft.layers.of_span
        span, work = draft.threads.span, draft.threads.dur
        known = (span >= 0) & (draft.threads.kind == TaskKind.OPERATOR)
        total = max(int(work[known].sum()), 1)
        time = np.bincount(way[span[known]], weights=work[known], minlength=len(WAYS)) / total
        share = {name: float(value) for name, value in zip(WAYS, time, strict=True) if value > 0}
    span_ns = max(device.span, 1)
    typical = {}
    for lane in device.lanes:
        label = f"gpu{draft.trace.lanes[lane].device} stream {draft.trace.lanes[lane].stream}"
        typical[f"launch {label}"] = device.latency[lane]
        typical[f"gap {label}"] = device.gap[lane]
    blocked = Counter(draft.host.trace.names[n] for n in draft.host.name[draft.blocking.call[draft.blocking.blocked]])
    if draft.clock == "gpu" and draft.steps.lane >= 0:
        notes.append("the host runs ahead of the device: steps are measured where the device finishes them.")
    if draft.threads.parallel:
        several = "s" * (draft.threads.parallel > 1)
        notes.append(f"{draft.threads.parallel} burst{several} of helper threads ran beside the main thread.")
    if blocked:
        notes.append("blocking calls: " + ", ".join(f"{n} x {name}" for name, n in blocked.most_common(4)) + ".")
    carried: tuple[Carried, ...] = ()
    if draft.steps.cut_off:
        least_s = draft.steps.cut_off * float(np.mean(device.dur)) / 1e9
        why = f"{draft.steps.cut_off:,} launches as long as the others on average"
        carried = (Carried(source="work after the recording's end", faster_s=0.0, slower_s=least_s, of_s=0.0, why=why),)
    return GraphInfo(
        source=rank.source if rank else "",
        platform=rank.platform if rank else "cpu",
        devices=rank.devices if rank else (),
        world_size=rank.world_size if rank else 1,
        steps=draft.steps.numbers,
        step_source=draft.steps.source,
        step_clock=draft.clock,
        window_ns=(int(window[0]), int(window[-1])),
        linked_share=linked,
        attributed_share=1.0 - share.get("none", 0.0),
        attribution=share,
        unexplained_share=settled.unexplained_ns / span_ns,
        contention_share=settled.contention_ns / span_ns,
        overlap_share=device.overlap_share,
        typical_ns=typical,
        edge_classes=classes,
        recording=dict(rank.recording) if rank else {},
        carried=carried,
        notes=tuple(notes),
    )
