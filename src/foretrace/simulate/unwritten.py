"""Arrays that a pass will write, and a test mode in which what it leaves out shows.

Memory that nobody wrote holds old numbers, which look like results. With FORETRACE_POISON=1, or inside `poisoned`, such
arrays start out full of a number that no replay of a sound graph reaches, and the engines refuse to hand it out. The
tests run in this mode.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from foretrace.arrays import Array, Int64
from foretrace.graph.sound import END, LATEST

POISON = 7 << 60  # ns, behind the END of every sound graph
_ROW = -(1 << 30)  # of arrays of row numbers

_value: int | None = POISON if os.environ.get("FORETRACE_POISON") == "1" else None


def unwritten(shape: int | tuple[int, ...], dtype: type = np.int64) -> Array:
    """Return an array whose every element a pass will write before it is read."""
    array: Array = np.empty(shape, dtype=dtype)
    if _value is not None:
        array.fill(_value if np.dtype(dtype).itemsize == 8 else _ROW)
    return array


def written(*times: Int64, last: int = END) -> None:
    """Raise AssertionError, in the test mode, if a time (ns, up to `last`) comes from memory that nobody wrote."""
    if _value is not None:
        for array in times:
            count = int(((array > last) | (array < -LATEST)).sum())
            if count:
                raise AssertionError(f"{count} of {array.size} times come from memory that nobody wrote")


@contextmanager
def poisoned(value: int | None = POISON) -> Iterator[None]:
    """Fill unwritten arrays with this value (ns), or leave them as they come (None)."""
    global _value  # noqa: PLW0603  (a mode of the process, like the environment variable)
    before, _value = _value, value
    try:
        yield
    finally:
        _value = before
