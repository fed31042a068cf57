"""Edits that add or move tasks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import GraphError, NotApplicableError
from foretrace.graph.edit import remove
from foretrace.graph.insert import DeviceTask, HostTask, insert, typical
from foretrace.graph.select import select
from foretrace.graph.taskgraph import EdgeKind, Phase, TaskGraph, TaskKind
from foretrace.testing.technique import check_valid
from tests.graph.small_graphs import (
    CPU,
    STREAM_A,
    Recording,
    columns,
    recordings,
    start_end,
    total,
)

SEEDS = st.integers(0, 2**31)


def one_step(*, sync: bool = True) -> TaskGraph:
    recording = Recording()
    recording.mark()
    recording.work(10)
    recording.launch(STREAM_A, "gemm", 100)
    recording.work(7)
    if sync:
        recording.synchronise()
    recording.work(20)
    recording.mark()
    return recording.graph()


def row(graph: TaskGraph, name: str) -> int:
    return int(np.flatnonzero(select(graph, name=name))[0])


@given(graph=recordings(), seed=SEEDS, dur=st.integers(0, 30))
def test_insertion_keeps_the_graph_valid_and_never_speeds_it_up(graph: TaskGraph, seed: int, dur: int) -> None:
    before = columns(graph)
    random = np.random.default_rng(seed)
    host = np.flatnonzero((graph.lane == CPU) & (graph.kind != TaskKind.MARK))
    device = np.flatnonzero(graph.on_device)
    if not len(host):
        return
    new: list[HostTask | DeviceTask] = [
        HostTask(after=int(random.choice(host)), name="cast", dur_ns=dur) for _ in range(random.integers(1, 4))
    ]
    if len(device):
        for _ in range(random.integers(0, 3)):
            anchor = int(random.choice(device))
            call = int(graph.src[(graph.dst == anchor) & (graph.edge_kind == EdgeKind.LAUNCH)][0])
            new.append(DeviceTask(after=anchor, launched_after=call, name="cast_kernel", dur_ns=dur))
    edited = insert(graph, new)
    check_valid(edited)
    assert columns(graph) == before
    kernels = sum(isinstance(task, DeviceTask) for task in new)
    assert len(edited) == len(graph) + len(new) + kernels
    assert total(edited) >= total(graph)
    undone = remove(edited, select(edited, name=("cast", "cast_kernel")))
    assert total(undone) == total(graph)


def test_a_kernel_brings_its_launch_and_its_wait() -> None:
    graph = one_step()
    gemm, call = row(graph, "gemm"), row(graph, "cudaLaunchKernel")
    usual = typical(graph)
    assert (usual.call_name, usual.call_ns, usual.latency_ns) == ("cudaLaunchKernel", 3, 5)
    edited = insert(graph, [DeviceTask(after=gemm, launched_after=call, name="cast", dur_ns=40)])
    assert edited.changes[-1].what == "inserted 1 device task with its launch"
    # the synchronisation waits for the new kernel; gap 0 because the recording shows none
    assert total(edited) == total(graph) + 40
    cast = row(edited, "cast")
    assert edited.phase[cast] == Phase.FORWARD and edited.step[cast] == 0
    launch = edited.src[(edited.dst == cast) & (edited.edge_kind == EdgeKind.LAUNCH)]
    assert edited.names[edited.name[launch[0]]] == "cudaLaunchKernel"


def test_what_is_launched_after_a_synchronisation_is_not_waited_for() -> None:
    graph = one_step()
    gemm, back = row(graph, "gemm"), row(graph, "return")
    edited = insert(graph, [DeviceTask(after=gemm, launched_after=back, name="cast", dur_ns=400)])
    assert total(edited) == total(graph) + 3  # only the new call
    sync = row(graph, "cudaStreamSynchronize")
    same = insert(graph, [DeviceTask(after=gemm, launched_after=sync, name="cast", dur_ns=400)])
    assert total(same) == total(edited), "nothing comes between a blocking call and its return"


def test_a_blocking_task_holds_its_thread() -> None:
    graph = one_step(sync=False)
    gemm, call = row(graph, "gemm"), row(graph, "cudaLaunchKernel")
    new = DeviceTask(after=gemm, launched_after=call, name="copy", dur_ns=40, kind=TaskKind.COPY, blocking=True)
    edited = insert(graph, [new])
    check_valid(edited)
    assert total(graph) == 10 + 3 + 7 + 20
    assert total(edited) == 10 + 5 + 100 + 40 + 7 + 20


def test_several_tasks_after_one_row_keep_their_order() -> None:
    graph = one_step()
    call = row(graph, "cudaLaunchKernel")
    edited = insert(graph, [HostTask(after=call, name=name, dur_ns=1) for name in ("first", "second", "third")])
    start, _ = start_end(edited)
    times = [start[row(edited, name)] for name in ("first", "second", "third")]
    assert times == sorted(times) and len(set(times)) == 3
    check_valid(edited)


def test_a_full_queue_counts_what_is_inserted() -> None:
    recording = Recording()
    recording.mark()
    kernels = []
    for i in range(8):
        kernels.append(recording.launch(STREAM_A, "gemm", 100))
        if i >= 3:
            back = recording.task(TaskKind.RETURN, CPU, "return", 0)
            recording.edge(kernels[i - 3], back, EdgeKind.QUEUE)
    recording.mark()
    graph = recording.graph()
    first = row(graph, "gemm")
    call = row(graph, "cudaLaunchKernel")
    edited = insert(graph, [DeviceTask(after=first, launched_after=call, name="relu", dur_ns=50)])
    queue = edited.edge_kind == EdgeKind.QUEUE
    # launch 3 waited for kernel 0, three places ahead; the new kernel holds that place now
    waits = edited.src[queue & (edited.dst == edited.dst[queue].min())]
    assert [edited.names[edited.name[w]] for w in waits] == ["relu"]


def test_anchors_must_be_on_the_right_kind_of_lane() -> None:
    graph = one_step()
    gemm, call = row(graph, "gemm"), row(graph, "cudaLaunchKernel")
    with pytest.raises(GraphError, match="wrong kind of lane"):
        insert(graph, [HostTask(after=gemm, name="cast", dur_ns=1)])
    with pytest.raises(GraphError, match="wrong kind of lane"):
        insert(graph, [DeviceTask(after=call, launched_after=call, name="cast", dur_ns=1)])
    assert insert(graph, []) is graph


def test_typical_launches_need_launches() -> None:
    recording = Recording()
    recording.mark()
    recording.work(1)
    recording.mark()
    with pytest.raises(NotApplicableError, match="launches no kernel"):
        typical(recording.graph())
