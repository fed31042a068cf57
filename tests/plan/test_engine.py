"""The compiled loops equal their plain-Python twins, and what they say is what trying everything finds."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.plan import engine
from foretrace.plan.evaluate import Evaluator
from foretrace.plan.problem import CoarseStep, Plan, TransferCosts
from tests.plan import twins
from tests.plan.problems import plans, problem, problems

NEVER = 2**62


@given(st.data())
def test_the_queue_of_the_link_equals_its_twin(data: st.DataObject) -> None:
    p = data.draw(problems())
    plan = data.draw(plans(len(p), ahead=False))
    costs = TransferCosts.of(p)
    times = costs.of_plan(plan)
    free = np.zeros(p.slots + 1, dtype=np.int64)
    ends, chunks = (np.array(each, dtype=np.int64) for each in (plan.ends, plan.chunks))
    added = engine.finish(p.ready_ns, p.cut_ns, ends, chunks, times, costs.latency_ns, 0, 0, free)
    ready, cut = p.ready_ns.tolist(), p.cut_ns.tolist()
    expected = twins.finish(ready, cut, plan.ends, plan.chunks, times.tolist(), costs.latency_ns, p.slots)
    assert (added, int(free[-2])) == expected
    assert free[:-1].tolist() == sorted(free[:-1].tolist())


@given(st.data())
def test_a_queue_resumed_in_the_middle_ends_alike(data: st.DataObject) -> None:
    p = data.draw(problems())
    plan = data.draw(plans(len(p), ahead=False))
    costs = TransferCosts.of(p)
    times = costs.of_plan(plan)
    ends, chunks = (np.array(each, dtype=np.int64) for each in (plan.ends, plan.chunks))
    whole = np.zeros(p.slots + 1, dtype=np.int64)
    added = engine.finish(p.ready_ns, p.cut_ns, ends, chunks, times, costs.latency_ns, 0, 0, whole)
    middle = data.draw(st.integers(0, len(ends)))
    parts = np.zeros(p.slots + 1, dtype=np.int64)
    extra = engine.finish(
        p.ready_ns, p.cut_ns, ends[:middle], chunks[:middle], times[:middle], costs.latency_ns, 0, 0, parts
    )
    extra = engine.finish(p.ready_ns, p.cut_ns, ends, chunks, times, costs.latency_ns, middle, extra, parts)
    assert extra == added
    assert parts.tolist() == whole.tolist()


@settings(max_examples=40)
@given(st.data())
def test_steps_that_run_into_each_other_equal_their_twin(data: st.DataObject) -> None:
    p = data.draw(problems())
    plan = data.draw(plans(len(p), ahead=True))
    costs = TransferCosts.of(p)
    times = costs.of_plan(plan) + 1
    order = np.argsort(p.forward_place).astype(np.int64)
    begins = list(plan.begins)
    priority = np.array([int(p.forward_place[a : b + 1].min()) for a, b in zip(begins, plan.ends, strict=True)])
    marks = np.empty(5, dtype=np.int64)
    ends, chunks = (np.array(each, dtype=np.int64) for each in (plan.ends, plan.chunks))
    engine.across_steps(
        p.first_ns, p.forward_ns, order, p.backward_ns, p.last_ns, p.update_ns, p.rest_ns, p.cut_ns, ends, chunks,
        times, priority, costs.latency_ns, p.slots, 4, marks,
        np.empty(len(ends), dtype=np.int64),
    )  # fmt: skip
    expected = twins.across_steps(
        p.first_ns, p.forward_ns.tolist(), order.tolist(), p.backward_ns.tolist(), p.last_ns, p.update_ns.tolist(),
        p.rest_ns, p.cut_ns.tolist(), ends.tolist(), chunks.tolist(), times.tolist(), priority.tolist(),
        costs.latency_ns, p.slots, 4,
    )  # fmt: skip
    assert marks.tolist() == expected


@settings(max_examples=40)
@given(problems(most=6))
def test_dynamic_programming_finds_what_trying_everything_finds(p: CoarseStep) -> None:
    costs = TransferCosts.of(p, chunks=(1, 2))
    best, ends, kinds, _, complete = engine.best_buckets(
        p.ready_ns, p.cut_ns, costs.table, costs.chunks, costs.latency_ns, p.slots, p.last_ns, NEVER, 10_000
    )
    ready, cut, table, counts = (each.tolist() for each in (p.ready_ns, p.cut_ns, costs.table, costs.chunks))
    assert complete
    assert best == twins.best_end(ready, cut, table, counts, costs.latency_ns, p.slots, p.last_ns)
    plan = Plan(ends=tuple(ends.tolist()), chunks=tuple(costs.chunks[kinds].tolist()))
    assert Evaluator(problem=p, costs=costs).step_ns(plan) == best + p.after_ns
    tight, *_ = engine.best_buckets(
        p.ready_ns, p.cut_ns, costs.table, costs.chunks, costs.latency_ns, p.slots, p.last_ns, best, 10_000
    )
    assert tight == best, "a bound that can be met changes nothing"
    missed, *_ = engine.best_buckets(
        p.ready_ns, p.cut_ns, costs.table, costs.chunks, costs.latency_ns, p.slots, p.last_ns, best - 1, 10_000
    )
    assert missed == NEVER, "a bound that cannot be met is not met"


def test_a_known_answer() -> None:
    # Latency 30, 1 byte/ns. Alone: 10+130, then 140+130 = 270; together: 110+230 = 340; so two buckets.
    p = problem([10, 100], [100, 100])
    evaluate = Evaluator.of(p)
    assert evaluate.step_ns(Plan.single(2)) == 270
    assert evaluate.step_ns(Plan.whole(2)) == 340
    # Ready together: one latency is saved.
    p = problem([10, 0], [100, 100])
    assert Evaluator.of(p).step_ns(Plan.single(2)) == 270
    assert Evaluator.of(p).step_ns(Plan.whole(2)) == 240
