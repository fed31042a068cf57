"""`tune`: the setting that takes the least energy within a limit on time, in few measurements (PolyThrottle, 2023)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, isfinite

from foretrace.errors import ForetraceError
from foretrace.search.constrained import ConstrainedBayes
from foretrace.search.minimise import minimise
from foretrace.search.strategy import SearchStrategy
from foretrace.serving.energy.environment import EnergyProblem, EnergyUse, Setting, TunedEnvironment
from foretrace.serving.energy.recorded import RecordedTraining

STRATEGY = ConstrainedBayes(length=0.9, noise=(1e-4, 1e-1), clip=1.0)  # benchmarks/energy_tune.py --select
EVALUATIONS = 16


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
    environment: TunedEnvironment,
    slo: str,
    *,
    evaluations: int = EVALUATIONS,
    strategy: SearchStrategy = STRATEGY,
    seed: int = 0,
    tell: Callable[[float], None] | None = None,
) -> Tuned:
    """Measure the default setting, then those of the strategy.

    A relative `slo` is of the fastest recorded time; of a command, of its time at the default setting. Raises
    ForetraceError where nothing that was measured keeps it.
    """
    default = tuple(knob.default for knob in environment.knobs)
    measured = {default: environment.measure(default)}
    recorded = environment if isinstance(environment, RecordedTraining) else None
    reference = measured[default] if recorded is None else recorded.points[recorded.fastest]
    limit_s = limit(slo, reference.time_s)
    optimum = None
    if recorded is not None and (optimum := recorded.optimum(limit_s)) is None:
        raise _nothing(slo, recorded.points, environment)
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
