"""Edits that keep rows: they hold the graph valid, leave the original alone and mean what they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import GraphError
from foretrace.graph.edit import cut, remove, retime, scale
from foretrace.graph.select import select
from foretrace.graph.taskgraph import EdgeKind, TaskGraph, TaskKind
from foretrace.testing.technique import check_valid
from tests.graph.small_graphs import (
    CPU,
    STREAM_A,
    STREAM_B,
    Recording,
    columns,
    recordings,
    start_end,
    total,
)

SEEDS = st.integers(0, 2**31)


def some(graph: TaskGraph, seed: int, share: float = 0.3) -> np.ndarray:
    chosen: np.ndarray = np.random.default_rng(seed).random(len(graph)) < share
    return chosen


@given(graph=recordings(), seed=SEEDS, by=st.floats(0, 3))
def test_every_edit_keeps_the_graph_valid_and_the_original_untouched(graph: TaskGraph, seed: int, by: float) -> None:
    before, mask = columns(graph), some(graph, seed)
    edges = np.random.default_rng(seed).random(graph.edges) < 0.1
    order = np.isin(graph.edge_kind, (EdgeKind.PROGRAM, EdgeKind.STREAM))
    for edited in (
        scale(graph, mask, by),
        retime(graph, mask, np.arange(mask.sum())),
        remove(graph, mask),
        cut(graph, edges & ~order),
    ):
        check_valid(edited)
        assert len(edited) == len(graph) and len(edited.changes) == len(graph.changes) + 1
    assert columns(graph) == before and graph.changes == ()


@given(graph=recordings(), seed=SEEDS)
def test_scaling_by_one_changes_no_column(graph: TaskGraph, seed: int) -> None:
    assert columns(scale(graph, some(graph, seed), 1)) == columns(graph)


@given(graph=recordings(), seed=SEEDS)
def test_removing_never_delays_anything(graph: TaskGraph, seed: int) -> None:
    edited = remove(graph, some(graph, seed))
    assert np.all(start_end(edited)[1] <= start_end(graph)[1])
    assert total(edited) <= total(graph)


@given(graph=recordings(), seed=SEEDS)
def test_removing_twice_is_removing_both(graph: TaskGraph, seed: int) -> None:
    first, second = some(graph, seed), some(graph, seed + 1)
    one, two = remove(graph, first | second), remove(remove(graph, first), second)
    assert np.array_equal(one.gone, two.gone)
    assert np.array_equal(start_end(one)[1][~one.gone], start_end(two)[1][~one.gone])


@given(graph=recordings())
def test_without_device_work_only_the_host_is_left(graph: TaskGraph) -> None:
    edited = remove(graph, select(graph, kind="kernel"))
    stays = ~edited.gone & (edited.lane == CPU)
    assert total(edited) == edited.dur[stays].sum()
    assert not stays[select(graph, name="cudaLaunchKernel")].any()


def two_steps() -> TaskGraph:
    recording = Recording()
    recording.mark()
    recording.work(10)
    recording.launch(STREAM_A, "gemm", 100)
    recording.launch(STREAM_A, "relu", 40)
    recording.synchronise()
    recording.mark()
    return recording.graph()


def test_a_removed_kernel_takes_its_launch_and_one_gap() -> None:
    graph = two_steps()
    edited = remove(graph, select(graph, name="relu"))
    assert edited.changes[-1].what == "removed 1 kernel and 1 launch"
    assert edited.changes[-1].tasks == 2
    # 10 work, launch latency 5, 100 gemm, 2 until the return; before: a gap of 1 and 40 more
    assert total(graph) == 10 + 5 + 100 + 1 + 40 + 2
    assert total(edited) == 10 + 5 + 100 + 2


def test_a_removed_call_takes_its_return() -> None:
    graph = two_steps()
    edited = remove(graph, select(graph, name="cudaStreamSynchronize"))
    assert edited.gone[graph.kind == TaskKind.RETURN].all()
    assert total(edited) == 10 + 3 + 3
    assert edited.changes[-1].what == "removed 1 call"


def test_one_launch_of_many_kernels_goes_with_the_last() -> None:
    recording = Recording()
    recording.mark()
    first = recording.launch(STREAM_A, "gemm", 10)
    second = recording.task(TaskKind.KERNEL, STREAM_A, "relu", 10)
    recording.edge(recording.launches[first], second, EdgeKind.LAUNCH, 5, True)
    recording.mark()
    graph = recording.graph()
    call = graph.kind == TaskKind.CALL
    one = remove(graph, select(graph, name="gemm"))
    assert not one.gone[call].any()
    assert remove(one, select(one, name="relu")).gone[call].all()


def test_contention_ends_with_either_kernel() -> None:
    recording = Recording()
    recording.mark()
    gemm = recording.launch(STREAM_A, "gemm", 100)
    relu = recording.launch(STREAM_B, "relu", 10)
    recording.edge(gemm, relu, EdgeKind.CONTENTION, 0)
    recording.synchronise()
    recording.mark()
    graph = recording.graph()
    contention = EdgeKind.CONTENTION
    assert (remove(graph, select(graph, name="gemm")).edge_kind == contention).sum() == 0


def full_queue(places: int, kernels: int) -> TaskGraph:
    """A cheap thread ahead of a slow stream; a launch waits for the kernel `places` before its own."""
    recording = Recording()
    recording.mark()
    launched: list[int] = []
    for i in range(kernels):
        launched.append(recording.launch(STREAM_A, "gemm" if i % 2 else "relu", 100))
        if i >= places:
            back = recording.task(TaskKind.RETURN, CPU, "return", 0)
            recording.edge(launched[i - places], back, EdgeKind.QUEUE, 1)
    recording.mark()
    return recording.graph()


def test_a_full_queue_is_counted_again_after_a_removal() -> None:
    graph, places = full_queue(4, 20), 4
    edited = remove(graph, select(graph, name="relu"))
    check_valid(edited)
    same = full_queue(places, 10)  # the recording that has no relu kernels
    assert total(edited) == total(same)
    assert total(remove(graph, select(graph, kind="kernel"))) == 0


def test_negative_factors_are_refused() -> None:
    graph = two_steps()
    with pytest.raises(GraphError, match="negative"):
        scale(graph, select(graph), -1)
    with pytest.raises(GraphError, match="negative"):
        scale(graph, select(graph), float("nan"))


def test_changes_are_told_in_words() -> None:
    graph = two_steps()
    assert scale(graph, select(graph, kind="kernel"), 0.5).changes[-1].what == "scaled 2 kernels by 0.5"
    assert cut(graph, graph.edge_kind == EdgeKind.SYNC).changes[-1].what == "cut 1 sync edges"
    change = remove(graph, select(graph, name="nothing")).changes[-1]
    assert (change.what, change.tasks) == ("removed no tasks", 0)
