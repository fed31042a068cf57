"""The checks catch the builder errors that they were made for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foretrace.graph.builder import build
from foretrace.graph.taskgraph import EdgeKind, TaskGraph, TaskKind
from foretrace.simulate.check import CheckVerdict, check, device_zero, host_zero, structural_error, swap_steps
from foretrace.trace.read import read
from tests.kineto_files import Recording


def steps_of_two_kernels(count: int = 4) -> Recording:
    """Steps in which the host waits for its kernels; the kernels of each step take another time."""
    r = Recording()
    at = 0.0
    for step in range(count):
        long = 200.0 + 40 * step
        r.launch("a", at + 20, 5, at + 27, long)
        r.launch("b", at + 40, 5, at + 28 + long, long)
        r.call("cudaStreamSynchronize", at + 60, 2 * long - 26)
        r.note(f"ProfilerStep#{step}", at, 2 * long + 60)
        at += 2 * long + 60
    return r


def without(graph: TaskGraph, kind: EdgeKind) -> TaskGraph:
    """The graph as a builder would leave it that does not know this kind: what it explained becomes delay."""
    keep = graph.edge_kind != kind
    count = np.zeros(len(graph) + 1, dtype=np.int64)
    np.cumsum(np.bincount(graph.dst[keep], minlength=len(graph)), out=count[1:])
    from dataclasses import replace

    fewer = replace(
        graph,
        in_ptr=count,
        **{k: getattr(graph, k)[keep] for k in ("src", "edge_kind", "lag", "typical", "from_start", "inferred")},
    )
    anchor = np.where(fewer.from_start, graph.recorded[fewer.src], (graph.recorded + graph.dur)[fewer.src])
    base = fewer.release.copy()
    np.maximum.at(base, fewer.dst, anchor + fewer.lag)
    release = np.where(np.diff(count) == 0, graph.recorded, fewer.release)
    return replace(fewer, delay=graph.recorded - np.maximum(base, release), release=release)


def test_good_graph_passes_everything() -> None:
    report = check(build(steps_of_two_kernels().trace()))
    assert report.ok
    assert {f.verdict for f in report.findings} == {CheckVerdict.OK}


def test_missing_sync_edges_fail_structurally_though_replay_is_exact() -> None:
    graph = without(build(steps_of_two_kernels().trace()), EdgeKind.SYNC)
    report = check(graph)
    assert report.of("self-replay").verdict == CheckVerdict.OK
    assert report.of("structural replay").verdict == CheckVerdict.FAIL


def test_device_time_zero_leaves_the_host() -> None:
    graph = build(steps_of_two_kernels().trace())
    with_edges, host = device_zero(graph)
    assert 0 <= with_edges - host <= 4 * 20_000
    assert host < 4 * 150_000


def test_host_time_zero_leaves_the_busiest_stream() -> None:
    graph = build(steps_of_two_kernels().trace())
    span, busiest, _ = host_zero(graph)
    busy = int(graph.dur[graph.on_device].sum())
    assert busy <= busiest <= span <= busiest + 4 * 30_000


def test_swapped_steps_predict_each_other() -> None:
    swap = swap_steps(build(steps_of_two_kernels().trace()))
    assert swap.mean_error < 0.01 < swap.trivial_error
    assert swap.matched == 1.0


def test_unexplained_delay_refuses_device_whatifs() -> None:
    r = steps_of_two_kernels()
    # A second stream whose kernels wait for an event that nothing in the recording shows.
    for busy_from in (27, 487, 1027, 1647):
        r.launch("side", busy_from - 10, 5, busy_from + 100, 20, stream=9, tid=150)
    report = check(build(r.trace()))
    assert report.of("unexplained delay").verdict == CheckVerdict.FAIL
    assert not report.gpu_whatifs


def test_edited_graph_has_no_recording_to_reproduce() -> None:
    from foretrace.graph.taskgraph import Change

    graph = build(steps_of_two_kernels().trace()).noted(Change(technique="", what="nothing", tasks=0))
    assert check(graph).of("self-replay").verdict == CheckVerdict.SKIP


REAL = {  # file -> (most structural error of a step, most step-swap error); None: unusable, and why is tested below
    "kineto/resnet50_num_workers_0.worker0.1623143089861.pt.trace.json.gz": (0.01, 0.01),
    "kineto/resnet50_num_workers_4.worker0.1623212756351.pt.trace.json.gz": (0.01, 0.01),
    "hta/df_index_resolver.json.gz": (0.01, 0.01),
    "hta/trace_diff_control.json.gz": (0.025, 0.01),
    "tracelens/mi300_resnet_act_checkpoint.json.gz": (0.025, 0.01),
    "tracelens/h100_google_owlv2-large-patch14-ensemble__1016001.json.gz": (0.01, 0.01),
    "tracelens/b200_eager_trace.json.gz": (0.01, 0.01),
    "param/dlrm_kineto_8rank/worker1_step_12.1694128201556.pt.trace.json.gz": (0.01, 0.01),
}


@pytest.mark.parametrize("name", REAL)
def test_real_recordings_stand_the_checks(shared_data: Path, name: str) -> None:
    graph = build(read(shared_data / "traces" / name))
    report = check(graph)
    assert report.ok, [f.says for f in report.findings if f.verdict == CheckVerdict.FAIL]
    structural, swapped = REAL[name]
    assert structural_error(graph)[1] <= structural
    if graph.n_steps > 1:
        assert swap_steps(graph).mean_error <= swapped


@pytest.mark.parametrize("name", ["timeline_analysis_sampled_rank-0", "trace_filter_sampled_rank-1"])
def test_sampled_recordings_are_refused_with_a_reason(shared_data: Path, name: str) -> None:
    report = check(build(read(shared_data / "traces" / "hta" / f"{name}.json.gz")))
    assert not report.gpu_whatifs
    assert "dependencies are missing" in report.of("unexplained delay").says


KNOWN = [  # window without device time, ms
    ("tracelens/h100_google_owlv2-large-patch14-ensemble__1016001.json.gz", 838.4),
    ("tracelens/h100_Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz", 33.1),
    ("hta/trace_diff_control.json.gz", 390.6),
]


@pytest.mark.parametrize(("name", "expected"), KNOWN)
def test_known_windows_without_device_time(shared_data: Path, name: str, expected: float) -> None:
    with_edges, host = device_zero(build(read(shared_data / "traces" / name)))
    assert with_edges / 1e6 == pytest.approx(expected, rel=0.002)
    assert with_edges >= host


def test_kinds_that_waited_are_named() -> None:
    graph = build(steps_of_two_kernels().trace())
    assert np.sum(graph.kind == TaskKind.RETURN) == 4
