"""Strategies that learn where good points are from their coordinates: CMA-ES, and Bayesian optimisation."""

from __future__ import annotations

import warnings
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import erf, inf, nan, prod, sqrt
from random import Random
from typing import Any

import numpy as np

from foretrace.arrays import Float64
from foretrace.errors import MissingExtraError
from foretrace.search.space import Point, Space
from foretrace.search.strategy import SearchContext, Steps

_LENGTHS = np.geomspace(0.05, 3.0, 12)  # scales of coordinates that are tried
_NOISE = 1e-6  # of the variance, so that the matrix can be inverted
_cdf = np.frompyfunc(lambda x: 0.5 * (1 + erf(x / sqrt(2))), 1, 1)


@dataclass(frozen=True, kw_only=True)
class CMAES:
    """Evolution with a covariance matrix that is adapted (Hansen, 2016), by the package `cma`.

    Restarts at a random point with twice the population where it has converged (Auger and Hansen, 2005).
    """

    sigma: float = 0.3  # standard deviation at the begin, of coordinates from 0 to 1
    least: float = 0.01  # and at any time: coordinates are rounded to points

    def steps(self, context: SearchContext[Point]) -> Steps[Point]:
        """Generation by generation, from the best of the starts."""
        space, rng = context.space, context.rng
        at, _ = yield from context.first()
        options: dict[str, Any] = {
            "bounds": [0, 1], "minstd": self.least, "seed": nan, "verbose": -9,
            "randn": lambda *shape: np.reshape([rng.gauss(0, 1) for _ in range(prod(shape))], shape),
        }  # fmt: skip
        while True:
            evolution = _cma().CMAEvolutionStrategy(list(space.encode(at)), self.sigma, options)
            while not evolution.stop():
                asked = evolution.ask()
                costs = yield [space.decode(each) for each in asked]
                evolution.tell(asked, _finite(costs).tolist())
                yield ()
            at, options["popsize"] = space.random(rng), min(2 * evolution.popsize, 1024)


def _cma() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of plots that it could not draw
        try:
            return import_module("cma")
        except ImportError:
            raise MissingExtraError("CMA-ES needs cma; install it with pip install 'foretrace[search]'.") from None


@dataclass(frozen=True, kw_only=True)
class Bayes:
    """Expected improvement under a Gaussian process on the coordinates (Jones et al., 1998), for costs that are slow.

    The kernel is Matérn's with ν = 5/2; its one length has the largest marginal likelihood of twelve. What cannot be
    counts as the worst point that can.
    """

    begin: int = 8  # random points first, the starts among them
    candidates: int = 512  # random points whose improvement is reckoned; those of a space this small are all taken
    near: int = 64  # and neighbours of the best one
    most: int = 300  # points that the process knows: the best and the last ones

    def steps(self, context: SearchContext[Point]) -> Steps[Point]:
        """Point by point."""
        space, rng = context.space, context.rng
        first = [*context.starts, *(space.random(rng) for _ in range(self.begin - len(context.starts)))]
        met: dict[Hashable, tuple[Point, float]] = {}
        asked: Sequence[Point] = first
        while asked:
            costs = yield asked
            met |= {space.key(at): (at, cost) for at, cost in zip(asked, costs, strict=True)}
            yield ()
            asked = self._next(space, met, rng)

    def _next(self, space: Space[Point], met: dict[Hashable, tuple[Point, float]], rng: Random) -> Sequence[Point]:
        best = min(met.values(), key=lambda each: each[1])[0]
        new = candidates(space, met, best, rng, self.candidates, self.near)
        if not new:
            return [best] if space.size > len(met) else ()
        known = list(met.values())
        if len(known) > self.most:
            half = self.most // 2
            known = sorted(known[:-half], key=lambda each: each[1])[:half] + known[-half:]
        x = np.array([space.encode(at) for at, _ in known])
        y = _finite([cost for _, cost in known])
        gain = expected_improvement(x, y, np.array([space.encode(at) for at in new]))
        return [new[int(np.argmax(gain))]]


def candidates(
    space: Space[Point], met: Container[Hashable], best: Point, rng: Random, many: int, near: int
) -> list[Point]:
    """Points not met yet: all of a space of up to `many`, else so many random ones and `near` neighbours of `best`."""
    if space.size <= many:
        drawn = list(space.points())
    else:
        drawn = [space.random(rng) for _ in range(many)]
        drawn += [space.neighbour(best, rng) for _ in range(near)]
    return [*{key: at for at in drawn if (key := space.key(at)) not in met}.values()]


def expected_improvement(x: Float64, y: Float64, at: Float64) -> Float64:
    """By how much points `at` (m x d) are expected to be below the least of `y` (n), costs known at `x` (n x d)."""
    scale = y.std() or 1.0
    z = (y - y.mean()) / scale
    apart, across = _distances(x, x), _distances(at, x)
    fits = [(_fit(apart / length, z), length) for length in _LENGTHS]
    (_, factor, weights), length = max(fits, key=lambda each: each[0][0])
    kernel = matern(across / length)
    mean = kernel @ weights
    spread = np.sqrt(np.maximum(1 - (np.linalg.solve(factor, kernel.T) ** 2).sum(axis=0), 1e-12))
    below = (z.min() - mean) / spread
    density = np.exp(-0.5 * below**2) / sqrt(2 * np.pi)
    return np.asarray(scale * spread * (below * _cdf(below).astype(np.float64) + density))


def _fit(apart: Float64, z: Float64) -> tuple[float, Float64, Float64]:
    """(log marginal likelihood, Cholesky factor, weights) of a process of variance 1."""
    factor: Float64 = np.asarray(np.linalg.cholesky(matern(apart) + _NOISE * np.eye(len(z))), dtype=np.float64)
    weights: Float64 = np.asarray(np.linalg.solve(factor.T, np.linalg.solve(factor, z)), dtype=np.float64)
    return float(-0.5 * z @ weights - np.log(np.diag(factor)).sum()), factor, weights


def matern(apart: Float64) -> Float64:
    """Matérn's kernel with ν = 5/2 at distances over the length."""
    far = sqrt(5) * apart
    return np.asarray((1 + far + far**2 / 3) * np.exp(-far))


def _distances(a: Float64, b: Float64) -> Float64:
    return np.asarray(np.sqrt(((a[:, None] - b[None]) ** 2).sum(axis=2)))


def _finite(costs: Sequence[float]) -> Float64:
    """Costs whose infinite ones are a little above the others."""
    y = np.array(costs, dtype=np.float64)
    known = y[y < inf]
    top = known.max() + 0.1 * (np.ptp(known) + abs(known.max())) if len(known) else 0.0
    return np.where(y < inf, y, top)
