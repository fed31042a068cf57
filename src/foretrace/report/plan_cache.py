"""What `foretrace plan cache` answers: steps over an embedding server with and without look-ahead."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from foretrace.plan.look_ahead.plan import CachePlan, LookedAhead, PredictedStep
from foretrace.plan.look_ahead.trial import CacheTrial
from foretrace.report.blocks import About, Block, Column, Line, listing
from foretrace.report.units import between, digits, nbytes, share, things, unit_for
from foretrace.report.views import Report, taken


class PlanCacheView(Report, frozen=True, kw_only=True):
    """`foretrace plan cache`: what looking ahead gains."""

    command: str = "plan cache"
    trace: str
    batches: int
    warm: int  # batches before those that count
    samples: int
    trainers: int
    link: str
    optimizer: str
    width: int  # numbers in a row
    uncached: PredictedStep
    uncached_bytes: float
    chosen: LookedAhead
    others: tuple[LookedAhead, ...]
    trial: CacheTrial | None  # both ways, run in turns on shaped links
    ledger: str
    row: str

    def shown(self, top: int) -> Iterator[Block]:
        yield About((
            f"{self.trace} · {_batches(self.batches)} of {self.samples} · {things(self.trainers, 'trainer')}",
            f"rows of {self.width} · {self.link} each way · {self.optimizer}",
        ))  # fmt: skip
        unit = unit_for(self.uncached.high_s)
        every = sorted((self.chosen, *self.others), key=lambda each: each.look_ahead)
        yield listing(
            every, (lambda each: str(each.look_ahead), "batches ahead"),
            (lambda each: each.step.step_s, "step", "time"),
            (lambda each: between(each.step.low_s, each.step.high_s, unit), Column(f"range, {unit.name}", right=True)),
            ("hit_rate", "rows held", "share"), ("bound_s", Column("bound", "time", least=80)),
            (lambda each: nbytes(each.now_bytes), Column("at once", right=True, least=80)),
            (lambda each: nbytes(each.all_bytes), Column("all bytes", right=True, least=100)),
            (lambda each: nbytes(each.held_bytes), Column("memory", right=True, least=100)), top=top,
            noun="look-ahead",
        )  # fmt: skip
        yield Line(f"{_step(self.uncached)}, {nbytes(self.uncached_bytes)} each way", label="uncached")
        if self.trial is not None:
            yield listing(
                self.trial.arms, ("name", "run in turns"), ("measured_s", "measured", "seconds"),
                (lambda arm: arm.predicted.step_s, "predicted", "seconds"),
                (lambda arm: f"{100 * arm.residual:+.1f} %", Column("residual", right=True)),
            )  # fmt: skip
            yield Line(
                f"{digits(self.trial.speedup.value)}× ({digits(self.trial.speedup.low)} – "
                f"{digits(self.trial.speedup.high)}) faster, {share(self.trial.hit_rate)} of rows held; tables and "
                "dense weights of both are the same to the bit",
                label="measured",
            )
            yield f"row {self.row[:8]} added to {self.ledger}" if self.ledger else "no row was written"


def planned(plan: CachePlan, trial: CacheTrial | None = None, ledger: str = "", row: str = "") -> PlanCacheView:
    """Return the answer about a plan, with what became of it and where its rows went."""
    question, best = plan.question, plan.chosen
    sentence = (
        f"Looking {_batches(best.look_ahead)} ahead makes a step {digits(best.speedup.value)}× "
        f"({digits(best.speedup.low)} – {digits(best.speedup.high)}) faster: {_step(plan.uncached)} → "
        f"{_step(best.step)}."
    )
    words = [
        "foretrace", "plan", "cache", question.source, "--trainers", str(question.trainers), "--link", question.link,
        "--width", str(question.width),
    ]  # fmt: skip
    return taken(
        PlanCacheView, plan, question, headline=sentence, trace=question.source, samples=question.lookups.samples,
        trial=trial, ledger=ledger, row=row,
        next="foretrace ledger" if trial else shlex.join([*words, "--look-ahead", str(best.look_ahead), "--run"]),
    )  # fmt: skip


def _step(step: PredictedStep) -> str:
    unit = unit_for(step.high_s)
    return f"{digits(step.step_s / unit.seconds)} {unit.name} ({between(step.low_s, step.high_s, unit)})"


def _batches(count: int) -> str:
    return f"{count} batch{'es' * (count != 1)}"
