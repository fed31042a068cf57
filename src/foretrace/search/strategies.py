"""Strategies on nothing but the space: all points, random ones, Markov chains, descents, best first, evolution."""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf, nan, prod
from random import Random
from typing import Any

import numpy as np

from foretrace.arrays import Float64
from foretrace.errors import needing
from foretrace.search.space import Point
from foretrace.search.strategy import SearchContext, Steps, accepted

_BATCH = 256  # points of one ask, where none depends on another
Way = Generator[Sequence[Point], Sequence[float], tuple[Point, float]]


@dataclass(frozen=True)
class Exhaustive:
    """Every point; proves the best one."""

    def steps(self, context: SearchContext[Point]) -> Steps[Point]:
        best, points = inf, context.space.points()
        if context.starts:
            best = min((yield context.starts))
        while batch := list(islice(points, _BATCH)):
            best = min(best, *(yield batch))
            yield ()
        context.prove(best)


@dataclass(frozen=True)
class RandomSearch:
    """Random points, none depending on those before."""

    def steps(self, context: SearchContext[Point]) -> Steps[Point]:
        if context.starts:
            yield context.starts
        while True:
            yield [context.space.random(context.rng) for _ in range(_BATCH)]
            yield ()


@dataclass(frozen=True, kw_only=True)
class MCMC:
    """A Markov chain of random neighbours; a worse one is accepted with probability exp(−beta · (new − old)).

    FlexFlow (Jia et al., MLSys 2019, section 6.2) has beta = 0.05 per ms, and its program goes back to the best point
    every min(1000, max(1, proposals / 100)). A chain that has met nothing feasible takes every neighbour.
    """

    beta: float  # per unit of cost
    proposals: int = 100  # of a step
    reset: int = 0  # proposals after which the chain goes back to its best point; 0: never

    def steps(self, context: SearchContext[Point]) -> Steps[Point]:
        point, cost = yield from context.first()
        best, best_cost, made = point, cost, 0
        while True:
            for _ in range(self.proposals):
                other = context.space.neighbour(point, context.rng)
                (new,) = yield [other]
                if cost == inf or accepted(new - cost, self.beta, context.rng):
                    point, cost = other, new
                if cost < best_cost:
                    best, best_cost = point, cost
                made += 1
                if self.reset and made % self.reset == 0:
                    point, cost = best, best_cost
            yield ()


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Descents to where no neighbour is better: from the starts, then from the best point, changed at random.

    The first better one of the space's neighbours is taken, and from the last start the best of all moves. After the
    starts, the best point is in turns shaken by a few random changes, or walked from while worse ones are accepted less
    and less (simulated annealing). A step is one descent. Ends after `patience` descents that gained next to nothing.
    """

    starts: int = 5  # descended from: the best ones, and the last
    patience: int = 12
    gain: float = 1e-4  # share of the cost that counts as a gain
    kicks: int = 4  # changes that shake a point, at most
    walk: int = 1000  # changes of a walk
    hot: float = 3e-3  # temperature at its begin and end, as shares of the cost
    cold: float = 1e-5

    def steps(self, context: SearchContext[Point]) -> Steps[Point]:
        space, rng = context.space, context.rng
        best, best_cost = yield from context.first()
        begins = [best]
        if context.starts:
            costs = yield context.starts
            priced = {space.key(at): (at, cost) for at, cost in zip(context.starts, costs, strict=True)}
            ranked = [at for at, _ in sorted(priced.values(), key=lambda each: each[1])[: self.starts]]
            begins = [*{space.key(at): at for at in [*ranked, context.starts[-1]]}.values()]
        idle = 0
        for number in range(1 << 62):
            if number < len(begins):
                at = begins[number]
            elif number % 2:
                at = yield from self._walked(context, best, best_cost)
            else:
                at = best
                for _ in range(rng.randint(1, self.kicks)):
                    at = space.neighbour(at, rng)
            at, cost = yield from (steepest if number == len(begins) - 1 else descended)(context, at)
            idle = 0 if cost < best_cost - self.gain * abs(best_cost) else idle + 1
            if cost < best_cost:
                best, best_cost = at, cost
            if idle >= self.patience:
                return
            yield ()

    def _walked(
        self, context: SearchContext[Point], at: Point, cost: float
    ) -> Generator[Sequence[Point], Sequence[float], Point]:
        best, best_cost, scale = at, cost, abs(cost) or 1.0
        for i in range(self.walk):
            other = context.space.neighbour(at, context.rng)
            (new,) = yield [other]
            beta = 1 / (scale * self.hot * (self.cold / self.hot) ** (i / self.walk))
            if cost == inf or accepted(new - cost, beta, context.rng):
                at, cost = other, new
                if cost < best_cost:
                    best, best_cost = at, cost
        return best


def descended(context: SearchContext[Point], at: Point) -> Way[Point]:
    """Yield the first better neighbour, again and again."""
    (cost,) = yield [at]
    improved = True
    while improved:
        improved = False
        for other in context.space.neighbours(at, context.rng):
            (new,) = yield [other]
            if new < cost:
                at, cost, improved = other, new, True
                break
    return at, cost


def steepest(context: SearchContext[Point], at: Point) -> Way[Point]:
    """Yield the best of all moves, again and again."""
    (cost,) = yield [at]
    while others := list(context.space.moves(at)):
        costs = yield others
        best = min(range(len(others)), key=costs.__getitem__)
        if costs[best] >= cost:
            break
        at, cost = others[best], costs[best]
    return at, cost


@dataclass(frozen=True, kw_only=True)
class BestFirst:
    """MetaFlow's relaxed backtracking (Jia et al., MLSys 2019, section 5.1).

    The cheapest point known so far is taken, all its neighbours are priced, and what is new and costs less than alpha
    times the best is kept to be taken later; a step takes one point. With alpha = 1 only what improves on the best is
    followed (greedy); above 1 the search can pass through points that are worse.
    """

    alpha: float = 1.05

    def steps(self, context: SearchContext[Point]) -> Steps[Point]:
        """Search until nothing is left that is cheap enough to be taken."""
        space = context.space
        at, best = yield from context.first()
        count, heap, seen = 0, [(best, 0, at)], {space.key(at)}
        while True:
            _, _, at = heapq.heappop(heap)
            new: dict[Hashable, Point] = {}
            for other in space.neighbours(at, context.rng):
                new.setdefault(space.key(other), other)
            new = {key: other for key, other in new.items() if key not in seen}
            seen |= new.keys()
            costs = (yield list(new.values())) if new else ()
            for other, cost in zip(new.values(), costs, strict=True):
                if cost < self.alpha * best:
                    count += 1
                    heapq.heappush(heap, (cost, count, other))
                best = min(best, cost)
            if not heap or heap[0][0] > self.alpha * best:
                return
            yield ()


@dataclass(frozen=True, kw_only=True)
class Evolution:
    """The best of parents and children survive; children are made of two parents, or of one, and then changed.

    Parents are the better ones of random pairs. Two are crossed coordinate by coordinate, which needs coordinates.
    """

    population: int = 32
    crossed: float = 0.5  # share of the children that have two parents
    changes: float = 0.3  # probability of each further change

    def steps(self, context: SearchContext[Point]) -> Steps[Point]:
        space, rng = context.space, context.rng
        first = list(context.starts[: self.population])
        first += [space.random(rng) for _ in range(self.population - len(first))]
        living: list[tuple[float, Point]] = list(zip((yield first), first, strict=True))
        while True:
            yield ()
            children = [self._child(context, living, rng) for _ in range(self.population)]
            living += zip((yield children), children, strict=True)
            different = {space.key(at): (cost, at) for cost, at in living}
            living = sorted(different.values(), key=lambda each: each[0])[: self.population]

    def _child(self, context: SearchContext[Point], living: list[tuple[float, Point]], rng: Random) -> Point:
        def parent() -> Point:
            return min(rng.choice(living), rng.choice(living), key=lambda each: each[0])[1]

        child, space = parent(), context.space
        if rng.random() < self.crossed:
            child = space.decode(list(map(rng.choice, zip(space.encode(child), space.encode(parent()), strict=True))))
        child = space.neighbour(child, rng)
        while rng.random() < self.changes:
            child = space.neighbour(child, rng)
        return child


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
        with needing("CMA-ES"):
            import cma
    return cma


def _finite(costs: Sequence[float]) -> Float64:
    """Return costs whose infinite ones are a little above the others."""
    y = np.array(costs, dtype=np.float64)
    known = y[y < inf]
    top = known.max() + 0.1 * (np.ptp(known) + abs(known.max())) if len(known) else 0.0
    return np.where(y < inf, y, top)
