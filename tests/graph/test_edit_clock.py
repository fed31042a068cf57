"""Steps are measured where they finish."""

from __future__ import annotations

from itertools import pairwise

from foretrace.graph.clock import host_runs_ahead, last_launched, measure_on_device
from foretrace.graph.taskgraph import TaskGraph
from foretrace.testing.technique import check_valid
from foretrace.trace.trace import LaneKind
from tests.graph.small_graphs import STREAM_A, STREAM_B, Recording, start_end


def steps(graph: TaskGraph) -> list[int]:
    _, end = start_end(graph)
    marks = end[graph.marks]
    return [int(b - a) for a, b in pairwise(marks)]


def recording(kernel: int, *, sync: bool) -> TaskGraph:
    """Three steps of 13 host nanoseconds and a kernel on each of two streams."""
    made = Recording()
    made.mark()
    for _ in range(3):
        made.work(7)
        made.launch(STREAM_A, "gemm", kernel)
        made.launch(STREAM_B, "relu", kernel // 2)
        if sync:
            made.synchronise()
        made.mark()
    return made.graph()


def test_a_host_that_waits_measures_its_own_steps() -> None:
    graph = recording(100, sync=True)
    assert not host_runs_ahead(graph, start_end(graph)[1])


def test_a_host_that_runs_ahead_is_found_and_measured_on_the_device() -> None:
    graph = recording(100, sync=False)
    assert host_runs_ahead(graph, start_end(graph)[1])
    assert steps(graph) == [13, 13, 13]
    moved = measure_on_device(graph)
    check_valid(moved)
    assert steps(moved)[1:] == [101, 101], "the busier stream with its gap"
    assert not host_runs_ahead(moved, start_end(moved)[1])
    assert moved.lanes[-1].kind == LaneKind.MODEL
    assert moved.changes[-1].what == "the host runs ahead now: steps are measured on the device"


def test_a_short_kernel_leaves_the_clock_alone() -> None:
    graph = recording(10, sync=False)
    assert not host_runs_ahead(graph, start_end(graph)[1])


def test_the_last_launched_task_of_every_stream_is_found() -> None:
    graph = recording(100, sync=False)
    last = last_launched(graph)
    assert last.shape == (2, 4) and (last[:, 0] == -1).all()
    for column in range(1, 4):
        assert (graph.step[last[:, column]] == column - 1).all()
    host_only = Recording()
    host_only.mark()
    host_only.work(5)
    host_only.mark()
    assert last_launched(host_only.graph()).shape == (0, 2)
