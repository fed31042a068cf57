"""Every strategy keeps what a search promises, and finds what it is there for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest

from foretrace.deadline import Deadline, never
from foretrace.search.constrained import ConstrainedBayes
from foretrace.search.hybrid import Hybrid
from foretrace.search.minimise import minimise
from foretrace.search.reinforcement import DQN, REINFORCE
from foretrace.search.space import Choices, Problem
from foretrace.search.strategies import CMAES, MCMC, BestFirst, Descent, Evolution, Exhaustive, RandomSearch
from foretrace.search.strategy import Exact, SearchContext, SearchStrategy
from foretrace.testing.search import SearchConformance, Tabled


class TestExhaustive(SearchConformance):
    def strategy(self) -> SearchStrategy:
        return Exhaustive()

    def test_proves(self) -> None:
        for problem in self.problems().values():
            found = self._run(problem)
            assert found.proven and found.cost == found.bound == problem.optimum()


class TestConstrainedBayes(SearchConformance):
    calls = 17

    def strategy(self) -> SearchStrategy:
        return ConstrainedBayes(begin=4, candidates=20, near=4, most=12)


class TestRandomSearch(SearchConformance):
    def strategy(self) -> SearchStrategy:
        return RandomSearch()


class TestMCMC(SearchConformance):
    def strategy(self) -> SearchStrategy:
        return MCMC(beta=0.5)


class TestDescent(SearchConformance):
    def strategy(self) -> SearchStrategy:
        return Descent(walk=20)


class TestBestFirst(SearchConformance):
    def strategy(self) -> SearchStrategy:
        return BestFirst(alpha=1.5)


class TestEvolution(SearchConformance):
    def strategy(self) -> SearchStrategy:
        return Evolution(population=8)


class TestCMAES(SearchConformance):
    def strategy(self) -> SearchStrategy:
        pytest.importorskip("cma")
        return CMAES()


class TestDQN(SearchConformance):
    def strategy(self) -> SearchStrategy:
        return DQN(length=8, batch=8, width=8)


class TestREINFORCE(SearchConformance):
    def strategy(self) -> SearchStrategy:
        return REINFORCE(batch=6)


class TestHybrid(SearchConformance):
    def strategy(self) -> SearchStrategy:
        return Hybrid(refiner=MCMC(beta=0.5), lessons=10, rounds=20, width=8)


class TestHybridOfDescents(SearchConformance):
    """Refiners that end."""

    def strategy(self) -> SearchStrategy:
        return Hybrid(refiner=Descent(walk=20, patience=1), lessons=5, rounds=20, width=8)


@dataclass(frozen=True)
class Halves:
    """A solver that says what it knows bit by bit: better points, and a bound that rises to the least cost."""

    def solve(self, problem: Tabled, hints: Sequence[Any], until: Deadline) -> Iterator[tuple[Sequence[Any], float]]:
        points = sorted(problem.space.points(), key=problem.cost)
        least = problem.optimum()
        yield points[20:21], least - 2
        yield (), least - 1
        yield points[:1], least


class TestExact(SearchConformance):
    def strategy(self) -> SearchStrategy:
        return Exact(Halves())

    def test_ends_with_what_the_solver_proved(self) -> None:
        for problem in self.problems().values():
            found = self._run(problem)
            assert found.proven and found.ended == "proven" and found.cost == found.bound == problem.optimum()
        part = self._run(self.problems()["valley"], calls=3)
        assert not part.proven and part.bound < part.cost


@dataclass
class Grid(Problem[tuple[Any, ...]]):
    """A smooth bowl on a fine grid."""

    space: Choices
    target: tuple[int, ...]

    def costs(self, points: Sequence[tuple[Any, ...]]) -> list[float]:
        return [
            1 + sum((1 + i) * (a - b) ** 2 for i, (a, b) in enumerate(zip(p, self.target, strict=True))) for p in points
        ]


GRID = Grid(Choices((tuple(range(101)),) * 3), (71, 22, 40))


@pytest.mark.parametrize(
    ("strategy", "calls"),
    [
        (MCMC(beta=0.01), 6000),
        (Descent(), 3000),
        (Evolution(), 3000),
        (ConstrainedBayes(candidates=128, near=16), 60),
        (CMAES(), 600),
        (DQN(), 600),
        (REINFORCE(), 1000),
        (Hybrid(refiner=DQN(), lessons=100, rounds=300), 600),
    ],
    ids=lambda each: type(each).__name__,
)
def test_strategies_that_learn_beat_random_points(strategy: SearchStrategy, calls: int) -> None:
    if isinstance(strategy, CMAES):
        pytest.importorskip("cma")
    for seed in (1, 2):
        found = minimise(GRID, strategy=strategy, calls=calls, seed=seed)
        blind = minimise(GRID, strategy=RandomSearch(), calls=calls, seed=seed)
        assert found.cost < blind.cost


def test_a_chain_is_at_points_as_often_as_boltzmann_has_it() -> None:
    """In the long run in proportion to exp(−beta · cost); so each is proposed as often as the chain is elsewhere."""
    costs, visits = (0.0, 0.5, 1.0, 2.0), np.zeros(4)

    class Four(Problem[Any]):
        space = Choices((tuple(range(4)),))

        def costs(self, points: Sequence[Any]) -> Sequence[float]:
            return [costs[point[0]] for point in points]

    problem = Four()
    context: SearchContext[Any] = SearchContext(problem=problem, starts=((0,),), rng=Random(1), until=never())
    steps = MCMC(beta=1.5).steps(context)
    asked = next(steps)
    for _ in range(40_000):
        asked = steps.send(problem.costs(asked))
        for point in asked:
            visits[point[0]] += 1
    boltzmann = np.exp(-1.5 * np.array(costs))
    assert np.abs(visits / visits.sum() - (1 - boltzmann / boltzmann.sum()) / 3).max() < 0.01
