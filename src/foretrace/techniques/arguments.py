"""Techniques from text: `prefetch-data workers=4`, as `--do` takes it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any

from foretrace.errors import ForetraceError
from foretrace.names import near, resolve
from foretrace.techniques.base import Parameter, Technique
from foretrace.techniques.registry import technique

_UNIT = 7  # characters of the longest unit, "Gbits/s"
_TRUE, _FALSE = ("yes", "true", "on", "1"), ("no", "false", "off", "0")


def parse(text: str) -> Technique:
    """One technique from its name and `key=value` words; quote values that hold spaces.

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
    given: dict[str, Any] = {}
    for word in _joined(words[1:]):
        key, equals, value = word.partition("=")
        key = key.replace("-", "_")
        if not equals:
            raise ForetraceError(f"{kind.name}: {word!r} is no key=value; it takes {_listed(known)}.")
        if key not in known:
            close = near(key, known)
            hint = f"did you mean {close[0]}=?" if close else f"it takes {_listed(known)}."
            raise ForetraceError(f"{kind.name} has no parameter {key}; {hint}")
        if known[key].field in given:
            raise ForetraceError(f"{kind.name}: {key} is given twice; keep one.")
        given[known[key].field] = _convert(kind.name, known[key], value)
    missing = [each.name for each in known.values() if each.required and each.field not in given]
    if missing:
        raise ForetraceError(f"{kind.name} needs {' and '.join(f'{name}=' for name in missing)}.")
    return kind(**given)


def _joined(words: list[str]) -> list[str]:
    """The words, a unit put behind the number that it belongs to: "network=100 Gbps" is one."""
    found: list[str] = []
    for word in words:
        number = found[-1].rpartition("=")[2] if found and "=" in found[-1] else ""
        if "=" not in word and number.replace(".", "", 1).isdigit() and word[:1].isalpha() and len(word) <= _UNIT:
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


def parse_all(texts: Iterable[str]) -> tuple[Technique, ...]:
    """Several techniques, in the order in which they are applied."""
    return tuple(parse(text) for text in texts)


def _convert(name: str, to: Parameter, value: str) -> Any:
    readers: dict[str, Callable[[str], Any]] = {"float": float, "int": int, "bool": _boolean, "str": str}
    try:
        result = readers[to.type](value)
    except ValueError as error:
        raise ForetraceError(f"{name}: {to.name}={value} is not {_article(to.type)}.") from error
    if to.type == "float" and not isfinite(result):
        raise ForetraceError(f"{name}: {to.name}={value} is not a finite number.")
    if to.choices:
        result = resolve(str(result), to.choices) or result
    if to.choices and result not in to.choices:
        raise ForetraceError(f"{name}: {to.name}={value} is not one of {', '.join(to.choices)}.")
    return result


def _boolean(value: str) -> bool:
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise ValueError(value)


def _article(kind: str) -> str:
    return {"float": "a number", "int": "a whole number", "bool": "yes or no", "str": "text"}[kind]


def _listed(known: dict[str, Parameter]) -> str:
    return ", ".join(f"{name}=" for name in known) or "no parameters"
