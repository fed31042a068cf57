"""Whatever the bytes are, the reader answers with a `Trace` or one `TraceError`, in bounded memory."""

from __future__ import annotations

import gzip
import json
import random
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foretrace.errors import TraceError
from foretrace.trace.read import read
from foretrace.trace.trace import COLUMNS, Category, Trace
from tests.trace.recordings import document, training, write

TOKENS = [
    b"NaN", b"-Infinity", b"null", b"true", b"-1", b"1e400", b"1e-400", b"0x10", b"9" * 25, b"}", b"{", b"[", b"]",
    b'"', b"\\", b",", b"},{", b"}]}", b"[" * 3000, b"\x00", b"\xff", b"\\ud800", b'"ph":"X"', b'"ts":-5,',
    b'"dur":1e18,', b'"args":null,', b'"cat":null,', b'"traceEvents": [', b"\n", b" " * 3000,
]  # fmt: skip


def outcome(content: bytes, **options: Any) -> Trace | None:
    """Read in both ways; what is read must be sound, what is refused must be one sentence."""
    found = None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.json"
        path.write_bytes(content)
        for salvage in (True, False):
            try:
                found = read(path, salvage=salvage, **options)
            except TraceError as error:
                found = None
                assert "\n" not in str(error)
                assert "t.json" in str(error)
                assert str(error).endswith(".")
            else:
                check(found)
    return found


def check(trace: Trace) -> None:
    assert len(trace)
    assert {name: getattr(trace, name).dtype for name in COLUMNS} == {n: np.dtype(t) for n, t in COLUMNS.items()}
    assert trace.start.min() == 0
    assert trace.dur.min() >= 0
    assert (np.diff(trace.start) >= 0).all()
    assert trace.name.max() < len(trace.names)
    assert 0 <= trace.lane.min() <= trace.lane.max() < len(trace.lanes)
    assert trace.shape.max() < len(trace.shapes)
    assert trace.collective.max() < len(trace.collectives)
    assert trace.category.max() < len(Category)
    for row in np.flatnonzero(trace.shape >= 0)[:50].tolist():
        assert trace.shapes_of(row) is not None


# --- Generated documents --------------------------------------------------------------------------------------

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 50),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=8),
    st.sampled_from(["7", "stream 7", "0x0", "GPU 1", "-3", "[0, 1]"]),
)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3))
ARGUMENTS = [
    "correlation", "device", "stream", "bytes", "size", "Sequence number", "Input Dims", "Input type",
    "Concrete Inputs", "wait_on_stream", "wait_on_cuda_event_record_corr_id", "Collective name", "dtype",
    "In msg nelems", "Group size", "Process Group Ranks", "Bytes", "Device Type", "Device Id", "name", "x",
]  # fmt: skip
CATEGORIES = [
    "cpu_op", "Operator", "cuda_runtime", "kernel", "gpu_memcpy", "gpu_memset", "user_annotation",
    "gpu_user_annotation", "python_function", "cuda_sync", "cpu_instant_event", "overhead", "Trace", "new", "",
]  # fmt: skip
events = st.fixed_dictionaries(
    {},
    optional={
        "ph": st.sampled_from(["X", "X", "X", "X", "i", "M", "s", "f", "B", "E", "C", ""]) | values,
        "cat": st.sampled_from(CATEGORIES) | values,
        "name": st.sampled_from(["[memory]", "thread_name", "ProfilerStep#1", "nn.Module: A", "ncclKernel_X"]) | values,
        "pid": st.sampled_from([1, "CPU functions", "CUDA functions"]) | values,
        "tid": values,
        "ts": st.integers(0, 10_000) | st.floats(0, 1e6) | values,
        "dur": st.integers(0, 10_000) | st.floats(0, 1e6) | values,
        "args": st.dictionaries(st.sampled_from(ARGUMENTS), values, max_size=5) | values,
    },
)
metadata = st.dictionaries(
    st.sampled_from(["baseTimeNanoseconds", "distributedInfo", "deviceProperties", "foretrace", "traceName", "x"]),
    values | st.dictionaries(st.sampled_from(["rank", "world_size", "backend"]), values),
    max_size=3,
)


@given(st.lists(events, max_size=8), metadata, st.sampled_from([None, 0, 2]))
def test_any_document(found: list[Any], head: dict[str, Any], indent: int | None) -> None:
    outcome(json.dumps({**head, "traceEvents": found, **head}, indent=indent).encode())
    outcome(json.dumps(found, indent=indent).encode(), categories=set(Category))


sound = st.builds(
    lambda cat, ts, dur, tid: {"ph": "X", "cat": cat, "name": "n", "pid": 1, "tid": tid, "ts": ts, "dur": dur},
    st.sampled_from(["cpu_op", "kernel", "user_annotation", "overhead"]),
    st.integers(0, 10**15).map(lambda ns: ns // 10**9),
    st.integers(0, 10**6),
    st.integers(0, 5) | st.sampled_from(["a", "stream 5"]),
)


@given(st.lists(sound, min_size=1, max_size=20))
def test_sound_events_are_all_there(found: list[dict[str, Any]]) -> None:
    trace = outcome(document(found))
    if trace is None:  # some lie more than ten minutes apart
        starts = sorted(e["ts"] for e in found)
        assert max(np.diff(starts), default=0) > 600_000_000
        return
    first = min(e["ts"] for e in found)
    expected = sorted((e["ts"] - first, -e["dur"]) for e in found)
    assert [(s // 1000, -d // 1000) for s, d in zip(trace.start, trace.dur, strict=True)] == expected


# --- Damaged documents ----------------------------------------------------------------------------------------


def damage(content: bytes, seed: int) -> bytes:
    """Flip, cut out, repeat and insert bytes, mostly few."""
    dice = random.Random(seed)
    data = bytearray(content)
    for _ in range(dice.choice((1, 1, 1, 2, 5, 20))):
        at = dice.randrange(len(data) + 1)
        kind = dice.randrange(6)
        if kind == 0:
            data[at : at + 1] = bytes([dice.randrange(256)])
        elif kind == 1:
            del data[at : at + dice.choice((1, 5, 50, 5000))]
        elif kind == 2:
            data[at:at] = dice.choice(TOKENS)
        elif kind == 3:
            source = dice.randrange(len(data) + 1)
            data[at:at] = data[source : source + dice.choice((1, 10, 300, 3000))]
        elif kind == 4:
            end = at
            while end < len(data) and chr(data[end]) in "0123456789.-":
                end += 1
            data[at:end] = dice.choice(TOKENS)
        elif dice.random() < 0.3:
            del data[at:]
    return bytes(data)


WHOLE = document(training(20), distributedInfo={"rank": 1}, deviceProperties=[{"name": "A"}], baseTimeNanoseconds=7)


@given(st.integers(0, 2**32))
def test_damaged_documents(seed: int) -> None:
    outcome(damage(WHOLE, seed))


@given(st.integers(0, 2**32))
def test_damaged_gzip(seed: int) -> None:
    outcome(damage(gzip.compress(WHOLE, mtime=0), seed))


@given(st.integers(0, len(WHOLE)))
@example(0)
@example(len(WHOLE))
def test_cut_anywhere(at: int) -> None:
    trace = outcome(WHOLE[:at])
    assert (trace is not None) == (at >= len(WHOLE.rstrip()))


@given(st.binary(max_size=200))
@example(b"PK\x03\x04")
@example(b"\x1f\x8b")
@example(b"[")
@example(b'{"traceEvents": [')
@example(b"[" + b'"\\"' * 50)
def test_any_bytes(content: bytes) -> None:
    outcome(content)
    outcome(b'{"traceEvents": [' + content)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "file",
    [
        "hta/amd_trace_mi250_minitoy_train_ROCm6_2_kineto.json.gz",
        "hta/critical_path_alexnet_benchmark_result_2869224_1695835535_trace.json.gz",
        "param/dlrm_kineto_8rank/worker3_step_12.1694128201557.pt.trace.json.gz",
        "tracelens/h100_gaunernst_bert-small-uncased__1016001.json.gz",
        "tracelens/inference_vllm_decode_full_graph_execution.json.gz",
        "triosim/h100_vgg13_kineto.json.gz",
    ],
)
def test_damaged_real_files(shared_data: Path, file: str, seed: int) -> None:
    packed = (shared_data / "traces" / file).read_bytes()
    content = gzip.decompress(packed)
    for i in range(2):
        outcome(damage(content, 100 * seed + i))
        outcome(damage(packed, 100 * seed + i))
        outcome(content[: random.Random(100 * seed + i).randrange(len(content))])


# --- Memory ---------------------------------------------------------------------------------------------------


def test_memory_is_columns_and_one_chunk(tmp_path: Path) -> None:
    def peak(steps: int) -> tuple[int, Trace]:
        path = write(tmp_path / f"{steps}.json.gz", training(steps))
        tracemalloc.start()
        trace = read(path)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used, trace

    (small, _), (large, trace) = peak(500), peak(20_000)  # 0.6 and 23 MB of JSON
    assert large - small < 3 * trace.nbytes_held
