"""Each rule of the builder on the smallest recording that shows it."""

from __future__ import annotations

import numpy as np
import pytest

from foretrace.errors import GraphError
from foretrace.graph.builder import build
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, Phase, TaskGraph, TaskKind
from foretrace.simulate.replay import replay
from tests.kineto_files import AUTOGRAD, Recording


def tasks(graph: TaskGraph, kind: TaskKind, name: str = "") -> list[int]:
    return [int(v) for v in np.flatnonzero(graph.kind == kind) if name in graph.names[graph.name[v]]]


def edges(graph: TaskGraph, src: int, dst: int) -> list[EdgeKind]:
    into = range(int(graph.in_ptr[dst]), int(graph.in_ptr[dst + 1]))
    return [EdgeKind(graph.edge_kind[e]) for e in into if graph.src[e] == src]


def window(graph: TaskGraph) -> int:
    _, end = replay(graph)
    return int(end[graph.marks[-1]] - end[graph.marks[0]])


def faster(graph: TaskGraph, rows: list[int], by: float) -> TaskGraph:
    dur = graph.dur.copy()
    dur[rows] = np.rint(dur[rows] * by).astype(np.int64)
    return graph.with_columns(dur=dur)


def gpu_bound() -> Recording:
    """A step whose host waits for two kernels of 500 us in a stream synchronise."""
    r = Recording()
    r.note("ProfilerStep#1", 0, 1100)
    r.op("aten::mm", 10, 40)
    r.launch("gemm", 20, 6, 30, 500)
    r.launch("gemm", 60, 6, 531, 500)
    r.call("cudaStreamSynchronize", 80, 955)
    return r


def test_replay_is_exact() -> None:
    graph = build(gpu_bound().trace())
    start, _ = replay(graph)
    np.testing.assert_array_equal(start, graph.recorded)


def test_blocking_call_is_own_cost_and_wait() -> None:
    graph = build(gpu_bound().trace())
    [call] = tasks(graph, TaskKind.CALL, "Synchronize")
    [back] = tasks(graph, TaskKind.RETURN)
    last = tasks(graph, TaskKind.KERNEL)[-1]
    assert graph.dur[call] <= 20_000
    assert edges(graph, last, back) == [EdgeKind.SYNC]
    assert window(faster(graph, tasks(graph, TaskKind.KERNEL), 0.5)) == pytest.approx(600_000, rel=0.05)


def test_sync_waits_for_what_was_launched_before_it_not_for_what_ended_last() -> None:
    r = gpu_bound()
    r.launch("late", 1040, 6, 1050, 20)
    graph = build(r.trace())
    [back] = tasks(graph, TaskKind.RETURN)
    assert not edges(graph, tasks(graph, TaskKind.KERNEL, "late")[0], back)


def test_pageable_copy_to_device_returns_before_it_ends_and_stages_on_the_host() -> None:
    r = Recording()
    r.note("ProfilerStep#1", 0, 3000)
    for i in range(12):  # enough launches on an idle stream for a typical latency
        r.launch("k", 10 + 40 * i, 5, 18 + 40 * i, 4)
    r.copy("Memcpy HtoD (Pageable -> Device)", 600, 1900, 1008, 1527)
    graph = build(r.trace())
    [copy] = tasks(graph, TaskKind.COPY)
    [back] = tasks(graph, TaskKind.RETURN)
    into = slice(int(graph.in_ptr[back]), int(graph.in_ptr[back + 1]))
    sync = graph.edge_kind[into] == EdgeKind.SYNC
    assert graph.lag[into][sync].tolist() == [-35_000]
    [call] = tasks(graph, TaskKind.CALL, "Memcpy")
    assert graph.dur[call] == pytest.approx(400_000, abs=2_000)
    assert edges(graph, call, copy) == [EdgeKind.LAUNCH]


def test_small_pageable_copy_to_device_is_asynchronous() -> None:
    r = Recording()
    r.note("ProfilerStep#1", 0, 100)
    r.copy("Memcpy HtoD (Pageable -> Device)", 10, 5, 30, 1)
    assert not tasks(build(r.trace()), TaskKind.RETURN)


def test_copy_to_pageable_host_memory_waits_for_its_end() -> None:
    r = Recording()
    r.note("ProfilerStep#1", 0, 900)
    r.launch("k", 10, 5, 20, 700)
    r.copy("Memcpy DtoH (Device -> Pageable)", 30, 710, 721, 10)
    graph = build(r.trace())
    [copy], [back] = tasks(graph, TaskKind.COPY), tasks(graph, TaskKind.RETURN)
    assert edges(graph, copy, back) == [EdgeKind.SYNC]
    assert window(faster(graph, tasks(graph, TaskKind.KERNEL), 0.0)) < 250_000


def test_backward_thread_forks_and_joins() -> None:
    r = Recording()
    r.note("ProfilerStep#1", 0, 300)
    r.op("aten::mm", 10, 40, **{"Sequence number": 5})
    r.op("autograd::engine::evaluate_function: MmBackward0", 80, 100, tid=AUTOGRAD, **{"Sequence number": 5})
    r.launch("dgemm", 100, 5, 110, 20, tid=AUTOGRAD)
    r.op("aten::add", 200, 50)
    graph = build(r.trace())
    fork, join = tasks(graph, TaskKind.JOIN)
    kinds = [EdgeKind(k) for k in graph.edge_kind]
    assert kinds.count(EdgeKind.THREAD) == 2
    helper = [v for v in range(len(graph)) if graph.lanes[graph.lane[v]].stream == AUTOGRAD]
    assert edges(graph, fork, helper[0]) == [EdgeKind.THREAD]
    assert edges(graph, helper[-1], join) == [EdgeKind.THREAD]
    assert window(graph) - window(faster(graph, helper, 0.0)) == 100_000


def test_what_autograds_own_thread_does_between_nodes_is_backward_work() -> None:
    """Older AccumulateGrad, sums of residual gradients, buckets copied back; not so where forward work runs, too."""
    for forward, phase in ((False, Phase.BACKWARD), (True, Phase.FORWARD)):
        r = Recording()
        r.note("ProfilerStep#1", 0, 300)
        r.op("aten::mm", 10, 40, **{"Sequence number": 5})
        r.op("autograd::engine::evaluate_function: MmBackward0", 80, 20, tid=AUTOGRAD, **{"Sequence number": 5})
        r.op("torch::autograd::AccumulateGrad", 101, 20, tid=AUTOGRAD)
        r.launch("add", 105, 5, 115, 20, tid=AUTOGRAD)
        if forward:
            r.op("aten::relu", 130, 20, tid=AUTOGRAD, **{"Sequence number": 6})
        graph = build(r.trace())
        assert {int(graph.phase[v]) for v in tasks(graph, TaskKind.KERNEL, "add")} == {phase}


def test_backward_kernels_belong_to_the_forward_layer() -> None:
    r = Recording()
    r.note("ProfilerStep#1", 0, 300)
    r.module("Net_0", 5, 60)
    r.module("Linear_0", 8, 50)
    r.op("aten::linear", 10, 40, **{"Sequence number": 5})
    r.launch("gemm", 20, 5, 30, 20)
    r.op("autograd::engine::evaluate_function: AddmmBackward0", 80, 100, tid=AUTOGRAD, **{"Sequence number": 5})
    r.launch("dgemm", 100, 5, 110, 20, tid=AUTOGRAD)
    r.note("Optimizer.step#SGD.step", 200, 50)
    r.launch("sgd", 210, 5, 220, 5)
    graph = build(r.trace())
    layer = {graph.names[graph.name[v]]: graph.layers[graph.layer[v]] for v in tasks(graph, TaskKind.KERNEL)}
    assert layer == {"gemm": "Net_0.Linear_0", "dgemm": "Net_0.Linear_0", "sgd": "Optimizer.step#SGD.step"}
    phase = {graph.names[graph.name[v]]: Phase(graph.phase[v]) for v in tasks(graph, TaskKind.KERNEL)}
    assert phase == {"gemm": Phase.FORWARD, "dgemm": Phase.BACKWARD, "sgd": Phase.OPTIMIZER}
    assert graph.info.attributed_share == 1.0


def test_work_launched_before_the_recording_is_backlog() -> None:
    r = Recording()
    r.note("ProfilerStep#1", 100, 900)
    r.on_device("kernel", "before", 0, 400, 9999, 7)
    r.launch("mine", 120, 5, 401, 100)
    r.call("cudaDeviceSynchronize", 140, 365)
    graph = build(r.trace())
    assert graph.info.linked_share == pytest.approx(0.2)
    [before] = tasks(graph, TaskKind.KERNEL, "before")
    assert graph.release[before] == graph.recorded[before]
    assert not [e for e in range(graph.edges) if graph.src[e] == before and graph.edge_kind[e] == EdgeKind.LAUNCH]


def test_clocks_of_host_and_device_that_disagree_are_named() -> None:
    r = Recording()
    r.note("ProfilerStep#1", 0, 9000)
    r.copy("Memcpy DtoH (Device -> Pageable)", 100, 110, 150, 50)
    r.launch("early", 1000, 5, 10, 20)  # it ran before the copy whose end its launch came after
    with pytest.raises(GraphError, match=r"clocks disagree; record again, or .*\(the edges form a cycle"):
        build(r.trace())


def test_first_kernel_behind_unseen_work_has_a_release_not_a_long_latency() -> None:
    r = Recording()
    r.note("ProfilerStep#1", 0, 9000)
    r.launch("first", 10, 5, 8010, 100)
    graph = build(r.trace())
    [first] = tasks(graph, TaskKind.KERNEL)
    assert graph.release[first] == graph.recorded[first]
    into = int(graph.in_ptr[first])
    assert graph.lag[into] <= 10_000


def test_full_launch_queue_lets_a_launch_wait_for_a_slot() -> None:
    """One stream, cheap host, long kernels: a launch returns when the kernel 1,022 places ahead has ended."""
    depth, count, kernel = 1022, 1400, 100
    r = Recording()
    host = 0.0
    ends: list[float] = []
    for i in range(count):
        begin = host
        start = max(begin + 7, (ends[-1] + 1) if ends else 0)
        ends.append(start + kernel)
        # The queue holds `depth` kernels beside the one being launched.
        done = ends[i - depth - 1] if i > depth else 0.0
        finish = max(begin + 4, done + 1 if done > begin else 0)
        r.launch("k", begin, finish - begin, start, kernel)
        host = finish + 1
    r.note("ProfilerStep#1", 0, host)
    graph = build(r.trace())
    queue = int(np.sum(graph.edge_kind == EdgeKind.QUEUE))
    assert queue >= count - depth - 30
    half = window(faster(graph, tasks(graph, TaskKind.KERNEL), 0.5))
    assert half < 0.65 * window(graph)
    assert graph.info.unexplained_share < 0.01


def test_a_slot_of_the_launch_queue_holds_a_whole_graph() -> None:
    """Graphs of 20 kernels, then single kernels, in a queue of 1,022 launches: a call waits for what freed a slot."""
    depth, graphs, singles, kernel = 1022, 60, 1300, 30
    r = Recording()
    host = free = 0.0
    ends: list[float] = []  # of each launch
    for i in range(graphs + singles):
        done = ends[i - depth - 1] if i > depth else 0.0
        finish = max(host + 4, done + 1)
        correlation = r.call("cudaGraphLaunch" if i < graphs else "cudaLaunchKernel", host, finish - host)
        for _ in range(20 if i < graphs else 1):
            start = max(host + 7, free)
            r.on_device("kernel", "k", start, kernel, correlation, 7)
            free = start + kernel + 1
        ends.append(free - 1)
        host = finish + 1
    r.note("ProfilerStep#1", 0, host)
    graph = build(r.trace())
    queue = np.flatnonzero(graph.edge_kind == EdgeKind.QUEUE)
    assert len(queue) >= graphs + singles - depth - 30
    ended, returned = (graph.recorded + graph.dur)[graph.src[queue]], graph.recorded[graph.dst[queue]]
    assert np.all(ended <= returned)
    assert window(faster(graph, tasks(graph, TaskKind.KERNEL), 0.5)) < 0.65 * window(graph)


def test_a_launch_that_returned_before_a_task_ended_did_not_wait_for_it() -> None:
    """A queue that holds 1,022 launches, 1,300 in the end: no launch waits for what ended after its return."""
    count, kernel = 2600, 100
    r = Recording()
    host = 0.0
    ends: list[float] = []
    for i in range(count):
        depth = 1022 if i < 2300 else 1300
        start = max(host + 7, (ends[-1] + 1) if ends else 0)
        ends.append(start + kernel)
        finish = max(host + 4, ends[i - depth - 1] + 1 if i > depth else 0)
        r.launch("k", host, finish - host, start, kernel)
        host = finish + 1
    r.note("ProfilerStep#1", 0, host)
    graph = build(r.trace())
    queue = np.flatnonzero(graph.edge_kind == EdgeKind.QUEUE)
    assert len(queue) > 700
    assert np.all((graph.recorded + graph.dur)[graph.src[queue]] <= graph.recorded[graph.dst[queue]])


def test_contention_is_a_removable_edge_and_not_a_long_latency() -> None:
    r = Recording()
    r.note("ProfilerStep#1", 0, 2000)
    for i in range(12):
        r.launch("warm", 10 + 20 * i, 4, 17 + 20 * i, 5)
        r.launch("side", 15 + 20 * i, 4, 22 + 20 * i, 5, stream=8)
    r.launch("hog", 300, 4, 307, 600)
    r.launch("held up", 320, 4, 908, 50, stream=8)
    graph = build(r.trace())
    [hog], [held] = tasks(graph, TaskKind.KERNEL, "hog"), tasks(graph, TaskKind.KERNEL, "held up")
    assert edges(graph, hog, held) == [EdgeKind.CONTENTION]
    launch = [e for e in range(graph.in_ptr[held], graph.in_ptr[held + 1]) if graph.edge_kind[e] == EdgeKind.LAUNCH]
    assert graph.lag[launch[0]] == 7_000
    assert graph.delay[held] == 0
    assert graph.info.contention_share > 0.3 > graph.info.unexplained_share


def test_overlapping_neighbours_keep_the_streams_busy_time() -> None:
    r = Recording()
    r.note("ProfilerStep#1", 0, 200)
    r.launch("a", 10, 2, 20, 50)
    r.launch("b", 14, 2, 67, 50)  # starts 3 us before a ends
    graph = build(r.trace())
    a, b = tasks(graph, TaskKind.KERNEL)
    assert edges(graph, a, b).count(EdgeKind.STREAM) == 2
    start, _ = replay(faster(graph, [a], 0.0))
    assert start[b] >= start[a]


def test_graph_launch_starts_its_kernels_while_the_call_runs() -> None:
    r = Recording()
    r.note("ProfilerStep#1", 0, 2000)
    correlation = r.call("cudaGraphLaunch", 10, 1500)
    for i in range(5):
        r.on_device("kernel", f"k{i}", 24 + 10 * i, 9, correlation, 7)
    graph = build(r.trace())
    [call] = tasks(graph, TaskKind.CALL)
    for kernel in tasks(graph, TaskKind.KERNEL):
        assert edges(graph, call, kernel) == [EdgeKind.LAUNCH]
    start, _ = replay(graph)
    np.testing.assert_array_equal(start, graph.recorded)


def test_nested_driver_call_is_part_of_the_runtime_call() -> None:
    r = Recording()
    r.note("ProfilerStep#1", 0, 100)
    r.call("cudaLaunchKernelExC", 10, 20)
    inner = r.call("cuLaunchKernel", 12, 10)
    r.on_device("kernel", "k", 40, 5, inner, 7)
    graph = build(r.trace())
    [call] = tasks(graph, TaskKind.CALL)
    assert graph.names[graph.name[call]] == "cudaLaunchKernelExC"
    assert edges(graph, call, tasks(graph, TaskKind.KERNEL)[0]) == [EdgeKind.LAUNCH]


def test_cpu_only_tasks_are_self_times_with_bookkeeping_merged() -> None:
    r = Recording(device="")
    r.note("ProfilerStep#1", 0, 200)
    r.op("aten::conv2d", 10, 100)
    r.op("aten::empty", 20, 5)
    r.op("aten::mkldnn_convolution", 40, 60)
    r.op("aten::resolve_conj", 50, 3)
    r.op("aten::relu", 120, 30)
    graph = build(r.trace())
    assert not graph.on_device.any()
    work = [(graph.names[graph.name[v]], int(graph.dur[v]) // 1000) for v in tasks(graph, TaskKind.OPERATOR)]
    assert work == [
        ("aten::conv2d", 30),
        ("aten::mkldnn_convolution", 60),
        ("aten::conv2d", 10),
        ("aten::relu", 30),
    ]
    assert sum(int(graph.dur[v]) for v in tasks(graph, TaskKind.PYTHON)) == 70_000
    assert window(graph) == 200_000


def test_loader_time_is_a_task_of_its_own() -> None:
    r = Recording()
    r.note("ProfilerStep#1", 0, 500)
    r.note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 10, 300)
    r.op("aten::stack", 100, 50)
    r.launch("k", 400, 5, 410, 10)
    graph = build(r.trace())
    assert sum(int(graph.dur[v]) for v in tasks(graph, TaskKind.DATA)) == 300_000
    assert {graph.names[graph.name[v]] for v in tasks(graph, TaskKind.DATA)} == {
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    }


def test_steps_fall_back_to_optimizer_steps_then_to_the_whole_recording() -> None:
    r = Recording()
    for i in range(4):
        r.launch("k", 100 * i + 10, 5, 100 * i + 20, 10)
        r.note("Optimizer.step#SGD.step", 100 * i + 50, 20)
    graph = build(r.trace())
    assert graph.info.step_source == "Optimizer.step"
    _, end = replay(graph)
    assert np.diff(end[graph.marks]).tolist() == [100_000] * 3
    plain = Recording()
    plain.launch("k", 10, 5, 20, 400)
    graph = build(plain.trace())
    assert graph.info.step_source == "whole trace"
    assert window(graph) == 410_000


def test_host_that_runs_ahead_is_measured_on_the_device() -> None:
    r = Recording()
    for step in range(4):
        r.note(f"ProfilerStep#{step}", 100 * step, 100)
        r.launch("k", 100 * step + 10, 5, 20 + 300 * step, 300 - 1)
    r.call("cudaDeviceSynchronize", 410, 812)
    graph = build(r.trace())
    assert graph.info.step_clock == "gpu"
    _, end = replay(graph)
    assert np.diff(end[graph.marks])[1:].tolist() == [300_000] * 3


def test_cut_off_last_step_is_left_out() -> None:
    r = Recording(device="")
    for step in range(3):
        r.note(f"ProfilerStep#{step}", 100 * step, 100)
        r.op("aten::mm", 100 * step + 10, 50)
        if step < 2:
            r.note("Optimizer.step#SGD.step", 100 * step + 70, 20)
    graph = build(r.trace())
    assert graph.info.steps == (0, 1)
    assert any("ProfilerStep#2" in note for note in graph.info.notes)


def test_every_task_that_waits_for_nothing_has_a_release() -> None:
    graph = build(gpu_bound().trace())
    free = np.diff(graph.in_ptr) == 0
    assert np.all(graph.release[free] != NO_RELEASE)


def test_unknown_rank_is_named() -> None:
    with pytest.raises(GraphError, match="no rank 3"):
        build(gpu_bound().trace(), rank=3)


def test_a_step_that_begins_inside_the_optimizers_range_is_not_optimizer_work() -> None:
    r = Recording(device="")
    r.note("ProfilerStep#1", 0, 100)
    r.note("Optimizer.step#SGD.step", 80, 30)  # ends 10 us into the next step
    r.note("ProfilerStep#2", 100, 100)
    r.op("aten::mm", 120, 50)
    r.note("Optimizer.step#SGD.step", 180, 10)
    graph = build(r.trace())
    [mm] = tasks(graph, TaskKind.OPERATOR)
    assert Phase(graph.phase[mm]) == Phase.FORWARD


def ddp_step(r: Recording, at: float) -> None:
    """Two buckets on a communication stream, waited for at the end of backward, then the optimizer."""
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    r.note(f"ProfilerStep#{int(at)}", at, 1000)
    r.launch("forward", at + 10, 5, at + 20, 100)
    r.op("autograd::engine::evaluate_function: A", at + 40, 300, tid=AUTOGRAD)
    r.launch("backward 1", at + 50, 5, at + 121, 100, tid=AUTOGRAD)
    for bucket, begin in ((0, at + 70), (1, at + 170)):
        r.op("record_param_comms", begin, 40, tid=AUTOGRAD)
        r.call("cudaEventRecord", begin + 2, 1, tid=AUTOGRAD)
        r.call("cudaStreamWaitEvent", begin + 5, 1, tid=AUTOGRAD)
        start = at + (224 if bucket == 0 else 525)
        r.launch(nccl, begin + 10, 5, start, 300, stream=20, tid=AUTOGRAD)
        r.call("cudaEventRecord", begin + 20, 1, tid=AUTOGRAD)
        r.launch(f"backward {bucket + 2}", begin + 60, 5, at + 222 + 101 * bucket, 100, tid=AUTOGRAD)
    for bucket in (0, 1):
        r.call("cudaStreamWaitEvent", at + 300 + 10 * bucket, 1, tid=AUTOGRAD)
    r.note("Optimizer.step#SGD.step", at + 380, 100)
    r.launch("update", at + 400, 5, at + 827, 50)
    r.call("cudaDeviceSynchronize", at + 500, 380)


def test_events_between_streams_are_inferred_from_the_collective_operators() -> None:
    r = Recording()
    for step in range(4):
        ddp_step(r, 1000.0 * step)
    graph = build(r.trace())
    classes = {c.name: c for c in graph.info.edge_classes}
    assert classes["collective after its stream's work"].count == 8
    assert all(c.refuted == 0 for c in classes.values())
    updates = tasks(graph, TaskKind.KERNEL, "update")
    collectives = tasks(graph, TaskKind.COLLECTIVE)
    for step, update in enumerate(updates):
        assert edges(graph, collectives[2 * step + 1], update) == [EdgeKind.EVENT], (
            "the last bucket holds up the update"
        )
    firsts = tasks(graph, TaskKind.KERNEL, "backward 1")
    for step, first in enumerate(firsts):
        assert EdgeKind.EVENT in edges(graph, first, collectives[2 * step])
    assert graph.info.unexplained_share < 0.02
    slower = graph.with_columns(dur=np.where(graph.kind == TaskKind.COLLECTIVE, graph.dur * 2, graph.dur))
    assert window(slower) > window(graph) + 4 * 500_000


def test_stated_events_win_over_inference() -> None:
    r = Recording()
    r.note("ProfilerStep#1", 0, 900)
    r.launch("producer", 10, 5, 20, 300)
    record = r.call("cudaEventRecord", 30, 1)
    r.launch("later", 40, 5, 321, 200)
    wait = r.call("cudaStreamWaitEvent", 60, 1)
    r.on_device(
        "cuda_sync", "Stream Wait Event", 60, 0, wait, 9, wait_on_stream=7, wait_on_cuda_event_record_corr_id=record
    )
    r.launch("consumer", 70, 5, 322, 50, stream=9)
    graph = build(r.trace())
    [consumer] = tasks(graph, TaskKind.KERNEL, "consumer")
    assert edges(graph, tasks(graph, TaskKind.KERNEL, "producer")[0], consumer) == [EdgeKind.EVENT]
    assert not edges(graph, tasks(graph, TaskKind.KERNEL, "later")[0], consumer)


def test_gloo_collectives_have_a_lane_and_the_main_thread_waits_for_them() -> None:
    r = Recording(device="")
    r.note("ProfilerStep#1", 0, 1000)
    r.op("autograd::engine::evaluate_function: A", 10, 100)
    r.op("c10d::allreduce_", 60, 30)
    r.note("gloo:all_reduce", 100, 500, tid=300)
    r.op("aten::copy_", 605, 20)
    r.note("Optimizer.step#SGD.step", 700, 100)
    r.op("aten::add_", 720, 50)
    graph = build(r.trace())
    [collective] = tasks(graph, TaskKind.COLLECTIVE)
    assert graph.lanes[graph.lane[collective]].label == "gloo"
    start, _ = replay(graph)
    np.testing.assert_array_equal(start, graph.recorded)
    assert window(graph) - window(faster(graph, [collective], 0.5)) == 250_000
    assert window(faster(graph, [collective], 0.0)) >= 500_000
