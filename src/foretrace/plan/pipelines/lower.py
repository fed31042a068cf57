"""`lower`: a schedule with the times of its stages as a TaskGraph; `predict`: what the engines make of it.

A process is a lane that runs its row in order; what one stage sends to another is a task on the link between their
processes, so that a hop takes time of the link and not of the stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, GraphInfo, Lane, Phase, TaskGraph, TaskKind
from foretrace.graph.writer import GraphWriter
from foretrace.simulate.timeline import Timeline, simulate
from foretrace.trace.trace import LaneKind
from foretrace.training.pipeline.schedule import Action, ActionKind, B, F, I, PipelineSchedule, U, W

BATCHES = 4  # of a simulation, see `simulated_batches`
MOST_PASSES = 300_000  # of a schedule that is simulated; all of them take a minute or two
_PHASES = {F: Phase.FORWARD, B: Phase.BACKWARD, I: Phase.BACKWARD, W: Phase.BACKWARD, U: Phase.OPTIMIZER}


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """One stage's times for one micro-batch, seconds, and sizes, bytes."""

    forward_s: float
    backward_s: float
    weight_s: float | None = None  # of the backward pass, for gradients of weights; None: half of it
    update_s: float = 0.0
    hop_s: float = 0.0  # until what it sends, forward or backward, is with its neighbour
    activation_bytes: float = 0.0  # that a micro-batch keeps from forward to backward
    weight_bytes: float = 0.0  # one version; gradients take as much
    state_bytes: float = 0.0  # the optimizer's, and what is in work
    replicas: int = 1  # devices that take micro-batches in turns

    def of(self, kind: ActionKind) -> float:
        """Return what an action takes, seconds; of replicas, until the next one ends its own."""
        weight = self.backward_s / 2 if self.weight_s is None else self.weight_s
        times = {F: self.forward_s, B: self.backward_s, I: self.backward_s - weight, W: weight}
        return times[kind] / self.replicas if kind in times else self.update_s


@dataclass(frozen=True, kw_only=True)
class PipelinePrediction:
    """What a schedule takes: seconds, and shares and bytes per process."""

    timeline: Timeline
    total_s: float  # from the first forward pass to the last update
    batch_s: float  # median of what a batch adds, and never less than a process works for one
    bubble: tuple[float, ...]  # share of `batch_s` in which a process does nothing
    in_flight: tuple[int, ...]  # micro-batches, most at a time
    nbytes: tuple[float, ...]  # weights in all versions, gradients, the optimizer's state, activations in flight


def simulated_batches(stages: int, micro_batches: int) -> int:
    """Return how many batches to simulate so that what most of them add is what every one does from then on.

    Without a flush a batch is under way in as many others' time as stages hold its micro-batches; the first ones fill
    the pipeline and the last ones leave it emptier than it is in between.
    """
    settled = BATCHES * -(-stages // micro_batches)
    return max(min(settled, MOST_PASSES // (2 * stages * micro_batches)), BATCHES)


def lower(schedule: PipelineSchedule, costs: Sequence[StageCost]) -> TaskGraph:
    """Return the task graph of a schedule; a step is a batch, which ends when every process has updated.

    Raises ForetraceError where the stages are others than the schedule's.
    """
    if len(costs) != schedule.stages:
        raise ForetraceError(f"give one cost per stage: the schedule has {schedule.stages}, got {len(costs)}.")
    processes = len(schedule.rows)
    info = GraphInfo(source=schedule.name, platform="cuda", world_size=processes,
                     steps=tuple(range(schedule.first, schedule.last)))  # fmt: skip
    writer = GraphWriter(
        (Lane(rank=r, kind=LaneKind.GPU, device=r, stream=0, label=f"process {r}") for r in range(processes)), info
    )
    clock = writer.lane(Lane(rank=0, kind=LaneKind.CPU, label="batches"))
    writer.mark(clock, "batch", release=0, step=0)
    links: dict[tuple[int, int], int] = {}
    rows: list[list[int]] = [[] for _ in range(processes)]  # of each process's actions
    sent: dict[Action, int] = {}  # by reader
    updated: dict[int, list[int]] = {}
    for process, action, needs in schedule.run_order():
        kind, number, stage = action
        batch = (number if kind == U else number // schedule.micro_batches) - schedule.first
        stages = schedule.stages_of[process] if kind == U else [stage]
        task = writer.task(
            TaskKind.KERNEL, process, kind.name.lower(), _ns(sum(costs[each].of(kind) for each in stages)), step=batch,
            layer=f"stage {stages[0]}", phase=_PHASES[kind], release=NO_RELEASE if rows[process] else 0,
        )  # fmt: skip
        for other, place in needs:
            writer.edge(rows[other][place] if other == process else sent[action], task, EdgeKind.DATA)
        rows[process].append(task)
        reader = schedule.reader(action)
        if reader is not None and (to := schedule.process_of[reader.stage]) != process:
            if (process, to) not in links:
                links[process, to] = writer.lane(Lane(rank=process, kind=LaneKind.LINK, label=f"{process} to {to}"))
            sent[reader] = writer.task(TaskKind.COPY, links[process, to], "send", _ns(costs[stage].hop_s), step=batch,
                                       layer=f"stage {stage}")  # fmt: skip
            writer.edge(task, sent[reader], EdgeKind.DATA)
        if kind == U:
            updated.setdefault(batch, []).append(task)
    for _, ends in sorted(updated.items()):
        writer.mark(clock, "batch", ends, step=-1)
    return writer.graph()


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def predict(schedule: PipelineSchedule, costs: Sequence[StageCost]) -> PipelinePrediction:
    """Return time, bubble and memory of a schedule; errors as in `lower`."""
    graph = lower(schedule, costs)
    timeline, processes = simulate(graph), range(len(schedule.rows))
    work = graph.kind == TaskKind.KERNEL
    busy = np.bincount(graph.lane[work], weights=graph.dur[work], minlength=len(processes))
    busy_s = busy / (schedule.last - schedule.first) / 1e9
    batch_s = max(timeline.step_time_s, float(busy_s.max()))  # no process does a batch in less
    return PipelinePrediction(
        timeline=timeline,
        total_s=timeline.window_ns / 1e9,
        batch_s=batch_s,
        bubble=tuple(1 - float(busy_s[r]) / batch_s if batch_s else 0.0 for r in processes),
        in_flight=tuple(map(schedule.in_flight, processes)),
        nbytes=tuple(_held(schedule, r, costs) for r in processes),
    )


def _held(schedule: PipelineSchedule, process: int, costs: Sequence[StageCost]) -> float:
    """Return bytes of a process: of its stages together, which have most in flight at different times."""
    stages = schedule.stages_of[process]
    fixed = sum((schedule.versions[s] + 1) * costs[s].weight_bytes + costs[s].state_bytes for s in stages)
    now, most = dict.fromkeys(stages, 0), 0.0
    for each in schedule.rows[process]:
        if each.kind == F:
            now[each.stage] += 1
            held = sum(-(-now[s] // costs[s].replicas) * costs[s].activation_bytes for s in stages)
            most = max(most, held)
        elif each.kind in (B, W):
            now[each.stage] -= 1
    return fixed + most
