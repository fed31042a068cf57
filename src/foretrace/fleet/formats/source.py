"""`Source`: the text of a log, whatever it was packed in, cut into rows that know where they stand."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from foretrace import reading
from foretrace.errors import ForetraceError


@dataclass(frozen=True)
class Source:
    """A file that was read. path: as the user named it; text: decoded, line ends as written; notes: what was bent."""

    path: str
    text: str
    notes: tuple[str, ...] = ()

    @cached_property
    def lines(self) -> list[str]:
        """Lines without their ends; a line ends with a line feed, a carriage return before it is dropped."""
        lines = self.text.split("\n")
        if "\r" in self.text:
            lines = [line[:-1] if line.endswith("\r") else line for line in lines]
        return lines

    @cached_property
    def first(self) -> str:
        """The first line that is not blank, "" where there is none."""
        return next((line for line in self.lines if line.strip()), "")

    @cached_property
    def json(self) -> Any:
        """The text as JSON; None where it is not. Numbers that JSON does not know (NaN) are refused."""
        try:
            return reading.parse_json(self.text, self.path)
        except ForetraceError:
            return None

    @cached_property
    def header(self) -> tuple[str, ...]:
        """Names in the first line, taken as a row of a CSV file."""
        cells = split_line(self.first, ",")
        return tuple(cell.strip() for cell in cells) if cells else ()

    def has(self, *columns: str) -> bool:
        """Return whether all these are names in the first line."""
        return set(columns) <= set(self.header)

    def fail(self, why: str) -> ForetraceError:
        """Return the error to raise about the file as a whole; `why` ends with how to fix it."""
        return ForetraceError(f"{self.path}: {why}")


def load(path: str | Path) -> Source:
    """Read a file, unpack gzip, decode UTF-8 (or UTF-16 with its mark); raises ForetraceError where that fails."""
    return decode(str(path), reading.read_bytes(Path(path)))


def decode(path: str, data: bytes) -> Source:
    """Return bytes as text. What is not UTF-8 becomes the replacement character, and a note says how often."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        text, kind = data.decode("utf-16", errors="replace"), "UTF-16"
    else:
        text, kind = data.decode("utf-8-sig", errors="replace"), "UTF-8"
    # the character may also stand in the file itself, which is no damage
    bad = text.count("�") - data.count("�".encode()) * (kind == "UTF-8")
    note = f"{bad} pieces are not {kind} and were read as the replacement character"
    return Source(path, text, (note,) if bad > 0 else ())


def split_line(line: str, delimiter: str) -> list[str] | None:
    """Return cells of one line; quotes are as in CSV and may not reach over a line end. None where they are broken."""
    if '"' not in line:
        return line.split(delimiter)
    try:
        rows = list(csv.reader([line], delimiter=delimiter, strict=True))
    except csv.Error:
        return None
    return rows[0] if len(rows) == 1 else None


@dataclass(frozen=True)
class Table:
    """Rows of a delimited text: `rows` yields (line number, cells or None where the line cannot be cut)."""

    header: tuple[str, ...]
    rows: Iterator[tuple[int, list[str] | None]]
    blank: list[int]  # line numbers of blank lines, complete once `rows` is spent


def table(source: Source, delimiter: str = ",", *, header: bool = True) -> Table:
    """Cut a text into cells, line by line. Blank lines are no rows."""
    lines = source.lines
    at = 0
    names: tuple[str, ...] = ()
    if header:
        while at < len(lines) and not lines[at].strip():
            at += 1
        cells = split_line(lines[at], delimiter) if at < len(lines) else None
        if cells is None:
            raise source.fail("has no header line; copy it once more.")
        names = tuple(cell.strip() for cell in cells)
        at += 1
    blank: list[int] = []

    def rows() -> Iterator[tuple[int, list[str] | None]]:
        last = len(lines) - 1
        for number, line in enumerate(lines[at:], at + 1):
            if not line or line.isspace():
                if number <= last:  # what follows the last line end is no line
                    blank.append(number)
                continue
            yield number, (line.split(delimiter) if '"' not in line else split_line(line, delimiter))

    return Table(names, rows(), blank)


def whole_table(source: Source) -> Iterator[tuple[int, list[str] | None]]:
    """Yield rows of a CSV whose quoted cells may hold line ends: (first line, cells, None where its quotes are broken).

    After a broken row reading continues with the next line, so that one stray quote does not swallow the rest.
    """
    lines = source.text.split("\n")
    lines = [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    at = 0
    while at < len(lines):
        reader = csv.reader((lines[each] for each in range(at, len(lines))), strict=True)
        start = at
        while start < len(lines):
            try:
                cells = next(reader)
            except csv.Error:
                yield start + 1, None
                at = start + 1
                break
            if len(cells) > 1 or (cells and cells[0].strip()):
                yield start + 1, cells
            start = at + reader.line_num
        else:
            return
