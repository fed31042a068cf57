"""Gradient-boosted regression trees on histograms of features, in numpy: a baseline in the manner of Ansor.

Squared error, level by level, shrinkage, random rows per tree; nothing that has to be installed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_BINS = 32
_RIDGE = 1.0  # added to every leaf's count
_LEAST = 4  # rows on either side of a cut


@dataclass(frozen=True, kw_only=True)
class Boosted:
    """Trees of fixed depth: per tree and inner node the feature and the bin that go left, per leaf the step."""

    edges: Floats
    feature: NDArray[np.int64]
    cut: NDArray[np.int64]
    step: Floats
    start: float

    def predict(self, x: Floats) -> Floats:
        """[rows] of [rows x features]."""
        bins = _bins(x, self.edges)
        total = np.full(len(x), self.start)
        rows = np.arange(len(x))
        depth = self.step.shape[1].bit_length() - 1
        for feature, cut, step in zip(self.feature, self.cut, self.step, strict=True):
            node = np.zeros(len(x), np.int64)
            for _ in range(depth):
                node = 2 * node + 1 + (bins[rows, feature[node]] > cut[node])
            total += step[node - (len(step) - 1)]
        return total


def boost(x: Floats, y: Floats, *, trees: int = 300, depth: int = 5, rate: float = 0.08, seed: int = 0) -> Boosted:
    """Fit the trees to y."""
    rng = np.random.default_rng(seed)
    edges = np.quantile(x, np.linspace(0, 1, _BINS + 1)[1:-1], axis=0)
    bins = _bins(x, edges)
    flat = bins + _BINS * np.arange(x.shape[1])  # of every feature its own range of numbers
    start = float(y.mean())
    rest = y - start
    inner, leaves = 2**depth - 1, 2**depth
    features, cuts, steps = (np.zeros((trees, n), kind) for n, kind in ((inner, int), (inner, int), (leaves, float)))
    for tree in range(trees):
        used = rng.random(len(x)) < 0.7
        node = np.zeros(len(x), np.int64)
        for level in range(depth):
            first = 2**level - 1
            for each in range(first, 2 * first + 1):
                rows = np.flatnonzero(used & (node == each))
                features[tree, each], cuts[tree, each] = _cut(flat[rows], rest[rows], x.shape[1])
            node = 2 * node + 1 + (bins[np.arange(len(x)), features[tree, node]] > cuts[tree, node])
        leaf = node - inner
        sums = np.bincount(leaf[used], weights=rest[used], minlength=leaves)
        steps[tree] = rate * sums / (np.bincount(leaf[used], minlength=leaves) + _RIDGE)
        rest = rest - steps[tree][leaf]
    return Boosted(edges=edges, feature=features, cut=cuts, step=steps, start=start)


def _bins(x: Floats, edges: Floats) -> NDArray[np.int64]:
    return np.stack([np.searchsorted(edges[:, i], x[:, i], side="left") for i in range(x.shape[1])], axis=1)


def _cut(flat: NDArray[np.int64], rest: Floats, features: int) -> tuple[int, int]:
    """Feature and last bin of the left side that lower the squared error most; all rows left where nothing does."""
    if len(rest) < 2 * _LEAST:
        return 0, _BINS
    size = features * _BINS
    count = np.bincount(flat.ravel(), minlength=size).reshape(features, _BINS).cumsum(axis=1)[:, :-1]
    sums = np.bincount(flat.ravel(), weights=np.repeat(rest, features), minlength=size).reshape(features, _BINS)
    left = sums.cumsum(axis=1)[:, :-1]
    right, other = rest.sum() - left, len(rest) - count
    gain = left**2 / (count + _RIDGE) + right**2 / (other + _RIDGE)
    gain[(count < _LEAST) | (other < _LEAST)] = -np.inf
    best = int(gain.argmax())
    if not np.isfinite(gain.flat[best]):
        return 0, _BINS
    return best // (_BINS - 1), best % (_BINS - 1)
