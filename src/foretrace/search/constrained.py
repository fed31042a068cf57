"""`ConstrainedBayes`: Bayesian optimisation of an objective under one limit, both of which have to be measured."""

from __future__ import annotations

from collections.abc import Container, Hashable
from dataclasses import dataclass
from math import inf, log, pi, sqrt
from random import Random

import numpy as np

from foretrace.arrays import Float64
from foretrace.search.space import Constrained, Point, Space
from foretrace.search.strategy import SearchContext, Steps

_DRAWS = 64  # kernels that are averaged, by their likelihood
_NEGLIGIBLE = 1e-3  # of the largest likelihood, below which one is left out
_TRIES = 100  # random points until one is new


@dataclass(frozen=True, kw_only=True)
class ConstrainedBayes:
    """Expected improvement times the probability to keep the limit (Gardner et al., ICML 2014), of `Constrained`.

    Objective and excess have Gaussian processes of their own. The kernel is Matérn's with ν = 5/2, in part a sum over
    coordinates, in part of all together. Its lengths, its parts and the noise are drawn from a prior, and what the
    draws predict is averaged by their likelihood. Until a point keeps the limit, the probability alone counts; where
    costs are plain numbers there is no limit.
    """

    begin: int = 2  # points before the process is asked: the starts, then random ones
    length: float = 0.6  # median of the prior of lengths, of coordinates from 0 to 1
    joint: tuple[float, float] = (0.0, 1.0)  # share of the variance that is of all coordinates together
    noise: tuple[float, float] = (1e-4, 1e-2)  # of the variance
    clip: float = inf  # what is further above the best, or above the limit, counts as so far
    candidates: int = 512  # random points that are compared; those of a space this small are all taken
    near: int = 64  # and neighbours of the best one
    most: int = 100  # points that the processes know: the best and the last ones

    def steps(self, context: SearchContext[Point]) -> Steps[Point]:
        space, rng = context.space, context.rng
        first = {space.key(at): at for at in context.starts}
        for _ in range(_TRIES):
            if len(first) >= min(self.begin, space.size):
                break
            first.setdefault(space.key(at := space.random(rng)), at)
        asked, met = list(first.values()), dict[Hashable, tuple[Point, float]]()
        while asked:
            costs = yield asked
            met |= {space.key(at): (at, cost) for at, cost in zip(asked, costs, strict=True)}
            yield ()
            asked = self._next(space, met, rng)

    def _next(self, space: Space[Point], met: dict[Hashable, tuple[Point, float]], rng: Random) -> list[Point]:
        best, least = min(met.values(), key=lambda each: each[1])
        new = candidates(space, met, best, rng, self.candidates, self.near)
        known = [(at, cost) for at, cost in met.values() if isinstance(cost, Constrained) or cost < inf]
        if not new or not known:
            return new[:1] or ([best] if space.size > len(met) else [])
        if len(known) > self.most:
            half = self.most // 2
            known = sorted(known[:-half], key=lambda each: each[1])[:half] + known[-half:]
        x, at = (np.array([space.encode(each) for each in points]) for points in ([at for at, _ in known], new))
        gain = np.ones(len(new))
        if limited := [cost for _, cost in known if isinstance(cost, Constrained)]:
            excess = np.array([cost.excess for cost in limited])
            where = x[[isinstance(cost, Constrained) for _, cost in known]]
            mean, spread, weight = self._predict(where, np.minimum(excess, max(excess.min(), 0.0) + self.clip), at)
            gain = weight @ normal_cdf(-mean / spread)
        if least < inf:
            objective = np.array([cost.objective if isinstance(cost, Constrained) else cost for _, cost in known])
            mean, spread, weight = self._predict(x, np.minimum(objective, least + 2 * self.clip), at)
            below = (least - mean) / spread
            density = np.exp(-0.5 * below**2) / sqrt(2 * pi)
            gain = gain * (weight @ (spread * (below * normal_cdf(below) + density)))
        return [new[int(np.argmax(gain))]]

    def _predict(self, x: Float64, y: Float64, at: Float64) -> tuple[Float64, Float64, Float64]:
        """Return means and standard deviations of measurements at points (draws x m), and the weights of the draws."""
        rng = np.random.default_rng(0)  # the same draws every time
        lengths = self.length * np.exp(0.8 * rng.standard_normal((_DRAWS, x.shape[1])))
        joint, shares = rng.uniform(*self.joint, _DRAWS), rng.dirichlet(np.ones(x.shape[1]), _DRAWS)
        noise = np.exp(rng.uniform(log(self.noise[0]), log(self.noise[1]), _DRAWS))
        scale = y.std() or 1.0
        z = (y - y.mean()) / scale

        def kernel(a: Float64, b: Float64, which: slice | Float64) -> Float64:
            apart = np.abs(a[:, None] - b[None]) / lengths[which][:, None, None]
            alone = (matern(apart) * shares[which][:, None, None]).sum(axis=-1)
            together = matern(np.asarray(np.sqrt((apart**2).sum(axis=-1))))
            part = joint[which][:, None, None]
            return np.asarray((1 - part) * alone + part * together)

        factor = np.linalg.cholesky(kernel(x, x, slice(None)) + noise[:, None, None] * np.eye(len(z)))
        inverse = np.linalg.inv(factor)
        white = inverse @ z
        fit = -0.5 * (white**2).sum(axis=1) - np.log(np.diagonal(factor, axis1=1, axis2=2)).sum(axis=1)
        weight = np.exp(fit - fit.max())
        kept = weight > _NEGLIGIBLE
        across = kernel(at, x, kept) @ inverse[kept].transpose(0, 2, 1)
        mean = (across * white[kept][:, None]).sum(axis=-1)
        variance = np.maximum(1 + noise[kept][:, None] - (across**2).sum(axis=-1), 1e-9)
        return y.mean() + scale * mean, np.asarray(scale * np.sqrt(variance)), weight[kept] / weight[kept].sum()


def candidates(
    space: Space[Point], met: Container[Hashable], best: Point, rng: Random, many: int, near: int
) -> list[Point]:
    """Return points not met yet: all of a space of up to `many`, else `many` random ones and `near` to the best."""
    if space.size <= many:
        drawn = list(space.points())
    else:
        drawn = [space.random(rng) for _ in range(many)]
        drawn += [space.neighbour(best, rng) for _ in range(near)]
    return [*{key: at for at in drawn if (key := space.key(at)) not in met}.values()]


def matern(apart: Float64) -> Float64:
    """Return Matérn's kernel with ν = 5/2 at distances over the length."""
    far = sqrt(5) * apart
    return np.asarray((1 + far + far**2 / 3) * np.exp(-far))


def normal_cdf(x: Float64) -> Float64:
    """Return the cumulative standard normal distribution to 1e-7 (Abramowitz and Stegun, 1964, formula 7.1.26)."""
    t = 1 / (1 + 0.3275911 * np.abs(x) / sqrt(2))
    terms = np.polyval([1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592, 0.0], t)
    tail = 0.5 * terms * np.exp(-0.5 * x**2)
    return np.where(x > 0, 1 - tail, tail)
