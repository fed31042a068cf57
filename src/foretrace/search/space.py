"""`Space`: the points that a search chooses among; `Problem`: what each of them costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf, log, prod
from random import Random
from typing import Any, Generic, TypeVar

from foretrace.errors import ForetraceError

Point = TypeVar("Point")


# Floats are copied by their value and their attributes, so that a class of them is made of a number alone, too.
class Infeasible(float):
    """The cost of a point that cannot be: infinite, with the reason in words."""

    why: str

    def __new__(cls, why: str) -> Infeasible:
        found = super().__new__(cls, inf)
        found.why = why
        return found


class Constrained(float):
    """The cost of a point under a limit: its objective, or infinite where `excess` is above 0; strategies see both."""

    objective: float
    excess: float
    why = "above the limit"

    def __new__(cls, objective: float, excess: float = 0.0) -> Constrained:
        """Return a cost, finite where the limit is kept."""
        found = super().__new__(cls, inf if excess > 0 else objective)
        found.objective, found.excess = objective, excess
        return found


class Responded(float):
    """The cost of a point with what it answered, of which the cost is the distance to a target: a spectrum, say.

    Also of points that are not of the problem itself but of others to learn from; those have an infinite cost.
    """

    response: tuple[float, ...]

    def __new__(cls, cost: float, response: Sequence[float] = ()) -> Responded:
        found = super().__new__(cls, cost)
        found.response = tuple(map(float, response))
        return found


class LackingSpaceError(ForetraceError, NotImplementedError):
    """A strategy needs what a space lacks."""


def _lacking(space: object, lacks: str) -> LackingSpaceError:
    return LackingSpaceError(f"{type(space).__name__} {lacks}, which this strategy needs; choose another one.")


class Space(Generic[Point]):
    """Points and the ways from one to another. What a space lacks raises LackingSpaceError."""

    size: float = inf  # number of points

    def key(self, point: Point) -> Hashable:
        """Return what is equal for equal points alone; no point is paid for twice."""
        return point  # spaces of points that have no hash override this

    def random(self, rng: Random) -> Point:
        """Return any point."""
        raise _lacking(self, "draws no random points")

    def neighbour(self, point: Point, rng: Random) -> Point:
        """Return a random small change; as likely as the way back where Markov chains are to be fair."""
        raise _lacking(self, "has no random neighbours")

    def moves(self, point: Point) -> Iterator[Point]:
        """Return every smallest change."""
        raise _lacking(self, "does not list its moves")

    def neighbours(self, point: Point, rng: Random) -> Iterator[Point]:
        """Return points to try next, the most promising first: moves, and larger changes that the space knows."""
        return self.moves(point)

    def points(self) -> Iterator[Point]:
        """Return all points, each once."""
        raise _lacking(self, "does not list its points")

    def encode(self, point: Point) -> tuple[float, ...]:
        """Return coordinates from 0 to 1, near for points that are alike."""
        raise _lacking(self, "has no coordinates")

    def decode(self, code: Sequence[float]) -> Point:
        """Return the point nearest to some coordinates, which may lie outside of 0 to 1."""
        raise _lacking(self, "has no coordinates")


@dataclass(frozen=True)
class Choices(Space[tuple[Any, ...]]):
    """One value per dimension, each dimension's values in an order that means something; subsets by (False, True)."""

    values: tuple[tuple[Any, ...], ...]

    @cached_property
    def size(self) -> float:  # type: ignore[override]
        return float(prod(map(len, self.values)))

    @cached_property
    def _places(self) -> tuple[dict[Any, int], ...]:
        return tuple({value: i for i, value in enumerate(values)} for values in self.values)

    @cached_property
    def _free(self) -> tuple[int, ...]:
        return tuple(i for i, values in enumerate(self.values) if len(values) > 1)

    def random(self, rng: Random) -> tuple[Any, ...]:
        return tuple(rng.choice(values) for values in self.values)

    def neighbour(self, point: tuple[Any, ...], rng: Random) -> tuple[Any, ...]:
        if not self._free:
            return point
        i = rng.choice(self._free)
        other = rng.randrange(len(self.values[i]) - 1)
        other += other >= self._places[i][point[i]]
        return (*point[:i], self.values[i][other], *point[i + 1 :])

    def moves(self, point: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """Yield other values, the nearest first."""
        at = [places[value] for places, value in zip(self._places, point, strict=True)]
        others = ((abs(j - at[i]), i, j) for i in self._free for j in range(len(self.values[i])) if j != at[i])
        for _, i, j in sorted(others):
            yield (*point[:i], self.values[i][j], *point[i + 1 :])

    def points(self) -> Iterator[tuple[Any, ...]]:
        return product(*self.values)

    def encode(self, point: tuple[Any, ...]) -> tuple[float, ...]:
        places = zip(self._places, point, strict=True)
        return tuple(place[value] / max(len(place) - 1, 1) for place, value in places)

    def decode(self, code: Sequence[float]) -> tuple[Any, ...]:
        each = zip(self.values, code, strict=True)
        return tuple(values[round(min(max(at, 0.0), 1.0) * (len(values) - 1))] for values, at in each)


@dataclass(frozen=True)
class RatioChoices(Choices):
    """Positive numbers per dimension, near where their ratio is near 1; of `only` these combinations, if given."""

    only: tuple[tuple[float, ...], ...] = ()

    @cached_property
    def size(self) -> float:  # type: ignore[override]
        return float(len(self.only) or prod(map(len, self.values)))

    def random(self, rng: Random) -> tuple[Any, ...]:
        return rng.choice(self.only) if self.only else super().random(rng)

    def points(self) -> Iterator[tuple[Any, ...]]:
        return iter(self.only) if self.only else super().points()

    def encode(self, point: tuple[Any, ...]) -> tuple[float, ...]:
        ends = zip(point, map(min, self.values), map(max, self.values), strict=True)
        return tuple(log(value / low) / log(high / low) if high > low else 0.0 for value, low, high in ends)


class Problem(ABC, Generic[Point]):
    """What is to be minimised: set `space`, override `costs`."""

    space: Space[Point]
    bound: float = -inf  # no point costs less
    target_response: tuple[float, ...] = ()  # where costs are distances to one

    def lesson(self, rng: Random) -> Point:
        """Return a point to learn from, before a strategy knows better; it may be of a problem like this one."""
        return self.space.random(rng)

    def given(self, point: Point | None) -> tuple[float, ...]:
        """Return what says which problem a point is of; None: of this one. Near for problems that are alike."""
        return ()

    @abstractmethod
    def costs(self, points: Sequence[Point]) -> Sequence[float]:
        """Return the cost of every point; an infinite one, best an `Infeasible`, for what cannot be."""
