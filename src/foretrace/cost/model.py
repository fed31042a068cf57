"""`CostModel`: seconds of operator calls on a device, with a range and a reason; `Chain`: several of them in an order.

chain = Chain(members=(Measured(...), Learned(), Roofline()))
found = chain.predict(calls, named("h100"))
found.seconds, found.low_s, found.high_s        # n rows each; the range is meant to hold 4 times out of 5
found.shares(weights)                           # {"learned": 0.97, "roofline": 0.03} of the time
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrace.cost.calls import Calls, Family, Float64
from foretrace.hardware.devices import Device


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prediction:
    """Seconds per call (n rows), their 80 % range, and which model said so. NaN where none could."""

    seconds: Float64
    low_s: Float64
    high_s: Float64
    source: npt.NDArray[np.int16]  # index into `sources`, −1 where no model could say
    sources: tuple[str, ...]
    whys: tuple[str, ...]  # per source: one sentence on where its numbers come from

    def shares(self, weights: Float64 | None = None) -> dict[str, float]:
        """Return share of the time by source; `weights` says how often each call runs."""
        time = np.nan_to_num(self.seconds) * (1.0 if weights is None else weights)
        total = float(time.sum()) or 1.0
        found = {name: float(time[self.source == i].sum()) / total for i, name in enumerate(self.sources)}
        return {name: share for name, share in found.items() if share > 0}


class CostModel(ABC):
    """One way to know what calls cost on a device."""

    name: str

    @abstractmethod
    def predict(self, calls: Calls, device: Device) -> Prediction:
        """Return seconds of every call; NaN for those that this model cannot answer for."""

    def _answer(self, seconds: Float64, low: Float64, high: Float64, why: str) -> Prediction:
        """Return a prediction of one source; `low` and `high` are factors on `seconds`."""
        return Prediction(
            seconds=seconds,
            low_s=seconds * low,
            high_s=seconds * high,
            source=np.where(np.isnan(seconds), -1, 0).astype(np.int16),
            sources=(self.name,),
            whys=(why,),
        )


@dataclass(frozen=True, kw_only=True)
class Chain(CostModel):
    """The first member that can answer for a call does. Calls without work cost nothing, whatever members say."""

    members: Sequence[CostModel]
    name: str = "chain"

    def predict(self, calls: Calls, device: Device) -> Prediction:
        n = len(calls)
        seconds, low, high = (np.full(n, np.nan) for _ in range(3))
        source = np.full(n, -1, dtype=np.int16)
        sources: list[str] = []
        whys: list[str] = []
        idle = calls.family == Family.NONE
        seconds[idle] = low[idle] = high[idle] = 0.0
        left = np.flatnonzero(~idle)
        for member in self.members:
            if not len(left):
                break
            found = member.predict(calls.take(left), device)
            said = ~np.isnan(found.seconds)
            rows = left[said]
            seconds[rows], low[rows], high[rows] = found.seconds[said], found.low_s[said], found.high_s[said]
            source[rows] = found.source[said] + len(sources)
            sources += found.sources
            whys += found.whys
            left = left[~said]
        return Prediction(
            seconds=seconds, low_s=low, high_s=high, source=source, sources=tuple(sources), whys=tuple(whys)
        )
