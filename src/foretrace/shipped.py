"""What packages bring: rows of our tables, our templates, entry points of all that are installed."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from importlib.resources import files
from typing import Any, TypeVar

Row = TypeVar("Row")


def rows(
    package: str, table: str, kind: type[Row], special: Mapping[str, Callable[[str], Any]] | None = None
) -> tuple[Row, ...]:
    """Return rows of a packaged table; an empty cell is the field's default; `special`: how to read some columns."""
    import msgspec  # here: --help needs entry points alone

    text = files(package).joinpath(table).read_text(encoding="utf-8")
    found = []
    for row in csv.DictReader(text.splitlines()):
        cells = {key: (special or {}).get(key, str)(value) for key, value in row.items() if value}
        found.append(msgspec.convert(cells, kind, strict=False))
    return tuple(found)


def filled(package: str, template: str, **given: object) -> str:
    """Return a packaged template (Jinja) with these values; a line that holds a tag alone leaves none."""
    text: str = _template(package, template).render(**given)
    return text


@lru_cache
def _template(package: str, name: str) -> Any:
    import jinja2

    made = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    return made.from_string(files(package).joinpath(name).read_text(encoding="utf-8"))


def entry_points(group: str) -> tuple[metadata.EntryPoint, ...]:
    """Return what installed packages offer under a group.

    Read once while the folders of `sys.path` stay as they are: that takes 10 ms where 150 packages are installed, and
    every technique that is parsed asks.
    """
    changed = []
    for folder in sys.path:
        with suppress(OSError):
            changed.append((folder, os.stat(folder or ".").st_mtime_ns))  # noqa: PTH116  (half the time)
    return _offered(group, tuple(changed))


@lru_cache(maxsize=64)
def _offered(group: str, folders: tuple[tuple[str, int], ...]) -> tuple[metadata.EntryPoint, ...]:
    return tuple(metadata.entry_points(group=group))
