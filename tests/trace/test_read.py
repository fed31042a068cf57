"""The reader on good recordings: known answers, an independent reading of real files, sets of ranks, filters."""

from __future__ import annotations

import gzip
import json
import re
import tarfile
import zipfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretrace.errors import TraceError
from foretrace.trace.kineto import Recording
from foretrace.trace.read import read
from foretrace.trace.stream import sources
from foretrace.trace.trace import Category, LaneKind, Trace
from tests.trace.recordings import THREAD, call, document, kernel, op, step, training, write

RESNET = "kineto/resnet50_num_workers_{}.pt.trace.json.gz"
NOT_RECORDINGS = ("chakra", "dlrm_eg_", "_et.json")


def recordings(shared_data: Path) -> list[Path]:
    files = sorted((shared_data / "traces").rglob("*.json.gz"))
    return [f for f in files if not any(word in str(f) for word in NOT_RECORDINGS)]


@pytest.mark.parametrize("name", ["cnn", "recommender", "decode"])
def test_a_sound_recording_is_not_mended(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mending takes longer than reading; an end of the array in the middle of a stretch is no reason for it."""

    def mended(text: bytes) -> bytes:
        raise AssertionError(f"{len(text)} bytes were mended")

    monkeypatch.setattr("foretrace.trace.kineto.mend", mended)
    assert len(read(Path(__file__).parents[1] / "data" / f"{name}.json.gz")) > 1000


def names_of(trace: Trace) -> list[str]:
    return [trace.names[i] for i in trace.name]


def step_ms(trace: Trace) -> list[float]:
    marks = trace.named(lambda n: n.startswith("ProfilerStep#")) & (trace.category == Category.ANNOTATION)
    return [round(d / 1e6, 1) for d in trace.dur[marks].tolist()]


# --- Real recordings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (RESNET.format("0.worker0.1623143089861"), [176.1, 174.0, 176.9, 181.3, 176.5, 164.3]),
        (RESNET.format("4.worker0.1623212756351"), [181.6, 123.9, 126.8, 126.3, 163.5, 116.1]),
        ("hta/df_index_resolver.json.gz", [345.8, 365.3, 346.1, 344.3, 336.3]),
        ("hta/trace_diff_control.json.gz", [75.5, 76.9, 76.2, 76.7, 78.5, 81.1]),
        ("tracelens/mi300_resnet_act_checkpoint.json.gz", [16.8, 16.0, 15.9]),
    ],
)  # fmt: skip
def test_steps_last_what_the_shared_notes_say(shared_data: Path, file: str, expected: list[float]) -> None:
    assert step_ms(read(shared_data / "traces" / file)) == expected


@pytest.mark.parametrize(
    ("file", "events"),
    [
        (RESNET.format("0.worker0.1623143089861"), 75_718),
        (RESNET.format("4.worker0.1623212756351"), 71_424),
        ("param/resnet_kineto.json.gz", 111_631),
        ("param/linear_kineto.json.gz", 86_859),
        ("hta/df_index_resolver.json.gz", 216_092),
        ("hta/trace_diff_control.json.gz", 109_123),
        ("tracelens/b200_eager_trace.json.gz", 24_656),
    ],
)
def test_entries_are_as_many_as_the_shared_notes_say(shared_data: Path, file: str, events: int) -> None:
    counts = [
        sum(map(len, Recording(source, salvage=False).events())) for source in sources(shared_data / "traces" / file)
    ]
    assert counts == [events]


def test_every_real_recording_is_read_whole(shared_data: Path) -> None:
    files = recordings(shared_data)
    assert len(files) == 34
    for file in files:
        trace = read(file)
        assert len(trace)
        assert trace.start.min() == 0
        assert trace.dur.min() >= 0
        assert np.lexsort((-trace.dur, trace.start)).tolist() == list(range(len(trace)))
        assert set(np.unique(trace.lane)) <= set(range(len(trace.lanes)))
        assert {d.reason for d in trace.dropped} <= {"python_function events were not asked for"}


def test_what_is_no_recording_is_named(shared_data: Path) -> None:
    traces = shared_data / "traces"
    with pytest.raises(TraceError, match="is a PyTorch execution trace"):
        read(traces / "param" / "linear_et.json.gz")
    with pytest.raises(TraceError, match="no Kineto recording"):
        read(traces / "chakra" / "chakra.0.json.gz")
    with pytest.raises(TraceError, match="is not JSON"):
        read(traces / "chakra" / "chakra.0.et.gz")


def reference(file: Path) -> list[tuple[Any, ...]]:
    """An independent reading with the standard library, event by event, times by exact decimals."""
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    parsed = json.loads(raw, strict=False, parse_float=Decimal)
    category = {
        "cpu_op": 0, "Operator": 0, "cuda_runtime": 1, "cuda_driver": 1, "Runtime": 1, "kernel": 2, "Kernel": 2,
        "gpu_memcpy": 3, "Memcpy": 3, "gpu_memset": 4, "Memset": 4, "user_annotation": 5, "gpu_user_annotation": 6,
        "python_function": 8, "cuda_sync": 9, "overhead": 11,
    }  # fmt: skip
    rows = []
    for e in parsed["traceEvents"]:
        memory = e["ph"] == "i" and e["name"] == "[memory]"
        if (e["ph"] != "X" and not memory) or e.get("cat") == "Trace":
            continue
        args = e.get("args", {})
        code = 10 if memory else category[e["cat"]]
        name = e["name"]
        if code == 0 and re.match(r"ProfilerStep|Optimizer\.(step|zero_grad)#|enumerate\(DataLoader\)#", name):
            code = 5
        if code == 8 and name.startswith("nn.Module: "):
            code = 7
        if memory:
            kind = args["Device Type"]
            name = "[memory] cpu" if kind == 0 else f"[memory] cuda:{args['Device Id']}"
        device = code in (2, 3, 4, 6, 9)
        outer, inner = (args.get("device", e["pid"]), args.get("stream", e["tid"])) if device else (-1, e["tid"])
        inner = -1 if inner == 2**32 - 1 else int(inner)
        shapes = [args.get(k, []) for k in ("Input Dims", "Input type", "Concrete Inputs")]
        size = args.get("Bytes") if memory else args.get("bytes", args.get("size", -1))
        rows.append(
            (
                int(Decimal(e["ts"]) * 1000),
                -int(Decimal(e.get("dur", 0)) * 1000),
                name,
                code,
                (int(device), int(outer), inner),
                args.get("Addr", -1) if memory else args.get("correlation", -1) if code in (1, 2, 3, 4, 9) else -1,
                args.get("Sequence number", -1) if code in (0, 5) else -1,
                int(size) if code in (1, 2, 3, 4, 9, 10) else -1,
                json.dumps(shapes) if code in (0, 5) and shapes[0] else "",
                args.get("wait_on_stream", -1),
                args.get("Total Allocated", -1) if memory else args.get("wait_on_cuda_event_record_corr_id", -1),
            )
        )
    rows.sort(key=lambda row: row[:2])  # stable
    first = rows[0][0]
    return [(row[0] - first, *row[1:]) for row in rows]


@pytest.mark.parametrize(
    "file",
    [
        "hta/amd_trace_mi250_minitoy_train_ROCm6_2_kineto.json.gz",
        "hta/critical_path_alexnet_benchmark_result_2869224_1695835535_trace.json.gz",
        "hta/critical_path_cuda_event_sync_event_sync_trace.json.gz",
        "hta/timeline_analysis_sampled_rank-0.json.gz",
        "kineto/resnet50_num_workers_4.worker0.1623212756351.pt.trace.json.gz",
        "param/dlrm_kineto_8rank/worker3_step_12.1694128201557.pt.trace.json.gz",
        "tracelens/b200_eager_trace.json.gz",
        "tracelens/h100_gaunernst_bert-small-uncased__1016001.json.gz",
        "tracelens/mi300_gaunernst_bert-small-uncased__1016001.json.gz",
        "tracelens/inference_sglang_decode_sglang_Qwen3-8B_decode.json.gz",
        "triosim/h100_vgg13_kineto.json.gz",
    ],
)
def test_columns_agree_with_an_independent_reading(shared_data: Path, file: str) -> None:
    path = shared_data / "traces" / file
    expected = reference(path)
    t = read(path, categories=set(Category))
    lanes = [(int(lane.kind == LaneKind.GPU), lane.device, lane.stream) for lane in t.lanes]
    shapes = [json.dumps(json.loads(text)) for text in t.shapes]
    found = list(
        zip(
            t.start.tolist(),
            (-t.dur).tolist(),
            names_of(t),
            t.category.tolist(),
            [lanes[i] for i in t.lane],
            t.correlation.tolist(),
            t.sequence.tolist(),
            t.nbytes.tolist(),
            [shapes[i] if i >= 0 else "" for i in t.shape],
            t.wait_stream.tolist(),
            t.wait_correlation.tolist(),
            strict=True,
        )
    )
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        assert got == want


def test_eight_ranks_become_one_trace(shared_data: Path) -> None:
    trace = read(shared_data / "traces" / "param" / "dlrm_kineto_8rank")
    assert [r.rank for r in trace.ranks] == list(range(8))
    assert {r.world_size for r in trace.ranks} == {8}
    assert {r.backend for r in trace.ranks} == {"nccl"}
    assert trace.start.min() == 0
    assert len(step_ms(trace)) == 8
    third = trace.of_rank(3)
    assert {trace.lanes[i].rank for i in third.lane} == {3}
    alone = read(shared_data / "traces" / "param" / "dlrm_kineto_8rank", ranks=[3])
    shift = alone.ranks[0].base_ns - trace.ranks[0].base_ns
    assert (alone.start + shift).tolist() == third.start.tolist()
    collectives = third.collective >= 0
    assert int((collectives & (third.category == Category.KERNEL)).sum()) == 8
    assert {trace.collectives[i].name for i in third.collective[collectives]} == {"SendRecv", "AllReduce"}


# --- What a recording says ------------------------------------------------------------------------------------


def test_times_are_exact_nanoseconds(tmp_path: Path) -> None:
    text = document([op("a", 0, 0), op("b", 0, 0), op("c", 0, 0)]).decode()
    for ts, dur in (("1702839461731622.250", "0.001"), ("1702839461731622.251", "7"), ("1702839461731623", "1.5")):
        text = text.replace('"ts": 0, "dur": 0', f'"ts": {ts}, "dur": {dur}', 1)
    trace = read(write(tmp_path / "t.json", text.encode()))
    assert trace.start.tolist() == [0, 1, 750]
    assert trace.dur.tolist() == [1, 7000, 1500]
    assert trace.ranks[0].base_ns == 1_702_839_461_731_622_250


STEP = {"step": 0, "phase": "active", "wall_ns": 5, "cpu_ns": 4}


def test_metadata_before_and_behind_the_events(tmp_path: Path) -> None:
    trace = read(
        write(
            tmp_path / "t.json.gz",
            training(),
            distributedInfo={"backend": "nccl", "rank": 2, "world_size": 4},
            deviceProperties=[{"id": 0, "name": "A"}, {"id": 1, "name": "B"}],
            foretrace={"format": 1, "steps": [STEP]},
            baseTimeNanoseconds=5_000,
        )
    )
    (rank,) = trace.ranks
    assert (rank.rank, rank.world_size, rank.backend, rank.platform) == (2, 4, "nccl", "cuda")
    assert rank.devices == ("A", "B")
    assert rank.recording["steps"] == [STEP]
    assert rank.base_ns == 1_700_000_000_000_000_000 + 5_000
    assert rank.source.endswith("t.json.gz")
    assert {(lane.rank, lane.kind, lane.device, lane.stream, lane.label) for lane in trace.lanes} == {
        (2, LaneKind.CPU, -1, THREAD, "thread 100 (python)"),
        (2, LaneKind.GPU, 0, 7, "stream 7"),
    }


def test_order_is_start_then_longest_then_file(tmp_path: Path) -> None:
    events = [op("late", 20, 1), op("child", 10, 5), op("parent", 10, 9), op("twin", 10, 5)]
    assert names_of(read(write(tmp_path / "t.json", events))) == ["parent", "child", "twin", "late"]


def test_shapes_are_interned_and_decoded(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "Input Dims": [[2, 3], []],
        "Input type": ["float", "Scalar"],
        "Concrete Inputs": ["", "1"],
    }
    trace = read(write(tmp_path / "t.json", [op("a", 0, 1, **arguments), op("b", 1, 1, **arguments), op("c", 2, 1)]))
    assert len(trace.shapes) == 1
    shapes = trace.shapes_of(1)
    assert shapes is not None
    assert shapes.dims == ([2, 3], [])
    assert shapes.types == ("float", "Scalar")
    assert shapes.concrete == ("", "1")
    assert trace.shapes_of(2) is None


def test_collectives_from_arguments_and_from_names(tmp_path: Path) -> None:
    told: dict[str, Any] = {
        "Collective name": "allreduce", "dtype": "Float", "In msg nelems": 8, "Out msg nelems": 8, "Group size": 2,
        "Process Group Name": "0", "Process Group Ranks": "[0, 1]",
    }  # fmt: skip
    events = [
        call("cudaLaunchKernel", 0, 1, 1),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 1, 1, 1, **told),
        kernel("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", 2, 1, 2),
        kernel("ncclAllGatherRingLLKernel_sum_i8(ncclColl)", 3, 1, 3),
        kernel("gemm", 4, 1, 4),
        op("record_param_comms", 5, 1, **(told | {"Process Group Ranks": "[0, ..., 1]"})),
    ]
    trace = read(write(tmp_path / "t.json", events))
    found = [trace.collectives[i] if i >= 0 else None for i in trace.collective]
    names = [c.name if c else None for c in found]
    assert names == [None, "allreduce", "SendRecv", "AllGather", None, "allreduce"]
    first, last = found[1], found[5]
    assert first is not None
    assert last is not None
    assert (first.dtype, first.in_elements, first.group_size, first.group_ranks) == ("Float", 8, 2, (0, 1))
    assert last.group_ranks == ()


def test_array_of_events_without_metadata(tmp_path: Path) -> None:
    trace = read(write(tmp_path / "rank_5.json", json.dumps(training()).encode()))
    assert len(trace) == 8
    assert trace.ranks[0].rank == 5
    assert trace.ranks[0].devices == ()


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    seen: list[float] = []
    read(write(tmp_path / "t.json.gz", training(50)), progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


# --- Sets of files --------------------------------------------------------------------------------------------


@pytest.fixture
def ranks(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "run"
    folder.mkdir()
    return [write(folder / f"rank{i}.json.gz", training(2, at=1000 + i)) for i in range(11)]


def test_folder_zip_and_tar_hold_the_same_ranks(tmp_path: Path, ranks: list[Path]) -> None:
    packed = tmp_path / "run.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for path in ranks:
            archive.write(path, f"run/{path.name}")
    tarred = tmp_path / "run.tar.gz"
    with tarfile.open(tarred, "w:gz") as archive_:
        for path in ranks:
            archive_.add(path, f"run/{path.name}")
    of_folder = read(tmp_path / "run")
    assert [r.rank for r in of_folder.ranks] == list(range(11))
    assert len({r.base_ns for r in of_folder.ranks}) == 1
    for other in (read(packed), read(tarred), read(ranks), read([str(tmp_path / "run")])):
        assert [r.rank for r in other.ranks] == list(range(11))
        assert other.start.tolist() == of_folder.start.tolist()
        assert other.lane.tolist() == of_folder.lane.tolist()


def test_ranks_select_files(ranks: list[Path]) -> None:
    trace = read(ranks[0].parent, ranks={2, 10})
    assert [r.rank for r in trace.ranks] == [2, 10]
    assert {lane.rank for lane in trace.lanes} == {2, 10}
    with pytest.raises(TraceError, match="has no rank 12: choose from 0, 1"):
        read(ranks[0].parent, ranks=[2, 12])


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", training(), distributedInfo={"rank": 1})
    b = write(tmp_path / "b.json", training(), distributedInfo={"rank": 1})
    with pytest.raises(TraceError, match=r"a\.json and .*b\.json are both rank 1"):
        read([a, b])


def test_files_without_rank_are_numbered_by_their_place(tmp_path: Path) -> None:
    write(tmp_path / "a.json", training())
    write(tmp_path / "b.json", training(), distributedInfo={"rank": 0})
    write(tmp_path / "c.json", training())
    trace = read(tmp_path)
    assert [(r.rank, Path(r.source).name) for r in trace.ranks] == [(0, "b.json"), (1, "a.json"), (2, "c.json")]
    assert [d.reason for d in trace.dropped] == [
        "file tells no rank: taken as rank 1 by its place",
        "file tells no rank: taken as rank 2 by its place",
    ]


def test_rank_from_file_name(tmp_path: Path) -> None:
    for name, rank in (
        ("resnet50_num_workers_4.worker3.162.pt.trace.json", 3),
        ("rank-12.json", 12),
        ("trace_8_rank_1.json", 1),
        ("worker_7_step_12.json", 7),
        ("frank9.json", 0),
    ):
        assert read(write(tmp_path / name, training())).ranks[0].rank == rank


def test_folder_may_hold_other_json(tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", training())
    write(tmp_path / "settings.json", b'{"batch": 3}')
    trace = read(tmp_path)
    assert len(trace.ranks) == 1
    assert [d.count for d in trace.dropped] == [0]
    assert "settings.json" in trace.dropped[0].reason


# --- Filters --------------------------------------------------------------------------------------------------


def test_python_functions_are_left_out_but_modules_stay(tmp_path: Path) -> None:
    events = [
        op("torch/nn/modules/module.py(1): __call__", 0, 9, cat="python_function"),
        op("nn.Module: Linear_0", 1, 7, cat="python_function"),
        op("aten::linear", 2, 5),
    ]
    path = write(tmp_path / "t.json", events)
    trace = read(path)
    assert trace.category.tolist() == [Category.MODULE, Category.OPERATOR]
    assert [(d.reason, d.count) for d in trace.dropped] == [("python_function events were not asked for", 1)]
    everything = read(path, categories=set(Category))
    assert everything.category.tolist() == [Category.PYTHON, Category.MODULE, Category.OPERATOR]
    assert everything.dropped == ()


def test_categories_select_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", training())
    trace = read(path, categories={Category.KERNEL})
    assert trace.category.tolist() == [Category.KERNEL] * 2
    assert [d.count for d in trace.dropped] == [6]
    with pytest.raises(TraceError, match="holds no event that can be kept"):
        read(path, categories={Category.SYNC})


@pytest.fixture
def late_kernel(tmp_path: Path) -> Path:
    """Step 1 launches a kernel that runs in step 2; step 2 has one of its own, step 3 none."""
    events = [
        *(step(i, 1000 * i, 1000) for i in (1, 2, 3)),
        call("cudaLaunchKernel", 1100, 10, 1),
        call("cudaLaunchKernel", 2100, 10, 2),
        kernel("early", 2200, 100, 1),
        kernel("own", 2400, 100, 2),
        op("tail", 3100, 10),
    ]
    return write(tmp_path / "t.json", events)


def test_steps_keep_what_overlaps_and_what_they_launched(late_kernel: Path) -> None:
    assert names_of(read(late_kernel, steps=[1])) == ["ProfilerStep#1", "cudaLaunchKernel", "early"]
    second = read(late_kernel, steps={2})
    assert names_of(second) == ["ProfilerStep#2", "cudaLaunchKernel", "early", "own"]
    assert second.start[0] == 0
    assert names_of(read(late_kernel, steps=slice(-1, None))) == ["ProfilerStep#3", "tail"]
    assert names_of(read(late_kernel, steps=[1, 2, 3])) == names_of(read(late_kernel))


def test_steps_work_without_their_own_category(late_kernel: Path) -> None:
    assert names_of(read(late_kernel, steps=[1], categories={Category.KERNEL})) == ["early"]


def test_steps_that_are_not_there(late_kernel: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="has no step 7, 8: choose from 1, 2, 3"):
        read(late_kernel, steps=[2, 7, 8])
    with pytest.raises(TraceError, match="no step was selected"):
        read(late_kernel, steps=slice(9, None))
    with pytest.raises(TraceError, match="has no ProfilerStep marks"):
        read(write(tmp_path / "u.json", [op("a", 0, 1)]), steps=[0])
