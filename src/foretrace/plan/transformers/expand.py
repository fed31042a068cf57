"""`expand`: a configuration's step as a TaskGraph, one device per stage of its pipeline.

Devices of one stage do the same at the same time, so each stage is one lane. A pass takes its layers' share of the
step's parts, and the visible part of a hop; the hidden part is a task of the link. The last stage computes the logits.
Gradients are exchanged with the update; under ZeRO 2 and 3 with every pass, as the weights of ZeRO 3 are gathered.

Without overlap that is the closed form of `kernels.step` to the rounding of tasks to nanoseconds. With overlap it is
longer, at most by the hidden part of every hop: the closed form takes that to cost nothing once the pipeline is full,
but a pass still waits for it where the schedule has no other work in between.
"""

from __future__ import annotations

import numpy as np

from foretrace.graph.taskgraph import TaskGraph
from foretrace.plan.pipelines.lower import StageCost, lower
from foretrace.plan.transformers import kernels
from foretrace.plan.transformers.model import DeviceRates, Software, StepCost, constant_vector, fields_of, vector
from foretrace.plan.transformers.shape import TransformerSizes
from foretrace.training.pipeline.schedules import interleaved, one_f_one_b_flush


def stage_costs(
    model: TransformerSizes, on: DeviceRates, software: Software, found: StepCost, batch: int
) -> list[StageCost]:
    """What each virtual stage takes for one micro-batch, and its share of the update."""
    at, out = found.configuration, np.zeros(6)
    count, chunks, stages = batch // (at.data * at.micro), at.virtual, at.pipeline * at.virtual
    kernels.passes(vector(model, software), on.array(), constant_vector(software), fields_of(at),
                   model.layers / at.pipeline, count, out)  # fmt: skip
    forward, backward, logits, seen, hidden, update = out.tolist()
    return [
        StageCost(
            forward_s=forward / chunks + seen + (logits / 3 if stage == stages - 1 else 0.0),
            backward_s=backward / chunks + seen + (logits * 2 / 3 if stage == stages - 1 else 0.0),
            update_s=update / chunks,
            hop_s=hidden,
        )
        for stage in range(stages)
    ]


def expand(model: TransformerSizes, on: DeviceRates, software: Software, found: StepCost, batch: int) -> TaskGraph:
    """The step of a configuration that `cost` has timed, `batch` samples of it."""
    at = found.configuration
    count, costs = batch // (at.data * at.micro), stage_costs(model, on, software, found, batch)
    if at.virtual > 1:
        return lower(interleaved(len(costs), count, 1, chunks=at.virtual), costs)
    return lower(one_f_one_b_flush(len(costs), count, 1), costs)
