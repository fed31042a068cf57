"""The compiled engines against their plain-Python definitions, and the definitions against small known answers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import MissingExtraError
from foretrace.graph.sound import LATEST
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, TaskGraph, TaskKind
from foretrace.simulate import engine
from foretrace.simulate.replay import replay, replay_variants
from foretrace.simulate.schedule import schedule, schedule_in_order
from tests.simulate import twins
from tests.simulate.small import small_graph
from tests.strategies import task_graphs


@given(task_graphs(ranks=2), st.booleans())
def test_replay_equals_its_twin(graph: TaskGraph, structural: bool) -> None:
    start, end = replay(graph, structural=structural)
    assert (start.tolist(), end.tolist()) == twins.replay(graph, structural=structural)


@given(task_graphs(ranks=2), st.integers(1, 4), st.integers(0, 90), st.integers(0, 2**32 - 1))
def test_variants_equal_single_replays_of_edited_graphs(
    graph: TaskGraph, n_groups: int, n_variants: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    group = random.integers(-1, n_groups, len(graph)).astype(np.int32)
    scale = random.choice([0.0, 0.25, 0.5, 1.0, 1.7, random.random()], (n_groups, n_variants))
    for gone in (None, random.random(scale.shape) < 0.3):
        ends = replay_variants(graph, group, scale, gone, full=True)
        assert ends.tolist() == (twins.replay_variants(graph, group, scale, gone) or [[]] * len(graph))
        assert np.array_equal(replay_variants(graph, group, scale, gone), ends[graph.marks])


@given(task_graphs(lane_order=True))
def test_schedule_of_ordered_lanes_is_the_replay(graph: TaskGraph) -> None:
    for mine, theirs in zip(schedule(graph), replay(graph), strict=True):
        assert np.array_equal(mine, theirs)


@given(task_graphs(lane_order=None))
def test_schedule_equals_its_twin(graph: TaskGraph) -> None:
    result = schedule_in_order(graph)
    start, end, order = twins.schedule(graph)
    assert (result.start.tolist(), result.end.tolist()) == (start, end)
    assert sorted(result.order.tolist()) == sorted(order) == list(range(len(graph)))


@given(task_graphs(lane_order=False))
def test_an_unordered_lane_runs_one_task_at_a_time(graph: TaskGraph) -> None:
    start, end = schedule(graph)
    for lane in range(1, len(graph.lanes)):
        rows = np.flatnonzero(graph.lane == lane)
        rows = rows[np.lexsort((end[rows], start[rows]))]
        assert np.all(start[rows][1:] >= end[rows][:-1])


def test_a_machine_without_numba_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "foretrace.compiled")
    with pytest.raises(MissingExtraError, match="numba cannot be imported"):
        importlib.import_module("foretrace.compiled")


def test_memory_mapped_columns_compile_nothing_new(tmp_path: Path) -> None:
    graph = small_graph([(0, TaskKind.CPU, 5), (0, TaskKind.CPU, 6)], [(0, 1, EdgeKind.PROGRAM, 0, False)])
    replay(graph)
    np.save(tmp_path / "dur.npy", graph.dur)
    mapped = np.load(tmp_path / "dur.npy", mmap_mode="r")
    compiled: Any = engine.replay
    versions = len(compiled.signatures)
    assert replay(graph.with_columns(dur=mapped))[1].tolist() == [5, 11]
    assert len(compiled.signatures) == versions


def test_wrong_shapes_are_refused() -> None:
    graph = small_graph([(0, TaskKind.CPU, 5)], [])
    group = np.zeros(1, dtype=np.int32)
    with pytest.raises(ValueError, match="labels below 0"):
        replay_variants(graph, group, np.ones((0, 2)))
    with pytest.raises(ValueError, match="gone"):
        replay_variants(graph, group, np.ones((1, 2)), np.zeros((1, 1), dtype=np.bool_))
    with pytest.raises(ValueError, match="finite"):
        replay_variants(graph, group, np.full((1, 2), np.nan))


def test_replay_reads_the_equation() -> None:
    """The start is max(release, anchors + lags) + delay, by hand."""
    graph = small_graph(
        [(0, TaskKind.CALL, 10), (1, TaskKind.KERNEL, 50), (1, TaskKind.KERNEL, 7), (0, TaskKind.RETURN, 0)],
        [
            (0, 1, EdgeKind.LAUNCH, 4, True),  # 4 after the start of the call
            (1, 2, EdgeKind.STREAM, -5, False),  # overlaps its predecessor
            (0, 3, EdgeKind.PROGRAM, 0, False),
            (2, 3, EdgeKind.SYNC, 2, False),
        ],
    )
    graph = graph.with_columns(delay=np.array([0, 3, 0, 0]))
    start, end = replay(graph)
    assert start.tolist() == [0, 7, 52, 61]
    assert end.tolist() == [10, 57, 59, 61]
    assert replay(graph, structural=True)[0].tolist() == [0, 4, 49, 58]


def test_a_removed_task_takes_no_time_but_keeps_order() -> None:
    """Two kernels, the second gone: its wait still waits for the first; its launch and its gap are ignored."""
    graph = small_graph(
        [
            (0, TaskKind.CALL, 5), (1, TaskKind.KERNEL, 50), (0, TaskKind.CALL, 100), (1, TaskKind.KERNEL, 30),
            (0, TaskKind.RETURN, 0),
        ],
        [
            (0, 1, EdgeKind.LAUNCH, 6, False), (0, 2, EdgeKind.PROGRAM, 0, False),
            (2, 3, EdgeKind.LAUNCH, 6, False), (1, 3, EdgeKind.STREAM, 2, False),
            (2, 4, EdgeKind.PROGRAM, 0, False), (3, 4, EdgeKind.SYNC, 9, False),
        ],
    )  # fmt: skip
    assert replay(graph)[1].tolist() == [5, 61, 105, 141, 150]
    second = graph.with_columns(gone=np.array([False, False, False, True, False]))
    assert replay(second)[1].tolist() == [5, 61, 105, 61, 105]
    with_call = graph.with_columns(gone=np.array([False, False, True, True, False]))
    assert replay(with_call)[1].tolist() == [5, 61, 5, 61, 70]


def test_scaled_durations_round_halves_to_even() -> None:
    graph = small_graph([(0, TaskKind.CPU, 5), (1, TaskKind.KERNEL, 7), (2, TaskKind.KERNEL, 10**15 + 1)], [])
    ends = replay_variants(graph, np.zeros(3, dtype=np.int32), np.array([[0.5, 1.0]]), full=True)
    assert ends.tolist() == [[2, 5], [4, 7], [(10**15) // 2, 10**15 + 1]]
    longer = small_graph([(0, TaskKind.CPU, 2**53 + 2), (1, TaskKind.KERNEL, 7)], [])  # too long for the quicker loop
    ends = replay_variants(longer, np.zeros(2, dtype=np.int32), np.array([[0.5, 1.0]]), full=True)
    assert ends.tolist() == [[2**52 + 1, 2**53 + 2], [4, 7]]


@pytest.mark.parametrize("release", [NO_RELEASE, -LATEST, 0, 2**59 - 20, 2**59, LATEST])
def test_variants_are_exact_however_early_or_late(release: int) -> None:
    """From the earliest release and the longest wait before it to later than the quicker loop goes."""
    graph = small_graph(
        [(0, TaskKind.CPU, 7), (1, TaskKind.KERNEL, 9), (1, TaskKind.KERNEL, 4)],
        [(0, 1, EdgeKind.LAUNCH, -LATEST, True), (0, 2, EdgeKind.LAUNCH, 3, False), (1, 2, EdgeKind.STREAM, 1, False)],
    )
    graph = graph.with_columns(release=np.array([release, NO_RELEASE, NO_RELEASE]))
    group, scale = np.arange(3, dtype=np.int32), np.array([[1.0, 0.0], [1.0, -0.0], [1.0, 0.5]])
    for gone in (None, np.eye(3, 2, dtype=np.bool_)):
        ends = replay_variants(graph, group, scale, gone, full=True)
        assert ends.tolist() == twins.replay_variants(graph, group, scale, gone)


def test_an_unordered_lane_prefers_small_priorities() -> None:
    """Rows 1-3 are ready when row 0 still runs: the urgent one first, then by ready time, then by row."""
    graph = small_graph(
        [(0, TaskKind.KERNEL, 10), (0, TaskKind.KERNEL, 10), (0, TaskKind.KERNEL, 10), (0, TaskKind.KERNEL, 10)],
        [(0, 1, EdgeKind.STREAM, 0, False)],
        ordered=False,
    )
    graph = graph.with_columns(release=np.array([0, 3, 2, 9]), priority=np.array([0, 0, 0, -1], dtype=np.int32))
    assert schedule(graph)[0].tolist() == [0, 30, 20, 10]
    assert schedule(graph.with_columns(priority=np.zeros(4, dtype=np.int32)))[0].tolist() == [0, 20, 10, 30]


def test_a_lane_becomes_free_after_tasks_become_ready() -> None:
    """Row 2 is ready at the very moment when the lane becomes free, and more urgent than row 1."""
    graph = small_graph(
        [(0, TaskKind.KERNEL, 10), (0, TaskKind.KERNEL, 10), (0, TaskKind.KERNEL, 10)], [], ordered=False
    ).with_columns(release=np.array([0, 1, 10]), priority=np.array([0, 0, -1], dtype=np.int32))
    assert schedule(graph)[0].tolist() == [0, 20, 10]
