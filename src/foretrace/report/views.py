"""What all results share: the struct that each extends, step times and breakdowns.

A result encodes to the JSON contract as it stands (docs/json.md): names, units and order. Times are seconds.
Fields are only ever added; a field that changes its meaning or goes away raises `SCHEMA_VERSION`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from math import isfinite
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from foretrace.report.blocks import Block

Made = TypeVar("Made", bound=msgspec.Struct)

SCHEMA_VERSION = 1

# What people read; `part_word` knows that without a device nothing is launched.
_PART_WORDS = {
    "compute": "compute",
    "exposed_copy": "exposed copy",
    "exposed_communication": "exposed communication",
    "launch_bound": "launch-bound",
    "data_loading": "data loading",
    "synchronisation": "sync",
    "idle": "idle",
}
PARTS = tuple(_PART_WORDS)


def part_word(part: str, platform: str) -> str:
    """Return the word for a part of the step: "launch-bound", or "Python" where there is no device to launch on."""
    return "Python" if platform == "cpu" and part == "launch_bound" else _PART_WORDS[part]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a command answers."""

    schema_version: int = SCHEMA_VERSION
    command: str = ""  # each result says which it is of

    def shown(self, top: int) -> Iterable[Block]:
        """Return what a person sees beside headline, notes and next command; a ranking shows `top` rows."""
        if not getattr(self, "headline", ""):
            raise TypeError(f"a result must say what is shown, got {type(self).__name__}; see docs/write-a-command.md.")
        return ()


class Report(Result, frozen=True, kw_only=True):
    """What most commands answer: one sentence, remarks, and the command to try next, around their figures."""

    headline: str
    notes: tuple[str, ...] = ()
    next: str = ""


def taken(kind: type[Made], /, *sources: object, **others: Any) -> Made:
    """Return a struct whose fields are the same attributes of the first source that has them, but for `others`.

    Structs inside it are made in the same way, sequences and arrays become tuples, `_ns` of the first source become
    seconds; what has a default and is no attribute keeps it. A figure that is not finite is None where that may be.
    """
    if len(sources) == 1 and isinstance(sources[0], kind) and not others:
        return sources[0]
    found = others
    for name, required, may_be_none, inner in _fields(kind):
        if name not in others:
            source = next((each for each in sources if hasattr(each, name)), _NOWHERE)
            if source is not _NOWHERE:
                value = getattr(source, name)
            elif name.endswith("_s") and hasattr(sources[0], f"{name[:-2]}_ns"):
                value = getattr(sources[0], f"{name[:-2]}_ns") / 1e9
            elif required:
                raise TypeError(f"{kind.__name__} needs {name}, which none of its sources has.")
            else:
                continue
            value = value.tolist() if hasattr(value, "tolist") else value
            if isinstance(value, list | tuple):
                value = tuple(taken(inner, each) for each in value) if inner else tuple(value)
            found[name] = taken(inner, value) if inner and value is not None and not isinstance(value, tuple) else value
        if may_be_none and isinstance(found[name], float) and not isfinite(found[name]):
            found[name] = None
    return kind(**found)


_NOWHERE = object()


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, bool, bool, type[msgspec.Struct] | None], ...]:
    """Return name, whether it must be given, whether it may be None, and the struct that it holds."""

    def struct(type_: Any) -> type[msgspec.Struct] | None:
        if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
            return type_
        return None if get_origin(type_) is dict else next(filter(None, map(struct, get_args(type_))), None)

    found = []
    for field in msgspec.structs.fields(kind):
        type_ = field.type.__origin__ if hasattr(field.type, "__metadata__") else field.type  # without words and units
        found.append((field.name, field.required, type(None) in get_args(type_), struct(type_)))
    return tuple(found)


class StepTimeView(msgspec.Struct, frozen=True, kw_only=True):
    """Step times over the steps of a recording or prediction, seconds."""

    median: float
    p10: float
    p90: float
    mean: float


class BreakdownView(msgspec.Struct, frozen=True, kw_only=True):
    """Where a step goes, seconds; the parts exclude each other and sum to the step."""

    compute: float
    exposed_copy: float
    exposed_communication: float
    launch_bound: float
    data_loading: float
    synchronisation: float
    idle: float

    def parts(self) -> dict[str, float]:
        """Return part name -> seconds, in a fixed order."""
        return {name: getattr(self, name) for name in PARTS}
