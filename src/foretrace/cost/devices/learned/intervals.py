"""80 % ranges of the learned predictor: what it missed by on devices that it had not seen in training.

Every training device is left out once and predicted by nets that never saw it. The residuals log(true / said) are kept
by group of operators and by predicted time, every device with the same weight, and their 10 % and 90 % quantiles are
the range. The spread of nets with different seeds says nothing here: they agree on the same wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

GROUPS = ("bmm", "linear", "elementwise", "rows")
REGIMES_S = (1e-4, 1e-3)  # predicted seconds: below the first the host matters, above the last power


def regimes(seconds: Float64) -> Int64:
    """Which regime each prediction falls into (n)."""
    return np.searchsorted(np.array(REGIMES_S), seconds, side="right").astype(np.int64)


def factors(of: Sequence[Sequence[Sequence[float]]], group: Int64, seconds: Float64) -> tuple[Float64, Float64]:
    """(low, high) factors on predictions of these groups and seconds (n each)."""
    values = np.asarray(of, dtype=np.float64)[group, regimes(seconds)]
    return values[:, 0], values[:, 1]
