"""Placement against every placement of small problems."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import assume, given, settings

from foretrace.errors import ForetraceError
from foretrace.plan.placement import programs
from foretrace.plan.placement.blocks import PlacementBlocks, contract
from foretrace.plan.placement.latency import latency
from foretrace.plan.placement.place import place
from foretrace.plan.placement.problem import PlacementProblem
from foretrace.plan.placement.programs import Solved
from foretrace.plan.placement.series import bound
from tests.plan.placement.problems import chain, placements, problems


def _best(problem: PlacementProblem, *, contiguous: bool) -> float:
    return min((problem.check(each) for each in placements(problem, contiguous=contiguous)), default=inf)


@given(problems())
@settings(max_examples=60)
def test_contiguous_placement_is_the_best_of_all(problem: PlacementProblem) -> None:
    expected = _best(problem, contiguous=True)
    if expected == inf:
        with pytest.raises(ForetraceError, match=r"does not fit|no accelerator can run"):
            place(problem)
        return
    found = place(problem)
    assert found.proven
    assert found.objective_value == pytest.approx(expected)
    assert problem.check(found.devices) == found.objective_value


@given(problems(backward=False))
@settings(max_examples=100)
def test_latency_is_between_its_bound_and_that_of_every_placement(problem: PlacementProblem) -> None:
    blocks = contract(problem)
    best = min((latency(problem, each) for each in placements(problem, contiguous=False, blocks=blocks)), default=inf)
    assert bound(problem, blocks) <= best * (1 + 1e-9) + 1e-9
    if best == inf:
        return
    found = place(problem, objective="latency", seconds=0)
    assert best <= found.objective_value * (1 + 1e-9)
    assert latency(problem, found.devices) == found.objective_value


def test_bound_of_a_chain_is_reached() -> None:
    problem = replace(chain(9, accelerators=3), memory_limit=3.0)
    found = place(problem, objective="latency", seconds=0)
    assert found.proven
    assert found.objective_value == pytest.approx(9 + 2 * 2 * 0.5)  # two cuts, each sent and received


def test_integer_program_has_the_time_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def improve(problem: PlacementProblem, blocks: PlacementBlocks, hint: Any, objective: float, **how: Any) -> Solved:
        asked.append(how["seconds"])
        return Solved(devices=tuple(hint), bound=0.0, proven=False)

    monkeypatch.setattr(programs, "improve", improve)
    problem = chain(4, accelerators=2)
    for seconds in (0.0, 7.0):
        assert not place(problem, contiguous=False, seconds=seconds).proven
    assert asked == [7.0]


def test_integer_program_finds_the_best_of_all_sets() -> None:
    pytest.importorskip("ortools", reason="integer programs need OR-Tools: pip install 'foretrace[plan]'")
    tried = 0

    @given(problems(5))
    @settings(max_examples=4, derandomize=True, database=None)
    def check(problem: PlacementProblem) -> None:
        nonlocal tried
        assume(_best(problem, contiguous=True) < inf)
        tried += 1
        found = place(problem, contiguous=False, seconds=20)
        assert found.proven
        assert found.objective_value == pytest.approx(_best(problem, contiguous=False))

    check()
    assert tried
