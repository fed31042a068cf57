"""Techniques from text: `prefetch-data workers=4`, as `--do` takes it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any

from foretrace.errors import ForetraceError
from foretrace.names import keyed, resolve
from foretrace.techniques.base import Parameter, Technique
from foretrace.techniques.registry import technique

_UNIT = 7  # characters of the longest unit, "Gbits/s"
_TRUE, _FALSE = ("yes", "true", "on", "1"), ("no", "false", "off", "0")


def parse(text: str) -> Technique:
    """Return one technique from its name and `key=value` words; quote values that hold spaces.

    Dashes and underscores in keys are the same. Raises ForetraceError for an unknown name or key, a value of
    the wrong type, or a key that is missing.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ForetraceError(f"`do={text!r}`: {error}; close the quote.") from error
    if not words:
        raise ForetraceError('`do=""` names no technique; write for example `do="prefetch-data workers=4"`.')
    kind = technique(words[0])
    known = {each.name: each for each in kind.parameters()}
    given = {
        known[key].field: _convert(kind.name, known[key], value)
        for key, value in keyed(_joined(words[1:]), known, kind.name).items()
    }
    missing = [each.name for each in known.values() if each.required and each.field not in given]
    if missing:
        raise ForetraceError(f"{kind.name} needs {' and '.join(f'{name}=' for name in missing)}.")
    return kind(**given)


def _joined(words: list[str]) -> list[str]:
    """Return the words, a unit put behind the number that it belongs to: "network=100 Gbps" is one."""
    found: list[str] = []
    for word in words:
        number = found[-1].rpartition("=")[2] if found and "=" in found[-1] else ""
        if "=" not in word and number.replace(".", "", 1).isdigit() and word[:1].isalpha() and len(word) <= _UNIT:
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


def parse_all(texts: Iterable[str]) -> tuple[Technique, ...]:
    """Return several techniques, in the order in which they are applied."""
    return tuple(parse(text) for text in texts)


def _boolean(value: str) -> bool:
    if value.lower() in (*_TRUE, *_FALSE):
        return value.lower() in _TRUE
    raise ValueError(value)


_LARGEST = 1e12  # of any number: bytes of a terabyte
_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "float": (float, "a number"), "int": (int, "a whole number"), "bool": (_boolean, "yes or no"), "str": (str, "text"),
}  # fmt: skip


def _convert(name: str, to: Parameter, value: str) -> Any:
    read, wanted = _READERS[to.type]
    try:
        result = read(value)
    except ValueError as error:
        raise ForetraceError(f"{name}: {to.name}={value} is not {wanted}.") from error
    if to.type == "float" and not isfinite(result):
        raise ForetraceError(f"{name}: {to.name}={value} is not a finite number.")
    if to.type in ("float", "int") and abs(result) > _LARGEST:
        raise ForetraceError(f"{name}: {to.name} must be at most {_LARGEST:g}, got {value}.")
    if not to.choices:
        return result
    chosen = resolve(str(result), to.choices) or result
    if chosen not in to.choices:
        raise ForetraceError(f"{name}: {to.name}={value} is not one of {', '.join(to.choices)}.")
    return chosen
