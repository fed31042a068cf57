"""What `foretrace verify` and `foretrace ledger` answer: their views, sentences and terminal text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from foretrace.experiment import statistics
from foretrace.experiment.job import Outcome
from foretrace.experiment.ledger import Row
from foretrace.experiment.statistics import Ratio, Verdict
from foretrace.experiment.tables import Summary, floor_of, summaries
from foretrace.report import wording
from foretrace.report.assumptions import assumption
from foretrace.report.names import short_names
from foretrace.report.terminal import (
    Terminal,
    _bold,
    _column,
    _indented,
    _labelled,
    _note,
    _plain,
    _room,
    _table,
)
from foretrace.report.units import MINUS, between, column, count, digits, seconds, share, speed, unit_for
from foretrace.report.views import (
    ArmView,
    AssumptionView,
    LedgerRowView,
    LedgerSummaryView,
    LedgerView,
    RatioView,
    ResidualView,
    VerifyView,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

SHOWN_RESIDUALS = 6
_ARMS = {"before": "baseline", "after": "with it", "again": "baseline again"}
_CLOCKS = {"cpu": "CPU time", "wall": "wall clock"}


def verify(outcome: Outcome, *, ledger: str = "", row: str = "") -> VerifyView:
    """A verification: what was predicted, what was measured, and where the row went."""
    job = outcome.job
    return VerifyView(
        headline=headline(outcome),
        name=" + ".join(outcome.techniques),
        techniques=tuple(outcome.parameters),
        model=job.model,
        size=job.size,
        threads=job.threads,
        batches="loader" if job.loads else "ready",
        device=outcome.device,
        verdict=outcome.verdict,
        covered=outcome.covered,
        uncertain=outcome.uncertain,
        predicted=_ratio(outcome.predicted),
        measured=_ratio(outcome.measured),
        same=_ratio(outcome.same),
        floor=statistics.floor(outcome.same),
        error=outcome.error,
        recorded_s=outcome.recorded_s,
        arms=tuple(
            ArmView(
                name=name,
                median_s=arm.median_s,
                p10_s=arm.p10_s,
                p90_s=arm.p90_s,
                spread=arm.spread,
                wall_s=outcome.walls[name].median_s,
                cpu_s=outcome.cpus[name].median_s,
            )
            for name, arm in (("before", outcome.before), ("after", outcome.after), ("again", outcome.again))
        ),
        clock=outcome.clock,
        rounds=outcome.rounds,
        repeated_rounds=outcome.repeated_rounds,
        disturbed_rounds=outcome.disturbed_rounds,
        steps_per_block=outcome.steps_per_block,
        samples_before=outcome.samples_before,
        samples_after=outcome.samples_after,
        losses_before=outcome.losses_before,
        losses_after=outcome.losses_after,
        calibrated=outcome.calibrated,
        assumptions=tuple(assumption(each, each.step_at_low_s, each.step_at_high_s) for each in outcome.assumptions),
        residual=tuple(
            ResidualView(
                name=each.layer,
                phase=each.phase,
                predicted_s=each.predicted_s,
                recorded_s=each.recorded_s,
                difference_s=each.difference_s,
            )
            for each in outcome.residual
        ),
        treated_recorded_s=outcome.treated_recorded_s,
        ledger=ledger,
        row=row,
        notes=outcome.notes,
        next=_next(outcome, ledger),
    )


def headline(outcome: Outcome) -> str:
    """As in "Predicted 1.42× faster (0.700, 0.660 – 0.750 of the step), measured 1.38× …: covered, off by −2.80 %."."""
    predicted = f"Predicted {_speed(outcome.predicted)} ({_numbers(outcome.predicted)} of the step)"
    floor = statistics.floor(outcome.same)
    off = f"off by {_signed(outcome.error)}"
    if outcome.verdict == Verdict.INCONCLUSIVE:
        return f"{predicted}; nothing can be concluded: {outcome.uncertain}."
    if outcome.measured.effect <= floor:
        measured = f"measured no change above the floor of {share(floor)} ({_numbers(outcome.measured)})"
        agrees = "agrees" if outcome.verdict == Verdict.NO_CHANGE else "missed"
        return f"{predicted}, {measured}: {agrees}, {off}."
    return f"{predicted}, measured {_speed(outcome.measured)} ({_numbers(outcome.measured)}): {outcome.verdict}, {off}."


def ledger(rows: Sequence[Row], *, source: str, summary_only: bool = False) -> LedgerView:
    """Rows of a ledger and how well they were predicted; `summary_only` leaves the single rows out."""
    found = summaries(rows)
    return LedgerView(
        headline=_ledger_headline(found[-1] if found else None),
        source=source,
        rows=() if summary_only else tuple(_ledger_row(row) for row in rows),
        summary=tuple(
            LedgerSummaryView(
                name=each.name,
                rows=each.rows,
                concluded=each.concluded,
                median_error=each.median_error,
                worst_error=each.worst_error,
                coverage=each.coverage,
            )
            for each in found
        ),
        notes=(),
        next="" if summary_only or not found else "foretrace ledger --summary",
    )


def verify_text(view: VerifyView, terminal: Terminal) -> list[RenderableType]:
    """`VerifyView` for people."""
    parts: list[RenderableType] = [_bold(view.headline), ""]
    table = _table()
    for title in ("arm", "step", "p10 – p90", "wall", "CPU"):
        _column(table, title, right=title != "arm")
    figures = [[arm.median_s, arm.wall_s, arm.cpu_s] for arm in view.arms]
    unit = unit_for(max((arm.median_s for arm in view.arms), default=0.0))
    for arm, median, wall, cpu in zip(view.arms, *map(column, zip(*figures, strict=True)), strict=True):
        table.add_row(_ARMS[arm.name], median, f"{between(arm.p10_s, arm.p90_s, unit)} {unit.name}", wall, cpu)
    parts += [_indented(table), ""]
    parts.append(
        _labelled(
            "floor",
            f"{share(view.floor)}; the baseline against itself came to {_numbers(view.same)}, 80 % interval",
        )
    )
    parts.append(_labelled("measured", _how(view)))
    if view.samples_before != view.samples_after:
        parts.append(_labelled("samples per step", f"{count(view.samples_before)} → {count(view.samples_after)}"))
    if view.losses_before:
        parts.append(_labelled("first losses", f"{_losses(view.losses_before)}; with it {_losses(view.losses_after)}"))
    for each in view.assumptions[:3]:
        parts.append(_labelled("assumed", _assumed(each)))
    if view.residual:
        parts += ["", _indented(_residual(view, terminal))]
        parts.append(
            _note(
                f"The prediction starts from a step of {seconds(view.recorded_s)}; the treated step was recorded once "
                f"({seconds(view.treated_recorded_s)}) and scaled to {seconds(view.measured.value * view.recorded_s)}, "
                "the share that the arms measured."
            )
        )
    for note in view.notes:
        parts.append(_note(note))
    parts.append(_note(f"row {view.row[:8]} added to {view.ledger}" if view.ledger else "no row was written"))
    return parts


def ledger_text(view: LedgerView, terminal: Terminal, rows: int) -> list[RenderableType]:
    """`LedgerView` for people; the newest rows first."""
    parts: list[RenderableType] = [_bold(view.headline), ""]
    if view.rows:
        table = _table()
        for title in ("techniques", "model", "predicted", "measured", "error", "floor", "verdict"):
            _column(table, title, right=title in ("predicted", "measured", "error", "floor"))
        shown = view.rows[::-1][:rows]
        for row in shown:
            table.add_row(
                _plain(row.techniques),
                _plain(row.model),
                _numbers(row.predicted),
                digits(row.measured.value),
                _signed(row.error),
                share(row.floor),
                row.verdict,
            )
        parts += [_indented(table), ""]
        if len(shown) < len(view.rows):
            parts.append(_note(f"{count(len(view.rows) - len(shown))} older rows: --top {len(view.rows)} or --json."))
    summary = _table()
    for title in ("technique", "rows", "median error", "worst", "covered"):
        _column(summary, title, right=title != "technique")
    for each in view.summary:
        figures = (each.median_error, each.worst_error, each.coverage)
        rows_text = count(each.rows) if each.rows == each.concluded else f"{count(each.concluded)} of {each.rows}"
        summary.add_row(_plain(each.name), rows_text, *("–" if f is None else share(f) for f in figures))
    if view.summary:
        parts.append(_indented(summary))
    for note in view.notes:
        parts.append(_note(note))
    return parts


def _residual(view: VerifyView, terminal: Terminal) -> RenderableType:
    table = _table()
    _column(table, "where the treated step differs most")
    _column(table, "phase")
    for title in ("predicted", "recorded", "difference"):
        _column(table, title, right=True)
    shown = view.residual[:SHOWN_RESIDUALS]
    for name, row, *cells in zip(
        short_names([row.name for row in shown], _room(terminal)),
        shown,
        column([row.predicted_s for row in shown]),
        column([row.recorded_s for row in shown]),
        column([row.difference_s for row in shown], signed=True),
        strict=True,
    ):
        table.add_row(_plain(name), row.phase, *cells)
    return table


def _how(view: VerifyView) -> str:
    """As in "CPU time, 24 rounds of 3 steps per arm, 1 thread, batches ready in memory"."""
    parts = [
        _CLOCKS[view.clock],
        f"{count(view.rounds)} rounds of {count(view.steps_per_block)} steps per arm",
        f"{view.threads} {'thread' if view.threads == 1 else 'threads'}",
        "batches from the loader" if view.batches == "loader" else "batches ready in memory",
        f"{count(view.calibrated)} operators timed alone for the prediction",
    ]
    if view.repeated_rounds:
        parts.append(f"{_rounds(view.repeated_rounds)} run once more because others used the cores")
    if view.disturbed_rounds:
        parts.append(f"{_rounds(view.disturbed_rounds)} disturbed by others")
    return ", ".join(parts)


def _rounds(number: int) -> str:
    return f"{count(number)} {'round' if number == 1 else 'rounds'}"


def _assumed(a: AssumptionView) -> str:
    why = a.why.rstrip(".")
    return f"{a.name} {wording.assumption_value(a)} {wording.assumption_range(a)}: {why}"


def _losses(values: Sequence[float | None]) -> str:
    return ", ".join("not finite" if value is None else f"{value:.4g}" for value in values)


def _numbers(ratio: Ratio | RatioView) -> str:
    return f"{digits(ratio.value)}, {digits(ratio.low)} – {digits(ratio.high)}"


def _speed(ratio: Ratio) -> str:
    return speed(1.0, ratio.value)


def _signed(value: float) -> str:
    text = share(value)
    return text if text.startswith(MINUS) or text in ("0 %", "–") else f"+{text}"


def _ratio(ratio: Ratio) -> RatioView:
    return RatioView(value=ratio.value, low=ratio.low, high=ratio.high)


def _next(outcome: Outcome, ledger: str) -> str:
    if outcome.verdict == Verdict.INCONCLUSIVE:
        words = [shlex.quote(text) for text in outcome.job.techniques]
        again = f"foretrace verify {' '.join(words)} --model {shlex.quote(outcome.job.model)}"
        return f"{again} --seconds {3 * outcome.job.seconds:g}"
    return f"foretrace ledger --ledger {shlex.quote(ledger)}" if ledger else ""


def _ledger_row(row: Row) -> LedgerRowView:
    return LedgerRowView(
        id=row.id,
        time=row.time,
        techniques=row.techniques,
        model=row.model,
        size=row.size,
        threads=row.threads,
        device=row.device,
        predicted=RatioView(value=row.predicted, low=row.predicted_low, high=row.predicted_high),
        measured=RatioView(value=row.measured, low=row.measured_low, high=row.measured_high),
        before_s=row.before_s,
        after_s=row.after_s,
        error=row.error,
        covered=row.covered,
        floor=floor_of(row),
        verdict=row.verdict,
    )


def _ledger_headline(total: Summary | None) -> str:
    if total is None:
        return "No verification matches."
    plural = "verification" if total.rows == 1 else "verifications"
    if total.median_error is None or total.worst_error is None or total.coverage is None:
        return f"{count(total.rows)} {plural}, none of them conclusive."
    return (
        f"{count(total.rows)} {plural}: predictions are off by {share(total.median_error)} of the step (median; worst "
        f"{share(total.worst_error)}), and {share(total.coverage)} of their intervals cover what was measured."
    )
