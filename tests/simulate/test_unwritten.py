"""Memory that a pass does not write never reaches a result: what is found does not depend on what it held before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import GraphError
from foretrace.graph.taskgraph import ALL_COLUMNS, EdgeKind, TaskGraph, TaskKind
from foretrace.simulate import engine
from foretrace.simulate.flows.flows import simulate_flows
from foretrace.simulate.replay import replay, replay_copies, replay_variants, structure
from foretrace.simulate.schedule import schedule_in_order
from foretrace.simulate.timeline import simulate
from foretrace.simulate.unwritten import POISON, poisoned, unwritten, written
from tests.simulate.small import small_graph
from tests.simulate.test_flows import capacities, flows_of
from tests.strategies import task_graphs

Result = tuple[npt.NDArray[Any], ...]


def same_whatever_was_there(run: Callable[[], Result]) -> None:
    """The result is the same over clean memory and over two kinds of poison."""
    results = []
    for value in (None, POISON, POISON + 12_345):
        with poisoned(value):
            try:
                results.append(run())
            except GraphError as error:
                results.append((np.array(str(error)),))
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))


@given(task_graphs(), st.data())
def test_of_replays(graph: TaskGraph, data: st.DataObject) -> None:
    group = np.array(data.draw(st.lists(st.integers(-1, 2), min_size=len(graph), max_size=len(graph))), dtype=np.int32)
    scale = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=15, max_size=15)))
    scale = scale.reshape(3, 5)
    gone = scale == 0.5
    meets = np.isin(graph.edge_kind, (2, 3))
    rows = np.arange(len(graph), dtype=np.int32)
    same_whatever_was_there(lambda: replay(graph))
    same_whatever_was_there(lambda: (replay_variants(graph, group, scale, gone),))
    same_whatever_was_there(lambda: (replay_variants(graph, group, scale, gone, full=True),))
    same_whatever_was_there(lambda: (replay_copies(graph, meets, group, scale, rows),))


@given(task_graphs(lane_order=None, ranks=2))
def test_of_schedules(graph: TaskGraph) -> None:
    def run() -> Result:
        result = schedule_in_order(graph)
        return result.start, result.end, result.order

    def causes() -> Result:
        timeline = simulate(graph)
        return timeline.slack(), timeline.critical_path().task, timeline.sensitivity().saved_if_zero_ns

    same_whatever_was_there(run)
    same_whatever_was_there(causes)


@given(task_graphs(ranks=2), st.data())
def test_of_flows(graph: TaskGraph, data: st.DataObject) -> None:
    capacity = np.array(data.draw(capacities))
    flows = data.draw(flows_of(graph, len(capacity)))
    same_whatever_was_there(lambda: simulate_flows(graph, flows, capacity))


def test_poison_shows_what_a_pass_left_out() -> None:
    """The same pass over edges that go backward, behind the back of the check, is caught."""
    loop: Any = engine.replay
    n = 3
    in_ptr, from_start = np.array([0, 1, 1, 1]), np.zeros(1, dtype=np.uint8)
    src, zeros = np.array([2], dtype=np.uint32), np.zeros(n, dtype=np.int64)
    columns = [in_ptr, src, from_start, np.zeros(1, dtype=np.int64), zeros, zeros, zeros]
    for column in columns:
        column.flags.writeable = False
    with poisoned():
        times = unwritten(2 * n)
        loop(*columns, times)
        with pytest.raises(AssertionError, match="1 of 3 times come from memory that nobody wrote"):
            written(times[n:])


def test_poison_shows_in_variants() -> None:
    """A slot that is read and never written, behind the back of what lays slots out, is caught."""
    graph = small_graph(
        [(0, TaskKind.CPU, 5), (0, TaskKind.CPU, 5), (0, TaskKind.CPU, 6)],
        [(0, 1, EdgeKind.PROGRAM, 0, False), (1, 2, EdgeKind.PROGRAM, 0, False)],
    )
    group, scale = np.zeros(3, dtype=np.int32), np.ones((1, 2))
    replay_variants(graph, group, scale)
    *edges, read, slot, used = graph.passed["value slots"]
    graph.passed["value slots"] = (*edges, read + np.uint32(used), slot, 2 * used)
    with poisoned(), pytest.raises(AssertionError, match="come from memory that nobody wrote"):
        replay_variants(graph, group, scale)


@given(task_graphs())
def test_engines_take_their_columns_from_sound_graphs(graph: TaskGraph) -> None:
    replay(graph)
    assert graph.passed.keys() >= ALL_COLUMNS
    assert structure(graph)[1].dtype == np.uint32
