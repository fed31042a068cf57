"""Simulators of others, re-created for their known answers and kept apart from the engine: `--semantics NAME`.

Each plays a trace by the rules of the published program, quirks included, so that its published figures come out.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol

from foretrace.errors import ForetraceError
from foretrace.fleet.result import FleetResult
from foretrace.fleet.workload import Workload

_MODULES = {
    "tiresias": ("tiresias", "Tiresias"),
    "pollux": ("pollux", "PolluxSimulator"),
    "gavel": ("gavel", "Gavel"),
    "shockwave": ("shockwave", "Shockwave"),
}
NAMES = tuple(_MODULES)


class Semantics(Protocol):
    """One re-created simulator."""

    name: str
    policies: tuple[str, ...]
    default_cluster: str

    def run(
        self, workload: Workload, *, policy: str, cluster: str, seed: int, options: Mapping[str, str]
    ) -> FleetResult:
        """Play the workload; raises ForetraceError for a policy, cluster or option that it does not know."""
        ...


def semantics(name: str) -> Semantics:
    """The simulator of this name. Raises ForetraceError where there is none."""
    if name not in _MODULES:
        raise ForetraceError(f"there are no semantics {name!r}; there are {', '.join(NAMES)}.")
    module, kind = _MODULES[name]
    made: Semantics = getattr(import_module(f"{__package__}.{module}"), kind)()
    return made
