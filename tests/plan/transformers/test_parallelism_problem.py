"""`ParallelismSpace` as a space that is searched: all of it is valid and can be reached, costs are the sweep's."""

from __future__ import annotations

from dataclasses import astuple
from math import exp, inf, log
from random import Random

import pytest

from foretrace.errors import ForetraceError
from foretrace.plan.transformers.model import Parallelism, fields_of
from foretrace.plan.transformers.shape import TransformerSizes
from foretrace.plan.transformers.space import ParallelismProblem
from foretrace.search.minimise import minimise
from foretrace.search.strategies import Descent
from tests.plan.transformers.test_space import DENSE, MIXED, SMALL, plainly, space


@pytest.mark.parametrize(("model", "devices", "batch"), [(DENSE, 6, 8), (MIXED, 4, 4)])
def test_all_valid_configurations_and_no_others(model: TransformerSizes, devices: int, batch: int) -> None:
    valid = plainly(model, devices, batch, 1)
    of = ParallelismProblem(space(model, devices=devices, batch=batch)).space
    rng, met, queue = Random(1), set[tuple[int, ...]](), [Parallelism(data=devices)]
    queue = [of.random(rng)]
    while queue:
        at = queue.pop()
        row = tuple(fields_of(at).tolist())
        if row in met:
            continue
        met.add(row)
        assert of.decode(of.encode(at)) == at
        queue += of.moves(at)
    assert met == valid == {tuple(fields_of(at).tolist()) for at in of.points()}
    others = [of.random(rng) for _ in range(50)] + [of.neighbour(of.random(rng), rng) for _ in range(50)]
    others += [of.decode([rng.uniform(-0.5, 1.5) for _ in range(10)]) for _ in range(50)]
    assert {tuple(fields_of(at).tolist()) for at in others} <= valid


def test_costs_are_those_of_the_planner() -> None:
    here = space(SMALL, devices=8, batch=24, tensor=2)
    problem = ParallelismProblem(here)
    found = minimise(problem, strategy=Descent(walk=50), calls=400)
    best = here.cost(here.search(1).configurations[0]).seconds
    assert found.best is not None and found.best.tensor == 2
    assert exp(found.cost) == pytest.approx(here.cost(found.best).seconds)
    assert log(best) <= found.cost < log(1.05 * best)
    large = ParallelismProblem(space(SMALL, devices=1, batch=64))
    (cost,) = large.costs([Parallelism(micro=64)])
    assert cost == inf and getattr(cost, "why", "") == "out of memory"
    assert len(astuple(found.best)) == 12


def test_no_split_is_one_sentence() -> None:
    with pytest.raises(ForetraceError, match="no split over 7 devices is valid"):
        ParallelismProblem(space(SMALL, devices=7, batch=3)).space.random(Random(1))
