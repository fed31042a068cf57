"""Ranges that a graph carries: on its tasks, through edits, files and joins, and into the step's interval."""

from __future__ import annotations

from dataclasses import replace
from math import hypot
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.graph import edit
from foretrace.graph.builder import build
from foretrace.graph.insert import HostTask, insert
from foretrace.graph.store import load, save
from foretrace.graph.taskgraph import Carried, Doubt, EdgeKind, TaskGraph, TaskKind
from foretrace.simulate.doubt import assumed, doubted, ends, work_between
from foretrace.simulate.timeline import Timeline, simulate
from foretrace.techniques.whatif import whatif
from tests.kineto_files import Recording
from tests.simulate.small import small_graph
from tests.strategies import task_graphs


def small() -> TaskGraph:
    """Three launches of 10 us, kernels of 40 us, and a wait for them; then host work of 100 us."""
    r = Recording()
    at = 10.0
    for i in range(3):
        r.op("aten::mm", at - 4, 16)
        r.launch("gemm", at, 10, 25 + 42 * i, 40)
        at += 20
    r.call("cudaDeviceSynchronize", at, 170 - at)
    r.op("aten::to", 171, 100)
    r.note("ProfilerStep#1", 0, 280)
    return build(r.trace())


def estimated(graph: TaskGraph, *, kernels: tuple[float, float], host: tuple[float, float]) -> TaskGraph:
    """Every task that takes time as two sources estimated it, none recorded."""
    for source, rows, (low, high) in (
        ("kernels", np.flatnonzero(graph.on_device), kernels),
        ("host", np.flatnonzero(~graph.on_device), host),
    ):
        graph = doubted(graph, rows, source, np.full(len(rows), low), np.full(len(rows), high))
    return graph


def interval(graph: TaskGraph) -> tuple[float, float]:
    found = simulate(graph).interval_s()
    return found.low_s, found.high_s


def test_sources_are_independent_and_each_is_off_in_one_direction() -> None:
    graph = estimated(small(), kernels=(0.5, 2.0), host=(0.8, 1.5))
    step = simulate(graph).step_time_s
    moved = []
    for doubt, low, high in ends(graph):
        assert (doubt.low, doubt.high) in ((0.5, 2.0), (0.8, 1.5))
        moved.append((step - simulate(low).step_time_s, simulate(high).step_time_s - step))
    assert len(moved) == 2
    low_s, high_s = interval(graph)
    assert step - low_s == pytest.approx(hypot(*(each[0] for each in moved)))
    assert high_s - step == pytest.approx(hypot(*(each[1] for each in moved)))


def test_a_recorded_graph_has_the_noise_it_had() -> None:
    timeline = simulate(small())
    assert timeline.shifts == () and timeline.interval_s() == timeline.noise_s()


@given(graph=task_graphs(), low=st.floats(0.1, 1.0), high=st.floats(1.0, 5.0))
@settings(max_examples=25)
def test_a_range_always_holds_its_step(graph: TaskGraph, low: float, high: float) -> None:
    rows = np.flatnonzero(graph.dur > 0)
    found = doubted(graph, rows, "model", np.full(len(rows), low), np.full(len(rows), high))
    step = simulate(graph).step_time_s
    low_s, high_s = interval(found)
    assert 0 <= low_s <= step + 1e-12 and step - 1e-12 <= high_s < float("inf")


def test_doubts_go_where_their_tasks_go(tmp_path: Path) -> None:
    graph = estimated(small(), kernels=(0.5, 2.0), host=(0.8, 1.5))
    again = load(save(graph, tmp_path / "a.graph"))
    assert again.info.doubts == graph.info.doubts and np.array_equal(again.doubt, graph.doubt)
    assert interval(again) == interval(graph)
    none_on_device = edit.remove(graph, graph.on_device)
    assert {doubt.source for doubt, _, _ in ends(none_on_device)} == {"host"}
    host = int(np.flatnonzero(graph.kind == TaskKind.CPU)[0])
    longer = insert(graph, [HostTask(after=host, name="more", dur_ns=1_000_000)])
    new = int(np.flatnonzero(np.array(longer.names)[longer.name] == "more")[0])
    assert longer.info.doubts[longer.doubt[new]].source == "host"


def test_what_both_steps_rest_on_cancels_in_their_ratio() -> None:
    graph = estimated(small(), kernels=(0.5, 2.0), host=(0.5, 2.0))
    graph = replace(graph, info=replace(graph.info, doubts=tuple(replace(d, source="all") for d in graph.info.doubts)))
    found = whatif(graph, [])
    assert found.before_interval_s[1] > 1.5 * found.before_s
    assert found.ratio_interval == pytest.approx((1.0, 1.0), abs=0.02)


def test_an_assumption_of_durations_is_on_the_tasks_and_beside_what_was_known() -> None:
    graph = estimated(small(), kernels=(0.5, 2.0), host=(0.8, 1.5))
    device = graph.on_device
    low, high = (edit.scale(graph, device, by) for by in (0.9, 1.2))
    both = assumed(graph, low, high, "a technique")
    assert both is not None
    assert {doubt.source for doubt, _, _ in ends(both)} == {"kernels", "host", "a technique"}
    assert interval(both)[1] > interval(graph)[1]
    assert assumed(graph, edit.remove(graph, device), high, "a technique") is None


def test_what_no_task_stands_for_is_carried_with_the_step() -> None:
    graph = small()
    step = simulate(graph).step_time_s
    carried = Carried(source="one", faster_s=0.1 * step, slower_s=0.3 * step, of_s=step)
    graph = replace(graph, info=replace(graph.info, carried=(carried,)))
    slower = edit.scale(graph, np.ones(len(graph), dtype=np.bool_), 2.0)
    for each in (graph, slower):
        timeline: Timeline = simulate(each)
        (shift,) = timeline.shifts
        assert shift.slower_s == pytest.approx(0.3 * timeline.step_time_s, rel=1e-6)
    faster = simulate(edit.scale(graph, np.ones(len(graph), dtype=np.bool_), 0.1))
    assert faster.shifts[0].slower_s == pytest.approx(0.3 * step)


def test_a_later_change_may_uncover_what_an_assumption_decides() -> None:
    graph = small()
    step = simulate(graph).step_time_s
    more = insert(graph, [HostTask(after=3, like=3, name="more", dur_ns=30_000)])
    less = edit.scale(graph, graph.on_device, 0.5)
    work_s = work_between(graph, (less, more))
    assert work_s == pytest.approx((60e-6, 30e-6))
    carried = Carried(source="one", faster_s=0.0, slower_s=1e-6, of_s=step, work_s=work_s)
    graph = replace(graph, info=replace(graph.info, carried=(carried,)))
    assert simulate(graph).shifts[0].slower_s == pytest.approx(1e-6)
    (shift,) = simulate(edit.scale(graph, np.ones(len(graph), dtype=np.bool_), 0.9)).shifts
    assert shift.faster_s == pytest.approx(60e-6) and shift.slower_s == pytest.approx(30e-6)


def test_a_table_that_leads_in_a_circle_ends() -> None:
    graph = estimated(small(), kernels=(0.5, 2.0), host=(0.8, 1.5))
    bad = (*(replace(each, beside=1) for each in graph.info.doubts), Doubt(source="x", low=1, high=1, beside=9))
    assert simulate(replace(graph, info=replace(graph.info, doubts=bad))).interval_s().high_s > 0


def test_an_assumption_that_moves_nothing_or_what_took_no_time_is_on_no_task() -> None:
    graph = small_graph([(0, TaskKind.OPERATOR, 0), (0, TaskKind.OPERATOR, 10)], [(0, 1, EdgeKind.PROGRAM, 0, False)])
    low, high, first = (graph.with_columns(dur=np.array(each)) for each in ([0, 5], [0, 20], [1, 10]))
    assert assumed(graph, graph, graph, "source") is None and assumed(graph, graph, first, "source") is None
    found = assumed(graph, low, high, "source")
    assert found is not None and found.dur.tolist() == [0, 10]


@pytest.mark.parametrize("factors", [(-0.5, 1.0), (1.0, np.nan), (1.0, np.inf)])
def test_a_factor_that_no_time_has_is_refused(factors: tuple[float, float]) -> None:
    low, high = (np.array([each]) for each in factors)
    with pytest.raises(ValueError, match="model: want finite factors, 0 or more"):
        doubted(small(), np.array([0]), "model", low, high)
