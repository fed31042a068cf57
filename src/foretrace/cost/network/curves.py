"""Time of a collective as a function of its size, from measured points: a table, or alpha-beta pieces.

Plain alpha-beta (one latency, one bandwidth) misses by tens of per cent, because a library changes protocol, algorithm
and number of channels with the size. A *table* interpolates between the points on logarithmic scales. *Pieces* are one
alpha-beta line per regime, with few numbers. How much a curve is off is found by leaving points out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MOST_PIECES = 8
_LEAST_POINTS = 2  # of a piece
_LEAST_TO_LEAVE_OUT = 6
_CANDIDATES = 160  # places where a piece may end, tried at once
_FOLDS = 5
_SPARSE = 64
_WINDOWS = (1, 3, 5)  # points that a table takes the median of
_LEAST_RANGE = 0.01  # of a time, on both sides: what the same machine differs by from run to run at best
_UNKNOWN = 0.25  # relative error assumed where too few points were measured to leave one out


@dataclass(frozen=True, kw_only=True)
class AlphaBetaLine:
    """Alpha-beta: `alpha_s + beta_s * bytes`, from the first to the last size it was fitted on."""

    alpha_s: float
    beta_s: float
    first: float
    last: float

    def at(self, nbytes: Floats) -> Floats:
        """Return seconds of sizes."""
        return self.alpha_s + self.beta_s * nbytes


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Alpha-beta lines one after the other; between the last size of one and the first of the next they are joined."""

    lines: tuple[AlphaBetaLine, ...]

    def seconds(self, nbytes: Floats) -> Floats:
        """Return times of sizes; the outer lines continue beyond the sizes that were measured."""
        sizes = np.asarray(nbytes, dtype=np.float64)
        edges = np.array([line.first for line in self.lines[1:]])
        which = np.searchsorted(edges, sizes, side="right")
        found = np.empty_like(sizes)
        for at, line in enumerate(self.lines):
            mine = which == at
            found[mine] = line.at(sizes[mine])
            if at + 1 == len(self.lines):
                break
            gap = mine & (sizes > line.last)
            after = self.lines[at + 1]
            ends = np.array([line.last, after.first])
            times = np.array([line.at(ends[:1])[0], after.at(ends[1:])[0]])
            found[gap] = _log_log(sizes[gap], ends, times)
        return found


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


Curve = Pieces | TableCurve


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A curve, and the errors (log of measured / predicted) that it made at points left out of its fit."""

    curve: Curve
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


def fit_pieces(nbytes: Sequence[float] | Floats, seconds: Sequence[float] | Floats, most: int = MOST_PIECES) -> Fitted:
    """Return alpha-beta pieces; as many as lower the error at left-out points, `most` of them."""
    sizes, times = np.asarray(nbytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    most = min(most, max(len(sizes) // (2 * _LEAST_POINTS), 1))
    return _best(sizes, times, [partial(_pieces, number=number) for number in range(1, most + 1)])


_Fit = Callable[[Floats, Floats], Curve]


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
        before=_line(sizes[:quarter], times[:quarter]),
        after=_line(sizes[-quarter:], times[-quarter:]),
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


def _pieces(sizes: Floats, times: Floats, number: int) -> Pieces:
    """Return lines with the least sum of squared relative errors, by dynamic programming over where they end."""
    sums, ends, costs = _costs(sizes.tobytes(), times.tobytes())
    cuts = _refined(sums, _cuts(costs, ends, number), len(sizes))
    return Pieces(lines=tuple(_line(sizes[a:b], times[a:b]) for a, b in pairwise(cuts)))


@lru_cache(maxsize=8)  # the same points are cut into one piece, two, three, ... one after the other
def _costs(sizes_bytes: bytes, times_bytes: bytes) -> tuple[Floats, NDArray[np.int64], Floats]:
    """Return prefix sums, places where a piece may begin, and the error of a line between any two of them."""
    sizes, times = np.frombuffer(sizes_bytes), np.frombuffer(times_bytes)
    sums = _prefix_sums(sizes, _running_median(times, 3))  # a single outlier ends no piece
    ends = _candidates(sizes)
    costs = np.full((len(ends), len(ends)), np.inf)  # from, to
    for to in range(1, len(ends)):
        costs[:to, to] = _squares(sums, ends[:to], int(ends[to]))
    return sums, ends, costs


def _candidates(sizes: Floats) -> NDArray[np.int64]:
    """Return indices where a piece may begin: dense where sizes are far apart on a logarithmic scale."""
    count = len(sizes)
    if count <= _CANDIDATES:
        return np.arange(count + 1)
    even = np.linspace(0, count, _CANDIDATES // 2).astype(np.int64)
    logs = np.searchsorted(np.log(sizes), np.linspace(np.log(sizes[0]), np.log(sizes[-1]), _CANDIDATES // 2))
    return np.unique(np.concatenate([[0, count], even, logs.astype(np.int64)]))


def _prefix_sums(sizes: Floats, times: Floats) -> Floats:
    """Return rows: sums of 1/t, s/t, 1/t^2, s/t^2, s^2/t^2 up to every point, from which any piece's fit follows."""
    scale = sizes[-1]
    inverse, ratio = times.min() / times, times.min() / times * (sizes / scale)
    columns = np.stack([inverse, ratio, inverse * inverse, inverse * ratio, ratio * ratio])
    return np.concatenate([np.zeros((5, 1)), np.cumsum(columns, axis=1)], axis=1)


def _squares(sums: Floats, begin: NDArray[np.int64], end: int) -> Floats:
    """Return the least sum of squared relative errors of a line over [begin, end), with both numbers at least 0."""
    p, q, pp, pq, qq = sums[:, [end]] - sums[:, begin]
    count = end - begin
    both = pp * qq - pq * pq
    safe = np.where(both > 1e-18 * pp * qq, both, np.inf)
    alpha, beta = (p * qq - q * pq) / safe, (q * pp - p * pq) / safe
    flat, through = p * p / np.maximum(pp, 1e-300), q * q / np.maximum(qq, 1e-300)
    free = alpha * p + beta * q
    gained = np.where((alpha >= 0) & (beta >= 0) & np.isfinite(safe), free, np.maximum(flat, through))
    found: Floats = np.maximum(count - gained, 0.0)
    return np.where(count >= _LEAST_POINTS, found, np.inf)


def _cuts(costs: Floats, ends: NDArray[np.int64], number: int) -> list[int]:
    """Return where pieces begin and the last one ends: the best `number` pieces whose ends are among `ends`."""
    if number == 1:
        return [int(ends[0]), int(ends[-1])]
    best = costs[0].copy()
    came: list[NDArray[np.int64]] = []
    for _ in range(number - 1):
        through = best[:, None] + costs
        came.append(np.argmin(through, axis=0))
        best = np.min(through, axis=0)
    if not np.isfinite(best[-1]):
        return [int(ends[0]), int(ends[-1])]
    at, cuts = len(ends) - 1, [int(ends[-1])]
    for before in reversed(came):
        at = int(before[at])
        cuts.append(int(ends[at]))
    return [int(ends[0]), *reversed(cuts[:-1]), int(ends[-1])] if cuts[-1] == ends[0] else [int(ends[0]), *cuts[::-1]]


def _refined(sums: Floats, cuts: list[int], count: int) -> list[int]:
    """Return every inner cut moved to the best index between its neighbours' pieces."""
    for _ in range(2):
        for at in range(1, len(cuts) - 1):
            reach = max(count // _CANDIDATES * 2, 1)
            low, high = (
                max(cuts[at] - reach, cuts[at - 1] + _LEAST_POINTS),
                min(cuts[at] + reach, cuts[at + 1] - _LEAST_POINTS),
            )
            tried = range(low, high + 1)
            if len(tried) > 1:
                cost = [
                    _squares(sums, np.array([cuts[at - 1]]), cut)[0] + _squares(sums, np.array([cut]), cuts[at + 1])[0]
                    for cut in tried
                ]
                cuts[at] = tried[int(np.argmin(cost))]
    return cuts


def _line(sizes: Floats, times: Floats) -> AlphaBetaLine:
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
    return AlphaBetaLine(alpha_s=alpha, beta_s=beta, first=float(sizes[0]), last=float(sizes[-1]))


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
