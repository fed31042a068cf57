"""Tables of ledger rows in Markdown, for docs/accuracy/techniques.md."""

from __future__ import annotations

from collections.abc import Sequence

from foretrace.experiment.ledger import Row, floor_of, summaries

HEADER = (
    "technique", "model", "step, ms", "predicted", "80 % interval", "measured", "error", "covered", "A/A floor",
    "verdict",
)  # fmt: skip


def markdown(rows: Sequence[Row]) -> str:
    """One line per row, ordered by technique and model. Ratios are treated over baseline step."""
    ordered = sorted(rows, key=lambda row: (len(row.names), row.techniques, row.model, row.time))
    lines = [
        "| " + " | ".join(HEADER) + " |",
        "|---|---|" + "---:|" * 5 + "---|---:|---|",
    ]
    for row in ordered:
        model = row.model if row.size in ("", "tiny") else f"{row.model} ({row.size})"
        cells = (
            row.techniques,
            model,
            f"{1e3 * row.before_s:.1f}",
            f"{row.predicted:.3f}",
            f"{row.predicted_low:.3f} – {row.predicted_high:.3f}",
            f"{row.measured:.3f}",
            _percent(row.error, signed=True),
            "yes" if row.covered else "no",
            _percent(floor_of(row)),
            row.verdict,
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def markdown_summary(rows: Sequence[Row]) -> str:
    """Median and worst absolute error and coverage, per technique and over all rows."""
    header = ("technique", "rows", "concluded", "median error", "worst error", "covered")
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    for each in summaries(rows):
        name = f"**{each.name}**" if each.name == "all" else each.name
        figures = (each.median_error, each.worst_error, each.coverage)
        cells = (name, str(each.rows), str(each.concluded), *(_percent(figure) for figure in figures))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _percent(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "–"
    text = f"{100 * value:+.1f}" if signed else f"{100 * value:.1f}"
    return f"{text} %".replace("-", "−")
