"""The search for messages that overtake: any-time, repeatable, never worse than where it began."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.deadline import Deadline
from foretrace.plan.buckets import least_step
from foretrace.plan.evaluate import Evaluator
from foretrace.plan.moves import alike, all_moves, around, random_move, together, toggled
from foretrace.plan.problem import CoarseStep, Plan
from foretrace.plan.search import RoundsState, Search
from tests.plan.problems import Table, plans, problem, problems


def blocks(count: int = 6) -> CoarseStep:
    """Repeated blocks of three tensors, the deepest first; the link is the bottleneck."""
    n = 3 * count
    made = problem([40, 10, 5] * count, [400, 30, 30] * count, forward=[30, 5, 5] * count, network=Table(latency_ns=20))
    from dataclasses import replace

    return replace(made, tensors=tuple(f"layer.{i // 3}.{'abc'[i % 3]}" for i in range(n)))


def well_formed(plan: Plan, n: int) -> bool:
    ends = list(plan.ends)
    return ends == sorted(set(ends)) and ends[0] >= 0 and ends[-1] == n - 1 and len(plan.chunks) == len(ends)


@settings(max_examples=40)
@given(st.data())
def test_moves_make_plans(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 9))
    plan = data.draw(plans(n))
    random = Random(data.draw(st.integers(0, 99)))
    made = [*all_moves(plan), *around(plan, range(len(plan.ends))), random_move(plan, random)]
    assert all(well_formed(each, n) and each.ahead == plan.ahead for each in made)
    for boundary in range(n - 1):
        assert (boundary in toggled(plan, boundary).ends) != (boundary in plan.ends)
        assert toggled(toggled(plan, boundary), boundary).ends == plan.ends


def test_what_is_alike_is_decided_alike() -> None:
    p = blocks()
    groups = alike(p)
    assert [0, 3, 6, 9, 12, 15] in groups
    plan = together(Plan.whole(len(p)), groups[0], apart=True)
    assert set(groups[0]) <= set(plan.ends)
    assert together(plan, groups[0], apart=False) == Plan.whole(len(p))


@settings(max_examples=8)
@given(problems(slots=2))
def test_a_search_ends_between_its_bound_and_where_it_began(p: CoarseStep) -> None:
    evaluate = Evaluator.of(p)
    search = Search.begin(evaluate)
    began = search.state.best_ns
    state = search.run(rounds=4)
    assert least_step(evaluate) <= state.best_ns <= began
    assert evaluate.step_ns(state.best) == state.best_ns


def test_it_is_repeatable_and_resumes_where_it_stood() -> None:
    evaluate = Evaluator.of(blocks())
    whole = Search.begin(evaluate, seed=3).run(rounds=6)
    first = Search.begin(evaluate, seed=3).run(rounds=2)
    again = Search.resume(evaluate, RoundsState.of_json(first.to_json())).run(rounds=6)
    assert again == whole


def test_time_that_is_up_changes_no_state() -> None:
    search = Search.begin(Evaluator.of(blocks()))
    before = search.state
    assert search.round(until=Deadline(0.0)) is False
    assert search.state == before
    assert search.best[1] <= before.best_ns
