"""Designs as a space: a named strategy finds what the enumeration has."""

from __future__ import annotations

from math import exp, inf

import pytest

from foretrace.hardware.accelerators import TPU_LIKE
from foretrace.plan.codesign.search import CodesignSpace, DesignProblem, design_columns
from foretrace.plan.transformers.shape import transformer
from foretrace.search.named import search_named
from foretrace.search.space import Choices


def test_designs_are_those_that_are_enumerated() -> None:
    space = CodesignSpace(
        model=transformer("gpt2-medium"), devices=8, batch=16, training=True, like=TPU_LIKE, designs=design_columns(2e7)
    )
    problem = DesignProblem(space, 50.0)
    seconds = space.price(50.0).seconds
    rows = [0, len(seconds) // 2, len(seconds) - 1]
    costs = problem.costs([tuple(space.designs.sizes[row, [0, 1, 2, 3, 5]].tolist()) for row in rows])
    assert [exp(each) for each in costs] == pytest.approx(seconds[rows].tolist())
    assert exp(problem.optimum) == pytest.approx(seconds.min())
    assert isinstance(problem.space, Choices)
    biggest = tuple(max(values) for values in problem.space.values)
    assert problem.costs([biggest]) == [inf]
    found = search_named(problem, "hybrid:evolution", calls=400)
    assert seconds.min() * (1 - 1e-12) <= exp(found.found.cost) <= 1.3 * seconds.min()
    assert found.found.learned is not None and found.found.calls == 400
