"""Catalogs that come with the package: the rows of a CSV table as dataclasses."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any, TypeVar

import msgspec

Row = TypeVar("Row")


def rows(
    package: str, table: str, kind: type[Row], special: Mapping[str, Callable[[str], Any]] | None = None
) -> tuple[Row, ...]:
    """The rows of a table of a package. An empty cell is the field's default; `special`: how to read some columns."""
    text = files(package).joinpath(table).read_text(encoding="utf-8")
    found = []
    for row in csv.DictReader(text.splitlines()):
        cells = {key: (special or {}).get(key, str)(value) for key, value in row.items() if value}
        found.append(msgspec.convert(cells, kind, strict=False))
    return tuple(found)
