"""Many independent cells, each written down as soon as it is done: a killed sweep loses only cells in flight."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from foretrace import executor
from foretrace.errors import ForetraceError, refused
from foretrace.files import write_text

Values = Mapping[str, Any]  # plain JSON values by name
HEAD = "sweep.json"  # says what all cells of a folder share


@dataclass(frozen=True, slots=True)
class Swept:
    """Rows in the order of the cells, each the cell's own values and what was found; how many were there already."""

    rows: tuple[dict[str, Any], ...]
    reused: int
    folder: str


def sweep(
    function: Callable[[Values], Values],
    cells: Sequence[Values],
    *,
    folder: Path,
    of: Values | None = None,
    on: str = "here",
    progress: Callable[[float], None] | None = None,
) -> Swept:
    """Return `function` of every cell, on all cores or a Ray cluster; cells that `folder` has are not done again.

    function: of a module; a cell (JSON values by name) to JSON values by name. of: what all cells share (a trace, its
    time stamp); a folder that was begun with something else is refused. Each worker writes its cell's file (whole, then
    renamed), so with `on` = "ray" the folder has to be one that all machines see.
    """
    executor.check_place(on)
    shared = dict(of or {})
    kept: dict[Path, dict[str, Any]] = {}
    for cell in map(dict, cells):
        if kept.setdefault(folder / f"{key_of(cell)}.json", cell) is not cell:
            raise ForetraceError(f"a cell of the sweep stands twice: {cell}; name each value once.")
    new = _claim(folder, shared)
    missing = {path: cell for path, cell in kept.items() if not path.exists()}
    there = len(kept) - len(missing)
    if progress is not None and kept:
        progress(there / len(kept))

    def tell(share: float) -> None:
        if progress is not None:
            progress((there + share * len(missing)) / len(kept))

    try:
        executor.map(partial(_do, function), list(missing.items()), on=on, progress=tell)
    except ForetraceError:
        if new:  # a mistake, not work to continue
            _leave(folder)
        raise
    return Swept(tuple(map(_read, kept)), there, str(folder))


def key_of(cell: Values) -> str:
    """Return a name for a cell's file that depends on its values alone."""
    try:
        text = json.dumps(cell, sort_keys=True, allow_nan=False)
    except ValueError:
        raise ForetraceError(f"a cell of the sweep has a value that is no number: {dict(cell)}; correct it.") from None
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _leave(folder: Path) -> None:
    """Remove a folder in which no cell was done."""
    if [each.name for each in folder.iterdir()] == [HEAD]:
        (folder / HEAD).unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()


def _claim(folder: Path, shared: Values) -> bool:
    """Begin a folder (True), or see that it was begun with the same things (False)."""
    with refused(f"cannot write to {folder}", "choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
    head = folder / HEAD
    if head.exists():
        try:
            begun = json.loads(head.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ForetraceError(f"{head} cannot be read; choose another folder, or remove this one.") from None
        if not isinstance(begun, dict):
            raise ForetraceError(f"{head} says nothing about a sweep; choose another folder, or remove this one.")
        if begun != json.loads(json.dumps(shared)):
            differs = sorted(k for k in {*begun, *shared} if begun.get(k) != shared.get(k))
            raise ForetraceError(
                f"{folder} holds a sweep with another {', '.join(differs)}; choose another folder, or remove it."
            )
        return False
    if any(folder.iterdir()):
        raise ForetraceError(f"{folder} has files in it but no sweep; choose a new or empty folder.")
    write_text(head, json.dumps(shared, indent=1))
    return True


def _do(function: Callable[[Values], Values], task: tuple[Path, dict[str, Any]]) -> None:
    path, cell = task
    write_text(path, json.dumps({"cell": cell, "found": dict(function(cell))}))


def _read(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ForetraceError(f"{path} cannot be read; remove it and run the sweep again.") from None
    return {**said["cell"], **said["found"]}
