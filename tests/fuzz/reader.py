"""One reader of files that others made, and what its figures and its printed text must be."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.cli.streams import Printed

Figure = tuple[str, Any]  # a name, and numbers that must be finite and not negative
Samples = Mapping[str, bytes]  # by file name, whose ending says what kind of file it is


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One way into the program.

    covers: modules that open the files; samples: whole files; play: reads a file and goes on as a command does,
    giving figures on the way; it may raise ForetraceError. Figures that are views (msgspec) must be finite alone.
    play is also told a way, 0 to 7: which options to read with (bit 0), and whether to go on to the pages (0 and 1).
    """

    name: str
    covers: tuple[str, ...]
    samples: Callable[[], Samples]
    play: Callable[[Path, int], Iterator[Figure]]


WAYS = 8


def check(name: str, value: Any) -> str:
    """What is wrong with a figure, "" where nothing is."""
    if hasattr(value, "__struct_fields__"):
        import msgspec

        bad = [number for number in _numbers(msgspec.to_builtins(value)) if not np.isfinite(number)]
        return f"{name} holds {bad[0]}" if bad else ""
    numbers = np.asarray(value, dtype=np.float64)
    if not np.isfinite(numbers).all():
        return f"{name} is not finite"
    return f"{name} is {numbers.min():g}" if numbers.size and numbers.min() < 0 else ""


def _numbers(value: Any) -> Iterator[float]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
        elif isinstance(each, float):
            yield each


def printed(text: str, *, colour: bool = False) -> None:
    """Check that of what goes to a terminal nothing is obeyed there, colours aside; as a command prints it."""
    out = io.StringIO()
    Printed(out, colours=colour).write(text)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()) if colour else out.getvalue()
    found = re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", shown)
    assert found is None, f"{found[0]!r} reaches the terminal" if found else ""
