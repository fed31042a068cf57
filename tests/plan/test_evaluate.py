"""What the search reckons with equals the simulation of the whole graph."""

from __future__ import annotations

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.plan.evaluate import Evaluator
from foretrace.plan.problem import Plan, TransferCosts
from tests.plan.problems import Table, problem


def test_many_plans_at_once_equal_each_alone() -> None:
    p = problem([10, 20, 30, 5], [100, 5, 70, 20], slots=2)
    evaluate = Evaluator.of(p)
    several = [Plan.whole(4), Plan.single(4), Plan(ends=(1, 3), chunks=(2, 1))]
    assert evaluate.steps_ns(several).tolist() == [evaluate.step_ns(each) for each in several]


def test_an_overtaking_message_shortens_the_step() -> None:
    # The last gradient of the backward pass is the first one that the next forward pass needs.
    p = problem([10, 10], [1000, 10], forward=[10, 500], network=Table(latency_ns=0))
    evaluate = Evaluator.of(p)
    single = Plan.single(2)
    assert evaluate.step_ns(Plan(ends=single.ends, chunks=(4, 1), ahead=True)) < evaluate.step_ns(single)


def test_costs_are_those_of_the_network_for_every_size() -> None:
    n = 40
    p = problem([1] * n, list(range(1, n + 1)), network=Table(latency_ns=7, flat_below=50))
    costs = TransferCosts.of(p)
    prefix = np.concatenate([[0], np.cumsum(p.nbytes)])
    for c, count in enumerate(costs.chunks.tolist()):
        for i in range(n):
            for j in range(i, n):
                size = -(-int(prefix[j + 1] - prefix[i]) // count)
                assert costs.table[c, i, j] == 7 + max(size, 50)


def test_a_coarser_problem_keeps_its_sums() -> None:
    p = problem([3, 4, 5, 6], [10, 1, 2, 30], forward=[1, 2, 3, 4], update=[1, 1, 1, 1])
    small = p.coarsened(2)
    assert len(small) == 2
    assert small.nbytes.sum() == p.nbytes.sum()
    assert small.compute_ns == p.compute_ns
    assert small.tensors == ("t0+t1+t2", "t3")
    assert sorted(small.forward_place.tolist()) == [0, 1]


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ForetraceError, match="no gradient"):
        problem([], [])
    with pytest.raises(ForetraceError, match="negative"):
        problem([-1], [1])
    with pytest.raises(ForetraceError, match="transfers at a time"):
        problem([1], [1], slots=0)
