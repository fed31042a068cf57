"""What `foretrace plan look-ups` answers."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from foretrace.plan.look_ups import LookUpCandidate, LookUpPlan
from foretrace.report.blocks import About, Block, Column, Line, listing
from foretrace.report.units import digits, things
from foretrace.report.views import Report

_NOTES = (
    "areas are of a 45 nm process; wires, control and the clock are not modelled, and layers that are not looked up "
    "need multipliers beside it",
    "the range is that of areas: multipliers 30 % larger or smaller, memories cheap with ports for nothing, or dear",
)


class LookUpView(msgspec.Struct, frozen=True, kw_only=True):
    """A setting: performance per area never stands without the accuracy that was measured at it."""

    length: int
    prototypes: int
    distance: str
    accuracy: float
    loss: float
    loss_interval: tuple[float, float]
    over_dense: float  # performance per area over the best array of multipliers
    over_dense_interval: tuple[float, float]
    units: int
    banks: int
    word: int
    cycles: float  # for one sample
    area_mm2: float
    parts_mm2: dict[str, float]
    fits: bool


class LookUpPlanView(Report, frozen=True, kw_only=True):
    """`foretrace plan look-ups`: an accelerator that looks products up."""

    command: str = "plan look-ups"
    model: str
    layers: int
    share: float
    dense: float  # accuracy
    samples: int
    bits: int
    points: int
    choice: LookUpView | None
    candidates: tuple[LookUpView, ...]

    def shown(self, top: int) -> Iterator[Block]:
        yield About((
            self.model, things(self.layers, "layer"), f"{self.share:.0%} of the multiply-adds",
            f"dense accuracy {self.dense:.4g}",
        ))  # fmt: skip
        yield listing(
            self.candidates,
            (lambda each: f"{each.length}, {each.prototypes}, {each.distance}", "length, prototypes, distance"),
            (lambda each: f"{each.accuracy:.4g}", Column("accuracy", right=True)),
            (lambda each: f"{100 * each.loss:.2g}", Column("loss, points", right=True)),
            (_points, Column("range", right=True, least=90)),
            (lambda each: f"{digits(each.over_dense)}×", Column("per area", right=True)),
            (lambda each: "{} – {}".format(*map(digits, each.over_dense_interval)), Column("range", right=True)),
            (lambda each: f"{each.units}, {each.banks} × {each.word}", Column("units, banks", right=True, least=100)),
            (lambda each: digits(each.area_mm2), Column("mm²", right=True, least=100)),
            (lambda each: "" if each.fits else "loses more", ""), top=top, noun="setting", how="--top",
        )  # fmt: skip
        yield Line("performance per area over the best array of multipliers, in these layers", label="per area")


def _points(each: LookUpView) -> str:
    return " – ".join(f"{100 * end:.2g}" for end in each.loss_interval)


def _view(each: LookUpCandidate) -> LookUpView:
    design, measured = each.design, each.design.measured
    return LookUpView(
        length=measured.length, prototypes=measured.prototypes, distance=measured.distance,
        accuracy=measured.accuracy, loss=each.loss, loss_interval=each.loss_interval, over_dense=design.over_dense,
        over_dense_interval=(design.over_dense_low, design.over_dense_high), units=design.units, banks=design.banks,
        word=design.word, cycles=design.cycles, area_mm2=1e-6 * design.area_um2,
        parts_mm2={name: 1e-6 * area for name, area in design.parts_um2.items()}, fits=each.fits,
    )  # fmt: skip


def planned_look_ups(plan: LookUpPlan, model: str) -> LookUpPlanView:
    """The answer about a plan."""
    measured, choice = plan.candidates[0].design.measured, plan.choice
    if choice is None:
        sentence = "No setting keeps the accuracy asked for: each of them loses more."
    else:
        at, low, high = choice.design, choice.design.over_dense_low, choice.design.over_dense_high
        gain = at.over_dense
        what = f"{digits(gain)}× the performance per area ({digits(low)} – {digits(high)})"
        low_loss, high_loss = (f"{100 * end:.2g}" for end in choice.loss_interval)
        sentence = (
            f"Looking {things(plan.layers, 'layer')} up has {what} of multipliers at length {at.measured.length} and "
            f"{at.measured.prototypes} prototypes ({at.measured.distance}), and loses {100 * choice.loss:.2g} points of "
            f"accuracy ({low_loss} – {high_loss})."
        )
    return LookUpPlanView(
        headline=sentence, model=model, layers=plan.layers, share=plan.share, dense=measured.dense,
        samples=measured.samples, bits=measured.bits, points=plan.points,
        choice=None if choice is None else _view(choice), candidates=tuple(map(_view, plan.candidates)), notes=_NOTES,
    )  # fmt: skip
