"""How rows are updated: gradients added up in the order of the ranks, then applied once.

Whoever updates a row, a server or one of several trainers, calls these two functions on the same numbers, so that all
get the same bits. An optimizer keeps its state in the row itself, in columns behind the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from foretrace.arrays import Float32, Int64
from foretrace.errors import ForetraceError
from foretrace.names import numbers
from foretrace.training.rows.rows import distinct


def add_up(parts: Sequence[tuple[Int64, Float32]]) -> tuple[Int64, Float32]:
    """Return the sum of gradients per row, from distinct rows (n,) and gradients (n, width) of every rank, in their
    order.

    A rank that did not touch a row adds nothing to it: not even a zero, which would change the sign of another one.
    """
    ids = distinct(np.concatenate([part[0] for part in parts]))
    sums = np.empty((len(ids), parts[0][1].shape[1]), np.float32)
    begun = np.zeros(len(ids), np.bool_)
    for own, gradients in parts:
        at = np.searchsorted(ids, own)
        more = begun[at]
        sums[at[~more]] = gradients[~more]
        sums[at[more]] += gradients[more]
        begun[at] = True
    return ids, sums


_RATES = {"sgd": 0.1, "adagrad": 0.02}
DENSE_RATE = 0.1  # of the dense weights, which SGD trains


@dataclass(frozen=True, kw_only=True)
class RowOptimizer:
    """Updates rows (n, width + state) by gradients (n, width).

    `kind` is sgd, or adagrad: one sum of mean squared gradients per row, as FBGEMM's EXACT_ROWWISE_ADAGRAD.
    """

    kind: str
    rate: float
    epsilon: float = 1e-8

    @property
    def state(self) -> int:
        """Columns behind the weights."""
        return int(self.kind == "adagrad")

    def apply(self, rows: Float32, gradients: Float32) -> Float32:
        """Return the rows afterwards; each depends on its own numbers alone."""
        if not self.state:
            return rows - np.float32(self.rate) * gradients
        found = rows.copy()
        found[:, -1] += np.square(gradients).mean(axis=1)
        steps = np.float32(self.rate) / (np.sqrt(found[:, -1:]) + np.float32(self.epsilon))
        found[:, :-1] -= steps * gradients
        return found


def row_optimizer(text: str) -> RowOptimizer:
    """Parse `sgd` or `adagrad rate=0.05`. Raises ForetraceError."""
    kind, *words = text.split() or [""]
    if kind not in _RATES:
        raise ForetraceError(f"An optimizer of rows must be {' or '.join(_RATES)}, got {text!r}.")
    rate = numbers(words, {"rate": _RATES[kind]}, kind)["rate"]
    if not 0 < rate < inf:
        raise ForetraceError(f"The rate of {kind} must be a number above 0, got {text!r}.")
    return RowOptimizer(kind=kind, rate=rate)
