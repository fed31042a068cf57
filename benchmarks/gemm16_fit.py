"""Fitting the law of 16-bit products: to measurements of several GPUs at once, or of one, from a law that others share.

Robust least squares in logarithmic time: Levenberg-Marquardt steps, weights that make the sum one of absolute errors
(outliers of the measurements pull no more than others), and a normal prior on every parameter. What a few measurements
of a new GPU say is `gemm16_shift`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrace.cost.devices.learned.gemm16_law import Chip, seconds

Floats = NDArray[np.float64]

NOISE = 0.4  # of a measured product against the law; above its error, because products of one grid resemble each other
_DIFFERENCE = 0.02  # of a parameter, for slopes; wide enough to see past single kernels' steps
_LEAST_RESIDUAL = 0.04  # smaller ones count as squares: measurements repeat no better


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProducts:
    """Products timed on one device."""

    chip: Chip
    m: Floats
    n: Floats
    k: Floats
    seconds: Floats

    def __len__(self) -> int:
        return len(self.m)

    def take(self, rows: NDArray[np.int64]) -> MeasuredProducts:
        """The products of these rows."""
        return MeasuredProducts(
            chip=self.chip, m=self.m[rows], n=self.n[rows], k=self.k[rows], seconds=self.seconds[rows]
        )


def adapt(
    theta: Mapping[str, float], spread: Mapping[str, float], measured: MeasuredProducts, *, noise: float = NOISE
) -> dict[str, float]:
    """The law shifted to measurements of one device; only parameters in `spread` move, by about so much.

    `noise` is what a product counts for: more of it, and the prior holds longer.
    """
    if not len(measured):
        return dict(theta)
    names = list(spread)

    def predict(shift: Floats) -> Floats:
        moved = {**theta, **{name: theta[name] + float(by) for name, by in zip(names, shift, strict=True)}}
        return np.log(seconds(moved, measured.chip, measured.m, measured.n, measured.k))

    deviation = np.array([spread[name] for name in names])
    found = solve(predict, np.log(measured.seconds), np.zeros(len(names)), deviation, noise=noise, iterations=12)
    return {**theta, **{name: theta[name] + float(by) for name, by in zip(names, found, strict=True)}}


def fit_together(
    start: Mapping[str, float],
    devices: Sequence[MeasuredProducts],
    own: Mapping[str, float],
    *,
    spread: float = 1.5,
    fixed: Sequence[str] = (),
    iterations: int = 30,
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """One law for all devices, and per device the shifts of those parameters that it has of its `own`.

    `own` gives their deviations; each device's measurements count alike, however many they are.
    """
    names = [name for name in start if name not in fixed and not name.startswith("follow_")]
    mine = list(own)
    at = [slice(len(names) + i * len(mine), len(names) + (i + 1) * len(mine)) for i in range(len(devices))]

    def law(x: Floats, device: int) -> dict[str, float]:
        found = {**start, **dict(zip(names, x[: len(names)].tolist(), strict=True))}
        for name, shift in zip(mine, x[at[device]].tolist(), strict=True):
            found[name] += shift
        return found

    def predict(x: Floats) -> Floats:
        parts = [np.log(seconds(law(x, i), d.chip, d.m, d.n, d.k)) for i, d in enumerate(devices)]
        return np.concatenate(parts)

    first = np.concatenate([[start[name] for name in names], np.zeros(len(mine) * len(devices))])
    deviation = np.concatenate([np.full(len(names), spread), np.tile([own[name] for name in mine], len(devices))])
    target = np.log(np.concatenate([d.seconds for d in devices]))
    weights = np.concatenate([np.full(len(d), 1.0 / len(d)) for d in devices]) * np.mean([len(d) for d in devices])
    found = solve(predict, target, first, deviation, weights=weights, iterations=iterations)
    shared = {**start, **dict(zip(names, found[: len(names)].tolist(), strict=True))}
    return shared, [dict(zip(mine, found[each].tolist(), strict=True)) for each in at]


def solve(
    predict: Callable[[Floats], Floats],
    target: Floats,
    start: Floats,
    deviation: Floats,
    *,
    noise: float = 0.1,
    weights: Floats | None = None,
    iterations: int = 30,
) -> Floats:
    """Parameters at which the sum of |predict - target| / noise and of squared shifts / (2 deviation^2) is least."""
    x, damping = start.copy(), 1e-2
    scale = np.ones(len(target)) if weights is None else weights

    def cost(residual: Floats, at: Floats) -> float:
        size = np.abs(residual)
        inner = np.where(size < _LEAST_RESIDUAL, (size**2 / _LEAST_RESIDUAL + _LEAST_RESIDUAL) / 2, size)
        return float((scale * inner).sum() / noise + 0.5 * (((at - start) / deviation) ** 2).sum())

    here = predict(x)
    least = cost(here - target, x)
    for _ in range(iterations):
        residual = here - target
        weight = scale / (noise * np.maximum(np.abs(residual), _LEAST_RESIDUAL))
        slopes = np.empty((len(target), len(x)))
        for i in range(len(x)):
            moved = x.copy()
            moved[i] += _DIFFERENCE
            slopes[:, i] = (predict(moved) - here) / _DIFFERENCE
        normal = slopes.T @ (slopes * weight[:, None]) + np.diag(1.0 / deviation**2)
        gradient = slopes.T @ (weight * residual) + (x - start) / deviation**2
        for _ in range(6):
            trial = x - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            there = predict(trial)
            reached = cost(there - target, trial)
            if reached < least:
                gain, x, here, least = least - reached, trial, there, reached
                damping = max(damping / 3, 1e-6)
                break
            damping *= 4
        else:
            break
        if gain < 1e-5 * least:
            break
    return x
