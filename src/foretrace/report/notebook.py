"""What notebooks show of results that Python code gets from `flow`: what the command prints that asks the same."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from foretrace.report import page, terminal
from foretrace.report.views import Result

# Which module of this room answers with a result of another room, and by which function.
ANSWERED_BY = {
    "Timeline": "show",
    "WhatIf": "whatif",
    "Advice": "advise",
    "CheckReport": "check",
}


def result_of(found: object) -> Result:
    """Return the answer of the command that shows such a result. Raises TypeError where no command does."""
    name = ANSWERED_BY.get(type(found).__name__)
    if name is None:
        raise TypeError(f"no command shows a {type(found).__name__}; there are {', '.join(ANSWERED_BY)}.")
    answer: Any = getattr(import_module(f"foretrace.report.{name}"), name)
    result: Result = answer(found)
    return result


def html(found: object) -> str:
    """Return the fragment of a page that shows a result."""
    return page.fragment(result_of(found))


def text(found: object) -> str:
    """Return the same for a console."""
    return terminal.render(result_of(found), terminal.Terminal(width=terminal.PIPE_WIDTH))
