"""A search against plain enumeration on random small spaces; its state, and its chains on other processes."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, nan
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.search.hybrid import Hybrid
from foretrace.search.minimise import Found, SearchState, minimise
from foretrace.search.space import Choices, Infeasible, Problem, Responded, Space
from foretrace.search.strategies import MCMC, BestFirst, Descent, Evolution, Exhaustive, RandomSearch
from foretrace.search.strategy import SearchStrategy

STRATEGIES: list[SearchStrategy] = [
    Exhaustive(), RandomSearch(), MCMC(beta=1.0), Descent(walk=10), BestFirst(alpha=2.0), Evolution(population=4),
]  # fmt: skip


@dataclass(frozen=True)
class Numbers(Problem[tuple[Any, ...]]):
    """A random cost for every point, infinite for some."""

    space: Choices
    seed: int
    holes: float = 0.0
    die_once: Path | None = None  # the first process that prices more than a few points dies and leaves this file

    def costs(self, points: Sequence[tuple[Any, ...]]) -> list[float]:
        if self.die_once is not None and not self.die_once.exists():
            self.die_once.touch()
            os._exit(9)
        return list(map(self.cost, points))

    def cost(self, point: tuple[Any, ...]) -> float:
        """Of one point."""
        random = Random(f"{self.seed} {point}")
        return Infeasible("no room") if random.random() < self.holes else random.randint(-5, 20)


@st.composite
def numbers(draw: st.DrawFn) -> Numbers:
    """Spaces of up to 81 points."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    space = Choices(tuple(tuple(range(size)) for size in sizes))
    return Numbers(space, draw(st.integers(0, 999)), draw(st.sampled_from([0.0, 0.4, 1.0])))


@settings(max_examples=60, deadline=None)
@given(numbers(), st.sampled_from(STRATEGIES), st.integers(1, 100), st.integers(1, 2), st.booleans())
def test_searches_are_between_the_optimum_and_their_start(
    problem: Numbers, strategy: SearchStrategy, calls: int, chains: int, begun: bool
) -> None:
    points = list(problem.space.points())
    optimum, start = min(map(problem.cost, points)), points[len(points) // 2]
    starts = [start] if begun or isinstance(strategy, BestFirst) else []
    calls = max(calls, chains)
    found = minimise(problem, strategy=strategy, starts=starts, calls=calls, chains=chains)
    assert optimum <= found.cost <= (problem.cost(start) if starts else inf)
    assert (inf if found.best is None else problem.cost(found.best)) == found.cost
    assert found.bound <= optimum
    assert found.calls <= min(calls, chains * len(points))
    if found.proven:
        assert found.cost == optimum
    if found.calls == chains * len(points) and optimum < inf:
        assert found.proven
    assert sum(found.infeasible.values()) + sum(problem.cost(each) < inf for each in points) * chains <= chains * len(
        points
    )


@settings(max_examples=25, deadline=None)
@given(numbers())
def test_trying_all_points_proves_the_best(problem: Numbers) -> None:
    found = minimise(problem, strategy=Exhaustive())
    assert found.cost == min(map(problem.cost, problem.space.points()))
    assert found.proven == (found.cost < inf)
    assert found.calls == problem.space.size


def test_spaces_say_what_they_are() -> None:
    space = Choices(((1, 2, 4), ("a",), (False, True)))
    points = list(space.points())
    assert len(set(points)) == space.size == 6
    random = Random(1)
    for point in points:
        assert space.decode(space.encode(point)) == point
        near = list(space.neighbours(point, random))
        assert len(set(near)) == 3 and all(sum(a != b for a, b in zip(point, each, strict=True)) == 1 for each in near)
        assert {space.neighbour(point, random) for _ in range(60)} == set(near)
    assert space.decode((9.0, 0.3, -1.0)) == (4, "a", False)
    assert list(space.neighbours((4, "a", True), random))[-1] == (1, "a", True)  # nearer values come first
    with pytest.raises(NotImplementedError, match="has no coordinates"):
        Space[Any]().encode(1)


PROBLEM = Numbers(Choices((tuple(range(6)),) * 5), 7, 0.2)


def test_a_state_is_json_and_belongs_to_its_search() -> None:
    strategy = MCMC(beta=0.3)
    whole = minimise(PROBLEM, strategy=strategy, calls=300, seed=4)
    kept = json.dumps(minimise(PROBLEM, strategy=strategy, calls=120, seed=4).state.to_json())
    state = SearchState.of_json(json.loads(kept))
    assert minimise(PROBLEM, strategy=strategy, calls=300, seed=4, state=state) == whole
    shorter = minimise(PROBLEM, strategy=strategy, calls=10, seed=4, state=state)
    assert shorter.calls == 120 and shorter.state == state  # nothing that was paid for is forgotten
    for other in ({"strategy": MCMC(beta=0.4)}, {"seed": 5}, {"chains": 2}):
        with pytest.raises(ForetraceError, match="resume with what it was begun with"):
            minimise(PROBLEM, **({"strategy": strategy, "seed": 4} | other), calls=300, state=state)  # type: ignore[arg-type]
    letters = Numbers(Choices((tuple("abcdef"),) * 5), 7, 0.2)
    with pytest.raises(ForetraceError, match="among other points"):
        minimise(letters, strategy=strategy, calls=300, seed=4, state=state)
    for held in ({}, [1], {"strategy": "", "seed": 1, "costs": [[1], []], "best": [1]}):
        with pytest.raises(ValueError, match=r"is no state of a search|differ in number"):
            SearchState.of_json(held)


def test_who_listens_hears_of_every_step_and_may_keep_it() -> None:
    told: list[tuple[int, SearchState]] = []

    def tell(so_far: Callable[[], Found[Any]]) -> None:
        found = so_far()
        told.append((found.steps, found.state))

    whole = minimise(PROBLEM, strategy=Evolution(population=8), calls=200, tell=tell)
    assert [steps for steps, _ in told] == list(range(1, len(told) + 1))
    for _, state in told[::5]:
        assert minimise(PROBLEM, strategy=Evolution(population=8), calls=200, state=state) == whole
    limited = minimise(PROBLEM, strategy=Evolution(population=8), steps=3)
    assert (limited.steps, limited.ended) == (3, "steps")


def test_a_cost_near_enough_to_the_bound_ends_a_search() -> None:
    class Bounded(Numbers):
        bound = -5.5

    found = minimise(Bounded(PROBLEM.space, 7), strategy=RandomSearch(), gap=0.1)
    assert found.proven and found.cost == -5 and found.ended == "proven" and found.bound == -5.5
    with pytest.raises(ValueError, match="below the bound"):
        Bounded.bound = -3
        minimise(Bounded(PROBLEM.space, 7), strategy=RandomSearch(), calls=2000)


@pytest.mark.parametrize("given", [{"calls": 0}, {"steps": -1}, {"chains": 0}])
def test_budgets_that_are_none(given: dict[str, int]) -> None:
    with pytest.raises(ForetraceError, match="allows no search; give 1 or more"):
        minimise(PROBLEM, strategy=RandomSearch(), **given)  # type: ignore[arg-type]


def test_a_cost_that_is_no_number_is_our_mistake() -> None:
    class Wrong(Numbers):
        def cost(self, point: tuple[Any, ...]) -> float:
            return nan

    with pytest.raises(ValueError, match="is not a number"):
        minimise(Wrong(PROBLEM.space, 1), strategy=RandomSearch())


def test_chains_are_the_same_on_other_processes(tmp_path: Path) -> None:
    given: dict[str, Any] = {"strategy": MCMC(beta=0.3), "calls": 403, "chains": 3, "seed": 2}
    told: list[int] = []
    here = minimise(PROBLEM, **given)
    there = minimise(PROBLEM, **given, on="here", tell=lambda so_far: told.append(so_far().calls))
    assert here == there and here.calls == 403
    assert told == sorted(told) and told[-1] == 403
    part = minimise(PROBLEM, **(given | {"calls": 100})).state
    assert minimise(PROBLEM, **given, on="here", state=part) == here
    dying = Numbers(PROBLEM.space, 7, 0.2, die_once=tmp_path / "died")
    assert minimise(dying, **given, on="here") == here
    assert (tmp_path / "died").exists()


class Answering(Problem[Any]):
    """Points on a line that answer with their square; the target is that of 0.5."""

    space = Choices((tuple(range(101)),))

    def __init__(self, target: Sequence[float] = (0.25,)) -> None:
        self.target_response = tuple(target)

    def lesson(self, rng: Random) -> Any:
        return (rng.randint(0, 100),)

    def costs(self, points: Sequence[Any]) -> list[float]:
        return [Responded(abs((at / 100) ** 2 - self.target_response[0]), ((at / 100) ** 2,)) for (at,) in points]


def test_a_start_is_learned_from_counted_lessons() -> None:
    hybrid = Hybrid(refiner=RandomSearch(), lessons=12, rounds=800, width=16)
    found = minimise(Answering(), strategy=hybrid, calls=40, seed=3)
    assert found.calls == 40 and found.learned is not None and found.learned.lessons <= 12
    assert found.learned.cost <= 0.03, "the inverse of a square is known where it was seen"
    assert found.cost <= min(found.learned.cost, found.learned.nearest)
    alone = minimise(Answering(), strategy=replace(hybrid, answers=0, blind=0.0), calls=20, seed=3)
    assert alone.learned is not None and alone.learned.cost == alone.learned.nearest >= found.learned.cost


def test_responses_are_resumed_from_json() -> None:
    hybrid = Hybrid(refiner=RandomSearch(), lessons=10, rounds=20, width=8)
    whole = minimise(Answering(), strategy=hybrid, calls=30)
    part = minimise(Answering(), strategy=hybrid, calls=17)
    state = SearchState.of_json(json.loads(json.dumps(part.state.to_json())))
    assert minimise(Answering(), strategy=hybrid, calls=30, state=state) == whole
    far = Responded(inf, (1.0,))
    assert pickle.loads(pickle.dumps(far)).response == (1.0,) and float(far) == inf


def test_a_target_of_another_length_is_refused() -> None:
    with pytest.raises(ForetraceError, match="must have 1 numbers, as what is simulated has, got 2"):
        minimise(
            Answering((0.25, 0.5)), strategy=Hybrid(refiner=RandomSearch(), lessons=5, rounds=5, width=4), calls=20
        )


class Line(Space[tuple[int, ...]]):
    """Whole numbers whose neighbours are near; random ones are far."""

    def random(self, rng: Random) -> tuple[int, ...]:
        return (rng.randint(10**8, 10**9),)

    def neighbour(self, point: tuple[int, ...], rng: Random) -> tuple[int, ...]:
        return (point[0] - rng.randint(1, 1000),)

    def encode(self, point: tuple[int, ...]) -> tuple[float, ...]:
        return (point[0] / 10**9,)

    def decode(self, code: Sequence[float]) -> tuple[int, ...]:
        return (round(code[0] * 10**9),)


def test_half_of_the_calls_are_of_random_starts() -> None:
    """The one side walks near the start that is given, the other far from there."""
    priced: list[int] = []

    class Long(Problem[Any]):
        space = Line()

        def costs(self, points: Sequence[Any]) -> list[float]:
            priced.extend(at for (at,) in points)
            return [float(at) for (at,) in points]

    hybrid = Hybrid(refiner=MCMC(beta=1e9), lessons=1, answers=0, rounds=1)
    minimise(Long(), strategy=hybrid, starts=[(10**7,)], calls=301)
    near = sum(at <= 10**7 for at in priced[2:])
    assert 120 <= near <= 180
