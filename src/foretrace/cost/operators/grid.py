"""The operators of `foretrace calibrate device`: classes x sizes x {float32, bfloat16, channels_last} x two batches.

They are what training steps spend their time in. A technique's question about a call that was not measured itself is
answered from those of its class nearest in size (`similar`); two batch points give the share of a call that does not
grow with the batch. Which they are, and which calls say most of a processor, `benchmarks/operator_calls.py` writes.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from statistics import median

import msgspec

from foretrace.cost.operators.operator import Operator


@dataclass(frozen=True, kw_only=True)
class Point:
    """One operator of the grid with its twins; those that do not apply are None."""

    family: str
    size: str  # for reading: "512 x 256 x 1024"
    base: Operator
    bfloat16: Operator | None
    channels_last: Operator | None
    both: Operator | None  # bfloat16 and channels_last
    batch: Operator  # twice the batch
    batch_bfloat16: Operator | None

    @property
    def operators(self) -> tuple[Operator, ...]:
        """All of them, those to be compared beside each other."""
        found = (self.base, self.bfloat16, self.channels_last, self.both, self.batch, self.batch_bfloat16)
        return tuple(each for each in found if each is not None)


class ChosenCalls(msgspec.Struct, frozen=True, kw_only=True):
    """What a calibration measures."""

    grid: tuple[Point, ...]  # one size of every class first, then another of each
    designed: tuple[Operator, ...]  # those first after which least is left unknown of all of them


@cache
def chosen() -> ChosenCalls:
    """Return what comes with the package."""
    packed = resources.files("foretrace.cost.operators").joinpath("calls.json.gz").read_bytes()
    return msgspec.json.decode(gzip.decompress(packed), type=ChosenCalls)


@dataclass(frozen=True, kw_only=True)
class TimedClass:
    """What is known of one class of operators, sizes ascending by time; ratios are to float32."""

    family: str
    float32_s: list[float]
    bfloat16: list[float]
    channels_last: list[float]
    fixed: float | None  # share of the time that stays when the batch grows, median over the sizes


def timed_classes(seconds: Mapping[str, float]) -> list[TimedClass]:
    """Return the classes of the grid that these times (by operator key) tell of."""
    families: dict[str, list[Point]] = {}
    for point in chosen().grid:
        if point.base.key in seconds:
            families.setdefault(point.family, []).append(point)

    def ratios(pairs: Iterable[tuple[Operator, Operator | None]]) -> list[float]:
        return sorted(seconds[b.key] / seconds[a.key] for a, b in pairs if b is not None and b.key in seconds)

    found = []
    for family, members in families.items():
        twice = [min(max(2.0 - each, 0.0), 1.0) for each in ratios((each.base, each.batch) for each in members)]
        found.append(
            TimedClass(
                family=family,
                float32_s=sorted(seconds[each.base.key] for each in members),
                bfloat16=ratios((each.base, each.bfloat16) for each in members),
                channels_last=ratios((each.base, each.channels_last) for each in members),
                fixed=median(twice) if twice else None,
            )
        )
    return found
