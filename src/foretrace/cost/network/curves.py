"""Time of a collective as a function of its size, from measured points between which it is interpolated.

Plain alpha-beta (one latency, one bandwidth) misses by tens of per cent, because a library changes protocol, algorithm
and number of channels with the size. How much a curve is off is found by leaving points out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_LEAST_TO_LEAVE_OUT = 6
_FOLDS = 5
_SPARSE = 64
_WINDOWS = (1, 3, 5)  # points that a table takes the median of
_LEAST_RANGE = 0.01  # of a time, on both sides: what the same machine differs by from run to run at best
_UNKNOWN = 0.25  # relative error assumed where too few points were measured to leave one out


@dataclass(frozen=True, kw_only=True)
class AlphaBetaLine:
    """Alpha-beta: `alpha_s + beta_s * bytes`."""

    alpha_s: float
    beta_s: float

    def at(self, nbytes: Floats) -> Floats:
        """Return seconds of sizes."""
        return self.alpha_s + self.beta_s * nbytes


@dataclass(frozen=True, kw_only=True)
class TableCurve:
    """Interpolation on logarithmic scales; beyond the points an alpha-beta line of the outer ones continues."""

    nbytes: Floats
    times: Floats
    before: AlphaBetaLine
    after: AlphaBetaLine
    curved: bool = False  # by monotone cubics instead of straight lines

    def seconds(self, nbytes: Floats) -> Floats:
        """Return times of sizes."""
        sizes = np.asarray(nbytes, dtype=np.float64)
        found = (_log_log_cubic if self.curved else _log_log)(sizes, self.nbytes, self.times)
        low, high = sizes < self.nbytes[0], sizes > self.nbytes[-1]
        found[low] = self.times[0] * self.before.at(sizes[low]) / self.before.at(self.nbytes[:1])[0]
        found[high] = self.times[-1] * self.after.at(sizes[high]) / self.after.at(self.nbytes[-1:])[0]
        return found


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A curve, and the errors (log of measured / predicted) that it made at points left out of its fit."""

    curve: TableCurve
    nbytes: Floats  # of the left-out points
    errors: Floats

    @property
    def mape(self) -> float:
        """Mean absolute relative error at left-out points; nan where there are too few points."""
        return float(np.mean(np.abs(np.expm1(-self.errors)))) if len(self.errors) else float("nan")

    def factors(self, nbytes: float) -> tuple[float, float]:
        """Return low and high multiples of the predicted time, 80 %, from errors at sizes near this one."""
        if len(self.errors) < _LEAST_TO_LEAVE_OUT - 2:
            return 1 - _UNKNOWN, 1 + _UNKNOWN
        distance = np.abs(np.log(self.nbytes / nbytes))
        near = self.errors[np.argsort(distance)[: max(15, len(self.errors) // 8)]]
        low, high = np.quantile(near, [0.1, 0.9])
        beyond = max(float(np.log(nbytes / self.nbytes.max())), float(np.log(self.nbytes.min() / nbytes)), 0.0)
        extra = 0.05 * min(beyond, 10.0)  # 5 % per factor e outside of the sizes measured
        return float(np.exp(min(low, -_LEAST_RANGE) - extra)), float(np.exp(max(high, _LEAST_RANGE) + extra))


def fit_table(nbytes: Sequence[float] | Floats, seconds: Sequence[float] | Floats) -> Fitted:
    """Return a table of these points; neighbours are merged by a running median where that lowers the
    left-out error.
    """
    sizes, times = np.asarray(nbytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    fits = [partial(_table, window=window) for window in _WINDOWS]
    if len(sizes) <= _SPARSE:  # between few points it matters how the curve bends
        fits.append(partial(_table, window=1, curved=True))
    return _best(sizes, times, fits)


_Fit = Callable[[Floats, Floats], TableCurve]


def _best(sizes: Floats, times: Floats, fits: Sequence[_Fit]) -> Fitted:
    """Return the fit whose error at left-out points is lowest; the simpler one, which comes first, where two
    are equal.
    """
    left_out = [_left_out(sizes, times, fit) for fit in fits]
    costs = [float(np.mean(np.abs(errors))) if len(errors) else 0.0 for _, errors in left_out]
    at = next(at for at, cost in enumerate(costs) if cost <= min(costs) + 1e-9)
    where, errors = left_out[at]
    return Fitted(curve=fits[at](sizes, times), nbytes=where, errors=errors)


def _left_out(sizes: Floats, times: Floats, fit: _Fit) -> tuple[Floats, Floats]:
    """Return sizes and errors of every inner point, each predicted by a fit that did not see it."""
    count = len(sizes)
    if count < _LEAST_TO_LEAVE_OUT:
        return np.empty(0), np.empty(0)
    where, errors = [], []
    for fold in range(_FOLDS):
        out = np.arange(count) % _FOLDS == fold
        out[[0, -1]] = False  # the ends hold the range
        curve = fit(sizes[~out], times[~out])
        where.append(sizes[out])
        errors.append(np.log(times[out] / curve.seconds(sizes[out])))
    return np.concatenate(where), np.concatenate(errors)


def _table(sizes: Floats, times: Floats, window: int, *, curved: bool = False) -> TableCurve:
    quarter = max(len(sizes) // 4, 2)
    return TableCurve(
        curved=curved and len(sizes) > 2,
        nbytes=sizes,
        times=_running_median(times, window),
        before=line(sizes[:quarter], times[:quarter]),
        after=line(sizes[-quarter:], times[-quarter:]),
    )


def _running_median(times: Floats, window: int) -> Floats:
    """Return the median of so many neighbours; near the ends of as many as there are on both sides."""
    if window == 1 or len(times) < window:
        return times
    found = times.copy()
    half = window // 2
    found[half : len(times) - half] = np.median(sliding_window_view(times, window), axis=1)
    for at in range(1, half):
        for middle, near in ((at, times[: 2 * at + 1]), (len(times) - 1 - at, times[-2 * at - 1 :])):
            found[middle] = np.median(near)
    return found


def _log_log(at: Floats, sizes: Floats, times: Floats) -> Floats:
    found: Floats = np.exp(np.interp(np.log(at), np.log(sizes), np.log(times)))
    return found


def _log_log_cubic(at: Floats, sizes: Floats, times: Floats) -> Floats:
    """Return monotone piecewise cubics on logarithmic scales (Fritsch and Carlson, 1980; slopes by harmonic means)."""
    x, y = np.log(sizes), np.log(times)
    step, secant = np.diff(x), np.diff(y) / np.diff(x)
    left, right = 2 * step[1:] + step[:-1], step[1:] + 2 * step[:-1]
    same = secant[1:] * secant[:-1] > 0
    safe = np.where(same, secant[1:] * secant[:-1], 1.0)
    inner = np.where(same, (left + right) * safe / (left * secant[1:] + right * secant[:-1] + ~same), 0.0)
    slope = np.concatenate([secant[:1], inner, secant[-1:]])
    where = np.clip(np.searchsorted(x, np.log(at), side="right") - 1, 0, len(step) - 1)
    u = np.clip((np.log(at) - x[where]) / step[where], 0.0, 1.0)
    found: Floats = np.exp(
        (1 + 2 * u) * (1 - u) ** 2 * y[where]
        + u * (1 - u) ** 2 * step[where] * slope[where]
        + u * u * (3 - 2 * u) * y[where + 1]
        + u * u * (u - 1) * step[where] * slope[where + 1]
    )
    return found


def line(sizes: Floats, times: Floats) -> AlphaBetaLine:
    """Return alpha-beta with both numbers at least 0, least relative squares with the weight of outliers cut
    (Huber).
    """
    weights = np.ones_like(times)
    alpha = beta = 0.0
    for _ in range(4):
        alpha, beta = _weighted(sizes, times, weights)
        off = np.abs((alpha + beta * sizes) / times - 1)
        scale = 1.5 * float(np.median(off)) + 1e-6
        weights = np.minimum(1.0, scale / np.maximum(off, 1e-12))
    return AlphaBetaLine(alpha_s=alpha, beta_s=beta)


def _weighted(sizes: Floats, times: Floats, weights: Floats) -> tuple[float, float]:
    scale = float(sizes[-1])
    floor = float(np.finfo(np.float64).tiny) ** 0.25
    one, two = 1 / times, np.maximum(sizes / scale, floor) / times  # squares of what is smaller would be 0
    pp, pq, qq = (float(np.sum(weights * a * b)) for a, b in ((one, one), (one, two), (two, two)))
    p, q = float(np.sum(weights * one)), float(np.sum(weights * two))
    both = pp * qq - pq * pq
    if both > 1e-12 * pp * qq:
        alpha, beta = (p * qq - q * pq) / both, (q * pp - p * pq) / both
        if alpha >= 0 and beta >= 0:
            return alpha, beta / scale
    flat, through = p / pp, q / qq
    squares = [float(np.sum(weights * (a / times + b * two - 1) ** 2)) for a, b in ((flat, 0.0), (0.0, through))]
    return (flat, 0.0) if squares[0] <= squares[1] else (0.0, through / scale)
