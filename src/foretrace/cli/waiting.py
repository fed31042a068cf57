"""A line on the terminal while a command says nothing for a while, so that nobody wonders whether it still works."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

SILENCE_S = 2.0
_CLEAR = "\r\x1b[2K"


@contextmanager
def sign_of_life(what: str, *, silence_s: float = SILENCE_S) -> Iterator[None]:
    """Say on standard error, while the block runs, what works and for how long, whenever nothing else was written.

    The line goes as soon as anything is written to standard output or standard error (an answer, a progress bar), and
    with the block. Nothing happens unless standard error is a terminal that can clear a line.
    """
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield
        return
    line = _Line(sys.stderr, what, silence_s)
    usual = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Heard(usual[0], line.quiet), _Heard(usual[1], line.quiet)
    thread = threading.Thread(target=line.watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        line.end()
        thread.join()
        sys.stdout, sys.stderr = usual


class _Line:
    """The line, drawn by a thread of its own."""

    def __init__(self, stream: TextIO, what: str, silence_s: float) -> None:
        self._stream, self._what, self._silence_s = stream, what, silence_s
        self._began = self._spoken = time.monotonic()
        self._drawn = False
        self._over = threading.Event()
        self._lock = threading.RLock()

    def watch(self) -> None:
        """Draw and renew the line until the end."""
        while not self._over.wait(min(self._silence_s / 2, 1.0)):
            with self._lock:
                now = time.monotonic()
                if not self._over.is_set() and now - self._spoken >= self._silence_s:
                    why = ", compiling loops, once after an installation" if _compiling() else ""
                    self._stream.write(f"{_CLEAR}foretrace {self._what}: at work for {now - self._began:.0f} s{why}")
                    self._stream.flush()
                    self._drawn = True

    def quiet(self) -> None:
        """Clear the line: somebody else speaks."""
        with self._lock:
            self._spoken = time.monotonic()
            if self._drawn:
                self._stream.write(_CLEAR)
                self._stream.flush()
                self._drawn = False

    def end(self) -> None:
        """Clear the line for good."""
        self._over.set()
        self.quiet()


def _compiling() -> bool:
    """Return whether a loop is being compiled, which takes longer than most commands."""
    loops = sys.modules.get("foretrace.compiled")
    return loops is not None and bool(loops.compiling())


class _Heard:
    """A text stream that tells when something is written to it."""

    def __init__(self, stream: TextIO, tell: Callable[[], None]) -> None:
        self._stream, self._tell = stream, tell

    def write(self, text: str) -> int:
        self._tell()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
