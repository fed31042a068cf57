"""`apart`: an integer program solved by CP-SAT (Google OR-Tools) in a process of its own.

The libraries of CP-SAT and of another solver (HiGHS) cannot be loaded together.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from foretrace.errors import ForetraceError, needing

_END_S = 0.5  # to stop a solver and to read its answer


@dataclass(frozen=True, kw_only=True)
class SolverLimits:
    """When a solver stops: `seconds` from when `apart` is called, or after so much work, whichever is sooner."""

    seconds: float = inf
    work: float = inf  # seconds as CP-SAT counts them by what it does: the same answer on every machine
    threads: int = 2

    def set(self, parameters: Any, began: float) -> None:
        """Set the parameters of a CpSolver that is about to solve; `began` as time.time() counts."""
        if isfinite(self.seconds):
            parameters.max_time_in_seconds = max(self.seconds - _END_S - (time.time() - began), 0.0)
        if isfinite(self.work):
            parameters.max_deterministic_time = self.work
            parameters.interleave_search = self.threads > 1  # in turns that do not depend on time
        parameters.num_workers = self.threads
        parameters.random_seed = 0


def apart(module: str, given: tuple[Any, ...], limits: SolverLimits, what: str) -> Any | None:
    """Return what `answer` of a module gives for these arguments, the limits and when it began; None after its time.

    Raises MissingExtraError without OR-Tools, naming `what` needs it, and ForetraceError where the solver fails.
    """
    with needing(what):
        import ortools  # noqa: F401  (quick; what solves imports the rest)
    try:
        done = subprocess.run(
            [sys.executable, "-m", module], input=pickle.dumps((*given, limits, time.time())), capture_output=True,
            check=False, timeout=1.1 * limits.seconds if isfinite(limits.seconds) else None,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ForetraceError(f"the solver stopped ({last}); give it less time or a smaller graph.")
    return pickle.loads(done.stdout)


def answer(solve: Callable[..., Any]) -> None:
    """Read, in that process, the arguments, solve, write what was found."""
    sys.stdout.buffer.write(pickle.dumps(solve(*pickle.load(sys.stdin.buffer))))
