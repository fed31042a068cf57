"""`Deadline`: so many seconds for work that stops with the best so far, and how long its next part may take.

Looking at the clock after the time is over keeps no budget: the part that was under way, and what has to be done with
the result, come on top. So a part is begun only where the longest of its kind so far would still end in time, and time
for what comes afterwards is kept free.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite

from foretrace.errors import ForetraceError

Clock = Callable[[], float]


def ending(name: str, seconds: float, such_as: int) -> None:
    """Raise ForetraceError where a limit that the user gave by this name is none."""
    if not isfinite(seconds):
        raise ForetraceError(f"`{name}={seconds}` never ends; give a number of seconds, e.g. `{name}={such_as}`.")


class Deadline:
    """So many seconds from now. `clock` counts seconds, by default without those spent compiling loops."""

    def __init__(self, seconds: float, clock: Clock | None = None) -> None:
        self.seconds = seconds
        self.clock = clock or uncompiled
        self._began = self.clock()
        self._took: dict[str, float] = {}

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return self.clock() - self._began

    @property
    def left(self) -> float:
        """Seconds until the end, negative after it."""
        return self.seconds - self.spent

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return self.left <= 0

    def allows(self, *kinds: str, then: float = 0.0) -> bool:
        """Return whether a part of each of these kinds, and `then` so many seconds of other work, would end in time."""
        return self.left > sum(map(self.took, kinds)) + then

    def took(self, kind: str) -> float:
        """Return seconds of the longest part of a kind so far, 0 before the first."""
        return self._took.get(kind, 0.0)

    @contextmanager
    def part(self, kind: str) -> Iterator[None]:
        """Time one part of a kind."""
        began = self.clock()
        yield
        self._took[kind] = max(self.took(kind), self.clock() - began)

    @property
    def budget_s(self) -> float:
        """Seconds left for a part that keeps its own time, none below 0."""
        return max(self.left, 0.0)

    def until(self, keep: float = 0.0) -> Deadline:
        """Return one on the same clock that ends `keep` seconds earlier."""
        return Deadline(max(self.left - keep, 0.0), self.clock)


def never() -> Deadline:
    """Return one that does not come."""
    return Deadline(float("inf"))


def uncompiled() -> float:
    """Return seconds, those left out in which loops were compiled (the first use after an installation)."""
    loops = sys.modules.get("foretrace.compiled")  # not imported for this: it loads numba
    return time.monotonic() - (loops.compiled_s() if loops else 0.0)
