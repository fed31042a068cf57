"""Standard output and error as commands may use them, wherever they lead.

Nothing that others wrote can command a terminal; a character that the terminal's encoding lacks becomes one that it
has; a full disk or a closed output is a sentence and exit code 2.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from foretrace.errors import ForetraceError
from foretrace.plaintext import visible

_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")
# What our reports use beyond ASCII. Of other characters the code remains.
_INSTEAD = str.maketrans({
    "–": "-", "—": "-", "−": "-", "·": "-", "→": "->", "×": "x", "µ": "u", "…": "...", "±": "+-", "≤": "<=", "≥": ">=",
    "█": "#", "▓": "=", "▒": "-", "░": ".", "²": "2", "³": "3", "Σ": "sum", "σ": "s", "\u00a0": " ", "\u2009": " ",
    "’": "'", "‘": "'", "“": '"', "”": '"', "━": "-", "│": "|",
})  # fmt: skip


class OutputError(ForetraceError):
    """What a command answers cannot be written."""


class Printed:
    """A text stream that nothing harmful gets through; colours pass where `colours`, to a terminal."""

    def __init__(self, stream: TextIO, *, colours: bool = False) -> None:
        self._stream, self._colours = stream, colours

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text. Raises OutputError where the stream cannot take it, BrokenPipeError where nobody reads on."""
        parts = _COLOUR.split(text) if self._colours else [text]
        shown = "".join(part if i % 2 else visible(part) for i, part in enumerate(parts))
        with _said():
            try:
                self._stream.write(shown)
            except UnicodeEncodeError as error:
                code = error.encoding
                self._stream.write(shown.translate(_INSTEAD).encode(code, "backslashreplace").decode(code))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write what is held back; raises as `write` does."""
        with _said():
            self._stream.flush()


@contextmanager
def _said() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno == errno.EINVAL and sys.platform == "win32":  # a closed pipe there
            raise BrokenPipeError from None
        raise OutputError(
            f"cannot write to standard output ({error.strerror or error}); make room, or send it elsewhere."
        ) from None


class _Closed:
    """In place of an output that was closed before we began."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        if text:
            raise OSError(errno.EBADF, "it is closed")
        return 0

    def flush(self) -> None:
        """Do nothing: no output is held back."""

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        raise OSError(errno.EBADF, "it is closed")


@contextmanager
def guarded() -> Iterator[None]:
    """Guard standard output and error as above, while a command runs."""
    _keep_numbers()
    out, err = sys.stdout, sys.stderr
    sys.stdout = Printed(out or _Closed(), colours=bool(out) and out.isatty())  # type: ignore[arg-type]
    with open(os.devnull, "w", encoding="utf-8") as nowhere:  # noqa: PTH123  (a device, not a path of ours)
        if err is None:  # print would turn to standard output instead
            sys.stderr = nowhere
        try:
            yield
        finally:
            sys.stdout, sys.stderr = out, err


def _keep_numbers() -> None:
    """Keep files that are opened later from getting the number of a standard stream that is closed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):
                os.open(os.devnull, os.O_RDWR)


def give_up() -> None:
    """Let what is still held back for standard output go nowhere, so that nothing complains when the process ends."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
