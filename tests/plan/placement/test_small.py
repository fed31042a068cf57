"""Placement against every placement of small problems."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings

from foretrace import deadline
from foretrace.errors import ForetraceError
from foretrace.plan.placement import programs
from foretrace.plan.placement.blocks import PlacementBlocks, contract
from foretrace.plan.placement.latency import bound, latency
from foretrace.plan.placement.place import place
from foretrace.plan.placement.problem import PlacementProblem
from foretrace.plan.solver import SolverLimits
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


@given(problems())
@settings(max_examples=150)
def test_latency_is_between_its_bound_and_that_of_every_placement(problem: PlacementProblem) -> None:
    blocks = contract(problem)
    best = min((latency(problem, each) for each in placements(problem, contiguous=False, blocks=blocks)), default=inf)
    assert bound(problem, blocks) <= best * (1 + 1e-9) + 1e-9
    if best == inf:
        return
    found = place(problem, objective="latency", seconds=0)
    assert best <= found.objective_value * (1 + 1e-9)
    assert latency(problem, found.devices) == found.objective_value


def test_a_training_step_has_the_latency_of_one_device() -> None:
    """Forward and backward passes of two accelerators, each as one piece, would wait for each other."""
    problem = replace(
        chain(4, accelerators=2), backward=np.arange(4) >= 2, colour=np.array([0, 1, 1, 0]), memory_limit=4.0
    )
    assert place(problem, objective="latency", seconds=0).objective_value == 4.0
    with pytest.raises(ForetraceError, match=r"must stay together.*give `memory_limit=1MB`"):
        place(replace(problem, memory_limit=2.0), objective="latency", seconds=0)
    slow = replace(problem, memory_limit=2.0, cpus=1, cpu_time=np.full(4, 9.0))
    assert place(slow, objective="latency", seconds=0).objective_value <= 36.0


def test_activations_of_one_batch_count_for_latency() -> None:
    """A full pipeline has as many batches under way as devices, one batch has one."""
    saved = np.full(4, 2.0)
    problem = replace(chain(4, accelerators=2), nbytes=1 + saved, saved=saved, memory_limit=8.0)
    assert place(problem, objective="latency", seconds=0).objective_value == 4.0
    assert len(place(problem).devices) == 2


def test_devices_beyond_the_operators_stay_idle() -> None:
    problem = replace(chain(3, accelerators=10**9), cpus=10**9)
    assert place(problem).objective_value == 1.0  # two CPUs beside an accelerator, or three
    assert place(problem, objective="latency", seconds=0).objective_value == 3.0
    alone = replace(problem, accelerators=0)
    assert place(alone, objective="latency", seconds=0).proven
    assert {each.kind for each in place(alone, objective="latency", seconds=0).devices} == {"cpu"}


def test_operators_that_wait_for_nothing_run_side_by_side() -> None:
    problem = replace(chain(6, accelerators=3), edges=np.zeros((0, 2), dtype=np.int64))
    found = place(problem, objective="latency", seconds=0)
    assert found.proven
    assert found.objective_value == 2.0


def test_bound_of_a_chain_is_reached() -> None:
    problem = replace(chain(9, accelerators=3), memory_limit=3.0)
    found = place(problem, objective="latency", seconds=0)
    assert found.proven
    assert found.objective_value == pytest.approx(9 + 2 * 2 * 0.5)  # two cuts, each sent and received


def test_integer_program_has_the_time_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def improve(problem: PlacementProblem, blocks: PlacementBlocks, hint: Any, objective: float, **how: Any) -> Any:
        asked.append(how["limits"].seconds)
        return tuple(hint), 0.0

    monkeypatch.setattr(programs, "improve", improve)
    monkeypatch.setattr(deadline, "uncompiled", count().__next__)  # a second passes with every look at the clock
    problem = chain(4, accelerators=2)
    for seconds in (0.0, 1.0, 7.0):
        assert not place(problem, contiguous=False, seconds=seconds).proven
    assert asked == [6.0]
    assert not place(problem, contiguous=False, seconds=0.0, work=3.0).proven
    assert asked == [6.0, inf]


def test_a_solver_ends_before_what_called_it_must() -> None:
    parameters = SimpleNamespace()
    SolverLimits(seconds=10.0).set(parameters, began=time.time() - 4.0)
    assert 5.0 < parameters.max_time_in_seconds <= 5.5
    SolverLimits(seconds=10.0).set(parameters, began=time.time() - 40.0)
    assert parameters.max_time_in_seconds == 0.0
    assert not hasattr(parameters, "interleave_search")
    SolverLimits(work=3.0).set(parameters, began=0.0)
    assert (parameters.max_deterministic_time, parameters.interleave_search) == (3.0, True)


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
        every = placements(problem, contiguous=False, blocks=contract(problem))
        least = min(latency(problem, each) for each in every)
        if least < inf:
            found = place(problem, objective="latency", seconds=20)
            assert found.proven
            assert found.objective_value == pytest.approx(least)

    check()
    assert tried
