"""`tune`: the setting that takes the least energy within a limit on time, in few measurements (PolyThrottle, 2023).

`TunedEnvironment` is work whose energy and time depend on settings: recorded (`recorded.py`), or a command that runs
here (`command.py`); `EnergyProblem` is its search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, log

from foretrace.errors import ForetraceError
from foretrace.search.constrained import ConstrainedBayes
from foretrace.search.minimise import minimise
from foretrace.search.space import Constrained, Problem, RatioChoices
from foretrace.search.strategy import SearchStrategy

STRATEGY = ConstrainedBayes(length=0.9, noise=(1e-4, 1e-1), clip=1.0)  # benchmarks/energy_tune.py --select
EVALUATIONS = 16
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
class TunedEnvironment:
    """Work whose energy and time depend on settings."""

    name: str
    knobs: tuple[Knob, ...]
    points: Mapping[Setting, EnergyUse] = field(default_factory=dict)  # of all settings, where they were recorded

    def named(self, setting: Setting) -> dict[str, float]:
        """Return its values by the names of the knobs."""
        return {knob.name: value for knob, value in zip(self.knobs, setting, strict=True)}

    def measure(self, setting: Setting) -> EnergyUse:
        """Do the work so, or return what was recorded of it. Raises ForetraceError where that cannot be."""
        return self.points[setting]

    @property
    def fastest(self) -> Setting:
        """The recorded setting with the least time."""
        return min(self.points, key=lambda at: self.points[at].time_s)

    def optimum(self, limit_s: float) -> Setting | None:
        """Return the recorded setting with the least energy within a time, by enumeration; None where there is none."""
        kept = (at for at, each in self.points.items() if each.time_s <= limit_s)
        return min(kept, key=lambda at: self.points[at].energy_j, default=None)


class EnergyProblem(Problem[Setting]):
    """The least energy within `limit_s`: costs are logarithms, and each setting is measured once."""

    def __init__(self, environment: TunedEnvironment, limit_s: float, measured: dict[Setting, EnergyUse]) -> None:
        self.environment, self.limit_s, self.measured = environment, limit_s, measured
        self.space = RatioChoices(tuple(knob.levels for knob in environment.knobs), tuple(sorted(environment.points)))

    def costs(self, points: Sequence[Setting]) -> list[float]:
        """Return the cost of every setting, with by how much it is above the limit."""
        for point in points:
            if point not in self.measured:
                self.measured[point] = self.environment.measure(point)
        found = (self.measured[point] for point in points)
        return [Constrained(log(each.energy_j), log(each.time_s / self.limit_s)) for each in found]


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The answer: what was measured, in order, and the best of it."""

    environment: TunedEnvironment
    limit_s: float
    best: Setting
    default: Setting
    measured: dict[Setting, EnergyUse]
    optimum: Setting | None  # by enumeration; None where not everything was recorded

    @property
    def at_best(self) -> EnergyUse:
        """What the work takes at the best setting."""
        return self.measured[self.best]


def limit(text: str, reference_s: float) -> float:
    """Return seconds from "1.1x", of the reference, or "250ms", "2s". Raises ForetraceError."""
    units = {"ms": 1e-3, "x": reference_s, "s": 1.0}
    unit = next((each for each in units if text.endswith(each)), "")
    try:
        found = float(text.removesuffix(unit)) * units.get(unit, 1.0)
    except ValueError:
        found = -1.0
    if not (found > 0 and isfinite(found)):
        raise ForetraceError(f"`slo={text}` is no limit of a time; write 1.1x, 250ms or 2s.")
    return found


def tune(
    environment: TunedEnvironment, slo: str, *, evaluations: int = EVALUATIONS, strategy: SearchStrategy = STRATEGY,
    seed: int = 0, tell: Callable[[float], None] | None = None,
) -> Tuned:  # fmt: skip
    """Measure the default setting, then those of the strategy.

    A relative `slo` is of the fastest recorded time; of a command, of its time at the default setting. Raises
    ForetraceError where nothing that was measured keeps it.
    """
    default = tuple(knob.default for knob in environment.knobs)
    measured = {default: environment.measure(default)}
    recorded = environment.points
    limit_s = limit(slo, (recorded[environment.fastest] if recorded else measured[default]).time_s)
    optimum = environment.optimum(limit_s)
    if recorded and optimum is None:
        raise _nothing(slo, recorded, environment)
    problem = EnergyProblem(environment, limit_s, measured)
    found = minimise(
        problem, strategy=strategy, starts=[default], calls=evaluations, seed=seed,
        tell=None if tell is None else lambda _: tell(min(len(measured) / evaluations, 1.0)),
    )  # fmt: skip
    if found.best is None or found.cost == inf:
        raise _nothing(slo, measured, environment)
    return Tuned(
        environment=environment, limit_s=limit_s, best=found.best, default=default, measured=measured, optimum=optimum
    )


def words(setting: Mapping[str, float]) -> str:
    """Return text such as "batch=8 gpu-power-limit=125"."""
    return " ".join(f"{name}={value:g}" for name, value in setting.items())


def _nothing(slo: str, met: Mapping[Setting, EnergyUse], environment: TunedEnvironment) -> ForetraceError:
    fastest = min(met, key=lambda at: met[at].time_s)
    return ForetraceError(
        f"none of {len(met)} settings of {environment.name} keeps `slo={slo}`: the fastest, "
        f"{words(environment.named(fastest))}, takes {met[fastest].time_s:.4g} s; allow more."
    )
