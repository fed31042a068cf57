"""A model cut into the stages of a pipeline by the best placement, and what every schedule makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Float64, Mask
from foretrace.errors import ForetraceError
from foretrace.model.operator_graph import Role
from foretrace.plan.pipelines.lower import StageCost, predict
from foretrace.plan.placement.place import Placement, place
from foretrace.plan.placement.source import KEPT, PlaceableModel
from foretrace.training.pipeline.schedules import SCHEDULES

_BATCHES = 4  # of a simulation: without a flush, what a batch adds settles after the first ones


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduledPipeline:
    """A schedule of the stages with figures as in `PipelinePrediction`; without them, `why` it cannot be."""

    name: str
    batch_s: float | None = None
    interval_s: tuple[float, float] | None = None  # with every operator as fast and as slow as it may be
    bubble: tuple[float, ...] | None = None  # per stage, share of the time without work, filling and draining included
    in_flight: tuple[int, ...] | None = None  # micro-batches, most at a time
    memory_bytes: tuple[float, ...] | None = None  # per stage
    fits: bool = False
    why: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class CutModel:
    """The stages, and the schedules by time per batch; those that do not fit or cannot be stand last."""

    placement: Placement
    stages: tuple[StageCost, ...]
    schedules: tuple[ScheduledPipeline, ...]
    micro_batches: int
    memory_limit: float


def stage_costs(
    model: PlaceableModel, placement: Placement, kernels_s: Float64, host_s: Float64
) -> tuple[StageCost, ...]:
    """Times and sizes of every stage for one micro-batch, of kernels and of the host that launches them (n each).

    A pass takes as long as its kernels or as its host, whichever is longer.
    """
    graph = model.graph
    stage = np.full(len(graph), -1)
    for number, each in enumerate(placement.devices):
        stage[[placement.problem.ids[row] for row in each.nodes]] = number
    starts, ends, tensors = graph.edges
    leaving = {
        (int(tensor), int(stage[start]), bool(model.backward[start]))
        for tensor, start, end in zip(tensors, starts, ends, strict=True)
        if stage[start] >= 0 <= stage[end] and stage[start] != stage[end]
    }
    updates = [model.update_times(each) for each in (kernels_s, host_s)]

    def slower(rows: Mask) -> float:
        return float(max(kernels_s[rows].sum(), host_s[rows].sum()))

    found = []
    for number in range(len(placement.devices)):
        mine = stage == number
        held = dict.fromkeys(Role, 0.0)
        for storage, at in model.holder.items():
            if mine[at]:
                held[graph.storages[storage].role] += graph.storages[storage].nbytes
        sizes = [
            sum(graph.tensors[tensor].nbytes for tensor, source, back in leaving if source == number and back == way)
            for way in (False, True)
        ]
        kept = sum(held[role] for role in KEPT)
        weights = held[Role.WEIGHT]
        found.append(
            StageCost(
                forward_s=slower(mine & ~model.backward),
                backward_s=slower(mine & model.backward),
                update_s=float(max(each[mine].sum() for each in updates)),
                hop_s=max(sizes) / model.bytes_per_s,
                activation_bytes=held[Role.ACTIVATION],
                input_bytes=float(sizes[0]),
                weight_bytes=weights,
                state_bytes=max(kept - 2 * weights, 0.0),
            )
        )
    return tuple(found)


def cut(model: PlaceableModel, *, micro_batches: int, names: Sequence[str] = ()) -> CutModel:
    """Cut a model into one stage per device and simulate the schedules of that name, by default all.

    The model's batch is a micro-batch. Raises ForetraceError for a model that is not trained, for an unknown schedule,
    and where no placement fits.
    """
    if not model.backward.any():
        raise ForetraceError(f"{model.graph.name} has no backward pass, which a pipeline of training needs.")
    if not model.problem().nbytes.any():
        raise ForetraceError(
            f"{model.graph.name} says nothing of sizes in memory, which stages need; give the model, not a recording."
        )
    for name in names:
        if name not in SCHEDULES:
            raise ForetraceError(f"there is no schedule {name}; choose from {', '.join(SCHEDULES)}.")
    placement = place(model.problem())
    if any(each.kind != "accelerator" for each in placement.devices):
        raise ForetraceError("a stage of a pipeline must be on an accelerator; leave CPUs out.")
    expected = stage_costs(model, placement, model.costs.seconds, model.host_s)
    others = [stage_costs(model, placement, *each) for each in model.ends]
    found = []
    for name in names or SCHEDULES:
        if name == "interleaved":
            why = "it needs several stages per device, and the model was cut into one each."
            found.append(ScheduledPipeline(name=name, why=why))
            continue
        try:
            schedule = SCHEDULES[name](len(expected), micro_batches, _BATCHES)
        except ForetraceError as error:
            found.append(ScheduledPipeline(name=name, why=str(error)))
            continue
        took = predict(schedule, expected)
        low, high = (predict(schedule, each).batch_s for each in others)
        fits = max(took.nbytes) <= model.memory_limit
        why = "" if fits else f"a device needs {max(took.nbytes) / 1e9:.3g} GB."
        found.append(
            ScheduledPipeline(
                name=name, batch_s=took.batch_s, interval_s=(low, high), bubble=took.bubble, in_flight=took.in_flight,
                memory_bytes=took.nbytes, fits=fits, why=why,
            )
        )  # fmt: skip
    found.sort(key=lambda each: (not each.fits, np.inf if each.batch_s is None else each.batch_s))
    return CutModel(
        placement=placement, stages=expected, schedules=tuple(found), micro_batches=micro_batches,
        memory_limit=model.memory_limit,
    )  # fmt: skip
