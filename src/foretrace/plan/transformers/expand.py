"""`expand`: a configuration's step as a TaskGraph, one device per stage of its pipeline.

Devices of one stage do the same at the same time, so each stage is one lane. A pass takes its layers' share of the
step's parts, and the visible part of a hop; the hidden part is a task of the link. The last stage computes the logits.
Gradients are exchanged with the update; under ZeRO 2 and 3 with every pass, as the weights of ZeRO 3 are gathered.

Without overlap that is the closed form of `kernels.step` to the rounding of tasks to nanoseconds. With overlap it is
longer, at most by the hidden part of every hop: the closed form takes that to cost nothing once the pipeline is full,
but a pass still waits for it where the schedule has no other work in between.
"""

from __future__ import annotations

from foretrace.graph.taskgraph import TaskGraph
from foretrace.plan.pipelines.lower import BATCHES, StageCost, lower
from foretrace.plan.transformers import kernels
from foretrace.plan.transformers.model import Parallelism, fields_of
from foretrace.plan.transformers.space import ParallelismSpace
from foretrace.training.pipeline.schedules import interleaved, one_f_one_b_flush, two_bw


def stage_cost(space: ParallelismSpace, at: Parallelism, layers: float, count: int, *, last: bool) -> StageCost:
    """Return what a stage takes for one of `count` micro-batches, and its share of the update.

    `layers`: of its device, which has `at.virtual` such stages; `last`: it computes the logits.
    """
    share = at.virtual
    forward, backward, logits, seen, hidden, update = kernels.passes(*space.arrays, fields_of(at), float(layers), count)
    return StageCost(
        forward_s=forward / share + seen + (logits / 3 if last else 0.0),
        backward_s=backward / share + seen + (logits * 2 / 3 if last else 0.0), update_s=update / share, hop_s=hidden,
    )  # fmt: skip


def stage_costs(space: ParallelismSpace, at: Parallelism) -> list[StageCost]:
    """Return what each virtual stage of a configuration takes."""
    stages, layers = at.pipeline * at.virtual, space.model.layers / at.pipeline
    count = space.batch // (at.data * at.micro)
    return [stage_cost(space, at, layers, count, last=each == stages - 1) for each in range(stages)]


def expand(space: ParallelismSpace, at: Parallelism) -> TaskGraph:
    """Return the step of a configuration; without a flush several, of which the first fill the pipeline."""
    costs, count = stage_costs(space, at), space.batch // (at.data * at.micro)
    if at.virtual > 1:
        return lower(interleaved(len(costs), count, 1, chunks=at.virtual), costs)
    if at.versions > 1:
        return lower(two_bw(len(costs), count, BATCHES), costs)
    return lower(one_f_one_b_flush(len(costs), count, 1), costs)
