"""80 % ranges of the learned float32 predictor from what it missed by on devices left out of its training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from foretrace.cost.devices.learned import fp32
from foretrace.errors import ForetraceError

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

LEVEL = 0.8
_FEWEST = 30  # residuals of a device that make a group and regime of its own

Table: TypeAlias = list[list[tuple[float, float]]]  # [group][regime] -> factors on the prediction


def weighted_quantiles(devices: Sequence[Float64]) -> tuple[float, float]:
    """The quantiles that leave (1 - LEVEL) / 2 on each side, every device with the same weight."""
    values = np.concatenate(devices)
    weights = np.concatenate([np.full(len(each), 1.0 / len(each)) for each in devices if len(each)])
    order = np.argsort(values, kind="stable")
    position = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    tail = (1 - LEVEL) / 2
    low, high = np.interp([tail, 1 - tail], position, values[order])
    return float(low), float(high)


def table(groups: Sequence[Int64], said_s: Sequence[Float64], true_s: Sequence[Float64]) -> Table:
    """Factors by group and regime from the residuals of every left-out device (one entry of each list per device).

    A regime without enough residuals takes those of its whole group. Raises ForetraceError if a group has none.
    """
    residuals = [np.log(true / said) for said, true in zip(said_s, true_s, strict=True)]
    result: Table = []
    for group, name in enumerate(fp32.GROUPS):
        whole = [r[g == group] for r, g in zip(residuals, groups, strict=True) if (g == group).any()]
        if not whole:
            raise ForetraceError(f"no device left out has a row of {name}; intervals need some of every group.")
        row: list[tuple[float, float]] = []
        for regime in range(len(fp32.REGIMES_S) + 1):
            part = [
                r[(g == group) & (fp32.regimes(said) == regime)]
                for r, g, said in zip(residuals, groups, said_s, strict=True)
            ]
            part = [each for each in part if len(each) >= _FEWEST]
            low, high = weighted_quantiles(part if len(part) > 1 else whole)
            row.append((float(np.exp(low)), float(np.exp(high))))
        result.append(row)
    return result
