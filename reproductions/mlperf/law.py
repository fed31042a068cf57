"""Scaling out: the same global batch, or another one, on more devices, from a smaller run.

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
    """Two runs of one model: devices, global batch of the smaller run, and how many times the samples per second.

    `larger_batch` is the global batch of the run on more devices, 0 where it is the same: then the speed-up is that of
    a step, too.
    """

    global_batch: int
    fewer: int
    more: int
    speedup: float
    larger_batch: int = 0

    @property
    def batches(self) -> tuple[int, int]:
        """Global batches of both runs."""
        return self.global_batch, self.larger_batch or self.global_batch

    def __post_init__(self) -> None:
        sound = 0 < self.fewer < self.more and self.global_batch > 0 and self.larger_batch >= 0
        if not (sound and 0 < self.speedup < float("inf")):
            batches = " and ".join(map(str, dict.fromkeys(self.batches)))
            raise ForetraceError(
                f"runs on {self.fewer} and {self.more} devices, batch {batches}, speed-up {self.speedup:g}, "
                "are no pair: the second needs more devices, and all figures must be above 0."
            )


def speedup(pair: Pair, overhead: float) -> float:
    """How many times the samples per second the larger run has where a step costs `overhead` samples beside its own."""
    few, many = pair.batches
    return many / few * (few / pair.fewer + overhead) / (many / pair.more + overhead)


def fit_overhead(pairs: Sequence[Pair]) -> float:
    """Samples with the smallest sum of absolute logarithmic errors over these pairs. Raises ForetraceError for none."""
    if not pairs:
        raise ForetraceError("there is no pair of runs to learn the cost of a step from.")
    few, many = np.array([p.batches for p in pairs]).T
    fewer, more, measured = np.array([[p.fewer, p.more, p.speedup] for p in pairs]).T
    predicted = many / few * (few / fewer + _GRID[:, None]) / (many / more + _GRID[:, None])
    return float(_GRID[np.abs(np.log(predicted / measured)).sum(axis=1).argmin()])
