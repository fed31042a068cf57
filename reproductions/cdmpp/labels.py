"""Normalisations of latencies, each with its inverse, so that a predictor learns on labels of a usable shape.

Latencies of programs span orders of magnitude with a long tail. CDMPP (EuroSys 2024, section 5) learns on Box-Cox
transformed ones; Yeo-Johnson, quantiles and the logarithm are alternatives. Transforms are fitted on training labels
only, and standardise their result to mean 0 and deviation 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foretrace.errors import ForetraceError

Floats = NDArray[np.float64]
METHODS = ("box-cox", "yeo-johnson", "log", "quantile", "none")
_SEARCH = (-3.0, 3.0)  # of lambda
_KNOTS = 200  # of the quantile transform
_GOLDEN = 0.5 * (5**0.5 - 1)


@dataclass(frozen=True, kw_only=True)
class Labels:
    """A fitted normalisation: `forward` to normal labels, `inverse` back. `unit` divides the values first."""

    method: str
    unit: float
    power: float
    mean: float
    deviation: float
    knots: tuple[float, ...] = ()

    def forward(self, values: ArrayLike) -> Floats:
        x = np.asarray(values, float) / self.unit
        return np.asarray((self._bend(x) - self.mean) / self.deviation)

    def inverse(self, labels: ArrayLike) -> Floats:
        """Values of labels; beyond the end of a transform's range its last finite value."""
        y = np.asarray(labels, float) * self.deviation + self.mean
        return self.unit * np.asarray(self._unbend(y))

    def _bend(self, x: Floats) -> Floats:
        if self.method == "box-cox":
            return box_cox(x, self.power)
        if self.method == "yeo-johnson":
            return yeo_johnson(x, self.power)
        if self.method == "log":
            return np.log(x)
        if self.method == "quantile":
            return np.interp(np.log(x), self.knots, _scores(len(self.knots)))
        return x

    def _unbend(self, y: Floats) -> Floats:
        if self.method == "box-cox":
            return inverse_box_cox(y, self.power)
        if self.method == "yeo-johnson":
            return inverse_yeo_johnson(y, self.power)
        if self.method == "log":
            return np.exp(y)
        if self.method == "quantile":
            return np.exp(np.interp(y, _scores(len(self.knots)), self.knots))
        return y

    def as_data(self) -> dict[str, Any]:
        return {
            "method": self.method, "unit": self.unit, "power": self.power, "mean": self.mean,
            "deviation": self.deviation, "knots": list(self.knots),
        }  # fmt: skip


def labels_from_data(data: Mapping[str, Any]) -> Labels:
    return Labels(**{**data, "knots": tuple(data["knots"])})


def fit(values: ArrayLike, method: str = "box-cox") -> Labels:
    """The normalisation of this method that suits the values best (by likelihood).

    Raises ForetraceError where values are not positive and finite, or the method is unknown.
    """
    x = np.asarray(values, float).ravel()
    if method not in METHODS:
        raise ForetraceError(f"label normalisation {method!r} is unknown; take one of {', '.join(METHODS)}.")
    if len(x) < 2 or not (np.isfinite(x).all() and (x > 0).all()) or x.min() == x.max():
        raise ForetraceError("labels must be at least two different positive finite numbers; leave out the others.")
    unit = float(np.exp(np.log(x).mean()))
    x = x / unit
    power, knots = 0.0, ()
    if method in ("box-cox", "yeo-johnson"):
        bend, slope = (box_cox, np.log(x)) if method == "box-cox" else (yeo_johnson, np.log1p(x))
        power = _search(lambda each: _likelihood(bend(x, each), (each - 1) * slope.sum()))
    elif method == "quantile":
        places = np.linspace(0, 1, min(_KNOTS, len(x)))
        knots = tuple(np.maximum.accumulate(np.quantile(np.log(x), places) + 1e-9 * places).tolist())
    raw = Labels(method=method, unit=unit, power=power, mean=0.0, deviation=1.0, knots=knots)
    bent = raw.forward(x * unit)
    mean, deviation = float(bent.mean()), float(bent.std())
    return Labels(method=method, unit=unit, power=power, mean=mean, deviation=deviation, knots=knots)


def _likelihood(bent: Floats, slope: float) -> float:
    return float(-0.5 * len(bent) * np.log(bent.var()) + slope)


def _search(gain: Any) -> float:
    """The lambda of the largest gain, by golden sections."""
    low, high = _SEARCH
    while high - low > 1e-6:
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        low, high = (low, right) if gain(left) >= gain(right) else (left, high)
    return 0.5 * (low + high)


def box_cox(x: Floats, power: float) -> Floats:
    """(x^power - 1) / power for x > 0; the logarithm at power 0 (Box and Cox, 1964)."""
    log = np.log(x)
    return log if abs(power) < 1e-9 else np.asarray(np.expm1(power * log) / power)


def inverse_box_cox(y: Floats, power: float) -> Floats:
    if abs(power) < 1e-9:
        return np.asarray(np.exp(y))
    return np.asarray(np.exp(np.log1p(np.maximum(power * y, -1 + 1e-6)) / power))


def yeo_johnson(x: Floats, power: float) -> Floats:
    """Box-Cox of x + 1 for x >= 0, mirrored with power 2 - power below (Yeo and Johnson, 2000)."""
    x = np.asarray(x, float)
    up = box_cox(np.maximum(x, 0) + 1, power)
    return np.where(x >= 0, up, -box_cox(np.maximum(-x, 0) + 1, 2 - power))


def inverse_yeo_johnson(y: Floats, power: float) -> Floats:
    y = np.asarray(y, float)
    up = inverse_box_cox(np.maximum(y, 0), power) - 1
    return np.where(y >= 0, up, 1 - inverse_box_cox(np.maximum(-y, 0), 2 - power))


def _scores(count: int) -> Floats:
    """Normal scores of evenly spaced ranks: quantiles of the normal distribution."""
    from statistics import NormalDist

    normal = NormalDist()
    return np.array([normal.inv_cdf(min(max(p, 1e-3), 1 - 1e-3)) for p in np.linspace(0, 1, count)])
