"""Calls: families, dimensions and bytes of operators; the chain of models; the roofline."""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.cost.calls import Call, Calls, Family, Precision, describe, family_of
from foretrace.cost.devices.defaults import AsRun, as_run, standard
from foretrace.cost.devices.roofline import Roofline, floor_s, peak_flops, share_of
from foretrace.cost.model import Chain, CostModel, Prediction
from foretrace.hardware.devices import Device, catalog, named


def text(*dims: list[int], kind: str = "float", concrete: list[str] | None = None) -> str:
    return json.dumps([list(dims), [kind] * len(dims), concrete or [""] * len(dims)])


@pytest.mark.parametrize(
    ("op", "family"),
    [
        ("aten::addmm", Family.GEMM),
        ("aten::bmm", Family.GEMM),
        ("aten::convolution_backward", Family.CONV),
        ("aten::_scaled_dot_product_flash_attention", Family.ATTENTION),
        ("aten::_scaled_dot_product_flash_attention_backward", Family.ATTENTION),
        ("aten::_softmax", Family.SOFTMAX),
        ("aten::_log_softmax_backward_data", Family.SOFTMAX),
        ("aten::native_layer_norm", Family.NORM),
        ("aten::native_batch_norm_backward", Family.NORM),
        ("aten::cudnn_batch_norm", Family.NORM),
        ("aten::max_pool2d_with_indices_backward", Family.POOL),
        ("aten::embedding_dense_backward", Family.LOOKUP),
        ("aten::index_select", Family.LOOKUP),
        ("aten::_to_copy", Family.MOVE),
        ("aten::cat", Family.MOVE),
        ("aten::_foreach_addcdiv_", Family.OPTIMIZER),
        ("aten::_fused_adamw_", Family.OPTIMIZER),
        ("aten::sum", Family.REDUCTION),
        ("aten::mkldnn_rnn_layer", Family.RECURRENT),
        ("aten::gelu_backward", Family.ELEMENTWISE),
        ("aten::threshold_backward", Family.ELEMENTWISE),
        ("aten::view", Family.NONE),
        ("aten::t", Family.NONE),
        ("flash_attn::_flash_attn_forward", Family.OTHER),
        ("aten::_grouped_mm", Family.GEMM),
        ("aten::_scaled_mm", Family.GEMM),
        ("aten::linalg_inv_ex", Family.OTHER),
        ("aten::_linalg_svd", Family.OTHER),
        ("aten::topk", Family.OTHER),
        ("aten::linalg_vector_norm", Family.REDUCTION),
        ("aten::_values", Family.NONE),
    ],
)
def test_families(op: str, family: Family) -> None:
    assert family_of(op) == family


def test_products() -> None:
    found = describe("aten::addmm", text([512], [8, 16, 256][1:], [256, 512]))
    assert (found.b, found.m, found.n, found.k) == (1, 16, 512, 256)
    assert found.flops == 2 * 16 * 512 * 256
    batched = describe("aten::bmm", text([12, 64, 32], [12, 32, 48], kind="c10::BFloat16"), [[12, 64, 48]])
    assert (batched.b, batched.m, batched.n, batched.k) == (12, 64, 48, 32)
    assert batched.precision == Precision.BF16
    assert batched.written_bytes == 12 * 64 * 48 * 2
    assert batched.read_bytes == 2 * 12 * (64 * 32 + 32 * 48)
    linear = describe("aten::linear", text([4, 10, 256], [512, 256], [512]))
    assert (linear.m, linear.n, linear.k) == (40, 512, 256)


def test_convolutions_are_implicit_products() -> None:
    sizes = text([8, 64, 56, 56], [128, 64, 3, 3], [], concrete=["", "", ""])
    found = describe("aten::convolution", sizes, [[8, 128, 28, 28]])
    assert (found.b, found.m, found.n, found.k) == (1, 8 * 28 * 28, 128, 64 * 9)
    depthwise = describe("aten::convolution", text([2, 32, 8, 8], [32, 1, 3, 3]), [[2, 32, 8, 8]])
    assert (depthwise.b, depthwise.n, depthwise.k) == (32, 1, 9)
    backward = describe("aten::convolution_backward", text([8, 128, 28, 28], [8, 64, 56, 56], [128, 64, 3, 3]))
    assert (backward.m, backward.n, backward.k) == (8 * 28 * 28, 128, 64 * 9)


def test_rows() -> None:
    norm = describe("aten::native_layer_norm", text([4, 8, 256]))
    assert (norm.m, norm.n) == (32, 256)
    softmax = describe("aten::_softmax", text([2, 12, 64, 64]))
    assert (softmax.m, softmax.n) == (2 * 12 * 64, 64)
    attention = describe(
        "aten::_scaled_dot_product_efficient_attention", text([2, 8, 128, 64], [2, 8, 96, 64], [2, 8, 96, 64])
    )
    assert (attention.b, attention.m, attention.n, attention.k) == (16, 128, 96, 64)
    # what it calls in turn has heads behind the sequence, and is the same work
    for name in ("_flash_attention_forward", "_efficient_attention_forward"):
        within = describe(f"aten::{name}", text([2, 128, 8, 64], [2, 96, 8, 64], [2, 96, 8, 64]))
        assert (within.b, within.m, within.n, within.k, within.flops) == (16, 128, 96, 64, attention.flops)


@given(
    st.sampled_from(
        ["aten::addmm", "aten::mm", "aten::convolution", "aten::_softmax", "aten::cat", "x::y", "aten::sum"]
    ),
    st.text(max_size=60) | st.just('[[[2,3],[3,4]],["float","float"],["",""]]') | st.just('[[[]],[""],[""]]'),
)
def test_nonsense_is_described_without_failing(op: str, sizes: str) -> None:
    found = describe(op, sizes)
    assert found.flops >= 0 and found.read_bytes >= 0 and found.written_bytes >= 0
    assert len(Calls.from_rows([found])) == 1


def test_rows_are_taken_in_order() -> None:
    calls = Calls.of([("aten::mm", text([2, 3], [3, 4])), ("aten::relu", text([5, 5])), ("aten::view", text([2, 2]))])
    taken = calls.take(np.array([2, 0]))
    assert taken.op == ("aten::view", "aten::mm")
    assert calls.take(calls.family == Family.ELEMENTWISE).op == ("aten::relu",)


# --- models ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Only(CostModel):
    """Answers for one family."""

    family: Family
    name: str = "only"

    def predict(self, calls: Calls, device: Device) -> Prediction:
        seconds = np.where(calls.family == self.family, 1.0, np.nan)
        return self._answer(seconds, np.full(len(calls), 0.5), np.full(len(calls), 2.0), "it says so")


def test_a_chain_asks_in_order_and_says_who_answered() -> None:
    calls = Calls.of(
        [("aten::mm", text([64, 64], [64, 64])), ("aten::relu", text([64, 64])), ("aten::t", text([2, 2]))]
    )
    found = Chain(members=(Only(family=Family.GEMM), Roofline())).predict(calls, named("h100"))
    assert found.sources == ("only", "roofline")
    assert found.source.tolist() == [0, 1, -1]
    assert found.seconds[0] == 1 and found.low_s[0] == 0.5 and found.high_s[0] == 2
    assert found.seconds[2] == 0  # a view costs nothing, whoever is asked
    assert sum(found.shares().values()) == pytest.approx(1)
    weighted = found.shares(np.array([0.0, 1.0, 1.0]))
    assert weighted == {"roofline": 1.0}


def test_what_nobody_knows_stays_unknown() -> None:
    calls = Calls.of([("aten::relu", text([64, 64]))])
    found = Chain(members=(Only(family=Family.GEMM),)).predict(calls, named("h100"))
    assert np.isnan(found.seconds).all() and found.source.tolist() == [-1] and found.shares() == {}


def test_the_roofline_is_never_faster_than_the_device() -> None:
    calls = Calls.of([("aten::mm", text([4096, 4096], [4096, 4096])), ("aten::relu", text([1 << 26]))])
    for device in catalog():
        if device.vendor == "NVIDIA":
            found = Roofline().predict(calls, device)
            floor = floor_s(calls, device)
            assert (found.low_s >= 0.9 * floor).all() and (found.low_s <= found.seconds).all()
            assert (found.seconds <= found.high_s).all()
    h100 = named("h100")
    assert floor_s(calls, h100)[0] == pytest.approx(2 * 4096**3 / (h100.fp32_tflops * 1e12))
    assert floor_s(calls, h100)[1] == pytest.approx(2 * 4 * (1 << 26) / (h100.memory_gb_s * 1e9))


@pytest.mark.parametrize("kind", ["c10::BFloat16", "c10::Half", "float"])
def test_no_product_is_faster_than_the_peak_of_its_precision(kind: str) -> None:
    """Also where a device has no units for it, as V100 for bf16."""
    dims = [[8192, 8192], [8192, 8192]]
    calls = Calls.of([("aten::mm", json.dumps([dims, [kind] * 2, ["", ""]]))])
    for device in (each for each in catalog() if each.fp32_tflops):
        assert standard().predict(calls, device).seconds[0] >= floor_s(calls, device)[0], device.name


def test_a_device_without_units_of_a_precision_takes_the_next_wider_ones() -> None:
    p4, h100 = named("p4"), named("h100")
    assert peak_flops(p4, Precision.BF16) == pytest.approx(p4.fp32_tflops * 1e12)  # its 16-bit units are slower
    assert peak_flops(h100, Precision.FP8) > peak_flops(h100, Precision.BF16) > peak_flops(h100, Precision.FP32)
    t4 = named("t4")
    assert peak_flops(t4, Precision.TF32) == t4.fp32_tflops * 1e12


def test_every_family_has_a_share() -> None:
    for family in Family:
        for precision in (Precision.FP32, Precision.BF16) if family != Family.NONE else ():
            low, middle, high = share_of(family, precision)
            assert 0 < low < middle < high < 3, (family, precision)


def test_a_call_without_inputs_is_costed_as_nothing() -> None:
    calls = Calls.from_rows([Call(family=Family.OTHER, op="x::y")])
    assert Roofline().predict(calls, named("a100")).seconds[0] == pytest.approx(2e-6)


def test_convolutions_run_in_tf32_by_default() -> None:
    arguments = ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]
    sizes: list[list[int]] = [[64, 256, 56, 56], [256, 256, 3, 3], *([] for _ in range(7))]
    conv = ("aten::convolution", text(*sizes, concrete=arguments))
    calls = Calls.of([conv, ("aten::mm", text([64, 64], [64, 64]))])
    assert as_run(calls, named("a100")).precision.tolist() == [Precision.TF32, Precision.FP32]
    assert as_run(calls, named("v100")).precision.tolist() == [Precision.FP32, Precision.FP32]
    plain, run = (model.predict(calls, named("a100")).seconds for model in (Roofline(), AsRun(costs=Roofline())))
    assert run[1] == plain[1] and run[0] <= plain[0]


def typed(op: str, tensors: list[tuple[list[int], str]], concrete: list[str], *outputs: list[int]) -> Call:
    dims, kinds = [each for each, _ in tensors], [kind for _, kind in tensors]
    told = json.dumps([dims, kinds, [""] * len(dims)] if not concrete else [dims, kinds, concrete])
    return describe(op, told, list(outputs) or None, [4] * len(outputs) or None)


def test_rows_picked_from_a_table_are_moved_not_the_table() -> None:
    table, places, rows = ([1000, 64], "float"), ([50], "long int"), ([50, 64], "float")
    picked = typed("aten::index", [table, places], [], [50, 64])
    assert (picked.read_bytes, picked.written_bytes) == (50 * 64 * 4 + 50 * 8, 50 * 64 * 4)
    added = typed("aten::index_put_", [table, places, rows], [], [1000, 64])
    assert added.read_bytes + added.written_bytes == 3 * 50 * 64 * 4 + 50 * 8
    copied = typed("aten::index_put", [table, places, rows], [], [1000, 64])  # into a copy of the table
    assert copied.read_bytes + copied.written_bytes == 3 * 50 * 64 * 4 + 50 * 8 + 2 * 1000 * 64 * 4


def test_gradients_of_bags_fill_the_table() -> None:
    given = [([10, 64], "float"), ([50], "long int"), ([10], "long int"), ([50], "long int")]
    concrete = ["", "", "", "", "", "", "1000", "False", "0", "{}", "", "-1"]
    dense, sparse = (
        typed("aten::_embedding_bag_backward", given, [each.format(flag) for each in concrete])
        for flag in ("False", "True")
    )
    assert dense.read_bytes + dense.written_bytes == (3 * 50 + 1000) * 64 * 4 + 50 * 8
    assert sparse.read_bytes + sparse.written_bytes == 3 * 50 * 64 * 4 + 50 * 8


def test_products_of_groups_share_out_rows() -> None:
    for dims, sizes in (
        (([64, 96], [4, 96, 32], [4]), (4, 16, 32, 96)),  # every expert has 16 of 64 words
        (([96, 64], [64, 32], [4]), (4, 96, 32, 16)),  # gradients of their weights
    ):
        found = describe("aten::_grouped_mm", text(*dims))
        assert (found.b, found.m, found.n, found.k) == sizes
        assert found.flops == 2 * found.b * found.m * found.n * found.k == 2 * 64 * 96 * 32


def test_transposed_convolutions_are_products_of_input_pixels() -> None:
    x, w, y = [2, 8, 10, 10], [8, 16, 4, 4], [2, 16, 20, 20]
    settings = ["[2, 2]", "[1, 1]", "[1, 1]", "True", "[0, 0]", "1"]
    forward = typed("aten::convolution", [(x, "float"), (w, "float")], ["", "", "", *settings], y)
    given = [(y, "float"), (x, "float"), (w, "float")]
    mask = "[True, True, False]"
    backward = typed("aten::convolution_backward", given, ["", "", "", "", *settings, mask], x, w)
    for found, times in ((forward, 1), (backward, 2)):
        assert (found.b, found.m, found.n, found.k) == (1, 200, 256, 8)
        assert found.flops == times * 2 * found.b * found.m * found.n * found.k


@pytest.mark.parametrize(
    ("device", "precision", "tflops"),
    [
        ("t4", Precision.FP64, 8.141 / 32),  # 0.25 by its data sheet
        ("a100", Precision.FP64, 19.49),  # 19.5 on tensor cores
        ("v100", Precision.FP64, 7.85),
        ("l40s", Precision.FP64, 91.6 / 64),  # 1.4
        ("P100-SXM2-16GB", Precision.FP16, 10.6),  # added up in float32, as PyTorch does
        ("MI210", Precision.FP32, 45.2),  # of matrix units
    ],
)
def test_peaks_of_products_are_those_of_data_sheets(device: str, precision: Precision, tflops: float) -> None:
    assert peak_flops(named(device), precision) / 1e12 == pytest.approx(tflops, rel=0.01)


def test_precisions_that_no_table_has_have_wider_ranges() -> None:
    half, eighth = share_of(Family.GEMM, Precision.FP16), share_of(Family.GEMM, Precision.INT8)
    assert eighth.low < half.low / 3 and eighth.middle == half.middle
    assert share_of(Family.MOVE, Precision.INT8) == share_of(Family.MOVE, Precision.FP16)
    v100, sizes = named("v100"), text([4096, 4096], [4096, 4096], kind="c10::BFloat16")
    calls = Calls.of([("aten::mm", sizes), ("aten::mm", sizes.replace("BFloat16", "Half"))])
    found = Roofline().predict(calls, v100)  # it has no units for bfloat16
    assert found.high_s[0] / found.low_s[0] > 1.3 * found.high_s[1] / found.low_s[1]


def test_ranges_hold_products_of_another_table(shared_data: Path) -> None:
    """DeepBench's products, of which nothing was fitted; 16-bit ones of P100 are added up in float32."""
    devices = {"V100": "V100-SXM2", "T4": "T4", "P100": "P100-SXM2-16GB"}
    kinds = {"fp32": "float", "fp16_in_mixed": "c10::Half", "pseudo_fp16": "c10::Half"}
    rows: dict[tuple[str, str], list[tuple[str, float]]] = {}
    with gzip.open(shared_data / "deepbench" / "gemm.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            if row["suite"] == "train":
                m, n, k = (int(row[each]) for each in "mnk")
                sizes = text([m, k], [k, n], kind=kinds[row["precision"]])
                rows.setdefault((row["gpu"], row["precision"]), []).append((sizes, float(row["time_ms"]) / 1e3))
    assert len(rows) == 6
    for (gpu, precision), found in rows.items():
        told = standard().predict(Calls.of([("aten::mm", sizes) for sizes, _ in found]), named(devices[gpu]))
        seconds = np.array([each for _, each in found])
        held = (told.low_s <= seconds) & (seconds <= told.high_s)
        assert held.mean() >= 0.8, (gpu, precision)


def test_steps_of_a_recurrent_layer_follow_each_other() -> None:
    """Weights of 36 MB do not stay on a T4, which reads them again in each of 35 steps; those of 1 MB do."""
    told: dict[int, Prediction] = {}
    for hidden in (256, 1500):
        weights = [[4 * hidden, hidden], [4 * hidden, hidden], [4 * hidden], [4 * hidden]]
        dims = [[1, 35, hidden], weights, [], [], [1, 1, hidden]]
        sizes = json.dumps([dims, ["float", "TensorList", "Scalar", "", "float"], ["", "", "4", "", ""]])
        calls = Calls.of([("aten::_cudnn_rnn", sizes), ("aten::_cudnn_rnn", sizes.replace("[1, 35,", "[1, 70,"))])
        told[hidden] = Roofline().predict(calls, named("t4"))
    large, small = told[1500], told[256]
    assert large.low_s[0] > 35 * 36e6 / 320e9 and large.seconds[1] / large.seconds[0] == pytest.approx(2, rel=0.05)
    assert 35 * 2e-6 < small.low_s[0] < small.seconds[0] < 35 * 10e-6
