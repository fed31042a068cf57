"""Slurm's hostlists: `tux[0-3,7],login1` names six hosts."""

from __future__ import annotations

import itertools
import re

from foretrace.errors import ForetraceError

MOST = 1_000_000  # hosts of one expression; more is a slip of the pen
_NUMBERS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand(text: str) -> list[str]:
    """Names in the order in which they are written; leading zeros of a range are kept.

    Several brackets in one name count like a clock, the last one fastest. Raises ForetraceError where brackets do not
    match, a range runs backwards or there are more than a million names.
    """
    names: list[str] = []
    for part in _apart(text):
        pieces: list[list[str]] = []
        total = 1
        rest = part
        while rest:
            plain, opened, rest = rest.partition("[")
            pieces.append([plain])
            if opened:
                inner, closed, rest = rest.partition("]")
                if not closed or "[" in inner:
                    raise _broken(text, "its brackets do not match")
                values = _values(inner, text)
                total *= len(values)
                if total > MOST:
                    raise _broken(text, f"it names more than {MOST:,} hosts")
                pieces.append(values)
            elif "]" in plain:
                raise _broken(text, "its brackets do not match")
        if len(names) + total > MOST:
            raise _broken(text, f"it names more than {MOST:,} hosts")
        names.extend("".join(choice) for choice in itertools.product(*pieces))
    return names


def _apart(text: str) -> list[str]:
    """Parts between commas that stand outside brackets."""
    parts, depth, start = [], 0, 0
    for at, sign in enumerate(text):
        depth += (sign == "[") - (sign == "]")
        if sign == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def _values(inner: str, text: str) -> list[str]:
    values: list[str] = []
    for part in inner.split(","):
        found = _NUMBERS.fullmatch(part.strip())
        if not found:
            raise _broken(text, f"{part[:20]!r} is no number or range")
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise _broken(text, f"the range {part[:40]} runs backwards")
        if int(last) - int(first) >= MOST:
            raise _broken(text, f"it names more than {MOST:,} hosts")
        width = len(first) if first.startswith("0") else 0
        values.extend(str(number).zfill(width) for number in range(int(first), int(last) + 1))
    return values


def _broken(text: str, why: str) -> ForetraceError:
    return ForetraceError(f"cannot read the hosts {text[:60]!r}: {why}; write them as in tux[0-3,7].")
