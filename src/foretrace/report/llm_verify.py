"""`foretrace llm verify` as an answer: figures of a real engine beside their predictions."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from foretrace.experiment.statistics import Ratio
from foretrace.report.blocks import About, Block, Column, Line, listing
from foretrace.report.units import between, count, in_unit, share, signed, unit_for
from foretrace.report.views import Report, taken
from foretrace.serving.llm.verify import VerifiedEngine


class ServedFigureView(msgspec.Struct, frozen=True, kw_only=True):
    """One figure: medians over the runs, and ratios of each run."""

    name: str
    measured_s: float
    predicted_s: float
    measured: Ratio  # over predicted
    predicted: Ratio  # 1, with its range
    same: Ratio  # a second real run over the first
    error: float  # predicted / measured - 1
    covered: bool


class LlmVerifyView(Report, frozen=True, kw_only=True):
    """`foretrace llm verify`: predictions for a live engine, and what it did."""

    command: str = "llm verify"
    policy: str
    runs: int
    requests: str
    steps: int
    step_error: float
    preemptions: int
    figures: tuple[ServedFigureView, ...]
    ledger: str

    def shown(self, top: int) -> Iterator[Block]:
        yield About(("a small decoder on this processor", self.policy, self.requests))
        yield listing(
            self.figures, "name", ("predicted_s", "predicted", "time"), (_range, Column("80 % range", right=True)),
            ("measured_s", "measured", "time"), (lambda each: signed(each.error), Column("error", right=True)),
            (lambda each: share(abs(each.same.value - 1)), Column("two real runs", right=True)),
            (lambda each: "yes" if each.covered else "no", "covered"),
        )  # fmt: skip
        yield Line(
            f"{count(self.steps)} steps of {self.runs} runs, each made twice; single steps are predicted within "
            f"{share(self.step_error)} (median); {count(self.preemptions)} preemptions", soft=True,
        )  # fmt: skip


def llm_verified(found: VerifiedEngine, ledger: str = "") -> LlmVerifyView:
    """The answer to a verification; `ledger`: the file that its rows went to."""
    covered = sum(each.covered for each in found.figures)
    worst = max(found.figures, key=lambda each: abs(each.error))
    sentence = f"{covered} of {len(found.figures)} figures lie in their predicted ranges; {worst.name} is furthest off"
    notes = ["times are CPU seconds of one thread; idle time is skipped."]
    return taken(
        LlmVerifyView,
        found,
        headline=f"{sentence}: {in_unit(worst.predicted_s, unit_for(worst.predicted_s))} "
        f"{unit_for(worst.predicted_s).name} predicted, {in_unit(worst.measured_s, unit_for(worst.measured_s))} "
        f"{unit_for(worst.measured_s).name} measured.",
        policy=found.rules.policy,
        ledger=ledger,
        notes=(*notes, f"rows are in {ledger}") if ledger else tuple(notes),
        next="foretrace ledger --technique serve-llm" if ledger else "",
    )


def _range(each: ServedFigureView) -> str:
    unit = unit_for(each.predicted_s)
    low, high = (each.predicted_s * one for one in (each.predicted.low, each.predicted.high))
    return f"{between(low, high, unit)} {unit.name}"
