"""What `foretrace plan` answers: plans, and how good they are proven to be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import msgspec

from foretrace.hardware.devices import named
from foretrace.plan.pipelines.cut import CutModel, ScheduledPipeline
from foretrace.plan.placement.place import Placement
from foretrace.plan.placement.problem import DeviceLoad, PlacementProblem
from foretrace.plan.transformers.alpa import UnequalPlan
from foretrace.plan.transformers.model import Parallelism, StepCost
from foretrace.plan.transformers.plan import TransformerPlan
from foretrace.report import shared, units
from foretrace.report.blocks import About, Block, Column, Kind, Line, listing, table
from foretrace.report.shared import EnergyView, NamedSearchView, search_view, searched
from foretrace.report.units import between, count, digits, nbytes, seconds, share, things, unit_for, within
from foretrace.report.views import Result, taken
from foretrace.search.named import NamedSearch

UNSIZED = "The source says nothing of sizes in memory, so whether this fits was not checked."


class PlacedDeviceView(msgspec.Struct, frozen=True, kw_only=True):
    """One device and what it runs."""

    kind: str  # accelerator or cpu
    nodes: tuple[int, ...]  # ids of the file, or positions among the operators
    load: float  # its time per sample, in the unit of the objective
    memory: float | None  # bytes; null where the source says nothing of sizes
    layers: str  # first and last


class PlacementView(Result, frozen=True, kw_only=True):
    """`foretrace plan place`: which device runs what. Times are seconds of a model, and as given of a file."""

    command: str = "plan place"
    headline: str
    source: str
    objective: str  # throughput: the largest load of a device; latency: time of one sample
    contiguous: bool
    objective_value: float
    interval: tuple[float, float] | None  # with every operator as fast and as slow as it may be; null for given times
    energy: EnergyView | None  # of a batch, on all accelerators; null where there is no power model
    proven: bool  # no placement of its kind is better, with these times
    bound: float  # that no placement of its kind is better than
    gap: float  # how much better one could be at most, as a share
    devices: tuple[PlacedDeviceView, ...]
    seconds: float  # that the search took
    method: str
    notes: tuple[str, ...]

    def shown(self, top: int) -> Iterator[Block]:
        yield About((self.source, self.objective, self.method))
        if self.interval is not None:
            unit = unit_for(self.objective_value)
            yield Line(
                f"{seconds(self.objective_value)}; {between(*self.interval, unit)} with every "
                "operator as fast and as slow as it may be"
            )
        yield from shared.energy_lines(self.energy, per="a batch")
        kind: Kind = "digits" if self.interval is None else "time"
        yield table(
            ["device", Column("nodes", "count"), Column("load", kind), Column("memory", "bytes"),
             Column("layers", "name")],
            [
                (f"{each.kind} {at}", len(each.nodes), each.load, each.memory, each.layers)
                for at, each in enumerate(self.devices)
            ],
        )  # fmt: skip


def placed(found: Placement, source: str, device: str = "", grid: float | None = None) -> PlacementView:
    """Return the answer about a placement; `device`: of accelerators, `grid`: grams of CO2 per kWh."""
    problem = found.problem
    loads = [each.load for each in found.devices if each.kind == "accelerator"]
    energy = None
    if found.interval is not None and device and loads:
        energy = shared.energy(named(device), found.objective_value, found.interval, sum(loads) / len(loads),
                              len(loads), grid)  # fmt: skip
    sized = bool(problem.nbytes.any())
    accelerators = sum(each.kind == "accelerator" for each in found.devices)
    goodness = "proven best" if found.proven else f"{units.share_at_most(found.gap)} from the best"
    what = "A batch leaves the pipeline every" if found.objective == "throughput" else "One batch takes"
    time = (digits if problem.accelerator_range is None else seconds)(found.objective_value)
    hosts = [
        f"The host of device {at} takes {seconds(host)} to launch operators: a larger batch or CUDA graphs help."
        for at, host in found.launch_bound.items()
    ]
    return taken(
        PlacementView, found, source=source, energy=energy, notes=(*(() if sized else (UNSIZED,)), *hosts),
        headline=f"{what} {time} on {things(accelerators, 'accelerator')}: {goodness}.",
        devices=tuple(
            taken(PlacedDeviceView, each, nodes=tuple(problem.ids[row] for row in each.nodes),
                  memory=each.memory if sized else None, layers=_layers(problem, each))
            for each in found.devices
        ),
    )  # fmt: skip


def _layers(problem: PlacementProblem, device: DeviceLoad) -> str:
    """Return the first and last of the forward pass."""
    rows = [row for row in device.nodes if not problem.backward[row]] or device.nodes
    return f"{problem.labels[rows[0]]} – {problem.labels[rows[-1]]}"


class PipelineStageView(msgspec.Struct, frozen=True, kw_only=True):
    """One stage, for one micro-batch."""

    layers: str  # first and last
    replicas: int  # devices that take micro-batches in turns
    recomputed: int  # blocks of operators whose forward pass is run again
    forward_s: float
    backward_s: float
    update_s: float  # of a batch
    hop_s: float  # until the next stage has what it sends
    weight_bytes: float
    activation_bytes: float


class PipelineView(Result, frozen=True, kw_only=True):
    """`foretrace plan pipeline`: a model cut into stages, and what every schedule makes of them."""

    command: str = "plan pipeline"
    headline: str
    source: str
    micro_batches: int
    memory_limit_bytes: float
    planner: str
    proven: bool  # no cut has a smaller largest load
    stages: tuple[PipelineStageView, ...]
    schedules: tuple[ScheduledPipeline, ...]  # fastest first; those that do not fit or cannot be stand last
    energy: EnergyView | None  # of a batch by the first schedule; null where there is no power model

    def shown(self, top: int) -> Iterator[Block]:
        cut = f"the cut{'' if self.planner == 'placement' else f' by {self.planner}'} is "
        cut += "proven best" if self.proven else "not proven best"
        sizes = things(len(self.stages), "stage"), things(self.micro_batches, "micro-batch")
        yield About((self.source, *sizes, cut))
        columns: list[Column | str] = [
            "schedule", Column("batch", "time"), Column("range", right=True, extra=True), Column("bubble", right=True),
            Column("in flight", right=True, extra=True), Column("most memory", right=True), Column("", wide=True),
        ]  # fmt: skip
        yield table(columns, map(_schedule_row, self.schedules))
        yield from shared.energy_lines(self.energy, per=f"a batch by {self.schedules[0].name}")
        times = [Column(each, "time") for each in ("forward", "backward", "update", "hop")]
        counts = ["replicas", "recomputed"] if any(each.replicas > 1 or each.recomputed for each in self.stages) else []
        yield table(
            ["stage", *(Column(each, "count") for each in counts), *times, Column("weights", "bytes"),
             Column("layers", "name")],
            [
                (f"{at}", *(getattr(each, name) for name in counts), each.forward_s, each.backward_s, each.update_s,
                 each.hop_s, each.weight_bytes, each.layers)
                for at, each in enumerate(self.stages)
            ],
        )  # fmt: skip


def pipelined(found: CutModel, source: str, device: str = "", grid: float | None = None) -> PipelineView:
    """Return the answer about a pipeline; `device`: of its stages, `grid`: grams of CO2 per kWh."""
    best, energy = found.schedules[0], None
    if device and best.batch_s and best.interval_s and best.bubble:
        busy_s = best.batch_s * (1 - sum(best.bubble) / len(best.bubble))
        boards = sum(each.replicas for each in found.stages)
        energy = shared.energy(named(device), best.batch_s, best.interval_s, busy_s, boards, grid)
    if best.batch_s is not None and best.fits:
        batch, stages = things(found.micro_batches, "micro-batch"), things(len(found.stages), "stage")
        headline = f"{best.name} takes {seconds(best.batch_s)} for a batch of {batch} on {stages}."
    else:
        headline = f"No schedule fits: {best.why}"
    return taken(
        PipelineView, found, found.placement, headline=headline, source=source, energy=energy,
        memory_limit_bytes=found.memory_limit,
        stages=tuple(
            taken(PipelineStageView, cost, layers=_layers(found.placement.problem, each), recomputed=again)
            for each, cost, again in zip(found.placement.devices, found.stages, found.recomputed, strict=True)
        ),
    )  # fmt: skip


def _schedule_row(each: ScheduledPipeline) -> tuple[Any, ...]:
    if each.batch_s is None or each.interval_s is None or each.bubble is None or each.memory_bytes is None:
        return each.name, None, "–", "–", "–", "–", each.why
    unit = unit_for(each.batch_s)
    flight = ", ".join(map(str, each.in_flight or ()))
    return (each.name, each.batch_s, between(*each.interval_s, unit), share(max(each.bubble)), flight,
            nbytes(max(each.memory_bytes)), each.why)  # fmt: skip


class TransformerCandidateView(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration of a large transformer."""

    configuration: dict[str, int]
    words: str  # the same, to read
    step_s: float
    interval_s: tuple[float, float]  # 80 % range
    simulated_s: float | None  # of the step as tasks; null where its passes are more than 100,000, or it does not fit
    peak_bytes: float  # of the fullest device
    why: str  # it is not the best


class UnequalStageView(msgspec.Struct, frozen=True, kw_only=True):
    """One of the stages that differ."""

    layers: int
    devices: int
    tensor: int
    sequence: int
    context: int
    data: int
    expert: int
    recompute: int
    zero: int
    pass_s: float  # of a micro-batch, forward and backward, with what it waits for messages at most
    memory_bytes: float  # of a device


class UnequalPlanView(msgspec.Struct, frozen=True, kw_only=True):
    """The quickest pipeline whose stages may differ in layers, devices and degrees, simulated pass by pass."""

    micro_batches: int
    step_s: float
    interval_s: tuple[float, float]  # 80 % range
    equal_s: float | None  # of the best pipeline of equal stages; null where none fits
    stages: tuple[UnequalStageView, ...]


class TransformerPlanView(Result, frozen=True, kw_only=True):
    """`foretrace plan transformer`: the quickest configuration that fits, and what lost to it."""

    command: str = "plan transformer"
    headline: str
    source: str
    device: str
    devices: int
    batch: int
    best: TransformerCandidateView
    unequal: UnequalPlanView | None  # asked for by --unequal
    searched: NamedSearchView | None  # asked for by --strategy
    energy: EnergyView | None  # of the best step, on all devices; null where there is no power model
    parts_s: dict[str, float]  # of the best step
    memory_bytes: tuple[dict[str, float], ...]  # by stage, what holds it
    memory_limit_bytes: float
    tokens_per_s: float
    utilisation: float  # model FLOPs over the devices' peak
    gpu_hours: float | None  # for the tokens that were asked for
    runners_up: tuple[TransformerCandidateView, ...]
    too_large: tuple[TransformerCandidateView, ...]  # quicker, but they do not fit
    valid: int  # configurations, all of them timed
    fitting: int
    lost: dict[str, int]  # reason -> configurations
    seconds: float  # of the search
    notes: tuple[str, ...]

    def shown(self, top: int, explain: bool = False) -> Iterator[Block]:
        where = f"{count(self.devices)} × {self.device}"
        yield About((self.source, where, f"batch {count(self.batch)}", f"{count(self.valid)} configurations timed"))
        hours = "" if self.gpu_hours is None else f", {count(round(self.gpu_hours))} GPU-hours in all"
        yield Line(
            f"{count(round(self.tokens_per_s))} tokens/s, {share(self.utilisation)} of the peak{hours}; "
            f"{nbytes(self.best.peak_bytes)} of {nbytes(self.memory_limit_bytes)} on the fullest device"
        )
        if self.best.simulated_s is not None:
            apart = round(100 * (self.best.simulated_s / self.best.step_s - 1), 1) + 0.0  # no minus before 0.0
            why = ": passes wait for messages that were taken to hide behind others" if apart else ""
            yield Line(f"{seconds(self.best.simulated_s)} simulated pass by pass ({apart:+.1f} %{why})")
        yield from shared.energy_lines(self.energy)
        whole = self.best.step_s
        yield table(
            ["part of the step", Column("time", "time"), Column("share", "share")],
            [(name, time, time / whole) for name, time in self.parts_s.items() if time >= 0.001 * whole],
        )
        kinds, stages = list(self.memory_bytes[0]), dict.fromkeys((0, len(self.memory_bytes) - 1))
        yield table(
            ["memory of stage", *(Column(each, "bytes") for each in kinds)],
            [(str(at), *(self.memory_bytes[at][each] for each in kinds)) for at in stages],
        )
        yield listing(
            (*self.runners_up, *self.too_large), ("words", Column("others", wide=True)), ("step_s", "step", "time"),
            ("simulated_s", Column("simulated", "time", extra=True)), ("peak_bytes", "most memory", "bytes"),
            ("why", Column("why not", wide=True)),
        )  # fmt: skip
        if self.unequal is not None:
            yield from _differing(self.unequal)
        if self.searched is not None:
            yield from searched(self.searched)
        if explain:
            lost = sorted(self.lost.items(), key=lambda item: -item[1])
            yield table(["lost by", Column("configurations", "count")], [each for each in lost if each[1]])


def planned(
    found: TransformerPlan,
    source: str,
    *,
    tokens: float | None = None,
    unequal: UnequalPlan | None = None,
    by: NamedSearch[Parallelism] | None = None,
    grid: float | None = None,
) -> TransformerPlanView:
    """Return the answer about a large transformer; `grid`: grams of CO2 per kWh."""
    best, on = found.best, found.space.on
    busy_s = best.seconds - best.parts["bubble"]  # kernels of messages run while they wait
    interval_s = best.range_beside(found.simulated_s(best.configuration))
    time = within(best.seconds, interval_s)
    return taken(
        TransformerPlanView, found, found.space, headline=f"A step takes {time} with {best.configuration}.",
        source=source, device=on.device, best=_candidate(best, "", found),
        energy=shared.energy(named(on.device), best.seconds, interval_s, busy_s, found.space.devices, grid),
        unequal=None if unequal is None else taken(
            UnequalPlanView, unequal, stages=tuple(
                taken(UnequalStageView, each, each.configuration, pass_s=each.pace_s, memory_bytes=each.nbytes)
                for each in unequal.stages
            ),
        ),
        searched=None if by is None else search_view(
            by, None if by.found.best is None else asdict(by.found.best), best.seconds
        ),
        parts_s=best.parts, memory_bytes=best.memory,
        memory_limit_bytes=on.capacity, gpu_hours=None if tokens is None else found.gpu_hours(tokens),
        runners_up=tuple(_candidate(each.cost, each.why, found) for each in found.runners_up),
        too_large=tuple(_candidate(each.cost, each.why) for each in found.too_large),
    )  # fmt: skip


def _differing(view: UnequalPlanView) -> Iterator[Block]:
    equal = "" if view.equal_s is None else f", {seconds(view.equal_s)} with the best equal ones"
    yield Line(
        f"{within(view.step_s, view.interval_s)} with stages that may differ and "
        f"{count(view.micro_batches)} micro-batches{equal}, simulated"
    )
    names = ("layers", "devices", "tensor", "context", "data", "recompute", "zero")
    yield table(
        ["stage", *(Column(each, "count") for each in names), Column("passes", "time"), Column("memory", "bytes")],
        [
            (str(at), *(getattr(each, name) for name in names), each.pass_s, each.memory_bytes)
            for at, each in enumerate(view.stages)
        ],
    )


def _candidate(cost: StepCost, why: str, plan: TransformerPlan | None = None) -> TransformerCandidateView:
    simulated_s = None if plan is None else plan.simulated_s(cost.configuration)
    return taken(
        TransformerCandidateView, cost, configuration=asdict(cost.configuration), words=str(cost.configuration),
        step_s=cost.seconds, interval_s=cost.range_beside(simulated_s), simulated_s=simulated_s, why=why,
    )  # fmt: skip
