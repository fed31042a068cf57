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
from foretrace.graph.assemble import assemble
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, GraphInfo, Lane, Phase, TaskGraph, TaskKind
from foretrace.serving.llm.engine import EngineRules, Served
from foretrace.serving.llm.pace import across, along
from foretrace.serving.llm.step_times import StepTimes
from foretrace.simulate.doubt import doubted
from foretrace.trace.trace import LaneKind

_PARTS = ("linear", "attention of prompts", "attention of decoding", "output", "swap")
_HOST, _SEND, _STEP = len(_PARTS), len(_PARTS) + 1, len(_PARTS) + 2  # names of the other tasks


def steps_graph(run: Served, steps: StepTimes, rules: EngineRules) -> TaskGraph:
    """The steps of the log of a run, which was simulated with the middle of the step times.

    Raises ForetraceError where no steps were kept.
    """
    if not len(run.log):
        raise ForetraceError("no steps were kept; simulate with `log=` above 0.")
    stages = steps.stages
    scheduler, clock = stages, 2 * stages  # lanes: stages, the scheduler, links between stages, the marks
    tasks: list[tuple[int, ...]] = []
    edges: list[tuple[int, int, int]] = []
    last: dict[int, int] = {}  # task on each lane
    marks: list[int] = []

    def add(kind: TaskKind, name: int, lane: int, took: int, after: int = -1, *, release: int = NO_RELEASE) -> int:
        """A task behind the last one of its lane, and `after`."""
        task = len(tasks)
        phase = Phase.FORWARD if kind == TaskKind.KERNEL else Phase.NONE
        tasks.append((kind, name, lane, took, release, phase, len(marks) - 1))
        if lane in last:
            edges.append((last[lane], task, EdgeKind.STREAM if kind == TaskKind.KERNEL else EdgeKind.PROGRAM))
        if after >= 0:
            waits = {TaskKind.CPU: EdgeKind.SYNC, TaskKind.MARK: EdgeKind.SYNC, TaskKind.COPY: EdgeKind.DATA}
            launched = EdgeKind.LAUNCH if tasks[after][0] == TaskKind.CPU else EdgeKind.DATA
            edges.append((after, task, waits.get(kind, launched)))
        last[lane] = task
        return task

    marks.append(add(TaskKind.MARK, _STEP, clock, 0, release=round(run.log[0].start * 1e9)))
    before, waited = -1.0, -1
    for row in run.log:
        host = round((steps.host_s + steps.host_per_sequence_s * row.members) * 1e9)
        idle = row.start > before + 1e-9  # then it waited for a request, else for the step before
        release = round(row.start * 1e9) if idle else NO_RELEASE
        at = add(TaskKind.CPU, _HOST, scheduler, host, waited, release=release)
        before, parts = row.end, _parts(row, steps, steps.kv_bytes_per_token / rules.swap_bytes_per_s)
        whole = round((row.end - row.start) * 1e9) - host
        ends = np.round(np.cumsum(parts) / max(sum(parts), 1e-30) * whole).astype(np.int64)
        for stage in range(stages):
            if stage:
                sent = round((steps.send_s + steps.send_per_token_s * row.tokens) * 1e9)
                at = add(TaskKind.COPY, _SEND, scheduler + stage, sent, at)
            for name, took in enumerate(np.diff(ends, prepend=0).tolist()):
                at = add(TaskKind.KERNEL, name, stage, took, at) if took else at
            waited = at if stage == 0 else waited  # the next step is scheduled when the first stage is done
        marks.append(add(TaskKind.MARK, _STEP, clock, 0, at))
    names = ("kind", "name", "lane", "dur", "release", "phase", "step")
    engine = "stage {}" if stages > 1 else "engine"
    lanes = [Lane(rank=0, kind=LaneKind.GPU, device=s, stream=0, label=engine.format(s), ordered=True)
             for s in range(stages)]  # fmt: skip
    lanes.append(Lane(rank=0, kind=LaneKind.CPU, label="scheduler", ordered=True))
    lanes += [Lane(rank=0, kind=LaneKind.LINK, label=f"stage {s - 1} to {s}", ordered=True) for s in range(1, stages)]
    lanes.append(Lane(rank=0, kind=LaneKind.CPU, label="steps", ordered=True))
    src, dst, kinds = np.array(edges).T
    graph = assemble(
        dict(zip(names, np.array(tasks, np.int64).T, strict=True)),
        {"src": src, "dst": dst, "edge_kind": kinds, "lag": np.zeros(len(src), np.int64)},
        marks=np.array(marks), names=(*_PARTS, "schedule", "send", "step"), layers=(), lanes=tuple(lanes),
        info=GraphInfo(
            source=f"{steps.model} simulated", platform="cuda", world_size=1, steps=tuple(range(len(run.log)))
        ),
    )  # fmt: skip
    return _ranged(graph, run.log, steps)


def _ranged(graph: TaskGraph, log: Any, steps: StepTimes) -> TaskGraph:
    """The graph with the range of the step times, wider for steps beyond the grids (prompts taken as one chunk)."""
    t, decodes = steps.table, np.maximum(log.decodes, 1)
    beyond = np.max([
        np.ones(len(log)), log.tokens / t.tokens[-1], log.outputs / t.sequences[-1], log.decodes / t.batch[-1],
        log.context / decodes / t.mean_context[-1], (log.prompts > 0) * log.tokens / t.chunk[-1],
    ], axis=0)  # fmt: skip
    rows = np.flatnonzero(np.isin(graph.kind, (TaskKind.CPU, TaskKind.KERNEL)))
    wider = beyond[graph.step[rows]]
    return doubted(graph, rows, "step times", steps.low / wider, steps.high * wider, "; ".join(steps.whys))


def _parts(row: Any, steps: StepTimes, swap_s: float) -> list[float]:
    """Seconds of `_PARTS` on one stage; the attention of prompts is what the others leave of the step."""
    t = steps.table
    linear, output = along(t.tokens, t.linear_s, row.tokens), along(t.sequences, t.output_s, row.outputs)
    decode = across(t.batch, t.mean_context, t.decode_s, row.decodes, row.context / row.decodes) if row.decodes else 0.0
    host = steps.host_s + steps.host_per_sequence_s * row.members
    prompts = (row.end - row.start) - host - linear - output - decode - swap_s * row.moved
    return [linear, max(prompts, 0.0) if row.prompts else 0.0, decode, output, swap_s * row.moved]
