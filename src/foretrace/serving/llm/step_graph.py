"""`steps_graph`: steps of an engine as a TaskGraph, like that of a recording: show, blame, whatif, Perfetto.

A step is the host's work, and behind it on every pipeline stage a kernel for all that depends on tokens, one for the
attention of prompts, one for that of decoding sequences, and one for what leads to new tokens; between stages a send.
What steps share of a stage runs in their order. The replay takes, to the rounding of tasks to nanoseconds, what the
engine took.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, GraphInfo, Lane, Phase, TaskGraph, TaskKind
from foretrace.graph.writer import GraphWriter
from foretrace.serving.llm.engine import EngineRules, Served
from foretrace.serving.llm.step_times import StepTimes, along, beyond, decode_seconds
from foretrace.simulate.doubt import doubted
from foretrace.trace.trace import LaneKind

_PARTS = ("linear", "attention of prompts", "attention of decoding", "output", "swap")
_HOST, _SEND, _STEP = "schedule", "send", "step"


def steps_graph(run: Served, steps: StepTimes, rules: EngineRules) -> TaskGraph:
    """Return the steps of the log of a run, which was simulated with the middle of the step times.

    Raises ForetraceError where no steps were kept.
    """
    if not len(run.log):
        raise ForetraceError("no steps were kept; simulate with `log=` above 0.")
    log, word = run.log, "stage {}" if steps.stages > 1 else "engine"
    stages, host = range(steps.stages), steps.stages
    lanes = [Lane(rank=0, kind=LaneKind.GPU, device=s, stream=0, label=word.format(s)) for s in stages]
    lanes.append(Lane(rank=0, kind=LaneKind.CPU, label="scheduler"))
    lanes += [Lane(rank=0, kind=LaneKind.LINK, label=f"stage {s - 1} to {s}") for s in stages[1:]]
    info = GraphInfo(source=f"{steps.model} simulated", platform="cuda", world_size=1, steps=tuple(range(len(log))))
    writer = GraphWriter(lanes, info)
    clock = writer.lane(Lane(rank=0, kind=LaneKind.CPU, label="steps"))
    swap_s = steps.kv_bytes_per_token / rules.swap_bytes_per_s
    writer.mark(clock, _STEP, release=round(log[0].start * 1e9))
    before, waited = -1.0, -1
    for row in log:
        host_s = steps.table.host_s + steps.table.host_per_sequence_s * row.members
        idle = row.start > before + 1e-9  # then it waited for a request, else for the step before
        release = round(row.start * 1e9) if idle else NO_RELEASE
        before = row.end
        first = last = writer.task(TaskKind.CPU, host, _HOST, round(host_s * 1e9), release=release)
        if waited >= 0:
            writer.edge(waited, first, EdgeKind.SYNC)
        for stage in stages:
            if stage:
                sent = steps.send_s + steps.send_per_token_s * row.tokens
                link = writer.task(TaskKind.COPY, host + stage, _SEND, round(sent * 1e9))
                writer.edge(last, link, EdgeKind.DATA)
                last = link
            parts = _parts(row, steps, row.end - row.start - host_s, swap_s * row.moved)
            whole = round((row.end - row.start) * 1e9) - round(host_s * 1e9)
            ends = np.round(np.cumsum(parts) / max(sum(parts), 1e-30) * whole).astype(np.int64)
            for name, took in zip(_PARTS, np.diff(ends, prepend=0).tolist(), strict=True):
                if took:
                    task = writer.task(TaskKind.KERNEL, stage, name, took, phase=Phase.FORWARD)
                    writer.edge(last, task, EdgeKind.LAUNCH if last == first else EdgeKind.DATA)
                    last = task
            if stage == 0:  # the next step is scheduled when the first stage is done with this one
                waited = last
        writer.mark(clock, _STEP, [last])
    return _ranged(writer.graph(), run, steps)


def _ranged(graph: TaskGraph, run: Served, steps: StepTimes) -> TaskGraph:
    """Return the graph with the range of the step times, wider beyond the grids (prompts are taken as one chunk)."""
    t = steps.table
    far = [max(beyond(t, row), (row.prompts > 0) * row.tokens / t.chunk[-1], 1.0) for row in run.log]
    rows = np.flatnonzero(np.isin(graph.kind, (TaskKind.CPU, TaskKind.KERNEL)))
    wider = np.array(far)[graph.step[rows]]
    return doubted(graph, rows, "step times", t.low / wider, t.high * wider, "; ".join(steps.whys))


def _parts(row: Any, steps: StepTimes, device_s: float, swap_s: float) -> list[float]:
    """Return seconds of `_PARTS` on one stage; the attention of prompts is what the others leave of the device's."""
    t = steps.table
    linear, output = along(t.tokens, t.linear_s, row.tokens), along(t.sequences, t.output_s, row.outputs)
    decode = decode_seconds(t, row.decodes, row.context / row.decodes) if row.decodes else 0.0
    prompts = max(device_s - linear - output - decode - swap_s, 0.0) if row.prompts else 0.0
    return [linear, prompts, decode, output, swap_s]
