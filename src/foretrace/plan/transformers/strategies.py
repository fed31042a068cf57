"""`named`: strategies of parallel training by the names they go by, as points of `Parallelism`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import gcd
from typing import NamedTuple

from foretrace.errors import ForetraceError
from foretrace.names import chosen, question
from foretrace.plan.transformers.model import ENDS, Parallelism
from foretrace.plan.transformers.space import multiple


class NamedStrategy(NamedTuple):
    """What a name fixes: the degree that takes all devices which others leave, other fields, degrees it must have."""

    takes: str
    fixed: Mapping[str, int] = {}
    several: tuple[str, ...] = ()  # degrees that must be above 1


STRATEGIES = {
    "data": NamedStrategy("data"),
    "tensor": NamedStrategy("tensor"),
    "model": NamedStrategy("tensor"),
    "pipeline": NamedStrategy("pipeline"),
    "pipedream-2bw": NamedStrategy("pipeline", fixed={"versions": 2}, several=("pipeline",)),
    "hybrid": NamedStrategy("data", several=("data", "tensor")),
    "zero-1": NamedStrategy("data", fixed={"zero": 1}),
    "zero-2": NamedStrategy("data", fixed={"zero": 2}),
    "zero-3": NamedStrategy("data", fixed={"zero": 3}),
    "fsdp": NamedStrategy("data", fixed={"zero": 3}),
    # Synchronous, and every device serves a share of the weights: gradients are pushed to it, weights pulled from it.
    "parameter-server": NamedStrategy("data", fixed={"zero": 1}),
    "3d": NamedStrategy("data", several=("data", "tensor", "pipeline")),
    "sequence": NamedStrategy("tensor", fixed={"sequence": 1}, several=("tensor",)),
    "context": NamedStrategy("context"),
    "expert": NamedStrategy("data"),  # as many devices share the experts
}


def named(name: str, devices: int, **given: int) -> Parallelism:
    """Return the strategy of this name on so many devices; `given`: other fields of a `Parallelism`.

    Raises ForetraceError for an unknown name, and for degrees that do not divide the devices.
    """
    found = chosen(name.replace(" ", "-"), STRATEGIES, f"there is no strategy {name!r}")
    strategy = STRATEGIES[found]
    for key, value in {"devices": devices, **given}.items():
        if key != "devices" and key not in Parallelism.__dataclass_fields__:
            raise ForetraceError(f"a Parallelism has no field {key!r}; {question(key, Parallelism.__annotations__)}")
        if key not in ENDS and value < 1:
            raise ForetraceError(f"{key} must be above 0, got {value}; give 1 or more.")
    at = Parallelism(**{**strategy.fixed, **given})
    if strategy.takes not in given:
        others = at.devices // getattr(at, strategy.takes)
        if devices % others:
            raise ForetraceError(
                f"devices must be a multiple of the {others} that the given degrees need, got {devices}; give "
                f"{multiple(devices, others)}."
            )
        at = replace(at, **{strategy.takes: devices // others})
    if at.devices != devices:
        raise ForetraceError(f"degrees of {found} must multiply to {devices} devices, got {at.devices}; change one.")
    if found == "expert" and "expert" not in given:
        at = replace(at, expert=at.data)
    for degree in strategy.several:
        if getattr(at, degree) == 1:
            raise ForetraceError(f"{degree} of {found} must be above 1, got 1; give {degree}=2 or more devices.")
    if at.data % at.expert:
        raise ForetraceError(
            f"expert must divide the data degree {at.data}, got {at.expert}; give {gcd(at.data, at.expert)}."
        )
    return at
