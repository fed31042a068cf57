"""A model cut into the stages of a pipeline, and what every schedule makes of them.

The best placement gives every device a stage; `stages.py` has planners whose stages may have replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.errors import ForetraceError
from foretrace.model.operator_graph import Role
from foretrace.plan.pipelines.lower import BATCHES, MOST_PASSES, StageCost, predict, simulated_batches
from foretrace.plan.pipelines.stages import CostGraph, NodeCosts, ParallelStage, plan_stages
from foretrace.plan.placement.blocks import PlacementBlocks, contract, crossing
from foretrace.plan.placement.ideals import lattice
from foretrace.plan.placement.place import Placement, place
from foretrace.plan.placement.problem import DeviceLoad, PlacementProblem
from foretrace.plan.placement.source import KEPT, PlaceableModel
from foretrace.training.pipeline.schedule import SCHEDULES

PLANNERS = ("placement", "pipedream", "piper")
_MOST_CUTS = 500  # places where stages with replicas may end; beyond, those of one topological order


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduledPipeline:
    """A schedule of the stages with figures as in `PipelinePrediction`; without them, `why` it cannot be."""

    name: str
    batch_s: float | None = None
    interval_s: tuple[float, float] | None = None  # with every operator as fast and as slow as it may be
    bubble: tuple[float, ...] | None = None  # per stage, share of a batch's time without work
    in_flight: tuple[int, ...] | None = None  # micro-batches, most at a time
    memory_bytes: tuple[float, ...] | None = None  # per stage
    fits: bool = False
    why: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class CutModel:
    """The stages, and the schedules by time per batch; those that do not fit or cannot be stand last."""

    placement: Placement
    planner: str
    stages: tuple[StageCost, ...]
    recomputed: tuple[int, ...]  # blocks of operators of each stage whose forward pass is run again
    schedules: tuple[ScheduledPipeline, ...]
    micro_batches: int
    memory_limit: float


def stage_costs(
    model: PlaceableModel, placement: Placement, kernels_s: Float64, host_s: Float64
) -> tuple[StageCost, ...]:
    """Return times and sizes of every stage for one micro-batch, of kernels and their launching host (n each).

    A pass takes as long as its kernels or as its host, whichever is longer.
    """
    graph, count, back = model.graph, len(placement.devices), model.backward
    stage = np.full(len(graph), -1)
    for number, each in enumerate(placement.devices):
        stage[[placement.problem.ids[row] for row in each.nodes]] = number
    starts, ends, tensors = graph.edges
    leaving = (stage[starts] >= 0) & (stage[ends] >= 0) & (stage[starts] != stage[ends])
    sent = np.zeros((2, count))  # forward, backward
    for tensor, way, source in set(zip(*(each[leaving].tolist() for each in (tensors, back[starts], stage[starts])),
                                       strict=True)):  # fmt: skip
        sent[int(way), source] += graph.tensors[tensor].nbytes

    def slower(ways: Iterable[Float64]) -> Float64:
        totals: Float64 = np.max([_totals(stage, each, count) for each in ways], axis=0)
        return totals

    times = kernels_s, host_s
    weights, kept = (_totals(stage, model.held(*roles), count) for roles in ((Role.WEIGHT,), KEPT))
    columns: dict[str, Float64] = {
        "forward_s": slower(each * ~back for each in times), "backward_s": slower(each * back for each in times),
        "update_s": slower(map(model.update_times, times)), "hop_s": sent.max(axis=0) / model.bytes_per_s,
        "activation_bytes": _totals(stage, model.held(Role.ACTIVATION), count), "weight_bytes": weights,
        "state_bytes": np.maximum(kept - 2 * weights, 0.0),
    }  # fmt: skip
    return tuple(StageCost(**dict(zip(columns, row, strict=True))) for row in np.stack([*columns.values()], 1).tolist())


def _totals(label: Int64, values: Float64, count: int) -> Float64:
    """Return the sums of values (n) with labels 0, 1, ...; those without (−1) are left out."""
    mine = label >= 0
    return np.bincount(label[mine], weights=values[mine], minlength=count).astype(np.float64)


def cost_graph(model: PlaceableModel, kernels_s: Float64, host_s: Float64) -> tuple[CostGraph, PlacementBlocks]:
    """Return what planners with replicas read: blocks, as slow as kernels or host; of recomputed ones inputs stay."""
    problem = model.problem()
    blocks = contract(problem)
    if lattice(blocks, _MOST_CUTS) is None:
        blocks = blocks.linear()
    of, count, ids = np.full(len(model.graph), -1), len(blocks), list(problem.ids)
    for number, rows in enumerate(blocks.rows):
        of[[problem.ids[row] for row in rows]] = number
    time, forward = (
        np.maximum(*(_totals(of, each * which, count) for each in (kernels_s, host_s)))
        for which in (1, ~model.backward)
    )
    inputs = np.zeros(count)
    edges = {(before, after): 0.0 for before, many in enumerate(blocks.after) for after in many}
    for home, readers, row in zip(*crossing(problem, blocks), strict=True):
        for reader in () if problem.backward[row] else readers:
            nbytes = problem.transfer[row] * model.bytes_per_s
            edge = min(home, reader), max(home, reader)  # blocks stand in order; a backward pass may read a later one's
            edges[edge] = edges.get(edge, 0.0) + nbytes
            inputs[reader] += nbytes
    kept = np.zeros(len(ids)) if problem.saved is None else problem.saved
    saved, fixed = (_totals(of[ids], each, count) for each in (kept / model.devices, problem.nbytes - kept))
    costs = NodeCosts(
        time=np.stack([time, time + forward]), kept_bytes=np.stack([saved, np.minimum(inputs, saved)]),
        fixed_bytes=np.stack([fixed, fixed]), weight_bytes=_totals(of, model.held(Role.WEIGHT), count), entering={},
        leaving={},
    )  # fmt: skip
    return CostGraph(edges=edges, costs={1: costs}), blocks


def _replicated(model: PlaceableModel, cost: StageCost, stage: ParallelStage, costs: NodeCosts) -> StageCost:
    """Return a stage's cost on its replicas: each recomputes, and all exchange gradients with every update."""
    again, d = list(stage.again), stage.data
    kept, forward = costs.kept_bytes[:, again], (costs.time[1] - costs.time[0])[again]
    return replace(
        cost, replicas=d, backward_s=cost.backward_s + float(forward.sum()),
        update_s=cost.update_s + 2 * (d - 1) / d * cost.weight_bytes / model.bytes_per_s,
        activation_bytes=cost.activation_bytes - float((kept[0] - kept[1]).sum()),
        state_bytes=cost.state_bytes + float(kept[0].max(initial=0.0)),
    )  # fmt: skip


def _stages(
    model: PlaceableModel, problem: PlacementProblem, planner: str, micro_batches: int
) -> tuple[Placement, tuple[ParallelStage, ...]]:
    """Return the placement of a planner and, where it has replicas, its stages."""
    if planner == "placement":
        return place(problem), ()
    graph, blocks = cost_graph(model, model.costs.seconds, model.host_s)
    limit, count = (model.memory_limit, micro_batches) if planner == "piper" else (np.inf, 0)
    levels = [(model.devices, model.bytes_per_s)]
    stages = plan_stages(graph, levels, memory_bytes=limit, micro_batches=count)
    if again := [v for each in stages for v in each.again]:  # what one of them keeps is there beside all else
        limit -= graph.costs[1].kept_bytes[0, again].max()
        stages = plan_stages(graph, levels, memory_bytes=limit, micro_batches=count)
    devices = tuple(
        DeviceLoad(kind="accelerator", nodes=tuple(sorted(row for v in each.nodes for row in blocks.rows[v])),
                   load=each.load, memory=0.0)
        for each in stages
    )  # fmt: skip
    return Placement(
        problem=problem, objective="throughput", contiguous=True, devices=devices, bound=0.0, seconds=0.0,
        objective_value=max(each.load for each in stages), method=planner,
    ), stages  # fmt: skip


def cut(
    model: PlaceableModel, *, micro_batches: int, names: Sequence[str] = (), planner: str = "placement"
) -> CutModel:
    """Cut a model into stages by one of PLANNERS and simulate the schedules of that name, by default all.

    The model's batch is a micro-batch. Raises ForetraceError for a model that is not trained, for an unknown schedule
    or planner, and where no placement fits.
    """
    if planner not in PLANNERS:
        raise ForetraceError(f"`planner=` must be {', '.join(PLANNERS)}, got {planner!r}; choose one.")
    if not model.backward.any():
        raise ForetraceError(f"{model.graph.name} has no backward pass, which a pipeline of training needs.")
    problem = model.problem()
    if not problem.nbytes.any():
        raise ForetraceError(
            f"{model.graph.name} says nothing of sizes in memory, which stages need; give the model, not a recording."
        )
    most = max(MOST_PASSES // (2 * BATCHES * model.devices), 1)
    if micro_batches > most:
        raise ForetraceError(
            f"`micro_batches={micro_batches}` are more passes than are simulated; give {most} or fewer: what "
            "a micro-batch adds is the same from some number on."
        )
    for name in names:
        if name not in SCHEDULES:
            raise ForetraceError(f"there is no schedule {name}; choose from {', '.join(SCHEDULES)}.")
    placement, stages = _stages(model, problem, planner, micro_batches)
    ways = [(model.costs.seconds, model.host_s), *model.ends]
    expected, *others = (stage_costs(model, placement, *each) for each in ways)
    if stages:
        tables = [cost_graph(model, *each)[0].costs[1] for each in ways]
        expected, *others = (
            tuple(_replicated(model, cost, stage, table) for cost, stage in zip(each, stages, strict=True))
            for table, each in zip(tables, (expected, *others), strict=True)
        )
    # The first micro-batches of replicas come and the last ones go later than in turns that are always full.
    late = sum((1 - 1 / each.replicas) * (each.forward_s + each.backward_s) for each in others[1])
    found, batches = [], simulated_batches(len(expected), micro_batches)
    for name in names or SCHEDULES:
        try:
            if name == "interleaved":
                raise ForetraceError("it needs several stages per device, and the model was cut into one each.")
            schedule = SCHEDULES[name](len(expected), micro_batches, batches)
        except ForetraceError as error:
            found.append(ScheduledPipeline(name=name, why=str(error)))
            continue
        took = predict(schedule, expected)
        low, high = (predict(schedule, each).batch_s for each in others)
        fits = max(took.nbytes) <= model.memory_limit
        why = "" if fits else f"a device needs {max(took.nbytes) / 1e9:.3g} GB."
        found.append(
            ScheduledPipeline(
                name=name, batch_s=took.batch_s, interval_s=(low, high + late), bubble=took.bubble,
                in_flight=took.in_flight, memory_bytes=took.nbytes, fits=fits, why=why,
            )
        )  # fmt: skip
    found.sort(key=lambda each: (not each.fits, np.inf if each.batch_s is None else each.batch_s))
    return CutModel(
        placement=placement, planner=planner, stages=expected, micro_batches=micro_batches, schedules=tuple(found),
        recomputed=tuple(len(each.again) for each in stages) or (0,) * len(expected), memory_limit=model.memory_limit,
    )  # fmt: skip
