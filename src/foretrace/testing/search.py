"""`SearchConformance`: what every strategy of a search must do, as a class of tests to inherit from.

No worse than where it began, the same answer for the same seed, budgets kept, resumed as if never stopped, nothing
infeasible, no bound above the optimum, and no point paid for twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any

from foretrace.deadline import Deadline
from foretrace.search.minimise import Found, SearchState, minimise
from foretrace.search.space import Choices, Infeasible, Problem
from foretrace.search.strategy import SearchStrategy

_CALL_S, _BUDGET_S = 0.03, 2.0


@dataclass
class Tabled(Problem[Any]):
    """Costs by a function; counts what is priced, and moves a clock or stops where it is meant to."""

    space: Choices
    cost: Callable[[Any], float]
    priced: list[Any] = field(default_factory=list)
    now: float = 0.0
    stop_at: float = inf  # calls, after which the user presses Ctrl-C

    def costs(self, points: Sequence[Any]) -> list[float]:
        if len(self.priced) + len(points) > self.stop_at:
            self.stop_at = inf
            raise KeyboardInterrupt
        self.priced += points
        self.now += _CALL_S * len(points)
        return [self.cost(point) for point in points]

    def clock(self) -> float:
        """Return seconds that calls took."""
        return self.now

    def optimum(self) -> float:
        """Return the least cost, by trying all points."""
        return min(map(self.cost, self.space.points()))


class SearchConformance:
    """Tests of one strategy: override `strategy`; `problems` too where it needs a space of its own."""

    calls = 60

    def strategy(self) -> SearchStrategy:
        """Return the strategy."""
        raise NotImplementedError("override strategy() and return yours")

    def problems(self) -> Mapping[str, Tabled]:
        """Return small enough to try all points: a valley, a rugged surface, and one with holes."""
        five, sets = Choices((tuple(range(5)),) * 3), Choices(((False, True),) * 7)
        noise = {point: Random(repr(point)).random() for point in five.points()}

        def holed(point: Any) -> float:
            if sum(point) % 3 == 1:
                return Infeasible("one too many")
            return 0.5 + float(sum((i + 1) * x for i, x in enumerate(point)) % 11)

        return {
            "valley": Tabled(five, lambda point: 1.0 + sum((x - 3.2) ** 2 for x in point)),
            "rugged": Tabled(five, lambda point: -1.0 - noise[point]),
            "holes": Tabled(sets, holed),
        }

    def starts(self, problem: Tabled) -> list[Any]:
        """Return where the searches begin."""
        feasible = (point for point in problem.space.points() if problem.cost(point) < inf)
        return [next(feasible), next(feasible)]

    def test_is_never_worse_than_its_starts(self) -> None:
        for name, problem in self.problems().items():
            starts = self.starts(problem)
            for calls in (1, 2, 10, self.calls):
                found = self._run(problem, calls=calls)
                assert found.cost <= min(map(problem.cost, starts[:calls])), name
                assert found.cost == problem.cost(found.best), name

    def test_gives_the_same_answer_for_the_same_seed(self) -> None:
        for name, problem in self.problems().items():
            for chains in (1, 2):
                first, second = (self._run(problem, calls=self.calls, seed=5, chains=chains) for _ in range(2))
                assert first == second, name

    def test_keeps_to_its_calls(self) -> None:
        for name, problem in self.problems().items():
            for calls in (2, 17, self.calls):
                found = self._run(problem, calls=calls)
                assert found.calls == len(problem.priced) <= calls, name
                assert found.calls == calls or found.ended != "calls", name

    def test_keeps_to_its_seconds(self) -> None:
        for name, problem in self.problems().items():
            found = self._run(problem, seconds=Deadline(_BUDGET_S, problem.clock))
            assert problem.now <= 1.1 * _BUDGET_S, name
            assert problem.now >= 0.9 * _BUDGET_S or found.ended != "seconds", name

    def test_goes_on_as_if_it_had_never_been_stopped(self) -> None:
        for name, problem in self.problems().items():
            for chains in (1, 3):
                whole = self._run(problem, calls=self.calls, chains=chains)
                for stop in (3, 11, 40):
                    problem.stop_at = len(problem.priced) + stop
                    part = self._run(problem, calls=self.calls, chains=chains, clear=False)
                    assert part.ended == "stopped" or part == whole, name
                    state = SearchState.of_json(json.loads(json.dumps(part.state.to_json())))
                    problem.stop_at = inf
                    assert self._run(problem, calls=self.calls, chains=chains, state=state) == whole, name
                    assert len(problem.priced) == whole.calls - part.calls, f"{name}: what was known was priced again"

    def test_returns_nothing_that_cannot_be_and_says_why(self) -> None:
        problem = self.problems()["holes"]
        found = self._run(problem, calls=self.calls)
        assert found.cost < inf
        refused = sum(problem.cost(point) == inf for point in problem.priced)
        assert found.infeasible == ({"one too many": refused} if refused else {})

    def test_proves_only_what_is_so(self) -> None:
        for name, problem in self.problems().items():
            found = self._run(problem, calls=4 * self.calls)
            assert found.bound <= problem.optimum() <= found.cost, name
            assert not found.proven or found.cost == problem.optimum(), name

    def test_pays_for_no_point_twice(self) -> None:
        for name, problem in self.problems().items():
            found = self._run(problem, calls=self.calls)
            assert len(set(problem.priced)) == len(problem.priced) == found.calls, name
            calls, costs = zip(*found.curve, strict=True)
            assert list(costs) == sorted(set(costs), reverse=True) and costs[-1] == found.cost, name
            assert list(calls) == sorted(set(calls)) and calls[-1] <= found.calls, name

    def _run(self, problem: Tabled, *, clear: bool = True, **given: Any) -> Found[Any]:
        if clear:
            problem.priced.clear()
            problem.stop_at = inf
        return minimise(problem, strategy=self.strategy(), starts=self.starts(problem), **given)
