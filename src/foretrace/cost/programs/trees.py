"""Gradient-boosted regression trees on histograms of features, in numpy.

Friedman (2001) with the least absolute deviation: splits by squared error of the residuals' signs, steps by medians.
Trees grow leaf by leaf, where the gain is largest; a random part of the rows and of the features is used per tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_BINS = 32
_RIDGE = 1.0  # added to every leaf's count
_LEAST = 5  # rows on either side of a cut


@dataclass(frozen=True, kw_only=True)
class Boosted:
    """Trees: per tree and node the feature and bin that go left (to `left`, else to the next), or -1 and the step."""

    edges: Floats
    feature: NDArray[np.int64]
    cut: NDArray[np.int64]
    left: NDArray[np.int64]
    step: Floats
    start: float

    def predict(self, x: Floats) -> Floats:
        """Return [rows] of [rows x features]."""
        bins = _bins(x, self.edges)
        total, rows = np.full(len(x), self.start), np.arange(len(x))
        for feature, cut, left, step in zip(self.feature, self.cut, self.left, self.step, strict=True):
            node = np.zeros(len(x), np.int64)
            for _ in range(len(step) // 2):
                inner = feature[node] >= 0
                after = left[node] + (bins[rows, feature[node]] > cut[node])
                node = np.where(inner, after, node)
            total += step[node]
        return total


def boost(x: Floats, y: Floats, *, trees: int = 1000, leaves: int = 10, rate: float = 0.04, seed: int = 0) -> Boosted:
    """Fit the trees to y [rows] by features x [rows x features].

    The defaults were chosen on halves of the learning tasks of `docs/accuracy/programs.md`: smaller trees do not reach
    what they are shown, larger ones gain nothing more.
    """
    rng = np.random.default_rng(seed)
    edges = np.quantile(x, np.linspace(0, 1, _BINS + 1)[1:-1], axis=0)
    bins = _bins(x, edges)
    start = float(np.median(y))
    rest, nodes = y - start, 2 * leaves - 1
    feature, left = np.full((trees, nodes), -1), np.zeros((trees, nodes), np.int64)
    cut, steps = np.zeros((trees, nodes), np.int64), np.zeros((trees, nodes))
    for tree in range(trees):
        sign, leaf = np.sign(rest), np.zeros(len(x), np.int64)
        used = rng.random(len(x)) < 0.5
        tried = np.flatnonzero(rng.random(x.shape[1]) < 0.7)
        flat = bins[:, tried] + _BINS * np.arange(len(tried))  # of every feature its own range of numbers
        sums = {0: _sums(flat[used], sign[used])}
        best = {0: _cut(sums[0])}
        grown = 1
        while grown + 1 < nodes and (node := max(best, key=lambda each: best[each][0])) is not None:
            gain, column, cut[tree, node] = best.pop(node)
            if not gain > 0:
                break
            feature[tree, node], left[tree, node] = tried[column], grown
            mine = leaf == node
            leaf[mine] = grown + (bins[mine, feature[tree, node]] > cut[tree, node])
            rows = used & (leaf == grown)
            sums[grown] = _sums(flat[rows], sign[rows])
            sums[grown + 1] = sums.pop(node) - sums[grown]  # of signs: exact
            for each in (grown, grown + 1):
                best[each] = _cut(sums[each])
            grown += 2
        for each in np.unique(leaf):
            mine = leaf == each
            count = mine.sum()
            steps[tree, each] = rate * _median(rest[mine]) * count / (count + _RIDGE)
        rest = rest - steps[tree][leaf]
    return Boosted(edges=edges, feature=feature, cut=cut, left=left, step=steps, start=start)


def _bins(x: Floats, edges: Floats) -> NDArray[np.int64]:
    return np.stack([np.searchsorted(edges[:, i], x[:, i], side="left") for i in range(x.shape[1])], axis=1)


def _sums(flat: NDArray[np.int64], signs: Floats) -> Floats:
    """Return [2 x features x bins]: how many rows each bin has, and the sum of their signs."""
    size = flat.shape[1] * _BINS
    count = np.bincount(flat.ravel(), minlength=size).astype(np.float64)
    sums = np.bincount(flat.ravel(), weights=np.repeat(signs, flat.shape[1]), minlength=size)
    return np.stack([count, sums]).reshape(2, -1, _BINS)


def _cut(sums: Floats) -> tuple[float, int, int]:
    """Return how much a cut lowers the squared error at most, the feature and the last bin of its left side."""
    below = sums.cumsum(axis=2)
    if not below.size or (rows := below[0, 0, -1]) < 2 * _LEAST:
        return -np.inf, 0, 0
    (count, left), whole = below[:, :, :-1], below[1, 0, -1]
    right, other = whole - left, rows - count
    gain = left**2 / (count + _RIDGE) + right**2 / (other + _RIDGE) - whole**2 / (rows + _RIDGE)
    gain[(count < _LEAST) | (other < _LEAST)] = -np.inf
    best = int(gain.argmax())
    return float(gain.flat[best]), best // (_BINS - 1), best % (_BINS - 1)


def _median(values: Floats) -> float:
    """Return the median of few values: `np.median` takes ten times as long to begin."""
    ordered, middle = np.sort(values), len(values) // 2
    return float(ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2)
