"""What the builder knows beside the arrays: shares, typical lags, and notes for the reader."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from foretrace.graph.draft import Draft
from foretrace.graph.facts import check_facts
from foretrace.graph.layers import WAYS
from foretrace.graph.settle import Settled
from foretrace.graph.taskgraph import Carried, EdgeClass, GraphInfo, TaskKind

Int64 = npt.NDArray[np.int64]


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
        notes.append(f"{draft.threads.parallel} bursts of helper threads ran beside the main thread.")
    if blocked:
        notes.append("blocking calls: " + ", ".join(f"{n} x {name}" for name, n in blocked.most_common(4)) + ".")
    carried: tuple[Carried, ...] = ()
    if draft.steps.cut_off:
        least_s = draft.steps.cut_off * float(np.mean(device.dur)) / 1e9
        why = f"{draft.steps.cut_off:,} launches as long as the others on average"
        carried = (Carried(source="work after the recording's end", faster_s=0.0, slower_s=least_s, of_s=0.0, why=why),)
    if rank:
        check_facts(dict(rank.recording), rank.source or "the recording")
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
