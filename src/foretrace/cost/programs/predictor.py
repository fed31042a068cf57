"""How long a tensor program takes, before it runs: a formula of ten constants, and trees on what it leaves over.

cycles = (C^p + M^p)^(1/p): C of the machine code by itself (`listing.py`), M of the lines and pages that it misses
(`misses.py`). The constants and the trees are fitted to measured programs; a few seconds of them fit another processor,
because what one predicts best there is the ratio to the formula.

The trees are gradient-boosted on histograms of features: Friedman (2001) with the least absolute deviation, splits by
squared error of the residuals' signs, steps by medians. They grow leaf by leaf, where the gain is largest; a random
part of the rows and of the features is used per tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrace.cost.programs import listing, misses
from foretrace.cost.programs.compile import CompiledProgram
from foretrace.hardware.processor import Caches

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


ROW = (*listing.COUNTS, *listing.CYCLES, *misses.MISSES)
"""What is known of a program without running it, per run."""
BINDS = {
    "issue": ("throughput",), "dependency chain": ("long_chain", "short_chain", "window"), "branches": ("exits",),
    "L1": ("l1_next", "l1_other"), "L2": ("l2_next", "l2_other"), "pages": ("pages",),
}  # fmt: skip
"""What can hold a program back, and the terms that tell."""
_CODE, _MEMORY = listing.CYCLES, misses.MISSES[:-1]  # trees alone make something of `streams`
_TERMS = (*_CODE, *_MEMORY)
# Cycles per unit on a processor of 2022 (long chains weigh more than short ones, which overlap), p - 1, and GHz.
USUAL = (1.0, 0.8, 0.2, 0.5, 15.0, 1.5, 2.0, 4.0, 8.0, 7.0, 1.6, 3.5)
_PULL = 0.03  # towards these, in squared logarithms per program: what few programs do not tell stays
_FOLDS = 5
_LOW, _HIGH = 0.1, 0.9


def row(compiled: CompiledProgram, caches: Caches) -> Floats:
    """Return what is known of a compiled program [len(ROW)]."""
    found = listing.read(compiled.listing, compiled.trips)
    missed = misses.simulate(compiled.program, caches)
    return np.array([*found.counts.values(), *found.cycles.values(), *missed.values()])


@dataclass(frozen=True, kw_only=True)
class Formula:
    """The constants, in the order of `USUAL`."""

    constants: tuple[float, ...]

    def terms(self, rows: Floats) -> Floats:
        """Return seconds [rows x terms] that each term would take alone."""
        at = [ROW.index(name) for name in _TERMS]
        return np.asarray(rows[:, at] * np.array(self.constants[:-2]) / (1e9 * self.constants[-1]))

    def seconds(self, rows: Floats) -> Floats:
        terms, p = self.terms(rows), 1 + self.constants[-2]
        code, memory = terms[:, : len(_CODE)].sum(axis=1), terms[:, len(_CODE) :].sum(axis=1)
        return np.asarray((code**p + memory**p) ** (1 / p))


def fit_formula(rows: Floats, seconds: Floats) -> Formula:
    """Return the least soft absolute errors of log t, by Gauss and Newton on the logarithms of the constants."""
    start = np.log(USUAL)
    at, target = start.copy(), np.log(seconds)

    def off(x: Floats) -> Floats:
        return np.asarray(np.log(Formula(constants=tuple(np.exp(x))).seconds(rows)) - target)

    rest, damping = off(at), 1e-2
    for _ in range(60):
        slope = np.stack([(off(at + step) - rest) / 1e-4 for step in 1e-4 * np.eye(len(at))], axis=1)
        weight = 1 / np.sqrt(1 + (rest / 0.1) ** 2)
        pull = _PULL * np.sqrt(len(rows)) * np.append(np.ones(len(at) - 1), 0)  # the clock is free
        gram = slope.T @ (weight[:, None] * slope) + np.diag(pull)
        goal = slope.T @ (weight * rest) + pull * (at - start)
        after = at - np.linalg.solve(gram + damping * np.diag(np.diag(gram)), goal)
        new = off(after)
        better = _cost(new, after - start, pull) < _cost(rest, at - start, pull)
        damping = max(damping / 3, 1e-6) if better else damping * 4
        if better:
            done = np.abs(after - at).max() < 1e-4
            at, rest = after, new
            if done:
                break
    return Formula(constants=tuple(np.exp(at).tolist()))


def _cost(rest: Floats, moved: Floats, pull: Floats) -> float:
    return float((0.02 * (np.sqrt(1 + (rest / 0.1) ** 2) - 1)).sum() + 0.5 * (pull * moved**2).sum())


@dataclass(frozen=True, kw_only=True)
class ProgramPredictor:
    """Seconds of programs by their rows; `low` and `high`: measured over predicted, 10 and 90 % on tasks unseen."""

    formula: Formula
    trees: Boosted | None
    low: float
    high: float
    about: str = ""

    def predict(self, rows: Floats) -> Floats:
        """Return seconds [rows]."""
        prior = self.formula.seconds(rows)
        return prior if self.trees is None else np.asarray(prior * np.exp(self.trees.predict(relative(rows, prior))))

    def binds(self, rows: Floats) -> list[str]:
        """Return what holds each program back most."""
        terms = dict(zip(_TERMS, self.formula.terms(rows).T, strict=True))
        sums = np.stack([sum((terms[name] for name in names), np.zeros(len(rows))) for names in BINDS.values()])
        return [list(BINDS)[i] for i in sums.argmax(axis=0)]


def relative(rows: Floats, prior: Floats) -> Floats:
    """Return features of the trees: everything per predicted time, and the time."""
    return np.column_stack([rows / (1e9 * prior[:, None]), np.log(prior)])


def fit(rows: Floats, seconds: Floats, tasks: Sequence[int] | NDArray[np.int64], about: str = "") -> ProgramPredictor:
    """Return a predictor of these programs; its range from tasks that were left out of the fit in turn.

    Args:
        rows: [programs x len(ROW)], see `row`.
        seconds: [programs] as measured.
        tasks: [programs] which task each computes.
        about: where and when they were measured.

    """
    held = left_out(rows, seconds, np.asarray(tasks))
    low, high = np.quantile(seconds / held, [_LOW, _HIGH]).tolist()
    formula, trees = _fit(rows, seconds)
    return ProgramPredictor(formula=formula, trees=trees, low=low, high=high, about=about)


def left_out(rows: Floats, seconds: Floats, groups: NDArray[np.int64], folds: int = _FOLDS) -> Floats:
    """Return seconds [programs] as predicted without any program of the same group."""
    names = np.unique(groups)
    fold = np.random.default_rng(0).permutation(len(names)) % folds
    found = np.zeros(len(seconds))
    for each in range(min(folds, len(names))):
        out = np.isin(groups, names[fold == each])
        formula, trees = _fit(rows[~out], seconds[~out])
        one = ProgramPredictor(formula=formula, trees=trees, low=1, high=1)
        found[out] = one.predict(rows[out])
    return found


def _fit(rows: Floats, seconds: Floats) -> tuple[Formula, Boosted | None]:
    formula = fit_formula(rows, seconds)
    prior = formula.seconds(rows)
    if len(rows) < 40:
        return formula, None
    return formula, boost(relative(rows, prior), np.log(seconds / prior))
