"""What a few products measured on a new GPU say of all others there: one Gaussian process on log(measured / expected).

A GPU that nobody measured is expected to take the median of what several laws of `gemm16_law` say with its data sheet
put in: the one that all measured GPUs share, and the one of each family. A measured product moves the others as far as
they are alike, which the covariance says (`Belief`). It is a sum of

- what moving the law's parameters would do, each by about as much as GPUs were found to differ in it;
- smooth functions of sizes, expected time and waves (squared exponentials of one, two or three of them);
- the deviations of the families' laws from their median: a new GPU may be like one of them (an embedding of it);
- how many of the cuts that trees made of other GPUs' residuals two products share (which kernels are picked alike).

Amplitudes, lengths and noise maximise the marginal likelihood on GPUs that the laws had not seen
(`benchmarks/train_gemm16.py`). Which products to measure needs no time of any: those that lower the posterior variance
of a pool most, one after the other (Krause, Singh and Guestrin, JMLR 2008, greedy for the integrated variance).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.cost.devices.learned import gemm16_law as law
from foretrace.cost.devices.learned.gemm16_law import Chip, Floats, Singles

Theta = Mapping[str, float]
Bytes = NDArray[np.uint8]

#: Coordinates that a smooth function has: log2 of m, n, k, of the expected microseconds, and of waves of big tiles.
GROUPS = ((0,), (1,), (2,), (3,), (4,), (0, 1), (0, 2), (1, 2), (0, 1, 2))
LAW, CONSTANT, NOISE, LIKE = 0, 1, 2, 3  # places in `Belief.hyper`
SWING = slice(4, 4 + len(GROUPS))  # amplitude of each group
REACH = slice(SWING.stop, SWING.stop + 11)  # lengths: 5 coordinates alone, 3 in pairs, 3 of all three sizes
_REACH_OF = {1: REACH.start, 2: REACH.start + 5, 3: REACH.start + 8}

FULL = 40  # measured products from which on they count in full; before, in proportion
TAILS = 4.0  # degrees of freedom of Student's t: some products run kernels that nothing explains
_SLOPE = 0.02  # of a parameter, to see past single kernels' steps
_STEEPEST = 3.0
_LIKENESS = 0.7  # beyond this a law's deviation says that it is out of its depth, not what the GPU is like
_FURTHEST = 1.5  # no product is moved by more, in logarithms
_ROUNDS, _WEIGHINGS = 3, 10
_BLOCK = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """Where products stand for the covariance (n rows each)."""

    at: Floats  # [n, 5] coordinates
    like: Floats  # [n, laws of families]: their deviation from the expected time
    leaf: Bytes  # [n, trees]

    def take(self, rows: NDArray[Any]) -> Places:
        """Return those of these rows."""
        return Places(at=self.at[rows], like=self.like[rows], leaf=self.leaf[rows])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Belief:
    """How products on one unseen GPU hang together; learned from GPUs that were left out."""

    names: tuple[str, ...]  # parameters of the law that may move
    spread: Floats  # by about so much
    hyper: Floats  # logarithms, see LAW, CONSTANT, NOISE, LIKE, SWING, REACH
    leaf: float  # amplitude of what trees cut alike
    edges: Singles  # [features, cuts of each] of `gemm16.features`
    cuts: Bytes  # [trees, depth, 2]: feature and edge; a tree makes the same cut in all nodes of a level

    def leaves(self, features: Singles) -> Bytes:
        """Return [n, trees] from features [inputs, n]: the leaf of each tree that a product falls into."""
        bins = {f: np.searchsorted(self.edges[f], features[f]).astype(np.uint8) for f in np.unique(self.cuts[:, :, 0])}
        found = np.zeros((len(self.cuts), features.shape[1]), np.uint8)
        for tree, levels in enumerate(self.cuts):
            for f, edge in levels.tolist():
                found[tree] = 2 * found[tree] + (bins[f] > edge)
        return np.ascontiguousarray(found.T)

    def covariance(self, one: Places, other: Places) -> Floats:
        """Return [rows of one, rows of other], but for what the law's parameters do."""
        found: Floats = smooth(self.hyper, one.at, one.like, other.at, other.like)
        if len(self.cuts):
            same = np.zeros(found.shape)
            for tree in range(one.leaf.shape[1]):
                same += one.leaf[:, tree, None] == other.leaf[None, :, tree]
            found += self.leaf**2 / one.leaf.shape[1] * same
        return found

    def of_law(self, one: Floats, other: Floats) -> Floats:
        """Return the same of slopes [n, parameters] and [m, parameters]."""
        return np.asarray(np.exp(2 * self.hyper[LAW]) * (one * self.spread**2) @ other.T)


def smooth(hyper: Any, at: Any, like: Any, at_other: Any, like_other: Any, exp: Callable[[Any], Any] = np.exp) -> Any:
    """Return the covariance of smooth functions, a constant and the likeness to measured GPUs; numpy, or torch with its
    `exp`.
    """
    found = exp(2 * hyper[CONSTANT]) + exp(2 * hyper[LIKE]) * (like @ like_other.T)
    apart = [(at[:, i][:, None] - at_other[:, i][None, :]) ** 2 for i in range(5)]
    for i, group in enumerate(GROUPS):
        far = sum(apart[c] * exp(-2 * hyper[_REACH_OF[len(group)] + c]) for c in group)
        found = found + exp(2 * hyper[SWING.start + i]) * exp(-0.5 * far)
    return found


def coordinates(chip: Chip, m: Floats, n: Floats, k: Floats, b: Floats | None, expected: Floats) -> Floats:
    """Return [n, 5], see GROUPS, from logarithms of expected seconds."""
    waves = np.ceil(m / 128) * np.ceil(n / 128) / chip.sms * (1.0 if b is None else b)
    return np.stack(
        [np.log2(m), np.log2(n), np.log2(k), (expected + np.log(1e6)) / np.log(2), np.clip(np.log2(waves), -7, 12)],
        axis=1,
    )


def expected(
    laws: Sequence[Theta], chip: Chip, m: Floats, n: Floats, k: Floats, b: Floats | None = None
) -> tuple[Floats, Floats]:
    """Return logarithms of seconds: the median of all laws (n), and what each law says beside it [n, laws]."""
    each = np.stack([np.log(law.seconds(theta, chip, m, n, k, b)) for theta in laws], axis=1)
    middle = np.median(each, axis=1)
    return middle, each - middle[:, None]


def slopes(theta: Theta, names: Sequence[str], chip: Chip, m: Floats, n: Floats, k: Floats) -> Floats:
    """Return [n, names]: change of log seconds per unit of each parameter."""
    here = np.log(law.seconds(theta, chip, m, n, k))
    moved = [np.log(law.seconds({**theta, name: theta[name] + _SLOPE}, chip, m, n, k)) - here for name in names]
    return np.clip(np.stack(moved, axis=1) / _SLOPE, -_STEEPEST, _STEEPEST)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LawShift:
    """What measured products changed: the law as moved, and the weights of the measured places."""

    count: int
    law: Theta
    places: Places
    weights: Floats
    table: Singles  # [trees, leaves]: what the covariance by trees adds in each leaf

    def of(self, belief: Belief, places: Places, by_law: Floats) -> Floats:
        """Return the logarithm of the factor on the expected time; `by_law` is that of the moved over the shared law (n
        rows).
        """
        total = by_law.copy()
        hyper, weights = belief.hyper.astype(np.float32), self.weights.astype(np.float32)
        at, like = self.places.at.astype(np.float32), self.places.like.astype(np.float32)
        for start in range(0, len(total), _BLOCK):
            rows = slice(start, start + _BLOCK)
            near = smooth(hyper, places.at[rows].astype(np.float32), places.like[rows].astype(np.float32), at, like)
            total[rows] += near @ weights
            for tree, values in enumerate(self.table):
                total[rows] += values[places.leaf[rows, tree]]
        return np.asarray(min(1.0, self.count / FULL) * np.clip(total, -_FURTHEST, _FURTHEST))


def places_of(
    belief: Belief, chip: Chip, m: Floats, n: Floats, k: Floats, b: Floats | None, middle: Floats, beside: Floats,
    features: Singles,
) -> Places:  # fmt: skip
    """Return places of products; `middle` and `beside` are what `expected` says, the shared law first."""
    return Places(
        at=coordinates(chip, m, n, k, b, middle),
        like=np.clip(beside[:, 1:], -_LIKENESS, _LIKENESS),
        leaf=belief.leaves(features),
    )


def learn(
    belief: Belief, shared: Theta, chip: Chip, m: Floats, n: Floats, k: Floats, places: Places, residual: Floats
) -> LawShift:
    """Learn from measured products: `residual` is log(measured / expected seconds).

    The law's parameters are linearised again where they have moved to; products whose residual nothing explains weigh
    less, as Student's t has it.
    """
    theta, moved = dict(shared), np.zeros(len(belief.names))
    noise = np.exp(2 * belief.hyper[NOISE])
    before = np.log(law.seconds(shared, chip, m, n, k))
    alike = belief.covariance(places, places)
    certainty, weights = np.ones(len(residual)), np.zeros(len(residual))
    for _ in range(_ROUNDS):
        steep = slopes(theta, belief.names, chip, m, n, k)
        target = residual - (np.log(law.seconds(theta, chip, m, n, k)) - before) + steep @ moved
        whole = alike + belief.of_law(steep, steep)
        for _ in range(_WEIGHINGS):
            inverse = np.linalg.inv(whole + np.diag(noise / certainty))
            weights = inverse @ target
            off = (target - whole @ weights) ** 2 + np.diag(whole) - np.einsum("ij,jk,ki->i", whole, inverse, whole)
            certainty = (TAILS + 1) / (TAILS + off / noise)
        moved = np.exp(2 * belief.hyper[LAW]) * belief.spread**2 * (steep.T @ weights)
        theta = {**shared, **{name: shared[name] + float(by) for name, by in zip(belief.names, moved, strict=True)}}
    trees = len(belief.cuts)
    table = np.zeros((trees, 2 ** (belief.cuts.shape[1] if trees else 0)))
    for tree in range(trees):
        np.add.at(table[tree], places.leaf[:, tree], weights * belief.leaf**2 / trees)
    return LawShift(count=len(residual), law=theta, places=places, weights=weights, table=table.astype(np.float32))


def choose(belief: Belief, places: Places, steep: Floats, count: int) -> NDArray[np.int64]:
    """Return rows to measure, in order: each lowers the posterior variance of all places most, given those
    before it.
    """
    left = belief.covariance(places, places) + belief.of_law(steep, steep)
    noise = float(np.exp(2 * belief.hyper[NOISE]))
    free = np.ones(len(left), bool)
    chosen: list[int] = []
    for _ in range(min(count, len(left))):
        gain = np.where(free, np.einsum("ij,ij->j", left, left) / (np.diag(left) + noise), -np.inf)
        best = int(np.argmax(gain))
        free[best] = False
        chosen.append(best)
        left = left - np.outer(left[:, best], left[best]) / (left[best, best] + noise)
    return np.array(chosen, np.int64)
