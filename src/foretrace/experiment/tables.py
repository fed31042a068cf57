"""Summaries and tables of ledger rows, for `foretrace ledger`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import JSON_COLUMNS, Row, export_lines
from foretrace.experiment.statistics import Ratio, Verdict, floor
from foretrace.files import write_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How well the rows of one technique were predicted; errors and coverage over those that were concluded."""

    name: str
    rows: int
    concluded: int  # those that were not refused; the rest of the figures is theirs
    median_error: float | None  # of the absolute errors
    worst_error: float | None
    coverage: float | None  # share whose predicted interval holds the measured ratio


def summaries(rows: Sequence[Row]) -> tuple[Summary, ...]:
    """Return one summary per techniques (as they are named, together where several were applied), and "all" at
    the end.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(" + ".join(row.names), []).append(row)
    found = [_summary(name, groups[name]) for name in sorted(groups)]
    return (*found, _summary("all", rows)) if rows else ()


def _summary(name: str, rows: Sequence[Row]) -> Summary:
    concluded = [row for row in rows if row.verdict != Verdict.INCONCLUSIVE]
    errors = [abs(row.error) for row in concluded]
    return Summary(
        name=name,
        rows=len(rows),
        concluded=len(concluded),
        median_error=float(np.median(errors)) if errors else None,
        worst_error=max(errors, default=None),
        coverage=sum(row.covered for row in concluded) / len(concluded) if concluded else None,
    )


def floor_of(row: Row) -> float:
    """Return the smallest change that could be seen when the row was measured."""
    return floor(Ratio(value=row.same, low=row.same_low, high=row.same_high))


def checked(path: Path) -> None:
    """Raise ForetraceError where the name of a file says no format that `write` knows."""
    if path.suffix not in (".csv", ".jsonl"):
        raise ForetraceError(f"`export={path}`: give a name that ends in .csv or .jsonl.")


def write(rows: Sequence[Row], path: Path) -> None:
    """Write rows in the format that the name of the file says."""
    write_text(path, export_lines(rows) if path.suffix == ".jsonl" else csv(rows))


def csv(rows: Sequence[Row]) -> str:
    """Return the plain columns, one line per row."""
    import csv as writer
    import io

    names = [name for name in Row.__struct_fields__ if name not in JSON_COLUMNS]
    out = io.StringIO()
    table = writer.writer(out, lineterminator="\n")
    table.writerow(names)
    table.writerows([getattr(row, name) for name in names] for row in rows)
    return out.getvalue()
