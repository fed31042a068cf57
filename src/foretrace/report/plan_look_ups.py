"""What `foretrace plan look-ups` answers."""

from __future__ import annotations

from collections.abc import Iterator

from foretrace.plan.look_ups import LookUpCandidate, LookUpPlan
from foretrace.report.blocks import About, Block, Column, Line, listing
from foretrace.report.units import digits, share, things
from foretrace.report.views import Report, taken

_NOTES = (
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
            (_points, Column("range", right=True, least=90)),
            (lambda each: f"{digits(each.design.over_dense)}×", Column("per area", right=True)),
            (_span, Column("range", right=True)),
            (lambda each: f"{each.design.units}, {each.design.banks} × {each.design.word}",
             Column("units, banks", right=True, least=100)),
            (lambda each: digits(1e-6 * sum(each.design.parts_um2.values())), Column("mm²", right=True, least=100)),
            (lambda each: "" if each.fits else "loses more", ""), top=top, noun="setting", how="--top",
        )  # fmt: skip
        yield Line("performance per area over the best array of multipliers, in these layers", label="per area")


def _points(each: LookUpCandidate) -> str:
    return " – ".join(f"{100 * end:.2g}" for end in each.loss_interval)


def _span(each: LookUpCandidate) -> str:
    return " – ".join(map(digits, each.design.over_dense_interval))


def _named(each: LookUpCandidate) -> str:
    measured = each.design.measured
    return f"length {measured.length}, {measured.prototypes} prototypes, {measured.distance}"


def planned_look_ups(plan: LookUpPlan, model: str) -> LookUpPlanView:
    """Return the answer about a plan."""
    sentence, best = "No setting keeps the accuracy asked for: each of them loses more.", plan.choice
    if best is not None:
        sentence = (
            f"Looking {things(plan.layers, 'layer')} up has {digits(best.design.over_dense)}× ({_span(best)}) the "
            f"performance per area of multipliers and loses {100 * best.loss:.2g} points of accuracy "
            f"({_points(best)}): {_named(best)}."
        )
    return taken(LookUpPlanView, plan, headline=sentence, model=model, notes=_NOTES)
