"""Rows of the ledger on a page: what was predicted before a run, and what the run took."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median

from foretrace.experiment.ledger import Row, import_lines
from reproductions import ROOT
from tables import table

DATA_ACCESS = ROOT / "benchmarks" / "data" / "rows.jsonl"


def predictions(technique: str, path: Path = DATA_ACCESS) -> str:
    """The rows of one technique in a file of `foretrace ledger --export`, and a line on all of them.

    The first word of a row's techniques names it. Seconds are those of a step, a batch or an epoch.
    """
    rows = import_lines(path.read_text(encoding="utf-8"), str(path))
    mine = [each for each in rows if each.techniques.split()[0] == technique]
    errors = sorted(abs(100 * each.error) for each in mine)
    days = sorted({each.time[:10] for each in mine})
    header = ("run", "what", "predicted, ms", "range", "measured, ms", "error", "verdict")
    return (
        f"{table(header, _cells(mine))}\n\n"
        f"*{' and '.join(days)}; median error {median(errors):.1f} %, largest {errors[-1]:.1f} %, "
        f"{sum(each.covered for each in mine)} of {len(mine)} in their ranges. "
        f"[rows](../../benchmarks/data/{path.name}): seconds and machines.*"
    )


def _cells(rows: list[Row]) -> Iterator[tuple[str, ...]]:
    for each in rows:
        ms = 1e3 * each.before_s  # of a figure that was predicted, the prediction
        yield (
            f"`{each.model}`, {each.size}", each.techniques.partition(" ")[2], f"{ms * each.predicted:.3g}",
            f"{ms * each.predicted_low:.3g} – {ms * each.predicted_high:.3g}", f"{1e3 * each.after_s:.3g}",
            f"{100 * each.error:+.1f} %", str(each.verdict),
        )  # fmt: skip
