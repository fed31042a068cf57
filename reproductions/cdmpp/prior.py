"""A first estimate of a program's latency: so many nanoseconds per instruction, iteration and line, added up.

Extensive counts of the leaves times costs that are fitted without negative ones. The network then learns what the
program takes over this estimate: a ratio spans one order of magnitude where latencies span four, and what grows with
the sizes of a task need not be learned again for sizes never seen.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reproductions.cdmpp.ast import FEATURES, Encoded

Floats = NDArray[np.float64]
TERMS = (
    "arithmetic instructions", "memory instructions", "loop iterations", "executions", "bytes beyond registers",
    "bytes beyond 32 KiB", "bytes beyond 1 MiB", "divisions", "exponentials", "roots", "maxima", "dependent additions",
    "stores", "gathered lanes",
)  # fmt: skip
"""What is counted per leaf."""
_SWEEPS = 400
_COLUMN = {name: i for i, name in enumerate(FEATURES)}
_COUNTED = (
    "instructions", "memory instructions", "loop iterations", "executions", "traffic beyond 2048 B",
    "traffic beyond 32768 B", "traffic beyond 1048576 B", "div operations", "exp operations", "sqrt operations",
    "max operations",
)  # fmt: skip


def terms(leaves: Floats) -> Floats:
    """[leaves x terms] counts from features [leaves x features]."""

    def count(name: str) -> Floats:
        return np.asarray(np.exp2(leaves[:, _COLUMN[name]]) - 1)

    def plain(name: str) -> Floats:
        return leaves[:, _COLUMN[name]]

    executions = count("executions")
    # additions to as many results as stay in registers wait for each other only if the results are few
    dependent = plain("combines") * plain("in registers") * executions / np.exp2(plain("accumulators"))
    return np.stack(
        [*(count(name) for name in _COUNTED), dependent, count("issued of buffer 0"),
         executions * plain("gathered lanes")], axis=1,
    )  # fmt: skip


def fit_costs(encoded: Encoded, seconds: Floats) -> Floats:
    """Seconds per count [terms], none negative, of the least mean squared relative error (coordinate descent)."""
    counts = np.add.reduceat(terms(encoded.leaves), encoded.starts[:-1], axis=0) / seconds[:, None]
    scale = np.maximum(counts.mean(axis=0), 1e-30)
    counts = counts / scale
    gram, goal = counts.T @ counts, counts.sum(axis=0)
    costs = np.zeros(len(goal))
    for _ in range(_SWEEPS):
        for j in range(len(costs)):
            if gram[j, j] > 0:
                costs[j] = max(0.0, costs[j] + (goal[j] - gram[j] @ costs) / gram[j, j])
    return np.asarray(costs / scale)


def estimates(encoded: Encoded, costs: Floats) -> tuple[Floats, Floats]:
    """Seconds of every leaf and of every program."""
    leaves = np.maximum(terms(encoded.leaves) @ costs, 1e-12)
    return leaves, np.add.reduceat(leaves, encoded.starts[:-1])
