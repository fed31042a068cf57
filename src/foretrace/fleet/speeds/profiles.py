"""What an iteration of a model computes and exchanges on one GPU: a small table, and the reader of more like it."""

from __future__ import annotations

from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Annotated

import msgspec

from foretrace import reading
from foretrace.errors import ForetraceError

_Above = Annotated[float, msgspec.Meta(gt=0, le=1e300)]


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an iteration of a model computes and exchanges on one GPU."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    compute_ms: _Above
    gradient_mb: _Above  # MB (1e6 bytes) that every worker sends around
    batch: Annotated[int, msgspec.Meta(gt=0)]  # samples per iteration and GPU
    aliases: tuple[str, ...] = ()
    published_scale: _Above | None = None  # what the authors' simulator multiplies compute_ms by
    note: str = ""


class _Profiles(msgspec.Struct):
    profiles: Annotated[tuple[Profile, ...], msgspec.Meta(min_length=1)]


def load_profiles(path: Path | None = None) -> tuple[Profile, ...]:
    """Return profiles from JSON, by default the shipped ones. Raises ForetraceError naming entry and key."""
    where = path or files("foretrace.fleet").joinpath("model_profiles.json")
    text = where.read_text(encoding="utf-8") if path is None else reading.read_text(path)
    try:
        return msgspec.convert(reading.parse_json(text, str(where)), _Profiles).profiles
    except msgspec.ValidationError as error:
        raise ForetraceError(
            f'{where} holds no profiles ({error}); write {{"profiles": [{{"name": ..., "compute_ms": ...}}]}}.'
        ) from None


def above_zero(value: object) -> bool:
    """Return whether a value that somebody wrote is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value > 0
