"""The one error class for a user's mistake: a sentence that says what, where and how to fix it.

The command line prints the sentence on standard error and exits with code 2. Anything else that is raised is
our bug and keeps its traceback.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from foretrace.plaintext import sentence

OPTIONS = "FORETRACE_OPTIONS"  # in the environment while a command runs, and so in the processes that it starts
_PARAMETER = re.compile(r"`([a-z_]+)=([^`]*)`")


def spelled(text: str) -> str:
    """Spell parameters, written as in `workers=4`, as options of the running command, as in --workers 4.

    What stands below the command line names parameters and knows no options; without a command they stay as they are.
    """
    if not os.environ.get(OPTIONS):
        return text
    return _PARAMETER.sub(lambda found: f"--{found[1].replace('_', '-')} {found[2]}".rstrip(), text)


class ForetraceError(Exception):
    """A mistake in the input: the message is one sentence with the file or argument, the place and what to do.

    Parameters stand in it as in `workers=4`; a command shows its options instead (`spelled`).
    What others wrote may stand in it: it is shown on one line, without what a terminal would obey, and not without end.
    """

    def __str__(self) -> str:
        return sentence(spelled(super().__str__()))


class TraceError(ForetraceError):
    """A recording cannot be read."""


class GraphError(ForetraceError):
    """A task graph cannot be built, or breaks an invariant."""


class CycleError(GraphError):
    """Tasks of a graph would wait for each other."""


class NotApplicableError(ForetraceError):
    """A technique does not fit this graph; the message says why."""


class MissingExtraError(ForetraceError):
    """An optional package is needed; the message names the extra to install."""


@contextmanager
def refused(what: str, mend: str) -> Iterator[None]:
    """Say in the place of an OSError what cannot be done, why, and what to do. Raises ForetraceError."""
    try:
        yield
    except OSError as error:
        raise ForetraceError(f"{what} ({error.strerror or error}); {mend}.") from None


@contextmanager
def needing(sentence: str) -> Iterator[None]:
    """Say in the place of an ImportError what has to be installed. Raises MissingExtraError."""
    try:
        yield
    except ImportError:
        raise MissingExtraError(sentence) from None
