"""`CMAES`: evolution that learns from coordinates where good points are."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan, prod
from typing import Any

import numpy as np

from foretrace.arrays import Float64
from foretrace.search.space import Point
from foretrace.search.strategy import SearchContext, Steps
from foretrace.shipped import optional


@dataclass(frozen=True, kw_only=True)
class CMAES:
    """Evolution with a covariance matrix that is adapted (Hansen, 2016), by the package `cma`.

    Restarts at a random point with twice the population where it has converged (Auger and Hansen, 2005).
    """

    sigma: float = 0.3  # standard deviation at the begin, of coordinates from 0 to 1
    least: float = 0.01  # and at any time: coordinates are rounded to points

    def steps(self, context: SearchContext[Point]) -> Steps[Point]:
        """Yield generation by generation, from the best of the starts."""
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
        return optional("cma", "CMA-ES", "'foretrace[search]'")


def _finite(costs: Sequence[float]) -> Float64:
    """Return costs whose infinite ones are a little above the others."""
    y = np.array(costs, dtype=np.float64)
    known = y[y < inf]
    top = known.max() + 0.1 * (np.ptp(known) + abs(known.max())) if len(known) else 0.0
    return np.where(y < inf, y, top)
