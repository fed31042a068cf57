"""Noise of few steps: as wide as two steps say, and narrower for what a change gains of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from foretrace.graph.taskgraph import EdgeKind, TaskGraph, TaskKind
from foretrace.simulate.noise import between, factors, t_quantile
from foretrace.simulate.timeline import simulate
from tests.simulate.small import small_graph

T = 3.0777  # 0.9 quantile of Student's t with one degree of freedom


def steps_of(*lengths: Sequence[float]) -> TaskGraph:
    """Steps of host work alone: per step, its tasks one after the other (ms)."""
    rows: list[tuple[int, TaskKind, int]] = [(0, TaskKind.MARK, 0)]
    for tasks in lengths:
        rows += [*((0, TaskKind.CPU, round(1e6 * each)) for each in tasks), (0, TaskKind.MARK, 0)]
    graph = small_graph(rows, [(i, i + 1, EdgeKind.PROGRAM, 0, False) for i in range(len(rows) - 1)])
    marks = np.flatnonzero(graph.kind == TaskKind.MARK)
    step = (np.searchsorted(marks, np.arange(len(graph)), side="right") - 1).astype(np.int32)
    return replace(graph, marks=marks.astype(np.int32), step=step)


def saved_s(before: TaskGraph, after: TaskGraph) -> tuple[float, float]:
    was, now = simulate(before), simulate(after)
    below, above = between(was.draws, now.draws, np.subtract, 0.8)
    value = was.step_time_s - now.step_time_s
    return value - below, value + above


def test_two_steps_that_differ_give_a_wide_interval() -> None:
    found = simulate(steps_of([53], [87])).interval_s()
    assert found.low_s < 0.070 - T * 0.017 < 0.070 + T * 0.017 < found.high_s
    assert "how far the two are apart" in found.source
    alike = simulate(steps_of([70], [70])).interval_s()
    assert 0.065 < alike.low_s < alike.high_s < 0.075


def test_what_waits_in_one_step_alone_counts_too() -> None:
    """The work is the same in both steps; the second waits, for nothing that the recording names."""
    graph = steps_of([50], [50])
    delay = graph.delay.copy()
    delay[np.flatnonzero(graph.kind == TaskKind.CPU)[1]] = 30_000_000
    found = simulate(graph.with_columns(delay=delay)).interval_s()
    assert found.high_s - found.low_s > 2 * T * 0.015


def test_the_interval_of_two_steps_holds_the_step_that_often() -> None:
    """Steps drawn around 100 ms: the interval of two of them holds that in eight of ten cases, or more."""
    random = np.random.default_rng(3)
    for spread in (5.0, 25.0):
        pairs = np.maximum(random.normal(100.0, spread, (150, 2)), 1.0)
        found = [simulate(steps_of([a], [b])).interval_s() for a, b in pairs.tolist()]
        assert np.mean([each.low_s <= 0.1 <= each.high_s for each in found]) > 0.75


def test_what_slows_both_alike_cancels_in_what_is_gained() -> None:
    before = steps_of([53, 10], [87, 10])
    low, high = saved_s(before, steps_of([53], [87]))
    assert 0.008 < low < 0.010 < high < 0.012, "a task of 10 ms less in either step, which the noise of 35 % would hide"
    low, high = saved_s(before, steps_of([53, 5, 5], [87, 5, 5]))
    assert low == pytest.approx(0, abs=2e-9) and high == pytest.approx(0, abs=2e-9), "tasks may be split without a gain"
    low, high = saved_s(before, steps_of([26, 10], [87, 10]))
    assert low < 0 < high, "what is gained in one of two steps may be nothing"


def test_half_of_the_steps_waiting_leave_the_median_among_the_recorded_steps() -> None:
    """The 80 % interval reaches from a quick step to one that waits, and to none that was never seen."""
    lengths = [100 + i for i in range(15)] + [400 + 10 * i for i in range(14)]
    found = simulate(steps_of(*([each - 5, 5] for each in lengths))).interval_s()
    assert 0.100 <= found.low_s < 0.114
    assert 0.400 < found.high_s < 0.53


def test_other_steps_are_not_paired() -> None:
    before, after = steps_of([53], [87], [60]), steps_of([50], [84])
    low, high = saved_s(before, after)
    assert low < 0 < high and high - low > T * 0.034


def test_factors_of_two_steps_are_as_far_apart_as_their_classes() -> None:
    total = np.zeros((2, 7))
    total[:, 3], total[:, 0] = (53, 87), (10, 10)
    drawn, _, _ = factors(total, np.random.default_rng(0), 4000)
    assert np.std(drawn[3]) == pytest.approx(np.sqrt(2) * 34 / 140, rel=0.1)
    assert np.std(drawn[0]) == pytest.approx(0.005, rel=0.1)


@pytest.mark.parametrize(
    ("freedom", "said"), [(1, 3.0777), (2, 1.8856), (3, 1.6377), (4, 1.5332), (5, 1.4759), (9, 1.3830), (30, 1.3104)]
)
def test_quantiles_of_student_are_those_of_the_tables(freedom: int, said: float) -> None:
    assert t_quantile(0.9, freedom) == pytest.approx(said, abs=1e-4)
