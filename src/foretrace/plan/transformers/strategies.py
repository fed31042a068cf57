"""`named`: strategies of parallel training by the names they go by, as points of `Parallelism`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import gcd

from foretrace.errors import ForetraceError
from foretrace.names import question, resolve
from foretrace.plan.transformers.model import ENDS, Parallelism


@dataclass(frozen=True, kw_only=True)
class NamedStrategy:
    """What a name fixes: the degree that takes all devices which others leave, other fields, degrees it must have."""

    takes: str
    fixed: Mapping[str, int] = field(default_factory=dict)
    several: tuple[str, ...] = ()  # degrees that must be above 1
    inside: str = ""  # a degree that is as large as the one that takes the devices


STRATEGIES = {
    "data": NamedStrategy(takes="data"),
    "tensor": NamedStrategy(takes="tensor"),
    "model": NamedStrategy(takes="tensor"),
    "pipeline": NamedStrategy(takes="pipeline"),
    "pipedream-2bw": NamedStrategy(takes="pipeline", fixed={"versions": 2}, several=("pipeline",)),
    "hybrid": NamedStrategy(takes="data", several=("data", "tensor")),
    "zero-1": NamedStrategy(takes="data", fixed={"zero": 1}),
    "zero-2": NamedStrategy(takes="data", fixed={"zero": 2}),
    "zero-3": NamedStrategy(takes="data", fixed={"zero": 3}),
    "fsdp": NamedStrategy(takes="data", fixed={"zero": 3}),
    # Synchronous, and every device serves a share of the weights: gradients are pushed to it, weights pulled from it.
    "parameter-server": NamedStrategy(takes="data", fixed={"zero": 1}),
    "3d": NamedStrategy(takes="data", several=("data", "tensor", "pipeline")),
    "sequence": NamedStrategy(takes="tensor", fixed={"sequence": 1}, several=("tensor",)),
    "context": NamedStrategy(takes="context"),
    "expert": NamedStrategy(takes="data", inside="expert"),
}


def named(name: str, devices: int, **given: int) -> Parallelism:
    """Return the strategy of this name on so many devices; `given`: other fields of a `Parallelism`.

    Raises ForetraceError for an unknown name, and for degrees that do not divide the devices.
    """
    found = resolve(name.replace(" ", "-"), STRATEGIES)
    if not found:
        raise ForetraceError(f"there is no strategy {name!r}; {question(name, STRATEGIES)}")
    strategy = STRATEGIES[found]
    unknown = next((key for key in given if key not in Parallelism.__dataclass_fields__), None)
    if unknown:
        raise ForetraceError(
            f"a Parallelism has no field {unknown!r}; {question(unknown, Parallelism.__annotations__)}"
        )
    below = next((key for key, n in {"devices": devices, **given}.items() if key not in ENDS and n < 1), "")
    if below:
        raise ForetraceError(f"{below} must be above 0, got {given.get(below, devices)}; give 1 or more.")
    at = Parallelism(**{**strategy.fixed, **given})
    if strategy.takes not in given:
        others = at.devices // getattr(at, strategy.takes)
        if devices % others:
            raise ForetraceError(
                f"devices must be a multiple of the {others} that the given degrees need, got {devices}; give "
                f"{max(round(devices / others), 1) * others}."
            )
        at = replace(at, **{strategy.takes: devices // others})
    if at.devices != devices:
        raise ForetraceError(f"degrees of {found} must multiply to {devices} devices, got {at.devices}; change one.")
    if strategy.inside and strategy.inside not in given:
        at = replace(at, **{strategy.inside: getattr(at, strategy.takes)})
    for degree in strategy.several:
        if getattr(at, degree) == 1:
            raise ForetraceError(f"{degree} of {found} must be above 1, got 1; give {degree}=2 or more devices.")
    if at.data % at.expert:
        raise ForetraceError(
            f"expert must divide the data degree {at.data}, got {at.expert}; give {gcd(at.data, at.expert)}."
        )
    return at
