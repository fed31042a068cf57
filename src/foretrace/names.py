"""What a user calls something that has a name here: one resolver for techniques, devices, models and precisions.

A name is what it is written as, but for case and signs ("A100 SXM4-80GB" is "A100-SXM4-80GB"); an alias is another name
of the same thing ("amp"); all else is a mistake, which is answered with what comes near, aliases included.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any

from foretrace.errors import ForetraceError

_LIKE = 0.55  # of `difflib`'s ratio, from which a name is worth a question
_MANY = 3


def plain(name: str) -> str:
    """Return letters and digits alone, in lower case, and the points of numbers: "gpt3-1.3b" is not "gpt3-13b"."""
    return re.sub(r"[^a-z0-9.]|(?<![0-9])\.|\.(?![0-9])", "", name.lower())


def resolve(name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None) -> str | None:
    """Return the known name that `name` means, also by an alias, written in any way; None if it means none of them."""
    known = list(known)
    if name in known:
        return name
    wanted = plain(name)
    meant = {each for each in known if wanted and plain(each) == wanted}
    meant = meant or {to for alias, to in (aliases or {}).items() if wanted and plain(alias) == wanted}
    return meant.pop() if len(meant) == 1 else None


def chosen(name: str, known: Iterable[str], wrong: str, aliases: Mapping[str, str] | None = None) -> str:
    """Return the known name that is meant. Raises ForetraceError, `wrong` and what comes near, where it is none."""
    known = list(known)
    found = resolve(name, known, aliases)
    if found not in known:
        raise ForetraceError(f"{wrong}; {question(name, known, aliases)}")
    return found


def near(name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None) -> list[str]:
    """Return known names that come near, the nearest first; empty if none does."""
    wanted = plain(name)
    scores: dict[str, float] = {}
    for written, meant in [*((each, each) for each in known), *(aliases or {}).items()]:
        text = plain(written)
        score = SequenceMatcher(None, wanted, text).ratio()
        if wanted and text and (wanted.startswith(text) or text.startswith(wanted)):
            score = max(score, 0.9 - 0.01 * abs(len(text) - len(wanted)))
        scores[meant] = max(scores.get(meant, 0.0), score)
    order = sorted(scores, key=lambda each: (-scores[each], each))
    best = scores[order[0]] if order else 0.0
    return [each for each in order if scores[each] >= max(_LIKE, best - 0.15)][:_MANY]


def question(name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None, *, lists: str = "") -> str:
    """Return the end of a sentence on an unknown name: "did you mean h100?", or `lists`, where all are named."""
    known = list(known)
    found = near(name, known, aliases)
    return f"did you mean {' or '.join(found)}?" if found else lists or f"choose {', '.join(sorted(known))}."


def keyed(words: Iterable[str], known: Iterable[str], who: str, sign: str = "_") -> dict[str, str]:
    """Return what `key=value` words say, by known key; dashes and underscores in keys are the same, and told as `sign`.

    Raises ForetraceError, in the name of `who`, for a word without "=", an unknown key, and one given twice.
    """
    shown = {each: each.replace("_", sign) for each in known}
    listed = "it takes " + (", ".join(f"{each}=" for each in shown.values()) or "no parameters") + "."
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.replace("-", "_")
        if not equals:
            raise ForetraceError(f"{who}: {word!r} is no key=value; {listed}")
        if key not in shown:
            close = near(key, shown)
            hint = f"did you mean {shown[close[0]]}=?" if close else listed
            raise ForetraceError(f"{who} has no parameter {key.replace('_', sign)}; {hint}")
        if key in given:
            raise ForetraceError(f"{who}: {shown[key]} is given twice; keep one.")
        given[key] = value
    return given


def numbers(words: Iterable[str], defaults: Mapping[str, int | float], who: str) -> dict[str, Any]:
    """Return what `key=number` words say, each of the type of its default, which those that are not named keep.

    Raises ForetraceError as `keyed`, and for what is no such number.
    """
    found = dict(defaults)
    for key, value in keyed(words, defaults, who).items():
        try:
            found[key] = type(defaults[key])(value)
        except ValueError:
            kind = "whole number" if isinstance(defaults[key], int) else "number"
            raise ForetraceError(f"{who}: {key}= must be a {kind}, got {value!r}.") from None
    return found
