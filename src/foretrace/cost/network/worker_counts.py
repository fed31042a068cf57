"""Time of a collective among a number of workers that was not measured, from the numbers that were.

    t(p, s) = share(p) s (a + b / (p - 1)) / rings(p) + L(s) p ** g(s)

`share` is that of nccl-tests (2 (p - 1) / p for all-reduce). a and b, seconds per byte, are fitted to the largest
sizes: where a switch joins the devices, few of them reach less of the bandwidth than many (b / a is 0.2 on A100, so
that two lose 14 % against eight); where cables do, `rings` of them give the bandwidth and b is 0. Numbers near the one
asked count more, by 1 / |log(q / p)|. L is what a time has beyond moving the bytes, latency and the ramp of protocols;
its power g, 0 to 1, is pooled over sizes near the one asked: single sizes jump where a library changes protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretrace.cost.network.curves import Fitted, Floats

_SIZES = np.geomspace(1 / 4, 4, 9)  # around the one asked, over which the power is pooled
_POWER = 0.5  # of the number of workers, expected before any is seen
_CERTAIN = 0.2  # of that, as a sum of squared logarithms of numbers of workers
_LEAST_S = 1e-7  # of the rest, so that it has a logarithm
_MOST_LOST = 1.0  # b over a: two workers reach half of what many do, at least


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCount:
    """One number of workers: its curve, its largest size, its share of bytes on the bus, and the rings that it has."""

    workers: int
    curve: Fitted
    largest: float
    smallest: float
    share: float
    rings: int = 1

    @property
    def inverse(self) -> float:
        """Seconds per byte on the bus of one ring at the largest size."""
        return float(self.at(np.array([self.largest]))[0]) / (self.share * self.largest) * self.rings

    def at(self, sizes: Floats) -> Floats:
        """Return seconds of sizes; those that were not measured are moved to the nearest that was."""
        return self.curve.curve.seconds(np.clip(sizes, self.smallest, self.largest))

    def rest(self, sizes: Floats) -> Floats:
        """Return seconds beyond moving the bytes."""
        inside = np.clip(sizes, self.smallest, self.largest)
        moving: Floats = self.share * inside * self.inverse / self.rings
        found: Floats = np.maximum(self.at(sizes) - moving, _LEAST_S)
        return found


def seconds(
    measured: Sequence[MeasuredCount],
    workers: int,
    nbytes: float,
    *,
    share: float,
    rings: int = 1,
    cables: bool = False,
) -> float:
    """Return seconds of `nbytes` among `workers`, of whose collective `share` is the part on the bus.

    measured: one number at least, none of them `workers`; rings: of `workers`; cables: b is 0.
    """
    counts = np.array([each.workers for each in measured], dtype=np.float64)
    weights = 1 / np.maximum(np.abs(np.log(counts / workers)), 1e-6)
    a, b = _inverse(counts, np.array([each.inverse for each in measured]), weights, cables=cables)
    moving = share * nbytes * (a + b / (workers - 1)) / rings
    power = _power(counts, np.stack([each.rest(nbytes * _SIZES) for each in measured]))
    single = np.array([each.rest(np.array([nbytes]))[0] for each in measured])
    rest = float(np.sum(weights * single / counts**power) / np.sum(weights)) * workers**power
    return float(moving + rest)


def _inverse(counts: Floats, inverse: Floats, weights: Floats, *, cables: bool) -> tuple[float, float]:
    """Return a and b by least squares of relative errors, b within 0 and `_MOST_LOST` a."""
    flat = float(np.sum(weights * inverse) / np.sum(weights))
    if cables or len(counts) < 2:
        return flat, 0.0
    columns = np.stack([np.ones_like(counts), 1 / (counts - 1)], axis=1)
    scale = np.sqrt(weights) / inverse
    (a, b), *_ = np.linalg.lstsq(columns * scale[:, None], inverse * scale, rcond=None)
    if b <= 0 or a <= 0:
        lost = 0.0 if b <= 0 else _MOST_LOST
    elif b <= _MOST_LOST * a:
        return float(a), float(b)
    else:
        lost = _MOST_LOST
    if not lost:
        return flat, 0.0
    shape = 1 + lost / (counts - 1)
    a = float(np.sum(weights * inverse / shape) / np.sum(weights))
    return a, lost * a


def _power(counts: Floats, rests: Floats) -> float:
    """Return the power g from rests (counts, sizes), with a slope common to the sizes."""
    x = np.log(counts) - np.log(counts).mean()
    y = np.log(rests) - np.log(rests).mean(axis=0)
    found = (float(np.sum(x * y.mean(axis=1))) + _CERTAIN * _POWER) / (float(np.sum(x * x)) + _CERTAIN)
    return min(max(found, 0.0), 1.0)
