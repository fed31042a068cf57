"""Strong scaling: the same global batch on more devices, from a smaller run.

A step on b samples per device takes time in proportion to b + s: what it costs beside its samples (launches, kernels
that no longer fill the device, exchanging gradients) is worth s samples. s belongs to a model and barely to a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretrace.errors import ForetraceError

_GRID = np.concatenate([[0.0], np.geomspace(1e-4, 1e6, 4001)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two runs of one model with one global batch: devices, and how many times faster the larger one was per step."""

    global_batch: int
    fewer: int
    more: int
    speedup: float

    def __post_init__(self) -> None:
        if not (0 < self.fewer < self.more and self.global_batch > 0 and 0 < self.speedup < float("inf")):
            raise ForetraceError(
                f"runs on {self.fewer} and {self.more} devices, batch {self.global_batch}, speed-up {self.speedup:g}, "
                "are no pair: the second needs more devices, and all figures must be above 0."
            )


def speedup(pair: Pair, overhead: float) -> float:
    """How many times faster the larger run's steps are where a step costs `overhead` samples beside its own."""
    return (pair.global_batch / pair.fewer + overhead) / (pair.global_batch / pair.more + overhead)


def fit_overhead(pairs: Sequence[Pair]) -> float:
    """Samples with the smallest sum of absolute logarithmic errors over these pairs. Raises ForetraceError for none."""
    if not pairs:
        raise ForetraceError("there is no pair of runs to learn the cost of a step from.")
    batch, fewer, more, measured = np.array([[p.global_batch, p.fewer, p.more, p.speedup] for p in pairs]).T
    predicted = (batch / fewer + _GRID[:, None]) / (batch / more + _GRID[:, None])
    return float(_GRID[np.abs(np.log(predicted / measured)).sum(axis=1).argmin()])
