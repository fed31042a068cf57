"""From rows to a `Workload`: numbers and dates that are distinguished from rubbish, and an account of every row."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt

from foretrace.errors import ForetraceError
from foretrace.fleet.formats.source import Source, Table, table
from foretrace.fleet.workload import NUMBERS, SECOND, TEXTS, Origin, Refused, Workload

MOST_SECONDS = 9.0e9  # 285 years: what fits into 64 bits of nanoseconds
MOST_GPUS = 1_000_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class Bad(Exception):
    """A row is not what the format says: a clause without a full stop."""


class Aside(Exception):
    """A row is in order but is no job with GPUs that ran: the reason, the same for rows of the same kind."""


Row = dict[str, Any]


def number(text: str, what: str) -> float:
    """Return a finite number; raises Bad."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or "_" in text:  # Python takes 1_000 for a number, logs do not write it
        raise Bad(f"{what} is {text[:40]!r}, not a number")
    return value


def optional(text: str, what: str, *, none: Sequence[str] = ("",)) -> float:
    """Return the same, nan where the text says that there is none."""
    return math.nan if text.strip() in none else number(text, what)


def whole(text: str, what: str) -> int:
    """Return a whole number, also written as 4.0; raises Bad."""
    try:
        value = int(text)
    except ValueError:
        broken = number(text, what)
        if broken != math.floor(broken):
            raise Bad(f"{what} is {text[:40]!r}, not a whole number") from None
        value = int(broken)
    if "_" in text or not -(2**63) <= value < 2**63:
        raise Bad(f"{what} is {text[:40]!r}, not a whole number of 64 bits")
    return value


def gpus_of(text: str, what: str) -> int:
    """Return devices a job requests: 1 or more; raises Bad."""
    value = whole(text, what)
    if not 1 <= value <= MOST_GPUS:
        raise Bad(f"{what} is {text[:40]!r}, not a number of GPUs from 1 on")
    return value


def above_zero(text: str, what: str) -> float:
    """Raise Bad where the number is zero or less."""
    value = number(text, what)
    if value <= 0:
        raise Bad(f"{what} is {text[:40]!r}, not above zero")
    return value


def not_below_zero(text: str, what: str) -> float:
    """Raise Bad where the number is less than zero."""
    value = number(text, what)
    if value < 0:
        raise Bad(f"{what} is {text[:40]!r}, below zero")
    return value


def name_of(text: str, what: str) -> str:
    """Return what a job is called; raises Bad where it is blank."""
    if not text.strip():
        raise Bad(f"{what} is blank")
    return text


_BATCH = re.compile(r"\(batch size (\d{1,9})\)")


def batch_in(job_type: str) -> float:
    """Return samples per step from a job type such as `ResNet-18 (batch size 64)`, nan without one."""
    found = _BATCH.search(job_type)
    return float(found[1]) if found and int(found[1]) else math.nan


@dataclass
class Clock:
    """Reads dates as nanoseconds of Unix time. Dates without a zone are taken in `zone`."""

    zone: tzinfo = UTC
    naive: int = 0
    _days: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, timezone: str | None) -> Clock:
        """Make a clock for an IANA zone such as Europe/Berlin; raises ForetraceError for an unknown one."""
        if timezone is None or timezone == "UTC":
            return cls()
        try:
            return cls(ZoneInfo(timezone))
        except Exception:  # ValueError, KeyError and OSError, by what the name looks like
            raise ForetraceError(f"there is no time zone {timezone!r}; name one such as Europe/Berlin.") from None

    def read(self, text: str, what: str, *, after: int | None = None) -> int:
        """Return nanoseconds of Unix time of an ISO date (a blank or T between day and time); raises Bad.

        after: a time that cannot be later. It decides between the two hours that a clock shows when summer time ends.
        """
        try:
            if len(text) < 16:
                raise ValueError
            when = datetime.fromisoformat(text)
            if when.tzinfo is None:
                self.naive += 1
                when = when.replace(tzinfo=self.zone)
            since: int = (when - _EPOCH) // _MICROSECOND
            if after is not None and since * 1000 < after:
                since = (when.replace(fold=1) - _EPOCH) // _MICROSECOND
        except (ValueError, OverflowError):
            raise Bad(f"{what} is {text[:40]!r}, not a date and time") from None
        if not 0 <= since < MOST_SECONDS * 1e6:
            raise Bad(f"{what} is {text[:40]!r}, a year that no log has")
        return since * 1000

    @property
    def note(self) -> tuple[str, ...]:
        """One sentence where dates without a zone were met."""
        return (f"{self.naive} dates without a time zone were taken in {self.zone}",) if self.naive else ()


@dataclass
class RowAccount:
    """Where every row of a source went. Notes that account for rows begin with `N rows`."""

    source: Source
    refused: list[Refused] = field(default_factory=list)
    aside: dict[str, int] = field(default_factory=dict)
    joined: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)  # where each row stands

    @property
    def rows(self) -> int:
        """How many rows there are in all."""
        return len(self.places)

    def refuse(self, where: str, why: str) -> None:
        """Count a row that is not a job."""
        self.refused.append(Refused(where, why))

    def settle(self, *, salvage: bool) -> None:
        """Raise ForetraceError about the refused rows unless they are to be left out."""
        order = {where: at for at, where in enumerate(self.places)} if self.refused else {}
        self.refused.sort(key=lambda refused: order[refused.where])
        if self.refused and not salvage:
            first = self.refused[0]
            raise self.source.fail(
                f"{len(self.refused):,} of {self.rows:,} rows cannot be read, the first at {first.where} "
                f"({first.why}); correct them, or read with `salvage=` to leave them out."
            )

    def origin(self, format: str) -> Origin:
        """Return the account as the workload keeps it."""
        rows = [f"{count} rows set aside: {why}" for why, count in self.aside.items()]
        rows += [f"{count} rows joined: {how}" for how, count in self.joined.items()]
        return Origin(
            path=self.source.path,
            format=format,
            rows=self.rows,
            refused=tuple(self.refused),
            notes=(*self.source.notes, *rows, *self.notes),
        )


@dataclass(frozen=True, kw_only=True)
class LogRows:
    """Rows of a log, and what makes jobs of them.

    rows: (where, whatever `parse` takes). parse: returns columns of a job, or raises Bad or Aside. A job without a name
    (`job`) is called by the number of its row, from 0. Its
    dict has `submit`, and may have `start` and `end` (None unknown): seconds on the source's own clock, whose zero is
    `epoch_s`; nanoseconds of it where `exact`; nanoseconds of Unix time where `dated`, and then the clock of the
    workload starts at the first submission. loose: times may stand in any order and before zero, as in a workload that
    was made and not logged.
    details: columns of the source kept beside, by name, with the value of rows that lack them. `finish` may change or
    drop jobs once all rows are known, `settle` the workload that they are.
    """

    rows: Iterable[tuple[str, Any]]
    parse: Callable[[Any], Row]
    dated: bool = False
    exact: bool = False
    loose: bool = False
    epoch_s: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)
    notes: Callable[[], Iterable[str]] = tuple
    finish: Callable[[RowAccount, list[tuple[str, Row]]], list[tuple[str, Row]]] | None = None
    settle: Callable[[Workload], Workload] | None = None


def collect(source: Source, format: str, log: LogRows, *, salvage: bool, ties: str) -> Workload:
    """Return the jobs of a log; ties: order of jobs submitted at the same time (`file`, `reverse`, `name`).

    Raises ForetraceError where a row is refused and `salvage` is off, or no job is left.
    """
    ledger = RowAccount(source)
    good: list[tuple[str, Row]] = []
    for number_, (where, cells) in enumerate(log.rows):
        ledger.places.append(where)
        try:
            good.append((where, {"job": str(number_)} | log.parse(cells)))
        except Bad as bad:
            ledger.refuse(where, str(bad))
        except Aside as aside:
            ledger.aside[str(aside)] = ledger.aside.get(str(aside), 0) + 1
    if log.finish is not None:
        good = log.finish(ledger, good)
    whole_ns = log.dated or log.exact
    good = _possible(ledger, good, most=MOST_SECONDS * (SECOND if whole_ns else 1), loose=log.loose)
    ledger.settle(salvage=salvage)
    ledger.notes.extend(log.notes())
    if not good:
        why = f"; {next(iter(ledger.aside))}" if ledger.aside else ""
        raise source.fail(f"holds no job with GPUs among {ledger.rows:,} rows{why}; name another file.")
    jobs = [row for _, row in good]
    if not whole_ns:
        for row in jobs:
            for key in ("submit", "start", "end"):
                if row.get(key) is not None:
                    row[key] = round(row[key] * SECOND)
    made = _workload(_in_order(jobs, ties), ledger.origin(format), log)
    return made if log.settle is None else log.settle(made)


def _possible(ledger: RowAccount, good: list[tuple[str, Row]], *, most: float, loose: bool) -> list[tuple[str, Row]]:
    """Refuse what no single column shows: a name used twice, times before the submission or beyond the clock."""
    seen: dict[str, str] = {}
    kept = []
    for where, row in good:
        submit, start, end = row["submit"], row.get("start"), row.get("end")
        first = seen.setdefault(row["job"], where)
        if first is not where:
            ledger.refuse(where, f"a job {row['job'][:40]!r} stands at {first} already")
        elif loose:
            kept.append((where, row))
        elif not 0 <= submit < most or max(start or 0, end or 0) >= most:
            ledger.refuse(where, "its times lie outside the range of a clock that starts at zero")
        elif start is not None and start < submit:
            ledger.refuse(where, "it started before it was submitted")
        elif end is not None and end < (submit if start is None else start):
            ledger.refuse(where, "it ended before it " + ("was submitted" if start is None else "started"))
        elif row["work_s"] > MOST_SECONDS:
            ledger.refuse(where, "it runs longer than 285 years")
        else:
            kept.append((where, row))
    return kept


_ENDINGS = re.compile(r"(\.(csv|tsv|txt|trace|swf|json|log|psv))?(\.gz)?$")


def _workload(rows: list[Row], origin: Origin, log: LogRows) -> Workload:
    """Return rows with times in whole nanoseconds as columns."""
    rows = sorted(rows, key=lambda row: row["submit"])  # stable
    zero: int = rows[0]["submit"] if log.dated else 0
    submit = np.array([row["submit"] - zero for row in rows], np.int64)

    def stamps(key: str) -> npt.NDArray[np.int64]:
        return np.array([-1 if row.get(key) is None else row[key] - zero for row in rows], np.int64)

    # text stays in arrays of objects: numpy's own text arrays would drop null characters at the end
    columns: dict[str, Any] = {
        key: np.array([row.get(key, default) for row in rows], object if default == "" else np.float64)
        for key, default in (dict.fromkeys(TEXTS, "") | NUMBERS).items()
        if any(key in row for row in rows)
    }
    if any("min_gpus" in row for row in rows):
        columns["min_gpus"] = [row.get("min_gpus", row["gpus"]) for row in rows]
        columns["max_gpus"] = [row.get("max_gpus", row["gpus"]) for row in rows]
    kept = {}
    for key, default in log.details.items():
        values = [row.get(key, default) for row in rows]
        kept[key] = np.array(values, object) if isinstance(default, str) else np.array(values, _kind(values))
    made = Workload.of(
        name=_ENDINGS.sub("", Path(origin.path).name),
        job=[row["job"] for row in rows],
        submit_s=submit / SECOND,
        gpus=np.array([row["gpus"] for row in rows], np.int64),
        work_s=np.array([row["work_s"] for row in rows], np.float64),
        details=kept,
        epoch_s=zero / SECOND if log.dated else log.epoch_s,
        origin=origin,
        **columns,
    )
    # seconds as floats are short of nanoseconds after a hundred days; rows are in order already, so these fit
    return replace(made, submit_ns=submit, logged_start_ns=stamps("start"), logged_end_ns=stamps("end"))


def _kind(values: list[Any]) -> type[np.generic]:
    """Return the type of a column: whole numbers and flags keep theirs where no row lacks one."""
    for python, kind in ((bool, np.bool_), (int, np.int64)):
        if all(type(value) is python for value in values):
            return kind
    return np.float64


def _in_order(rows: list[Row], ties: str) -> list[Row]:
    """Return rows in the order of ties; `Workload.of` sorts by submission and keeps this order among equals."""
    if ties == "file":
        return rows
    if ties == "reverse":
        return rows[::-1]
    if ties == "name":

        def natural(row: Row) -> list[tuple[int, int, str]]:
            parts = re.split(r"([0-9]+)", row["job"])
            return [(0, len(part.lstrip("0")), part) if at % 2 else (1, 0, part) for at, part in enumerate(parts)]

        return sorted(rows, key=natural)
    raise ForetraceError(f"ties are ordered by file, reverse or name, not {ties!r}; say one of them.")


def with_columns(source: Source, taken: Table, wanted: Sequence[str], also: Sequence[str] = ()) -> dict[str, int]:
    """Return the position of each wanted column, and of those of `also` that are there; raises ForetraceError."""
    at = {name: position for position, name in reversed(list(enumerate(taken.header)))}
    missing = [name for name in wanted if name not in at]
    if missing:
        raise source.fail(f"has no column {missing[0]!r}; its columns are {', '.join(taken.header)[:200]}.")
    return {name: at[name] for name in (*wanted, *also) if name in at}


def table_rows(
    source: Source,
    parse: Callable[[dict[str, str]], Row],
    columns: Sequence[str],
    also: Sequence[str] = (),
    *,
    notes: Callable[[], Iterable[str]] = tuple,
    **how: Any,
) -> LogRows:
    """Return rows of a CSV file with a header: `parse` takes the cells of one by column.

    columns: what must be there; also: what may be; how: as in `LogRows`. Raises ForetraceError as `with_columns` does.
    """
    taken = table(source)
    at = with_columns(source, taken, columns, also)
    width = len(taken.header)

    def row(cells: list[str] | None) -> Row:
        cells = cut(cells, width)
        return parse({name: cells[position] for name, position in at.items()})

    def told() -> list[str]:
        return [*table_notes(taken, (*columns, *also)), *notes()]

    return LogRows(rows=placed(taken.rows), parse=row, notes=told, **how)


def every_row(source: Source, columns: Sequence[str] = ()) -> Iterable[tuple[int, dict[str, str]]]:
    """Yield (line, cells by column) of a table of which every row counts, blanks around the cells left out.

    Raises ForetraceError where one of these columns is missing, or a row cannot be cut.
    """
    taken = table(source)
    with_columns(source, taken, columns)
    for line, cells in taken.rows:
        try:
            row = cut(cells, len(taken.header))
        except Bad as why:
            raise source.fail(f"line {line}: {why}; correct that line.") from None
        yield line, dict(zip(taken.header, map(str.strip, row), strict=True))


def cut(cells: list[str] | None, width: int) -> list[str]:
    """Return the cells of a row; raises Bad where there are not exactly `width`."""
    if cells is None:
        raise Bad("its quotes are broken")
    if len(cells) != width:
        raise Bad(f"it has {len(cells)} columns where {width} belong")
    return cells


def placed(rows: Iterable[tuple[int, Any]]) -> Iterable[tuple[str, Any]]:
    """Return line numbers in words."""
    return ((f"line {number}", cells) for number, cells in rows)


def table_notes(taken: Table, used: Iterable[str] = ()) -> list[str]:
    """Return what of a table was not taken: blank lines, and columns nobody reads (where `used` says which are)."""
    notes = []
    if taken.blank:
        notes.append(f"blank lines are no rows: {len(taken.blank)}, the first is line {taken.blank[0]}")
    unread = [name for name in taken.header if name not in set(used)]
    if taken.header and unread:
        notes.append(f"columns that were not taken: {', '.join(unread)}")
    return notes
