"""Searches under a limit: what strategies see, what is kept, and that the limit is learnt."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from math import erf, inf, log, sqrt

import numpy as np
import pytest

from foretrace.search.constrained import ConstrainedBayes, normal_cdf
from foretrace.search.minimise import SearchState, minimise
from foretrace.search.space import Constrained, Problem, RatioChoices
from foretrace.search.strategies import Exhaustive

SPACE = RatioChoices((tuple(2.0**i for i in range(8)), (100.0, 125.0, 150.0, 200.0, 250.0)))


class Machine(Problem[tuple[float, float]]):
    """Time falls with watts and is least at 16 samples; the limit leaves few settings."""

    space = SPACE

    def __init__(self, limit: float = 1.15) -> None:
        self.limit, self.paid = limit, list[tuple[float, float]]()

    def time(self, point: tuple[float, float]) -> float:
        batch, watts = point
        return 1 + 0.1 * log(batch / 16) ** 2 + 0.4 * log(250 / watts)

    def costs(self, points: Sequence[tuple[float, float]]) -> list[float]:
        self.paid += points
        return [
            Constrained(log(self.time(point) * (60 + 0.5 * point[1])), log(self.time(point) / self.limit))
            for point in points
        ]


def test_cost_is_infinite_only_above_the_limit() -> None:
    kept, broken = Constrained(3.0, -0.1), Constrained(3.0, 0.1)
    assert kept == 3.0 and broken == inf and broken.objective == 3.0
    copy = pickle.loads(pickle.dumps(broken))
    assert (copy, copy.objective, copy.excess, copy.why) == (inf, 3.0, 0.1, "above the limit")


def test_the_optimum_under_the_limit_is_found_in_a_part_of_the_settings() -> None:
    proven = minimise(Machine(), strategy=Exhaustive())
    assert proven.infeasible["above the limit"] > 20
    calls = []
    for seed in range(4):
        found = minimise(Machine(), strategy=ConstrainedBayes(), starts=[(1.0, 250.0)], calls=16, seed=seed)
        assert found.best == proven.best
        calls.append(next(call for call, cost in found.curve if cost == proven.cost))
    assert np.median(calls) <= 12 < len(list(SPACE.points())) / 2


def test_search_goes_on_from_what_it_met_above_the_limit() -> None:
    whole = minimise(Machine(), strategy=ConstrainedBayes(), calls=10, seed=3)
    part = minimise(Machine(), strategy=ConstrainedBayes(), calls=5, seed=3)
    state = SearchState.of_json(json.loads(json.dumps(part.state.to_json())))
    problem = Machine()
    rest = minimise(problem, strategy=ConstrainedBayes(), calls=10, seed=3, state=state)
    assert (rest.best, rest.cost, rest.curve, len(problem.paid)) == (whole.best, whole.cost, whole.curve, 5)


def test_nothing_keeps_a_limit_that_nothing_can() -> None:
    found = minimise(Machine(0.5), strategy=ConstrainedBayes(), calls=6)
    assert found.best is None and found.infeasible == {"above the limit": 6}


def test_levels_are_near_by_their_ratio() -> None:
    assert SPACE.encode((16.0, 100.0)) == pytest.approx((4 / 7, 0.0))
    some = RatioChoices(SPACE.values, only=((1.0, 100.0), (2.0, 250.0)))
    assert some.size == 2 and list(some.points()) == [(1.0, 100.0), (2.0, 250.0)]


def test_normal_distribution_to_seven_digits() -> None:
    x = np.linspace(-8, 8, 400)
    assert normal_cdf(x) == pytest.approx([0.5 * (1 + erf(each / sqrt(2))) for each in x], abs=2e-7)
