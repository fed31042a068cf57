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
_DISTRIBUTIONS = {"pynvml": "nvidia-ml-py", "sklearn": "scikit-learn"}  # by the module that they bring
_OF_DEVELOPERS = {"dev", "docs", "reproductions"}
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
def needing(what: str) -> Iterator[None]:
    """Say in the place of an ImportError which optional package `what` needs. Raises MissingExtraError."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0].replace("_", "-")
        extras = _extras(package := _DISTRIBUTIONS.get(package, package))
        if not extras:  # none of ours
            raise
        ours = extras - _OF_DEVELOPERS
        install = f"'foretrace[{ours.pop()}]'" if len(ours) == 1 else package
        why = "is not installed"
        if not isinstance(error, ModuleNotFoundError):
            install, why = f"-U {install}", f"cannot be imported ({error})"
        raise MissingExtraError(f"{what} needs {package}, which {why}: pip install {install}") from None


def _extras(package: str) -> set[str]:
    """Return the extras that bring a package."""
    from importlib import metadata  # here: takes 20 ms, which only a mistake has to wait for

    try:
        lines = [line.partition(";") for line in metadata.requires("foretrace") or ()]
    except metadata.PackageNotFoundError:  # run from its source: what is missing is said by Python
        return set()
    found = (re.search(r"extra == .(\w+)", line) for name, _, line in lines if re.split(r"[^\w-]", name)[0] == package)
    return {each[1] for each in found if each}
