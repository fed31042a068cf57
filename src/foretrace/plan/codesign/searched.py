"""`DesignProblem`: the accelerators of a `CodesignSpace`, each with its best plan, as a space for any strategy."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any

from foretrace.plan.codesign.search import SIZES, CodesignSpace
from foretrace.search.space import Choices, Infeasible, Problem

CHOSEN = tuple(each for each in SIZES if each != "lanes")  # lanes are as wide as the arrays


class DesignProblem(Problem[tuple[Any, ...]]):
    """The logarithm of an iteration's seconds; a point has a value for each of `CHOSEN`.

    All designs are priced at once, which is quicker than one by one; a call looks one of them up.
    """

    def __init__(self, space: CodesignSpace, link_gb_s: float) -> None:
        designs = space.designs.sizes[:, [SIZES.index(each) for each in CHOSEN]]
        self.space = Choices(tuple(tuple(sorted(set(column.tolist()))) for column in designs.T))
        seconds = space.price(link_gb_s).seconds.tolist()
        self._seconds = dict(zip(map(tuple, designs.tolist()), seconds, strict=True))

    @property
    def optimum(self) -> float:
        """The least cost."""
        return log(min(self._seconds.values()))

    def costs(self, points: Sequence[tuple[Any, ...]]) -> list[float]:
        found = (self._seconds.get(tuple(point)) for point in points)
        return [Infeasible("above the area, or far below it") if each is None else log(each) for each in found]
