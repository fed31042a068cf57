"""Partial back-propagation predicted: groups, shares, traffic, memory, refusals."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import NotApplicableError
from foretrace.graph.taskgraph import Phase, TaskGraph, TaskKind
from foretrace.simulate.timeline import simulate
from foretrace.techniques.arguments import parse
from foretrace.techniques.base import Technique
from foretrace.techniques.distributed.gradients import find_gradients
from foretrace.techniques.distributed.partial_backprop import PartialBackprop, backward_costs
from foretrace.testing import TechniqueConformance, recorded, small_training
from foretrace.training.partial import grouped


@lru_cache
def alone() -> TaskGraph:
    return recorded(small_training())


class TestConformance(TechniqueConformance):
    technique: ClassVar[Technique] = PartialBackprop(workers=2, network="1gbit/50us")


class TestConformanceOfTheMeanWorker(TechniqueConformance):
    technique: ClassVar[Technique] = PartialBackprop(workers=3, network="1gbit/50us", barrier="mean")


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.integers(1, 8))
def test_groups_are_in_order_and_none_is_empty(cost: list[float], groups: int) -> None:
    groups = min(groups, len(cost))
    found = grouped(np.array(cost), groups)
    assert np.all(np.diff(found) >= 0)
    assert set(found.tolist()) == set(range(groups))


def test_equal_costs_are_cut_equally() -> None:
    assert grouped(np.ones(8), 4).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(("workers", "groups", "expected"), [(4, 0, [4, 3, 2, 1]), (2, 4, [2, 2, 1, 1]), (1, 0, [1])])
def test_contributors_by_hand(workers: int, groups: int, expected: list[int]) -> None:
    technique = PartialBackprop(workers=workers, groups=groups)
    assert [technique.contributors(group) for group in range(technique.parts)] == expected


def test_the_mean_worker_saves_what_the_reference_says() -> None:
    """(K + 1) / 2K of the backward time is left, up to groups that are not quite equal."""
    graph, workers = alone(), 2
    free = {"network": "1000gbit", "waiting_ms": 0.0, "copy_gb_s": 1e6}
    before = graph.dur[(graph.phase == Phase.BACKWARD) & (graph.step >= 0)].sum()
    after = PartialBackprop(workers=workers, barrier="mean", **free).predict(graph)  # type: ignore[arg-type]
    left = after.dur[(after.phase == Phase.BACKWARD) & (after.step >= 0) & (after.kind == TaskKind.OPERATOR)].sum()
    cost = backward_costs(graph, find_gradients(graph))
    group = grouped(cost, workers)
    expected = before - 0.5 * cost[group == 1].sum() * graph.n_steps
    assert left == pytest.approx(expected, rel=0.02)
    with_barrier = PartialBackprop(workers=workers, **free).predict(graph)  # type: ignore[arg-type]
    assert simulate(with_barrier).step_time_s == pytest.approx(simulate(graph).step_time_s, rel=0.01)


def test_one_worker_changes_nothing() -> None:
    graph = alone()
    assert simulate(PartialBackprop(workers=1).predict(graph)).step_time_s == simulate(graph).step_time_s


def test_layers_near_the_input_are_broadcast_by_the_only_one_that_has_them() -> None:
    graph = PartialBackprop(workers=3, network="1gbit").predict(alone())
    names = [graph.names[i] for i in graph.name[graph.kind == TaskKind.COLLECTIVE]]
    assert set(names) == {"all-reduce group 0", "all-reduce group 1", "broadcast group 2"}


def test_what_it_did_is_said() -> None:
    said = " ".join(change.what for change in PartialBackprop(workers=2, network="1gbit").predict(alone()).changes)
    assert "back-propagated" in said and "saved activations" in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("workers=0", "workers must be 1 or more"),
        ("workers=2", "say which link"),
        ("workers=4 groups=2 network=1gbit", "groups must be as many"),
        ("workers=99 network=1gbit", "give fewer"),
        ("workers=2 network=1gbit transfer=-1", "transfer"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(text: str, says: str) -> None:
    with pytest.raises(NotApplicableError, match=says) as reason:
        parse(f"partial-backprop {text}").predict(alone())
    assert str(reason.value).endswith(".")


def test_it_does_not_go_with_data_parallel() -> None:
    graph = parse("data-parallel workers=2 network=1gbit").predict(alone())
    with pytest.raises(NotApplicableError, match="leave data-parallel out"):
        PartialBackprop(workers=2, network="1gbit").predict(graph)
