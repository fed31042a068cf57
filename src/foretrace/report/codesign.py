"""Accelerators that are planned, as answers: `foretrace codesign`, the best one with its plan, and `plan look-ups`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import msgspec

from foretrace.graph.taskgraph import Phase
from foretrace.hardware.accelerators import Accelerator
from foretrace.plan.codesign.answer import Codesign, CodesignedPlan, LinkRow
from foretrace.plan.codesign.schedule import LayerSchedule
from foretrace.plan.codesign.search import CHOSEN, ENERGY_RANGE
from foretrace.plan.look_ups import LookUpCandidate, LookUpPlan
from foretrace.report.blocks import About, Block, Chart, Column, Curve, LaneChart, LaneSpan, Line, listing
from foretrace.report.names import command
from foretrace.report.shared import NamedSearchView, search_view, searched
from foretrace.report.units import count, digits, ranged, seconds, share, share_at_most, things, within
from foretrace.report.views import Report, taken
from foretrace.search.named import NamedSearch

NOTES = (
    "nothing here was measured: cycles are closed forms of systolic arrays, vector operators take stated numbers of "
    "operations, ranges are the ends of what is assumed of buffer ports and vector operators",
    "not modelled: overlap of messages with computing, a network on the chip, which flatters many small cores",
)


class DesignView(msgspec.Struct, frozen=True, kw_only=True):
    """An accelerator; as text, any command takes it for a device."""

    text: str
    tensor_cores: int
    width: int  # rows of each array
    depth: int  # its columns
    vector_cores: int
    lanes: int  # of each
    buffer_bytes: int
    area: float | None  # mm² in 45 nm; null for sizes that no table has


class CodesignBaselineView(msgspec.Struct, frozen=True, kw_only=True):
    """Something else than the best design with its best plan."""

    design: DesignView
    plan: dict[str, int]
    words: str  # the plan, to read
    iteration_s: float
    interval_s: tuple[float, float]
    ratio: float  # over the best
    ratio_interval: tuple[float, float]  # under one assumption for both, plans as they are
    calls: int  # designs that a search priced; 0 where none did


class ParetoDesignView(msgspec.Struct, frozen=True, kw_only=True):
    """A design that none beats in area, throughput and energy at once, each with its quickest plan."""

    design: str
    area: float  # mm²
    throughput: float  # samples/s
    energy_j: float  # of a batch
    plan: dict[str, int]


class LayerScheduleView(msgspec.Struct, frozen=True, kw_only=True):
    """Operators of a layer on the cores of a device, a micro-batch's forward or backward pass."""

    phase: str
    operators: int
    serial_s: float  # one after another, each in its better mode
    schedule_s: float
    bound_s: float  # no schedule is shorter
    gap: float
    proven: bool
    simulated_s: float
    spans: tuple[LaneSpan, ...]  # of operators on cores, by begin


class CodesignView(Report, frozen=True, kw_only=True):
    """`foretrace codesign`: which accelerator to build for a model, with the plan that uses it."""

    command: str = "codesign"
    source: str
    training: bool
    decode: int  # words in the cache behind which each sample has one more; 0: whole sequences
    devices: int
    batch: int
    link_gb_s: float
    design: DesignView
    plan: dict[str, int]
    words: str
    iteration_s: float
    interval_s: tuple[float, float]
    throughput: float  # samples/s
    simulated_s: float | None  # of the winner as tasks; null where its passes are more than 100,000
    area: float  # mm² in 45 nm
    energy_j: float  # of a batch
    energy_interval_j: tuple[float, float]
    pareto: tuple[ParetoDesignView, ...]  # by area
    baselines: dict[str, CodesignBaselineView]
    plan_gain: float  # of TPU-like: an expert's plan over its best one
    design_gain: float  # with the best plan of TPU-like: TPU-like over the best design for that plan
    links: tuple[LinkRow, ...]
    layer: tuple[LayerScheduleView, ...]
    searched: NamedSearchView | None  # asked for by --strategy
    designs: int
    plans: int  # that fit, with the least recomputation
    proven: bool  # every design was priced with every plan
    seconds: float  # of CPU that the search took

    def shown(self, top: int) -> Iterator[Block]:
        behind = f"one word behind {count(self.decode)}"
        what = "training" if self.training else behind if self.decode else "inference"
        yield About((self.source, what, things(self.devices, "device"), f"batch {count(self.batch)}",
                     f"{digits(self.link_gb_s)} GB/s links"))  # fmt: skip
        sure = "proven best within the model" if self.proven else "not proven"
        yield Line(f"{things(self.designs, 'design')} × {things(self.plans, 'plan')}, all priced: {sure}")
        yield Line(f"{ranged(self.energy_j, *self.energy_interval_j)} J a batch", label="energy")
        if self.simulated_s is not None:
            apart = round(100 * (self.simulated_s / self.iteration_s - 1), 1) + 0.0
            yield Line(f"{seconds(self.simulated_s)} simulated pass by pass ({apart:+.1f} %)")
        yield listing(
            list(self.baselines.items()),
            (lambda each: each[0], Column("compared with", wide=True)),
            (lambda each: each[1].iteration_s, "iteration", "time"),
            (lambda each: each[1].interval_s, Column("range", "seconds", extra=True)),
            (lambda each: each[1].ratio, "times as long", "ratio"),
            (lambda each: each[1].ratio_interval, "ratio's range", "ratio"),
            (
                lambda each: each[1].design.text.partition(":")[2].replace(",", ", "),
                Column("design", wide=True, extra=True),
            ),
        )
        yield Line(
            f"the plan alone gains {self.plan_gain:.2f}×, the design alone {self.design_gain:.2f}×", label="apart"
        )
        yield listing(
            self.links, ("link", "links"), ("iteration_s", "iteration", "time"),
            ("tpu_like", "TPU-like", "ratio"), ("balanced", "balanced", "ratio"),
            (lambda each: _short(each.design), Column("best design", wide=True)),
        )  # fmt: skip
        for each in self.layer:
            yield LaneChart(title=f"a layer {each.phase} on the cores of the winner", spans=each.spans)
            sure = "proven shortest" if each.proven else f"{share_at_most(each.gap)} from the shortest"
            yield Line(
                f"{seconds(each.schedule_s)} for {each.operators} operators, {seconds(each.serial_s)} one after "
                f"another; {sure}", label=f"a layer {each.phase}",
            )  # fmt: skip
        if self.searched is not None:
            yield from searched(self.searched)
        rows = _rising(self.pareto)
        area, rate = zip(*((each.area, each.throughput) for each in rows), strict=True)
        yield Chart(title="most samples/s by area, mm²", curves=(Curve(name="Pareto front", x=area, y=rate),))
        step = max((len(rows) - 1) / max(top - 1, 1), 1e-9)  # so many of them, from the smallest to the quickest
        yield listing(
            [rows[i] for i in sorted({min(round(step * k), len(rows) - 1) for k in range(top)})],
            ("area", "area, mm²", "digits"), ("throughput", "samples/s", "digits"),
            ("energy_j", "energy, J", "digits"),
            (lambda each: _short(each.design), Column("design", wide=True)), top=top, noun="design",
        )  # fmt: skip


def codesigned(
    found: Codesign, source: str, layer: Sequence[tuple[LayerSchedule, float]], *notes: str,
    by: NamedSearch[tuple[int, ...]] | None = None,
) -> CodesignView:  # fmt: skip
    """Return the answer; `layer`: schedules with the seconds that they simulate to."""
    best, space = found.best, found.space
    tpu, area = found.baselines["TPU-like"], best.design.area / 1e6
    ratio = tpu.over(best)[0]
    gain = f"{ratio:.2f}× faster" if ratio >= 1 else f"{1 / ratio:.2f}× slower"
    low, high = (factor * found.joules for factor in ENERGY_RANGE)
    fixed, expert = (
        found.baselines[each] for each in ("best design for the plan of TPU-like", "TPU-like with an expert's plan")
    )
    return taken(
        CodesignView, found, space, best, source=source, design=_design(best.design), plan=asdict(best.plan),
        words=str(best.plan), area=area, energy_j=found.joules, energy_interval_j=(low, high),
        headline=f"{_short(str(best.design))} ({area:.3g} mm²) takes {within(best.iteration_s, best.interval_s)} a "
        f"batch with {best.plan}, {gain} than TPU-like ({tpu.design.area / 1e6:.3g} mm²).",
        simulated_s=found.simulated.window_ns / 1e9 if found.drawable else None,
        pareto=tuple(_pareto(each, space.batch) for each in found.pareto),
        baselines={name: _baseline(each, best) for name, each in found.baselines.items()},
        plan_gain=expert.iteration_s / tpu.iteration_s, design_gain=tpu.iteration_s / fixed.iteration_s,
        layer=tuple(_layer(*each) for each in layer),
        searched=None if by is None else search_view(
            by, None if by.found.best is None else dict(zip(CHOSEN, by.found.best, strict=True)), best.iteration_s
        ),
        designs=len(space.designs), plans=len(space.plans[0]), notes=(*NOTES, *notes),
        next=command("plan", "transformer", source, device=best.design, devices=space.devices, batch=space.batch)
        if space.training else "",
    )  # fmt: skip


def _design(design: Accelerator) -> DesignView:
    return taken(DesignView, design, text=str(design), buffer_bytes=design.buffer, area=design.area / 1e6)


def _baseline(each: CodesignedPlan, best: CodesignedPlan) -> CodesignBaselineView:
    ratio, low, high = each.over(best)
    return taken(CodesignBaselineView, each, design=_design(each.design), plan=asdict(each.plan), words=str(each.plan),
                 ratio=ratio, ratio_interval=(low, high))  # fmt: skip


def _pareto(each: CodesignedPlan, batch: int) -> ParetoDesignView:
    return ParetoDesignView(design=str(each.design), area=each.design.area / 1e6, throughput=batch / each.iteration_s,
                            energy_j=each.joules, plan=asdict(each.plan))  # fmt: skip


def _layer(each: LayerSchedule, simulated_s: float) -> LayerScheduleView:
    return taken(
        LayerScheduleView, each, phase="backward" if each.phase == Phase.BACKWARD else "forward",
        operators=len(each.operators), schedule_s=each.ns / 1e9, simulated_s=simulated_s, spans=tuple(sorted(
            (LaneSpan(lane=each.lane(i), name=operator.name, begin_s=begin / 1e9, end_s=(begin + each.took(i)) / 1e9,
                  key="compute" if operator.tensor else "comm")
             for i, (operator, begin) in enumerate(zip(each.operators, each.begins, strict=True))),
            key=lambda span: span.begin_s,
        )),
    )  # fmt: skip


def _short(text: str) -> str:
    """Return a design without what all designs of an answer share."""
    return ",".join(each for each in text.partition(":")[2].split(",") if not each.startswith("link="))


def _rising(pareto: Sequence[ParetoDesignView]) -> list[ParetoDesignView]:
    """Return those that are quicker than all smaller ones."""
    rows = list[ParetoDesignView]()
    for each in pareto:
        if each.throughput > (rows[-1].throughput if rows else 0.0):
            rows.append(each)
    return rows


_LOOK_UP_NOTES = (
    "areas are of a 45 nm process; wires, control and the clock are not modelled, and layers that are not looked up "
    "need multipliers beside it",
    "the range is that of areas: multipliers 30 % larger or smaller, memories cheap with ports for nothing, or dear",
)


class LookUpPlanView(Report, frozen=True, kw_only=True):
    """`foretrace plan look-ups`: performance per area of accelerators, each beside the accuracy of its setting."""

    command: str = "plan look-ups"
    model: str
    layers: int
    share: float  # of the multiply-adds with weights
    points: int  # designs that were compared
    choice: LookUpCandidate | None
    candidates: tuple[LookUpCandidate, ...]

    def shown(self, top: int) -> Iterator[Block]:
        yield About((self.model, things(self.layers, "layer"), f"{share(self.share)} of the multiply-adds"))
        yield listing(
            self.candidates, (_named, "setting"),
            (lambda each: f"{each.design.measured.accuracy:.4g}", Column("accuracy", right=True)),
            (lambda each: f"{100 * each.loss:.2g}", Column("loss, points", right=True)),
            (_points, Column("range", right=True, extra=True)),
            ("design.over_dense", "per area", "ratio"), ("design.over_dense_interval", "range", "digits"),
            (lambda each: f"{each.design.units}, {each.design.banks} × {each.design.word}",
             Column("units, banks", right=True, extra=True)),
            (lambda each: digits(1e-6 * sum(each.design.parts_um2.values())), Column("mm²", right=True, extra=True)),
            (lambda each: "" if each.fits else "loses more", ""), top=top, noun="setting", how="--top",
        )  # fmt: skip
        yield Line("performance per area over the best array of multipliers, in these layers", label="per area")


def _points(each: LookUpCandidate) -> str:
    return " – ".join(f"{100 * end:.2g}" for end in each.loss_interval)


def _named(each: LookUpCandidate) -> str:
    measured = each.design.measured
    return f"length {measured.length}, {measured.prototypes} prototypes, {measured.distance}"


def planned_look_ups(plan: LookUpPlan, model: str) -> LookUpPlanView:
    """Return the answer about a plan."""
    sentence, best = "No setting keeps the accuracy asked for: each of them loses more.", plan.choice
    if best is not None:
        low, high = map(digits, best.design.over_dense_interval)
        sentence = (
            f"Looking {things(plan.layers, 'layer')} up has {digits(best.design.over_dense)}× ({low} – {high}) the "
            f"performance per area of multipliers and loses {100 * best.loss:.2g} points of accuracy "
            f"({_points(best)}): {_named(best)}."
        )
    return taken(LookUpPlanView, plan, headline=sentence, model=model, notes=_LOOK_UP_NOTES)
