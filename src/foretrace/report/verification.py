"""What `foretrace verify` and `foretrace ledger` answer: results, sentences and blocks."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

import msgspec

from foretrace.experiment import statistics
from foretrace.experiment.job import Assumed, Outcome
from foretrace.experiment.ledger import Row
from foretrace.experiment.statistics import Ratio, Verdict
from foretrace.experiment.tables import Summary, floor_of, summaries
from foretrace.report import assumptions
from foretrace.report.blocks import Block, Column, Line, listing
from foretrace.report.rig import RigArmView
from foretrace.report.units import between, count, digits, seconds, share, signed, speed, things, unit_for
from foretrace.report.views import Report, taken

SHOWN_RESIDUALS = 6
_ARMS = {"before": "baseline", "after": "with it", "again": "baseline again"}
_CLOCKS = {"cpu": "CPU time", "wall": "wall clock"}


class ArmView(RigArmView, frozen=True, kw_only=True):
    """Blocks of one arm of a verification: seconds per step on the clock that decides; `spread` is IQR over median."""

    wall_s: float  # medians on both clocks
    cpu_s: float


class ResidualView(msgspec.Struct, frozen=True, kw_only=True):
    """One layer of the treated step, as predicted and as recorded: busy seconds per step."""

    layer: str = msgspec.field(name="name")
    phase: str
    predicted_s: float
    recorded_s: float
    difference_s: float  # recorded − predicted


class VerifyView(Report, frozen=True, kw_only=True):
    """`foretrace verify`: the predicted change beside the measured one."""

    command: str = "verify"
    name: str  # the techniques, joined
    techniques: tuple[str, ...]
    model: str
    size: str
    threads: int
    batches: str
    device: str
    verdict: str
    covered: bool
    uncertain: str  # why nothing was concluded, if nothing was
    predicted: Ratio
    measured: Ratio
    same: Ratio  # the baseline against itself
    floor: float  # smallest change that could be seen
    error: float  # predicted / measured − 1
    recorded_s: float
    arms: tuple[ArmView, ...]
    clock: str
    rounds: int
    repeated_rounds: int
    disturbed_rounds: int
    steps_per_block: int
    samples_before: int
    samples_after: int
    losses_before: tuple[float | None, ...]
    losses_after: tuple[float | None, ...]
    calibrated: int
    assumptions: tuple[Assumed, ...]
    residual: tuple[ResidualView, ...]
    treated_recorded_s: float
    ledger: str  # file that the row went to; "" where none was written
    row: str  # its id

    def shown(self, top: int) -> Iterator[Block]:
        unit = unit_for(max((arm.median_s for arm in self.arms), default=0.0))
        yield listing(
            self.arms, (lambda arm: _ARMS[arm.name], "arm"), ("median_s", "step", "time"),
            (lambda arm: f"{between(arm.p10_s, arm.p90_s, unit)} {unit.name}", Column("p10 – p90", right=True)),
            ("wall_s", "wall", "time"), ("cpu_s", "CPU", "time"),
        )  # fmt: skip
        same = f"the baseline against itself came to {_numbers(self.same)}, 80 % interval"
        yield Line(f"{share(self.floor)}; {same}", label="floor")
        yield Line(_how(self), label="measured")
        if self.samples_before != self.samples_after:
            yield Line(f"{count(self.samples_before)} → {count(self.samples_after)}", label="samples per step")
        if self.losses_before:
            yield Line(f"{_losses(self.losses_before)}; with it {_losses(self.losses_after)}", label="first losses")
        for each in self.assumptions[:3]:
            yield Line(assumptions.said(each, replaced=False), label="assumed")
        if self.residual:
            yield listing(
                self.residual[:SHOWN_RESIDUALS], ("layer", "where the treated step differs most", "name"), "phase",
                ("predicted_s", "predicted", "time"), ("recorded_s", "recorded", "time"),
                ("difference_s", "difference", "change"),
            )  # fmt: skip
            yield Line(
                f"The prediction starts from a step of {seconds(self.recorded_s)}; the treated step was recorded once "
                f"({seconds(self.treated_recorded_s)}) and scaled to {seconds(self.measured.value * self.recorded_s)}, "
                "the share that the arms measured.",
                soft=True,
            )
        row = f"row {self.row[:8]} added to {self.ledger}" if self.ledger else "no row was written"
        yield Line(row, soft=True)


class LedgerRowView(msgspec.Struct, frozen=True, kw_only=True):
    """One verification as the ledger keeps it."""

    id: str
    time: str
    techniques: str
    model: str
    size: str
    threads: int
    device: str
    predicted: Ratio
    measured: Ratio
    before_s: float
    after_s: float
    error: float
    covered: bool
    floor: float
    verdict: str


class LedgerView(Report, frozen=True, kw_only=True):
    """`foretrace ledger`: what was verified so far."""

    command: str = "ledger"
    source: str
    rows: tuple[LedgerRowView, ...]
    summary: tuple[Summary, ...]

    def shown(self, top: int) -> Iterator[Block]:
        if self.rows:
            yield listing(
                self.rows[::-1], "techniques", "model",  # the newest first
                (lambda row: _numbers(row.predicted), Column("predicted", right=True)),
                ("measured.value", "measured", "digits"), (lambda row: signed(row.error), Column("error", right=True)),
                ("floor", "floor", "share"), "verdict", top=top, noun="older row", how="--top",
            )  # fmt: skip
        if self.summary:
            yield listing(
                self.summary, ("name", "technique"), (_rows, Column("rows", right=True)),
                ("median_error", "median error", "share"), ("worst_error", "worst", "share"),
                ("coverage", "covered", "share"),
            )  # fmt: skip


def verify(outcome: Outcome, ledger: str = "", row: str = "") -> VerifyView:
    """Return a verification: what was predicted, what was measured, and where the row went."""
    job = outcome.job
    return taken(
        VerifyView,
        outcome,
        outcome.trial,
        job,
        headline=headline(outcome),
        name=" + ".join(outcome.techniques),
        techniques=tuple(outcome.parameters),
        batches="loader" if job.loads else "ready",
        floor=statistics.floor(outcome.trial.same),
        arms=tuple(
            taken(ArmView, arm, name=name, wall_s=outcome.walls[name].median_s, cpu_s=outcome.cpus[name].median_s)
            for name, arm in (("before", outcome.before), ("after", outcome.trial.after), ("again", outcome.again))
        ),
        ledger=ledger,
        row=row,
        next=_next(outcome, ledger),
    )


def headline(outcome: Outcome) -> str:
    """Return text such as "Predicted 1.42× faster (0.700, 0.660 – 0.750 of the step), measured 1.38× …: covered, off by
    −2.80 %.".
    """
    trial = outcome.trial
    predicted = f"Predicted {_speed(trial.predicted)} ({_numbers(trial.predicted)} of the step)"
    floor = statistics.floor(trial.same)
    off = f"off by {signed(trial.error)}"
    if trial.verdict == Verdict.INCONCLUSIVE:
        return f"{predicted}; nothing can be concluded: {trial.uncertain}."
    if trial.measured.effect <= floor:
        measured = f"measured no change above the floor of {share(floor)} ({_numbers(trial.measured)})"
        agrees = "agrees" if trial.verdict == Verdict.NO_CHANGE else "missed"
        return f"{predicted}, {measured}: {agrees}, {off}."
    return f"{predicted}, measured {_speed(trial.measured)} ({_numbers(trial.measured)}): {trial.verdict}, {off}."


def ledger(rows: Sequence[Row], *, source: str, summary_only: bool = False) -> LedgerView:
    """Return rows of a ledger and how well they were predicted; `summary_only` leaves the single rows out."""
    found = summaries(rows)
    return LedgerView(
        headline=_ledger_headline(found[-1] if found else None),
        source=source,
        rows=() if summary_only else tuple(_ledger_row(row) for row in rows),
        summary=found,
        notes=(),
        next="" if summary_only or not found else "foretrace ledger --summary",
    )


def _rows(each: Summary) -> str:
    return count(each.rows) if each.rows == each.concluded else f"{count(each.concluded)} of {each.rows}"


def _how(view: VerifyView) -> str:
    """Return text such as "CPU time, 24 rounds of 3 steps per arm, 1 thread, batches ready in memory"."""
    parts = [
        _CLOCKS[view.clock],
        f"{count(view.rounds)} rounds of {count(view.steps_per_block)} steps per arm",
        things(view.threads, "thread"),
        "batches from the loader" if view.batches == "loader" else "batches ready in memory",
        f"{count(view.calibrated)} operators timed alone for the prediction",
    ]
    if view.repeated_rounds:
        parts.append(f"{things(view.repeated_rounds, 'round')} run once more because others used the cores")
    if view.disturbed_rounds:
        parts.append(f"{things(view.disturbed_rounds, 'round')} disturbed by others")
    return ", ".join(parts)


def _losses(values: Sequence[float | None]) -> str:
    return ", ".join("not finite" if value is None else f"{value:.4g}" for value in values)


def _numbers(ratio: Ratio) -> str:
    return f"{digits(ratio.value)}, {digits(ratio.low)} – {digits(ratio.high)}"


def _speed(ratio: Ratio) -> str:
    return speed(1.0, ratio.value)


def _next(outcome: Outcome, ledger: str) -> str:
    if outcome.trial.verdict == Verdict.INCONCLUSIVE:
        words = [shlex.quote(text) for text in outcome.job.techniques]
        again = f"foretrace verify {' '.join(words)} --model {shlex.quote(outcome.job.model)}"
        return f"{again} --seconds {3 * outcome.job.seconds:g}"
    return f"foretrace ledger --ledger {shlex.quote(ledger)}" if ledger else ""


def _ledger_row(row: Row) -> LedgerRowView:
    return taken(
        LedgerRowView,
        row,
        predicted=Ratio(value=row.predicted, low=row.predicted_low, high=row.predicted_high),
        measured=Ratio(value=row.measured, low=row.measured_low, high=row.measured_high),
        floor=floor_of(row),
    )


def _ledger_headline(total: Summary | None) -> str:
    if total is None:
        return "No verification matches."
    verified = things(total.rows, "verification")
    if total.median_error is None or total.worst_error is None or total.coverage is None:
        return f"{verified}, none of them conclusive."
    return (
        f"{verified}: predictions are off by {share(total.median_error)} of the step (median; worst "
        f"{share(total.worst_error)}), and {share(total.coverage)} of their intervals cover what was measured."
    )
