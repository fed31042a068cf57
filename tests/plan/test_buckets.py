"""Dynamic programming, bounds and theorems on random instances."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.plan.buckets import (
    best_buckets,
    by_caps,
    default,
    least_end,
    least_step,
    operators_pay,
    parts_pay,
    seeds,
    walk,
)  # fmt: skip
from foretrace.plan.evaluate import Evaluator
from foretrace.plan.problem import CoarseStep, Plan
from tests.plan import twins
from tests.plan.problems import Table, plans, problem, problems

times = st.integers(0, 200)


@settings(max_examples=50)
@given(problems(most=5))
def test_the_best_buckets_are_those_of_brute_force(p: CoarseStep) -> None:
    evaluate = Evaluator.of(p)
    found = best_buckets(evaluate)
    costs = evaluate.costs
    ready, cut, table, counts = (each.tolist() for each in (p.ready_ns, p.cut_ns, costs.table, costs.chunks))
    assert found.proven
    assert found.step_ns == twins.best_end(ready, cut, table, counts, costs.latency_ns, p.slots, p.last_ns) + p.after_ns
    assert evaluate.step_ns(found.plan) == found.step_ns


@settings(max_examples=50)
@given(st.data())
def test_no_plan_beats_the_bounds(data: st.DataObject) -> None:
    p = data.draw(problems())
    evaluate = Evaluator.of(p)
    plan = data.draw(plans(len(p)))
    chunked = Plan(ends=plan.ends, chunks=plan.chunks, ahead=plan.ahead)
    assert evaluate.step_ns(chunked) >= least_step(evaluate)
    if not plan.ahead:
        assert evaluate.step_ns(chunked) >= least_end(evaluate) + p.after_ns
        assert evaluate.step_ns(chunked) >= best_buckets(evaluate).step_ns


@settings(max_examples=40)
@given(problems(most=12))
def test_the_best_is_never_worse_than_any_rule(p: CoarseStep) -> None:
    evaluate = Evaluator.of(p)
    best = best_buckets(evaluate).step_ns
    rules = [*seeds(p, evaluate.costs), walk(p, evaluate.costs), default(p), by_caps(evaluate)[0]]
    assert best <= min(evaluate.step_ns(plan) for plan in rules)


@settings(max_examples=40)
@given(problems(most=10), st.floats(1.0, 4.0))
def test_a_faster_network_never_makes_the_best_step_longer(p: CoarseStep, faster: float) -> None:
    from dataclasses import replace

    net = p.network
    assert isinstance(net, Table)
    quick = replace(p, network=replace(net, bytes_per_ns=net.bytes_per_ns * faster))
    assert best_buckets(Evaluator.of(quick)).step_ns <= best_buckets(Evaluator.of(p)).step_ns


@given(times, times, times, times, times, times)
def test_theorem_2_is_exact_where_it_is_said_to_be(
    before: int, first: int, ready_first: int, gap: int, second: int, latency: int
) -> None:
    ready_second = ready_first + gap
    sent_first = max(before, ready_first) + first
    both = max(first + second - latency, first, second)
    alone, together = max(sent_first, ready_second) + second, max(before, ready_second) + both
    if before <= ready_second:  # the published form
        assert (sent_first > ready_second + both - second) == (together < alone)
    else:
        assert (both < first + second) == (together < alone)


@given(times, times, times, times, times)
def test_theorem_1_is_sufficient_and_its_fused_form_exact_where_the_link_is_idle(
    first: int, second: int, gain: int, end: int, latency: int
) -> None:
    both = max(first + second - latency, first, second)
    gain = min(gain, end)
    alone = end + second  # the link has sent the first tensor by then
    assert (end - gain + both <= alone) == operators_pay(both=both, second=second, gain=gain)
    if first <= gain:
        assert end - gain + first + second <= alone
        assert end - gain + both <= alone


@settings(max_examples=40)
@given(problems(most=6, cuts=False, slots=1))
def test_parts_pay_only_where_the_costs_say_so(p: CoarseStep) -> None:
    from foretrace.plan.problem import TransferCosts

    evaluate = Evaluator.of(p)
    whole = Evaluator(problem=p, costs=TransferCosts.of(p, chunks=(1,)))
    if not parts_pay(evaluate.costs):
        assert best_buckets(evaluate).step_ns == best_buckets(whole).step_ns


def test_a_known_best() -> None:
    # Latency 30, 1 byte/ns: the first two are ready together, the third much later.
    p = problem([10, 0, 300], [50, 50, 10])
    found = best_buckets(Evaluator.of(p))
    assert found.plan.ends == (1, 2)
    assert found.step_ns == 310 + 40


def test_the_walk_decides_as_the_theorem_does() -> None:
    p = problem([10, 0, 300], [50, 50, 10])
    assert walk(p, Evaluator.of(p).costs).ends == (1, 2)


def test_caps_close_a_bucket_with_the_tensor_that_fills_it() -> None:
    nbytes = np.array([3, 3, 3, 10, 1])
    assert Plan.capped(nbytes, 6).ends == (1, 3, 4)
    assert Plan.capped(nbytes, 6, first=1).ends == (0, 2, 3, 4)
