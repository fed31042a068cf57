"""What an iteration of a model computes and exchanges on one GPU: a small table, and the reader of more like it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from foretrace import reading
from foretrace.errors import ForetraceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What an iteration of a model computes and exchanges on one GPU."""

    name: str
    compute_ms: float
    gradient_mb: float  # MB (1e6 bytes) that every worker sends around
    batch: int  # samples per iteration and GPU
    aliases: tuple[str, ...] = ()
    published_scale: float | None = None  # what the authors' simulator multiplies compute_ms by
    note: str = ""


def load_profiles(path: Path | None = None) -> tuple[Profile, ...]:
    """Return profiles from JSON, by default the shipped ones. Raises ForetraceError naming entry and key."""
    where = "model_profiles.json" if path is None else str(path)
    text = (
        files("foretrace.fleet").joinpath("model_profiles.json").read_text(encoding="utf-8")
        if path is None
        else reading.read_text(path)
    )
    said: Any = reading.parse_json(text, where)
    rows = said.get("profiles") if isinstance(said, dict) else None
    if not isinstance(rows, list) or not rows:
        raise ForetraceError(f'{where} holds no profiles; write {{"profiles": [{{"name": ..., "compute_ms": ...}}]}}.')
    return tuple(_profile(row, f"{where}: profiles[{at}]") for at, row in enumerate(rows))


def _profile(row: Any, where: str) -> Profile:
    if not isinstance(row, dict) or not isinstance(row.get("name"), str) or not row["name"]:
        raise ForetraceError(f"{where} has no name; name the model.")
    unknown = set(row) - set(Profile.__dataclass_fields__)
    if unknown:
        raise ForetraceError(f"{where} ({row['name']}): unknown key {min(unknown)!r}; leave it out.")
    for key in ("compute_ms", "gradient_mb", "batch"):
        if not above_zero(row.get(key)):
            raise ForetraceError(f"{where} ({row['name']}): {key} must be a number above 0, not {row.get(key)!r}.")
    scale, aliases = row.get("published_scale"), row.get("aliases", [])
    if scale is not None and not above_zero(scale):
        raise ForetraceError(f"{where} ({row['name']}): published_scale must be a number above 0, or left out.")
    if not isinstance(aliases, list) or not all(isinstance(each, str) for each in aliases):
        raise ForetraceError(f"{where} ({row['name']}): aliases must be a list of names.")
    return Profile(**{**row, "aliases": tuple(aliases), "batch": int(row["batch"])})


def above_zero(value: object) -> bool:
    """Return whether a value that somebody wrote is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value > 0
