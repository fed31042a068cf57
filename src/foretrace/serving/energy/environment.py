"""`TunedEnvironment`: what can be set, and what the work takes then; `EnergyProblem`: its search under a limit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from foretrace.search.space import Constrained, Problem, RatioChoices

Setting = tuple[float, ...]  # a value per knob


@dataclass(frozen=True, kw_only=True)
class Knob:
    """Something that can be set: its levels, upwards, and the one to begin with."""

    name: str
    unit: str
    levels: tuple[float, ...]
    default: float


@dataclass(frozen=True, slots=True)
class EnergyUse:
    """What the work takes at a setting."""

    energy_j: float
    time_s: float


@dataclass(frozen=True, kw_only=True)
class TunedEnvironment(ABC):
    """Work whose energy and time depend on settings."""

    name: str
    knobs: tuple[Knob, ...]
    only: tuple[Setting, ...] = ()  # the combinations that there are; empty: all of the levels

    def named(self, setting: Setting) -> dict[str, float]:
        """Return its values by the names of the knobs."""
        return {knob.name: value for knob, value in zip(self.knobs, setting, strict=True)}

    @abstractmethod
    def measure(self, setting: Setting) -> EnergyUse:
        """Do the work so. Raises ForetraceError where that cannot be."""


class EnergyProblem(Problem[Setting]):
    """The least energy within `limit_s`: costs are logarithms, and each setting is measured once."""

    def __init__(self, environment: TunedEnvironment, limit_s: float, measured: dict[Setting, EnergyUse]) -> None:
        self.environment, self.limit_s, self.measured = environment, limit_s, measured
        self.space = RatioChoices(tuple(knob.levels for knob in environment.knobs), environment.only)

    def costs(self, points: Sequence[Setting]) -> list[float]:
        """Return the cost of every setting, with by how much it is above the limit."""
        for point in points:
            if point not in self.measured:
                self.measured[point] = self.environment.measure(point)
        found = (self.measured[point] for point in points)
        return [Constrained(log(each.energy_j), log(each.time_s / self.limit_s)) for each in found]
