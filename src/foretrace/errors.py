"""The one error class for a user's mistake: a sentence that says what, where and how to mend it.

The command line prints the sentence on standard error and exits with code 2. Anything else that is raised is
our bug and keeps its traceback.
"""

from __future__ import annotations

from foretrace.plaintext import sentence


class ForetraceError(Exception):
    """A mistake in the input: the message is one sentence with the file or argument, the place and the mend.

    What others wrote may stand in it: it is shown on one line, without what a terminal would obey, and not without end.
    """

    def __str__(self) -> str:
        return sentence(super().__str__())


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
