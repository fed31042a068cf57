"""The step of the coarsened view equals the simulation of the global graph of all workers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import GraphError
from foretrace.plan.evaluate import MEASURED, WARM_UP, Evaluator
from foretrace.plan.problem import Plan, TransferCosts
from foretrace.simulate.timeline import simulate
from reproductions.dpro.coarse import as_graph
from tests.plan.problems import plans, problem, problems


@settings(max_examples=40)
@given(st.data())
def test_a_step_equals_the_simulation_of_the_graph(data: st.DataObject) -> None:
    p = data.draw(problems())
    plan = data.draw(plans(len(p), ahead=False))
    evaluate = Evaluator.of(p)
    steps = simulate(as_graph(p, plan, evaluate.costs, steps=2)).step_times_ns.tolist()
    assert steps == [evaluate.step_ns(plan)] * 2


@settings(max_examples=40)
@given(st.data())
def test_overtaking_messages_equal_the_schedule_of_the_graph(data: st.DataObject) -> None:
    p = data.draw(problems(slots=1))
    plan = data.draw(plans(len(p), ahead=True))
    evaluate = Evaluator.of(p)
    if (evaluate.costs.of_plan(plan) == 0).any():
        return  # a message without length has no place in an order
    steps = simulate(as_graph(p, plan, evaluate.costs, steps=WARM_UP + MEASURED)).step_times_ns
    assert float(steps[WARM_UP:].sum()) / MEASURED == evaluate.step_ns(plan)


@settings(max_examples=30)
@given(st.data(), st.sampled_from([2, 3, 17]), st.integers(1, 3))
def test_many_workers_do_what_one_does(data: st.DataObject, workers: int, operators: int) -> None:
    p = data.draw(problems(most=4, slots=2))
    plan = data.draw(plans(len(p), ahead=False))
    evaluate = Evaluator.of(p)
    graph = as_graph(p, plan, evaluate.costs, workers=workers, operators=operators)
    assert simulate(graph).step_times_ns.tolist() == [evaluate.step_ns(plan)] * 2


def test_overtaking_needs_a_link_that_sends_one_message_at_a_time() -> None:
    p = problem([1], [1], slots=2)
    with pytest.raises(GraphError, match="one message at a time"):
        as_graph(p, Plan(ends=(0,), chunks=(1,), ahead=True), TransferCosts.of(p))
