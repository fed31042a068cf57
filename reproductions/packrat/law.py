"""A law of one instance's latency, fitted to the points of a profile that lacks some.

    latency = a + b/t + n·(c + d/t) + e·n²/(n + 8)/t        t threads, n samples; a to e at least 0

What an instance costs at all, by itself or shared out over its threads; what a sample costs, by itself or shared out;
and what a sample costs more once several no longer fit into caches together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from foretrace.arrays import Float64
from foretrace.serving.server.measure import LatencyProfile
from foretrace.serving.server.split import ModelInstance

_CACHED = 8.0  # samples at which half of the extra cost is reached
_ROUNDS, _LEAST = 20, 0.01  # of reweighting towards absolute relative errors; errors below count as this


@dataclass(frozen=True, slots=True)
class LatencyLaw:
    """Constants a to e, seconds."""

    constants: Float64

    def latency_s(self, points: Iterable[ModelInstance]) -> Float64:
        """The latency at points, measured or not."""
        found: Float64 = _terms(points) @ self.constants
        return found

    def errors(self, profile: LatencyProfile) -> Float64:
        """Relative errors at the points of a profile."""
        measured = profile.latency_s()
        found: Float64 = self.latency_s(measured) / np.array(list(measured.values())) - 1
        return found


def fit(profile: LatencyProfile) -> LatencyLaw:
    """The law with the least sum of absolute relative errors, found by reweighted least squares."""
    measured = profile.latency_s()
    relative = _terms(measured) / np.array(list(measured.values()))[:, None]
    weights = np.ones(len(relative))
    for _ in range(_ROUNDS):
        constants, _ = nnls(relative * weights[:, None], weights)
        weights = np.maximum(np.abs(relative @ constants - 1), _LEAST) ** -0.5
    return LatencyLaw(constants)


def _terms(points: Iterable[ModelInstance]) -> Float64:
    t, n = np.array(list(points), dtype=np.float64).T
    return np.stack([np.ones_like(t), 1 / t, n, n / t, n * n / (n + _CACHED) / t], axis=1)
