"""Fifteen years of habits: what PyTorch, Kineto and their file writers did at one time or another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretrace.trace.kineto import mend
from foretrace.trace.read import read
from foretrace.trace.trace import Category, LaneKind, Trace
from tests.trace.recordings import Event, call, document, kernel, op, thread_name, training, write


def names_of(trace: Trace) -> list[str]:
    return [trace.names[i] for i in trace.name]


def read_events(tmp_path: Path, events: list[Event], **options: Any) -> Trace:
    return read(write(tmp_path / "t.json", events), **options)


def read_text(tmp_path: Path, text: bytes, **options: Any) -> Trace:
    return read(write(tmp_path / "t.json", text), **options)


# --- Words ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "category"),
    [
        ("Operator", Category.OPERATOR),
        ("cpu_op", Category.OPERATOR),
        ("Runtime", Category.RUNTIME),
        ("cuda_driver", Category.RUNTIME),
        ("hip_runtime", Category.RUNTIME),
        ("Kernel", Category.KERNEL),
        ("Memcpy", Category.MEMCPY),
        ("Memset", Category.MEMSET),
        ("gpu_user_annotation", Category.GPU_ANNOTATION),
        ("overhead", Category.OVERHEAD),
        ("something_new", Category.OTHER),
    ],
)
def test_categories_of_all_ages(tmp_path: Path, word: str, category: Category) -> None:
    assert read_events(tmp_path, [op("x", 0, 1, cat=word)]).category.tolist() == [category]


def test_annotations_among_old_operators(tmp_path: Path) -> None:
    names = [
        "ProfilerStep#5",
        "Optimizer.step#SGD.step",
        "Optimizer.zero_grad#SGD.zero_grad",
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
        "aten::mm",
    ]
    trace = read_events(tmp_path, [op(n, i, 1, cat="Operator") for i, n in enumerate(names)])
    assert trace.category.tolist() == [Category.ANNOTATION] * 4 + [Category.OPERATOR]


def test_events_without_category_of_the_first_profiler(tmp_path: Path) -> None:
    events = [
        {"name": "aten::mm", "ph": "X", "ts": 1.5, "dur": 4.0, "tid": 1, "pid": "CPU functions", "args": {}},
        {"name": "gemm", "ph": "X", "ts": 2.5, "dur": 1.0000000000001, "tid": 0, "pid": "CUDA functions", "args": {}},
    ]
    trace = read_text(tmp_path, json.dumps(events).encode())
    assert trace.category.tolist() == [Category.OPERATOR, Category.KERNEL]
    assert trace.start.tolist() == [0, 1000]
    assert trace.dur.tolist() == [4000, 1000]
    assert [(lane.kind, lane.device, lane.stream) for lane in trace.lanes] == [
        (LaneKind.CPU, -1, 1),
        (LaneKind.GPU, 0, 0),
    ]


def test_gpu_annotations_repeat_steps_but_are_none(tmp_path: Path) -> None:
    mark = kernel("ProfilerStep#0", 1_700_000_000_000_100, 1, 0, cat="gpu_user_annotation")
    trace = read_events(tmp_path, [*training(), mark])
    steps = trace.named(lambda n: n.startswith("ProfilerStep"))
    assert sorted(trace.category[steps].tolist()) == [Category.ANNOTATION] * 2 + [Category.GPU_ANNOTATION]


# --- Threads, devices and times --------------------------------------------------------------------------------


def test_thread_ids_that_are_strings(tmp_path: Path) -> None:
    gpu = kernel("gemm", 3, 1, 1)
    gpu["tid"] = "stream 7"
    del gpu["args"]["stream"]
    gpu_of_string = kernel("gemm", 4, 1, 1)
    gpu_of_string |= {"pid": "GPU 2", "tid": "stream 9", "args": {}}
    events = [
        op("a", 0, 1, tid="25738"),
        op("b", 1, 1, tid=25738),
        op("c", 2, 1, tid="Main thread"),
        op("d", 2, 1, tid="Other thread"),
        op("e", 2, 1, tid="Main thread"),
        gpu,
        gpu_of_string,
        thread_name("25738", "thread 25738 (python)"),
        thread_name(25738, "thread 25738 (pt_main)"),
    ]
    trace = read_events(tmp_path, events)
    assert trace.lane.tolist() == [0, 0, 1, 2, 1, 3, 4]
    main, one, two, stream, other = trace.lanes
    assert (main.stream, main.label) == (25738, "thread 25738 (pt_main)")
    assert one.stream < two.stream + 2 < 0
    assert (stream.kind, stream.device, stream.stream) == (LaneKind.GPU, 0, 7)
    assert (other.device, other.stream, other.label) == (2, 9, "stream 9")


def test_same_thread_id_in_two_processes(tmp_path: Path) -> None:
    other = op("b", 1, 1, tid=5)
    other["pid"] = 98
    trace = read_events(tmp_path, [op("a", 0, 1, tid=5), other])
    assert [lane.stream for lane in trace.lanes] == [5, 5]


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("12", 12_000),
        ("12.5", 12_500),
        ("12.125", 12_125),
        ("12.1255", 12_126),
        ("12.1245", 12_124),
        ("1.2e1", 12_000),
        ('"12.5"', 12_500),
        ("0.001", 1),
    ],
)
def test_ways_to_write_a_time(tmp_path: Path, text: str, ns: int) -> None:
    content = document([op("x", 0, 777)]).replace(b'"dur": 777', f'"dur": {text}'.encode())
    assert read_text(tmp_path, content).dur.tolist() == [ns]


def test_times_before_the_base(tmp_path: Path) -> None:
    trace = read_events(tmp_path, [op("a", -2.5, 1), op("b", 1, 1)])
    assert trace.start.tolist() == [0, 3500]
    assert trace.ranks[0].base_ns == -2500


def test_synchronisation_events(tmp_path: Path) -> None:
    def sync(name: str, ts: float, stream: int, **args: Any) -> Event:
        work = kernel(name, ts, 1, 9, stream=stream, cat="cuda_sync", **args)
        work["tid"] = -1 if stream == 2**32 - 1 else stream
        return work

    trace = read_events(
        tmp_path,
        [
            sync("Stream Wait Event", 0, 20, wait_on_stream=7, wait_on_cuda_event_record_corr_id=5),
            sync("Context Sync", 1, 2**32 - 1),
            sync("Event Sync", 2, -1, wait_on_stream=7, wait_on_cuda_event_record_corr_id=5),
        ],
    )
    assert [trace.lanes[i].stream for i in trace.lane] == [20, -1, -1]
    assert trace.lanes[1].label == "every stream"
    assert trace.wait_stream.tolist() == [7, -1, 7]
    assert trace.wait_correlation.tolist() == [5, -1, 5]
    assert trace.category.tolist() == [Category.SYNC] * 3


# --- Memory, copies and platforms -----------------------------------------------------------------------------


def test_memory_instants_of_all_ages(tmp_path: Path) -> None:
    def memory(ts: int, size: int, kind: int, device: int, **more: Any) -> Event:
        args = {"Device Type": kind, "Device Id": device, "Bytes": size}
        return {"ph": "i", "s": "t", "name": "[memory]", "pid": 99, "tid": 100, "ts": ts, "args": args} | more

    events = [
        op("aten::empty", 0, 9),
        memory(1, 512, 0, -1),
        memory(2, -512, 1, 3, cat="cpu_instant_event"),
        memory(3, 7, 6, 0, cat="cpu_instant_event"),
        {"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": 50},
    ]
    trace = read_events(tmp_path, events)
    assert names_of(trace) == ["aten::empty", "[memory] cpu", "[memory] cuda:3", "[memory] cuda:0"]
    assert trace.nbytes.tolist() == [-1, 512, -512, 7]
    assert trace.dur.tolist() == [9000, 0, 0, 0]
    assert len(trace.lanes) == 1
    assert trace.dropped == ()


def test_rocm_writes_numbers_as_strings(tmp_path: Path) -> None:
    events = [
        call("hipMemcpyWithStream", 0, 9, 1) | {"args": {"correlation": "1", "size": "2560", "stream": "0x0"}},
        kernel("CopyHostToDevice", 1, 5, 1, cat="gpu_memcpy"),
        call("hipLaunchKernel", 10, 9, 2) | {"args": {"correlation": 2, "bytes": "0x10"}},
    ]
    trace = read_events(tmp_path, events)
    assert trace.ranks[0].platform == "rocm"
    assert trace.nbytes.tolist() == [2560, -1, 16]
    assert trace.correlation.tolist() == [1, 1, 2]


def test_platforms(tmp_path: Path) -> None:
    assert read_events(tmp_path, [op("aten::mm", 0, 1)]).ranks[0].platform == "cpu"
    assert read_events(tmp_path, [call("cudaGetDevice", 0, 1, 0)]).ranks[0].platform == "cuda"
    assert read_events(tmp_path, [kernel("gemm", 0, 1, 0)]).ranks[0].platform == "cuda"
    content = document([kernel("gemm", 0, 1, 0)], roctracer_version=4.1)
    assert read_text(tmp_path, content).ranks[0].platform == "rocm"


def test_correlation_zero_and_invalid_names(tmp_path: Path) -> None:
    trace = read_events(tmp_path, [call("INVALID", 0, 1, 0), call("INVALID", 2, 1, 0), kernel("k", 3, 1, 0)])
    assert trace.correlation.tolist() == [-1, -1, -1]
    assert names_of(trace)[0] == "INVALID"


def test_many_kernels_of_one_graph_launch(tmp_path: Path) -> None:
    events = [call("hipGraphLaunch", 0, 9, 4), *(kernel("k", 1 + i, 1, 4) for i in range(50))]
    assert (read_events(tmp_path, events).correlation == 4).all()


def test_driver_call_inside_its_runtime_call_may_share_the_id(tmp_path: Path) -> None:
    events = [
        call("cudaLaunchKernelExC", 0, 9, 4),
        call("cuLaunchKernelEx", 1, 5, 4, cat="cuda_driver"),
        kernel("k", 9, 1, 4),
    ]
    assert read_events(tmp_path, events).correlation.tolist() == [4, 4, 4]


def test_foreign_phases_are_counted(tmp_path: Path) -> None:
    other = [{"ph": ph, "name": "n", "pid": 1, "tid": 1, "ts": 5} for ph in ("B", "E", "C", "C", "weird")]
    trace = read_events(tmp_path, [op("a", 0, 1), *other])
    assert {d.reason: d.count for d in trace.dropped} == {
        'events of phase "B" are not read': 1,
        'events of phase "E" are not read': 1,
        'events of phase "C" are not read': 2,
        "events of unknown phases are not read": 1,
    }


# --- JSON that is none ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (b"raw \x01\x02 control", "raw    control"),
        (b"raw\nline", "raw line"),
        (b"bytes \xff\xfe", "bytes ??"),
        (b"C:\\Users\\x.py(3): f", "C:/Users/x.py(3): f"),
        (b"lone \\ud800 half", "lone /ud800 half"),
        (b"whole \\ud83d\\ude00 pair", "whole \U0001f600 pair"),
        (b'a \\"quoted\\" \\\\ name', 'a "quoted" \\ name'),
        ("kept: µ, ü".encode(), "kept: µ, ü"),
        (b'looks like },{\\"ph\\":\\"X\\"', 'looks like },{"ph":"X"'),
    ],
)
def test_names_that_break_json(tmp_path: Path, name: bytes, expected: str) -> None:
    content = document(training(3)).replace(b"aten::mm", name)
    trace = read_text(tmp_path, content)
    assert len(trace) == 12
    assert trace.names[trace.name[1]] == expected
    assert trace.dropped == ()


def test_numbers_that_are_none_in_arguments(tmp_path: Path) -> None:
    content = document(training(3)).replace(
        b'"context": 1', b'"context": NaN, "memory bandwidth (GB/s)": -Infinity, "x": [inf, "NaN"]'
    )
    trace = read_text(tmp_path, content)
    assert len(trace) == 12
    assert trace.dropped == ()


def test_mending_keeps_the_length() -> None:
    for text in (b'{"a": NaN, "b\x01": "x\\q\xff", "c": -Infinity, "d": "NaN \\"inf\\""}', b'"open NaN', b"\\", b""):
        assert len(mend(text)) == len(text)
    assert json.loads(mend(b'{"a": NaN, "b": "NaN inf"}')) == {"a": "", "b": "NaN inf"}


@pytest.mark.parametrize("block", [1, 7, 100, 4096])
def test_any_cut_into_blocks_reads_the_same(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    nested: dict[str, Any] = {"list": [{"ph": "X", "name": "no"}, {"a": 1}, {"b": [{}, {}]}], "text": '}, {"ph": "X"'}
    events = [*training(40), op("with nested arguments", 1_700_000_000_000_005, 1, **nested)]
    content = document(
        events,
        other={"traceEvents": [{"ph": "X"}]},
        deviceProperties=[{"id": 0, "name": "A"}, {"id": 1, "name": "B"}],
        traceName="x },{ y",
        baseTimeNanoseconds=3,
    )  # fmt: skip
    whole = read_text(tmp_path, content)
    monkeypatch.setattr("foretrace.trace.stream.BLOCK", block * 16)
    monkeypatch.setattr("foretrace.trace.kineto.BLOCK", block)
    pieces = read_text(tmp_path, content)
    assert names_of(pieces) == names_of(whole)
    assert pieces.start.tolist() == whole.start.tolist()
    assert pieces.ranks == whole.ranks
    assert pieces.dropped == whole.dropped == ()


def test_spaces_and_order_of_keys_do_not_matter(tmp_path: Path) -> None:
    parsed = json.loads(document(training(3), baseTimeNanoseconds=9))
    behind = {"baseTimeNanoseconds": 9, "deviceProperties": [{"name": "A", "ph": "X"}, {"name": "B", "ph": "X"}]}
    expected = names_of(read_text(tmp_path, json.dumps(parsed).encode()))
    for indent in (None, 0, 4):
        swapped = {"traceEvents": [dict(reversed(e.items())) for e in parsed["traceEvents"]], **behind}
        trace = read_text(tmp_path, json.dumps(swapped, indent=indent).encode())
        assert names_of(trace) == expected
        assert trace.ranks[0].devices == ("A", "B")
