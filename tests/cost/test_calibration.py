"""Calibrations: exact pairs, similar pairs with a known answer, and the files they are kept in."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from foretrace import flow
from foretrace.cost.operators import store
from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.machine import differences, fingerprint, fingerprint_of
from foretrace.cost.operators.operator import BFLOAT16, CHANNELS_LAST, Operator
from foretrace.cost.operators.similar import family, size
from foretrace.errors import ForetraceError
from foretrace.hardware import processor
from foretrace.testing.workloads import Cpu
from foretrace.trace.observe import machine

DATA = Path(__file__).resolve().parents[1] / "data"
HERE = {"cpu": "a processor", "threads": 1, "allocator": {}}


def mm(m: int, k: int, n: int, kind: str = "float") -> Operator:
    return Operator.of("aten::mm", [[m, k], [k, n]], [kind, kind])


def conv(batch: int, channels: int, side: int, kind: str = "float", layout: str = "") -> Operator:
    dims = [[batch, channels, side, side], [channels, channels, 3, 3], [], [], [], [], []]
    types = [kind, kind, "", "ScalarList", "ScalarList", "ScalarList", "Scalar"]
    return Operator.of("aten::mkldnn_convolution", dims, types, ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "1"], layout)


def test_an_exact_pair_is_its_ratio() -> None:
    found = Calibration(seconds={mm(8, 8, 8).key: 2.0, mm(8, 8, 8, BFLOAT16).key: 1.0})
    ratio = found.ratio(mm(8, 8, 8), mm(8, 8, 8, BFLOAT16))
    assert ratio is not None
    assert (ratio.value, ratio.timed) == (0.5, True)
    assert ratio.low < 0.5 < ratio.high


def test_products_gain_as_their_neighbours_did() -> None:
    """Small products lose in bfloat16, large ones gain: the ratio in between lies in between."""
    known = {64: 3.0, 128: 1.5, 256: 0.75, 512: 0.5, 1024: 0.5}
    seconds = {mm(n, n, n).key: 1.0 for n in known} | {mm(n, n, n, BFLOAT16).key: ratio for n, ratio in known.items()}
    found = Calibration(seconds=seconds)
    ratios = [found.ratio(mm(n, n, n), mm(n, n, n, BFLOAT16)) for n in (65, 180, 1000)]
    assert all(each is not None and not each.timed for each in ratios)
    small, middle, large = (each for each in ratios if each is not None)
    assert small.value > middle.value > large.value
    assert 2.0 < small.value <= 3.0
    assert 0.5 <= large.value < 0.6
    assert small.low <= small.value / 1.1
    assert log(small.high / small.low) > log(large.high / large.low)


def test_ranges_are_never_narrower_than_a_tenth() -> None:
    seconds = {mm(n, n, n).key: 1.0 for n in (64, 256)} | {mm(n, n, n, BFLOAT16).key: 0.5 for n in (64, 256)}
    ratio = Calibration(seconds=seconds).ratio(mm(128, 128, 128), mm(128, 128, 128, BFLOAT16))
    assert ratio is not None
    assert ratio.value == pytest.approx(0.5)
    assert ratio.low <= ratio.value / 1.0999
    assert ratio.high >= ratio.value * 1.0999


def test_convolutions_are_told_apart_by_channels_not_by_work() -> None:
    """Two convolutions of equal FLOPs, of which few channels gain from another layout and many do not."""
    few, many = conv(8, 16, 64), conv(8, 128, 8)
    seconds = {few.key: 1.0, many.key: 1.0}
    seconds |= {few.with_layout(CHANNELS_LAST).key: 0.6, many.with_layout(CHANNELS_LAST).key: 1.0}
    found = Calibration(seconds=seconds)
    for asked, expected in ((conv(4, 16, 64), 0.6), (conv(4, 128, 16), 1.0)):
        ratio = found.ratio(asked, asked.with_layout(CHANNELS_LAST))
        assert ratio is not None
        assert ratio.value == pytest.approx(expected, rel=0.08)


def test_a_fixed_share_serves_every_batch() -> None:
    """T(kB) = T(B) (f + (1 - f) k) with f = 0.2, measured for k = 2, asked for k = 4 and for half the batch."""
    one, two = conv(8, 64, 16), conv(16, 64, 16)
    found = Calibration(seconds={one.key: 1.0, two.key: 1.8})
    four = found.ratio(conv(9, 64, 16), conv(36, 64, 16))
    assert four is not None
    assert four.value == pytest.approx(0.2 + 0.8 * 4)
    assert four.low < four.value < four.high
    half = found.ratio(conv(18, 64, 16), conv(9, 64, 16))
    assert half is not None
    assert half.value == pytest.approx(1 / 1.8, rel=0.01)


def test_more_channels_are_no_larger_batch() -> None:
    found = Calibration(seconds={conv(8, 64, 16).key: 1.0, conv(8, 128, 16).key: 4.0})
    assert found.ratio(conv(4, 64, 16), conv(8, 64, 16)) is None


def test_changes_at_once_are_taken_one_after_the_other() -> None:
    """Twice the batch in bfloat16: the ratio of the types is looked up at the new size."""
    seconds = {
        mm(64, 256, 256).key: 1.0,
        mm(128, 256, 256).key: 2.0,
        mm(64, 256, 256, BFLOAT16).key: 1.0,
        mm(128, 256, 256, BFLOAT16).key: 1.0,
    }
    ratio = Calibration(seconds=seconds).ratio(mm(64, 256, 256), mm(128, 256, 256, BFLOAT16))
    assert ratio is not None
    assert ratio.timed
    assert ratio.value == 1.0
    near = Calibration(seconds=seconds).ratio(mm(80, 256, 256), mm(160, 256, 256, BFLOAT16))
    assert near is not None
    assert 0.9 < near.value < 1.7
    joint = conv(8, 64, 16, BFLOAT16, CHANNELS_LAST)
    apart = {
        conv(8, 64, 16).key: 1.0,
        conv(8, 64, 16, BFLOAT16).key: 0.5,
        conv(8, 64, 16, layout=CHANNELS_LAST).key: 0.8,
    }
    product = Calibration(seconds=apart).ratio(conv(8, 64, 16), joint)
    assert product is not None
    assert product.value == pytest.approx(0.4)


def test_nothing_similar_is_no_ratio() -> None:
    assert Calibration(seconds={mm(8, 8, 8).key: 1.0}).ratio(mm(8, 8, 8), mm(8, 8, 8, BFLOAT16)) is None
    strange = Operator("module:function", "not json")
    assert Calibration(seconds={strange.key: 1.0}).ratio(mm(8, 8, 8), mm(8, 8, 8, BFLOAT16)) is None


def test_classes_and_sizes() -> None:
    assert family(mm(8, 8, 8)) == family(Operator.of("aten::addmm", [[8], [8, 8], [8, 8]], ["float"] * 3)) == "gemm"
    depthwise = Operator.of("aten::mkldnn_convolution", [[8, 64, 9, 9], [64, 1, 3, 3]], ["float"] * 2)
    assert family(depthwise) == "conv, grouped"
    assert size(conv(8, 64, 16))[:2] == (log(64), log(64))


# --- files -----------------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded_and_merged() -> None:
    machine = HERE | {"cpu": "round trip"}
    assert store.load(machine) == {}
    assert not Calibration(machine=machine)
    first = Calibration(machine=machine, seconds={"a": 1.0, "b": 2.0}).save()
    second = Calibration(machine=machine, seconds={"b": 3.0}).save()
    assert first == second
    assert store.load(machine) == {"a": 1.0, "b": 3.0}
    assert store.load(machine | {"threads": 2}) == {}


def test_two_processes_that_save_at_once_lose_nothing() -> None:
    program = (
        "import sys\n"
        "from foretrace.cost.operators import store\n"
        "for i in range(40):\n"
        "    store.save({'cpu': 'shared'}, {f'{sys.argv[1]} {i}': 1.0})\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, name]) for name in ("one", "two")]
    assert [each.wait(timeout=60) for each in writers] == [0, 0]
    assert len(store.load({"cpu": "shared"})) == 80


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"format": 1}',
        '{"format": 9, "machine": {}, "seconds": {}}',
        '{"format": 1, "machine": 3, "seconds": {}}',
    ],
)
def test_a_damaged_file_is_named_with_the_mend(text: str) -> None:
    machine = HERE | {"cpu": f"damaged {text}"}
    path = store.save(machine, {"a": 1.0})
    path.write_text(text)
    with pytest.raises(ForetraceError, match=f"{path.name}.*delete it and run foretrace calibrate device"):
        store.load(machine)


def test_a_calibration_fits_its_machine_only() -> None:
    graph = flow.read(DATA / "cnn.json.gz").graph().graph
    recorded = fingerprint_of(graph.info.recording)
    assert recorded["threads"] == graph.info.recording["threads"]["intra_op"]
    mine = Calibration(machine=recorded, seconds={"a": 1.0})
    assert not mine.misfits(graph)
    other = Calibration(machine=recorded | {"threads": 7}, seconds={"a": 1.0})
    assert other.misfits(graph) == [f"number of threads (7, not {recorded['threads']})"]
    mine.save()
    assert Calibration.load_for(graph).seconds["a"] == 1.0
    silent = replace(graph, info=replace(graph.info, recording={}))
    assert mine.misfits(silent)
    assert not Calibration.load_for(silent)
    assert differences(recorded, recorded | {"allocator": {"MALLOC_ARENA_MAX": "1"}}) == [
        f"allocator settings ({'default'}, not MALLOC_ARENA_MAX=1)"
    ]


def test_the_fingerprint_is_of_this_process() -> None:
    found = fingerprint()
    assert found["threads"] == torch.get_num_threads() == 1
    assert found["torch"] == str(torch.__version__)
    assert None not in found.values()


@given(st.floats(0.0, 3.0))
def test_the_recorded_time_says_where_the_data_lies(own: float) -> None:
    before, after = Operator.of("aten::relu", [[8]], ["float"]), Operator.of("aten::relu", [[16]], ["float"])
    times = {before.near_key: 1.0, before.key: 2.0, after.near_key: 2.0, after.key: 6.0}
    found = Calibration(seconds=times).times_s(before, after, own)
    place = min(max(own - 1.0, 0.0), 1.0) if own else 1.0  # unknown: far
    assert found == pytest.approx((1.0 + place, 2.0 + 4.0 * place))


def test_a_call_timed_in_one_place_only_is_there() -> None:
    before, after = Operator.of("aten::relu", [[8]], ["float"]), Operator.of("aten::relu", [[16]], ["float"])
    known = Calibration(seconds={before.key: 2.0, after.key: 3.0})
    assert known.times_s(before, after, 1.0) == (2.0, 3.0)
    assert known.times_s(before, before.with_dims([[32]])) is None


def test_times_of_another_kind_of_processor_are_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_offered", lambda: ("avx", "avx2", "avx512", "avx512_bf16"))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    wide = fingerprint()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    narrow = fingerprint()
    assert differences(wide, narrow) == ["instruction sets (avx avx2 avx512 avx512_bf16, not avx avx2)"]
    store.save(wide, {"a": 1.0})
    assert store.load(narrow) == {}
    store.path_for(narrow).write_bytes(store.path_for(wide).read_bytes())  # copied from elsewhere
    with pytest.raises(ForetraceError, match=r"holds times of another machine .* instruction sets"):
        store.load(narrow)
    recording = {
        "machine": machine.machine(), "environment": machine.environment(), **machine.torch_settings(),
    }  # fmt: skip
    graph = replace(Cpu().graph(), info=replace(Cpu().graph().info, recording=recording))
    assert not Calibration(machine=narrow, seconds={"a": 1.0}).misfits(graph)
    with pytest.raises(ForetraceError, match="another machine than the recording's: instruction sets"):
        Calibration(machine=wide, seconds={"a": 1.0}).on(graph)


def test_cores_count_as_far_as_threads_use_them() -> None:
    def of(threads: int, usable: float) -> dict[str, Any]:
        return fingerprint_of({"machine": {"cores": 8, "usable_cores": usable}, "threads": {"intra_op": threads}})

    assert differences(of(1, 2.0), of(1, 4.0)) == [], "one thread has its core in either case"
    assert differences(of(4, 2.0), of(4, 4.0)) == ["cores for these threads (2.0, not 4)"]
