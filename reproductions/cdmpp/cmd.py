"""Central moment discrepancy (CMD): how far apart two sets of hidden vectors lie, as a number that can be trained on.

Zellinger et al. (ICLR 2017); CDMPP (EuroSys 2024) adds it to the loss so that programs of a measured and of a new
device look alike to the layers behind. For samples x, y in R^d whose values stay within an interval of length `span`

    CMD(x, y) = |E x - E y| / span + sum over k = 2..moments of |C_k(x) - C_k(y)| / span**k,

with C_k the central moment of order k of every coordinate and |.| the Euclidean norm. It needs no labels, no pairs and
no kernel width. Equal distributions give 0; the converse holds on a bounded interval as `moments` grows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    import torch

MOMENTS = 5
SPAN = 1.0


def cmd(source: ArrayLike, target: ArrayLike, *, moments: int = MOMENTS, span: float = SPAN) -> float:
    """CMD of two samples of shape [rows, features]; the numbers of rows may differ.

    Raises ForetraceError where they are no such samples of as many features, or one is empty.
    """
    x, y = np.asarray(source, dtype=np.float64), np.asarray(target, dtype=np.float64)
    _refuse(x.shape, y.shape, moments, span)
    mean_x, mean_y = x.mean(axis=0), y.mean(axis=0)
    total = float(np.linalg.norm(mean_x - mean_y)) / span
    x, y = x - mean_x, y - mean_y
    for k in range(2, moments + 1):
        total += float(np.linalg.norm((x**k).mean(axis=0) - (y**k).mean(axis=0))) / span**k
    return total


def cmd_torch(
    source: torch.Tensor, target: torch.Tensor, *, moments: int = MOMENTS, span: float = SPAN
) -> torch.Tensor:
    """`cmd` of two tensors as a scalar tensor with gradients (zero, not NaN, where the samples agree)."""
    import torch

    _refuse(tuple(source.shape), tuple(target.shape), moments, span)
    mean_x, mean_y = source.mean(dim=0), target.mean(dim=0)
    total: torch.Tensor = torch.linalg.vector_norm(mean_x - mean_y) / span
    x, y = source - mean_x, target - mean_y
    power_x, power_y = x, y
    for k in range(2, moments + 1):
        power_x, power_y = power_x * x, power_y * y
        total = total + torch.linalg.vector_norm(power_x.mean(dim=0) - power_y.mean(dim=0)) / span**k
    return total


def _refuse(x: tuple[int, ...], y: tuple[int, ...], moments: int, span: float) -> None:
    if len(x) != 2 or len(y) != 2 or x[1:] != y[1:] or 0 in x or 0 in y:
        raise ForetraceError(
            f"CMD was asked of samples of shapes {list(x)} and {list(y)}; "
            "give two of shape [rows, features] with as many features and at least one row each."
        )
    if moments < 1 or not span > 0:
        raise ForetraceError(f"CMD was asked of {moments} moments and a span of {span}; give at least 1 and above 0.")
