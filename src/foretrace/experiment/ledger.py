"""The ledger: every verification of this user as one row, predicted beside measured, in an SQLite file.

Rows are only ever added, each in one short transaction, so that processes may write at the same time and one that is
killed leaves a whole row or none. Write-ahead logging lets readers continue. Plain columns hold what is filtered
and summed up, JSON columns the rest; `Row` is both, and one line of an export. `summaries` say how well techniques
were predicted.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from io import StringIO
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from foretrace.errors import ForetraceError
from foretrace.experiment.statistics import Ratio, Verdict, floor
from foretrace.files import part_of, write_text
from foretrace.reading import home, read_text

SCHEMA = 1
APPLICATION = 0x466F5472  # "FoTr", so that `file` and we know what this is
BUSY_S = 30.0  # how long a writer waits for another one


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One verification. Times in seconds per step; ratios are treated over baseline step."""

    id: str  # of this row forever: a second import adds nothing
    time: str  # UTC, ISO 8601, when it was written
    techniques: str  # as written on the command line, joined by " + "
    model: str
    size: str
    threads: int
    batches: str  # "ready" or "loader"
    device: str
    torch: str
    python: str
    foretrace: str
    clock: str
    before_s: float
    after_s: float
    measured: float
    measured_low: float
    measured_high: float
    predicted: float
    predicted_low: float
    predicted_high: float
    error: float  # predicted / measured - 1
    covered: bool
    verdict: str
    same: float  # the baseline against itself
    same_low: float
    same_high: float
    samples_before: int
    samples_after: int
    seed: int
    machine: dict[str, Any]
    allocator: dict[str, str]
    parameters: dict[str, Any]  # per technique
    arms: dict[str, Any]  # statistics of every arm on both clocks, blocks, losses, and how they were run
    assumptions: tuple[dict[str, Any], ...]
    residual: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the techniques."""
        return tuple(self.parameters)


JSON_COLUMNS = ("machine", "allocator", "parameters", "arms", "assumptions", "residual", "notes")
_TYPES = {"int": "INTEGER", "float": "REAL", "bool": "INTEGER"}
_COLUMNS = {
    field.name: "TEXT" if field.name in JSON_COLUMNS else _TYPES.get(getattr(field.type, "__name__", ""), "TEXT")
    for field in msgspec.structs.fields(Row)
}


def default_path() -> Path:
    """Return $FORETRACE_LEDGER, else the user's data folder of this platform."""
    if given := os.environ.get("FORETRACE_LEDGER"):
        return Path(given)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home() / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_DATA_HOME") or home() / ".local" / "share")
    return base / "foretrace" / "ledger.sqlite"


class Ledger:
    """One ledger file. Nothing is opened between two calls, so that it may be shared freely."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or default_path()

    def checked(self) -> Ledger:
        """Return itself. Raises ForetraceError where rows cannot be added: better before minutes of measuring than
        after.
        """
        self.add(())
        return self

    def add(self, rows: Iterable[Row]) -> int:
        """Add rows in one transaction, without those whose id is known; how many were added.

        Makes the file where there is none. Raises ForetraceError where a row holds what no ledger can, where the file
        cannot be written or where it is no ledger; then nothing is added and nothing in the file is changed.
        """
        values = [_values(row) for row in rows]
        if not self.path.exists():
            self._make()
        marks = ", ".join("?" * len(_COLUMNS))
        with self._open(writing=True) as base:
            base.execute("BEGIN IMMEDIATE")
            before = base.total_changes
            base.executemany(
                f"INSERT INTO runs ({', '.join(_COLUMNS)}) VALUES ({marks}) ON CONFLICT (id) DO NOTHING", values
            )
            added = base.total_changes - before
            base.execute("COMMIT")
        return added

    def keep(self, *rows: Row) -> tuple[str, str]:
        """Add rows; this file and the id of the last one."""
        self.add(rows)
        return str(self.path), rows[-1].id

    def rows(self, *, model: str = "", technique: str = "") -> tuple[Row, ...]:
        """Return rows, oldest first: of one model, and of those that apply one technique, where asked for.

        Raises ForetraceError where there is no ledger, or it cannot be read.
        """
        if not self.path.exists():
            raise ForetraceError(f"there is no ledger at {self.path} yet; foretrace verify writes its first row.")
        where, values = ("WHERE model = ?", (model,)) if model else ("", ())
        with self._open() as base:
            found = base.execute(f"SELECT {', '.join(_COLUMNS)} FROM runs {where} ORDER BY time, rowid", values)
            rows = tuple(_row(each) for each in found)
        return tuple(row for row in rows if not technique or technique in row.names)

    def import_jsonl(self, path: Path) -> int:
        """Add the rows of an export; how many were new. Raises ForetraceError, naming a line that is no row."""
        text = read_text(path, mend="give a file of rows, one JSON object per line")
        return self.add(import_lines(text, str(path)))

    def _make(self) -> None:
        """Make an empty ledger beside its place and put it there whole, unless another process was first."""
        part = part_of(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(part, isolation_level=None)) as base:
                base.execute("PRAGMA journal_mode = WAL")  # readers continue during writes; it stays with the file
                columns = ", ".join(
                    f"{name} {kind} NOT NULL" + (" PRIMARY KEY" if name == "id" else "")
                    for name, kind in _COLUMNS.items()
                )
                base.execute(f"CREATE TABLE runs ({columns})")
                base.execute(f"PRAGMA application_id = {APPLICATION}")
                base.execute(f"PRAGMA user_version = {SCHEMA}")
            try:
                os.link(part, self.path)
            except OSError:  # another process was first, or a file system without links
                if not self.path.exists():
                    part.replace(self.path)
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(getattr(error, "strerror", None) or str(error)) from None
        finally:
            for suffix in ("", "-wal", "-shm", "-journal"):
                with suppress(OSError):
                    part.with_name(part.name + suffix).unlink()

    @contextmanager
    def _open(self, *, writing: bool = False) -> Iterator[sqlite3.Connection]:
        """Open a connection to a file that was seen to be a ledger of our schema. Raises ForetraceError.

        The first look is read-only: whatever else the file may be, it stays as it is, byte for byte.
        """
        try:
            with self._connected() as base:
                self._check(base)
                if not writing:
                    yield base
                    return
            with closing(sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)) as base:
                base.execute("PRAGMA synchronous = NORMAL")
                yield base
        except sqlite3.OperationalError as error:
            raise self._unusable(str(error)) from None
        except (sqlite3.DatabaseError, msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
            raise ForetraceError(
                f"{self.path} is no readable ledger ({error}); move it away and import an export of it, or choose "
                "another file with `ledger=`."
            ) from None

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """Open a read-only connection; in a folder that cannot be written, one that needs no file of locks there."""
        if not self.path.is_file():
            raise self._unusable("it is no file")
        where = self.path.absolute().as_uri()
        still = not os.access(self.path.parent, os.W_OK) and not self.path.with_name(self.path.name + "-wal").exists()
        mode = "immutable=1" if still else "mode=ro"
        with closing(sqlite3.connect(f"{where}?{mode}", uri=True, timeout=BUSY_S, isolation_level=None)) as base:
            yield base

    def _check(self, base: sqlite3.Connection) -> None:
        (application,), (schema,) = (
            base.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
        )
        if application != APPLICATION:
            raise ForetraceError(
                f"{self.path} is an SQLite file but no ledger, and was left as it is; choose another one with "
                "`ledger=`."
            )
        if schema != SCHEMA:
            raise ForetraceError(
                f"{self.path} has schema version {schema} and this foretrace reads {SCHEMA}; update foretrace, or "
                "export it there (foretrace ledger --export rows.jsonl) and import that here."
            )

    def _unusable(self, why: str) -> ForetraceError:
        return ForetraceError(f"cannot use the ledger {self.path} ({why}); choose another one with `ledger=`.")


def verified_on(path: Path | None = None) -> dict[str, tuple[str, ...]]:
    """Return models with a conclusive row, by technique, sorted; empty where there is no ledger yet.

    Rows of several techniques applied together count for none of them. Raises ForetraceError for a damaged ledger.
    """
    try:
        ledger = Ledger(path)
    except ForetraceError:  # no home folder, so none was ever written
        return {}
    return models_of(ledger.rows()) if ledger.path.is_file() else {}


def shipped_on() -> dict[str, tuple[str, ...]]:
    """Return the same for the rows that foretrace's own table of accuracy is made of."""
    from importlib.resources import files

    text = files("foretrace.experiment").joinpath("shipped.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, tuple[str, ...]])


def models_of(rows: Iterable[Row]) -> dict[str, tuple[str, ...]]:
    """Return models with a conclusive row, by technique, sorted; rows of several techniques together count for none."""
    found: dict[str, set[str]] = {}
    for row in rows:
        if len(row.names) == 1 and row.verdict != Verdict.INCONCLUSIVE:
            found.setdefault(row.names[0], set()).add(row.model)
    return {name: tuple(sorted(models)) for name, models in found.items()}


def export_lines(rows: Iterable[Row]) -> str:
    """Return rows as JSON lines. Raises ForetraceError where a row holds what an import would refuse."""
    return "".join(msgspec.json.encode(_sound(row)).decode() + "\n" for row in rows)


def import_lines(text: str, source: str) -> tuple[Row, ...]:
    """Return rows of an export; raises ForetraceError with the line that is none."""
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):  # JSON leaves other ends of lines (U+2028) as they are
        if not line.strip():
            continue
        try:
            rows.append(_sound(msgspec.json.decode(line, type=Row)))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ForetraceError(
                f"{source}, line {number} is no row of a ledger ({error}); give a file that "
                "foretrace ledger --export FILE.jsonl wrote."
            ) from None
        except ForetraceError as error:
            raise ForetraceError(f"{source}, line {number}: {error}") from None
    return tuple(rows)


def _sound(row: Row) -> Row:
    """Return a row that can be stored, exported and imported again: raises ForetraceError for a number that cannot.

    Text that is no Unicode (a file name that is no UTF-8) is kept in escaped form.
    """
    for name, kind in _COLUMNS.items():
        value = getattr(row, name)
        if kind == "REAL" and not isfinite(value):
            raise ForetraceError(f"{name} of a row of the ledger must be a finite number, got {value}; measure again.")
        if kind == "INTEGER" and not -(2**63) <= value < 2**63:
            raise ForetraceError(
                f"{name} of a row of the ledger must be below 2^63, got {value}; choose a smaller one."
            )
    return msgspec.structs.replace(row, **{name: _plain(getattr(row, name)) for name in Row.__struct_fields__})


def _plain(value: Any) -> Any:
    """Return the same value with text that can be encoded, and null for numbers that JSON does not know."""
    match value:
        case str():
            return value.encode("utf-8", errors="backslashreplace").decode()
        case float():
            return value if isfinite(value) else None
        case int() if not -(2**63) <= value < 2**64:
            return str(value)
        case dict():
            return {_plain(key): _plain(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(_plain(each) for each in value)
    return value


def _values(row: Row) -> tuple[Any, ...]:
    row = _sound(row)
    found = ((name, getattr(row, name)) for name in _COLUMNS)
    return tuple(msgspec.json.encode(value).decode() if name in JSON_COLUMNS else value for name, value in found)


def _row(values: Sequence[Any]) -> Row:
    found = dict(zip(_COLUMNS, values, strict=True))
    found |= {name: msgspec.json.decode(found[name]) for name in JSON_COLUMNS}
    found["covered"] = bool(found["covered"])
    return msgspec.convert(found, Row)


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
        median_error=median(errors) if errors else None,
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
    from csv import writer

    names = [name for name in Row.__struct_fields__ if name not in JSON_COLUMNS]
    out = StringIO()
    table = writer(out, lineterminator="\n")
    table.writerow(names)
    table.writerows([getattr(row, name) for name in names] for row in rows)
    return out.getvalue()
