"""`apart`: an integer program solved in a process of its own, which ends when its time is up.

The library of CP-SAT (Google OR-Tools) and that of another solver (HiGHS) cannot be loaded together.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from foretrace.errors import ForetraceError, MissingExtraError

_GRACE_S = 30.0  # to load the solver and to build the program


def apart(module: str, given: tuple[Any, ...], seconds: float, what: str) -> Any | None:
    """What `answer` of a module gives for these arguments; None where its time is up.

    Raises MissingExtraError without OR-Tools, naming `what` needs it, and ForetraceError where the solver fails.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module], input=pickle.dumps(given), capture_output=True, check=False,
            timeout=seconds + _GRACE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        if "ortools" in last:
            raise MissingExtraError(f"{what} need OR-Tools: pip install 'foretrace[plan]'.")
        raise ForetraceError(f"the solver stopped ({last}); give it less time or a smaller graph.")
    return pickle.loads(done.stdout)


def answer(solve: Callable[..., Any]) -> None:
    """In that process: read the arguments, solve, write what was found."""
    sys.stdout.buffer.write(pickle.dumps(solve(*pickle.load(sys.stdin.buffer))))
