"""`SearchStrategy`: which points to price next. A strategy is a generator, written as its algorithm is in a paper.

It yields points and gets their costs; an empty yield, or its end, ends a step (a generation, a round, an expansion),
after which a search may be stopped and told about. It draws from the context's random numbers alone and looks at no
clock, so that the same seed and the same costs lead along the same way: that is how a search is resumed.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from math import exp, inf
from random import Random
from typing import Any, Generic, Protocol

from foretrace.deadline import Deadline
from foretrace.search.space import Point, Problem, Space

Steps = Generator[Sequence[Point], Sequence[float], Any]
_DRAWS = 1000  # random points until one is feasible


@dataclass(frozen=True, kw_only=True)
class LearnedStart:
    """What a strategy that learns began with, beside what needs no learning."""

    lessons: int  # points that it learned from, all of them calls
    cost: float  # of the best learned answer
    nearest: float  # of the lesson that comes nearest


@dataclass
class SearchContext(Generic[Point]):
    """What a strategy is given: the problem, where to begin, random numbers, and where to leave what it knows."""

    problem: Problem[Point]
    starts: tuple[Point, ...]
    rng: Random
    until: Deadline  # for solvers that keep time themselves
    bound: float = field(init=False)
    learned: LearnedStart | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.bound = self.problem.bound

    @property
    def space(self) -> Space[Point]:
        return self.problem.space

    def prove(self, bound: float) -> None:
        """Note that no point costs less than `bound`."""
        self.bound = max(self.bound, bound)

    def first(self) -> Generator[Sequence[Point], Sequence[float], tuple[Point, float]]:
        """Yield the best of the starts with its cost; without any, a random point, feasible if one is met soon."""
        if self.starts:
            costs = yield self.starts
            best = min(range(len(costs)), key=costs.__getitem__)
            return self.starts[best], costs[best]
        for _ in range(_DRAWS):
            point = self.space.random(self.rng)
            (cost,) = yield [point]
            if cost < inf:
                break
        return point, cost


class SearchStrategy(Protocol):
    """Which points to price next; a frozen dataclass of its parameters, so that its text says which one it is."""

    def steps(self, context: SearchContext[Point], /) -> Steps[Point]:
        """Yield points to be priced until nothing is left to try."""
        ...


def accepted(more: float, beta: float, rng: Random) -> bool:
    """Return whether Metropolis' rule accepts what costs `more`: with probability min(1, exp(−beta · more))."""
    return more <= 0 or rng.random() < exp(-beta * more)


class Solver(Protocol):
    """An exact method (dynamic programming, CP-SAT, MILP) behind `Exact`."""

    def solve(
        self, problem: Any, hints: Sequence[Any], until: Deadline
    ) -> Iterator[tuple[Sequence[Any], float]]:  # fmt: skip
        """Yield (points, better and better; the lower bound known by then) until nothing is left to prove."""
        ...


@dataclass(frozen=True)
class Exact:
    """Points and bounds of a solver; what it finds is priced by the problem, and not believed."""

    solver: Solver

    def steps(self, context: SearchContext[Point]) -> Steps[Point]:
        """Price the starts, then what the solver finds."""
        if context.starts:
            yield context.starts
        for points, bound in self.solver.solve(context.problem, context.starts, context.until):
            if points:
                yield points
            context.prove(bound)
