"""Cells of a table that are measured once and kept, one JSON line each, so that a protocol goes on where it stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from foretrace.experiment.ledger import Row
from foretrace.files import write_text
from foretrace.reading import read_text

Cell = dict[str, Any]
SECONDS = "cpu_s"  # that a cell took; not part of what it found


def measured(path: Path, keys: Iterable[Cell], measure: Callable[[Cell], Cell], *, again: bool = False) -> list[Cell]:
    """Every key with what was found for it, in order; what is in the file already is not measured again."""
    known: dict[str, Cell] = {}
    if path.exists() and not again:
        for line in read_text(path, mend="remove it").splitlines():
            found = json.loads(line)
            known[_name(found["key"])] = found
    cells = []
    for key in keys:
        name = _name(key)
        if name not in known:
            begun = time.process_time()
            found = measure(key)
            known[name] = {"key": key, "found": found, SECONDS: round(time.process_time() - begun, 3)}
            write_text(path, "".join(json.dumps(each) + "\n" for each in known.values()))
        cells.append({**known[name]["key"], **known[name]["found"], SECONDS: known[name][SECONDS]})
    return cells


def where(rows: Iterable[Row]) -> str:
    """On which processors, and when, rows of the ledger were measured."""
    return "; ".join(
        dict.fromkeys(f"{row.machine['cpu']}, {row.machine['cores']} cores, {row.time[:10]}" for row in rows)
    )


def _name(key: Cell) -> str:
    return json.dumps(key, sort_keys=True)
