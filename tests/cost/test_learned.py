"""The learned float32 predictor: its laws, its ranges, and what it refuses to say."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import isolated
import left_out
from foretrace.cost.calls import Call, Calls, Family, Precision
from foretrace.cost.devices.learned import Learned, fp32
from foretrace.cost.devices.learned.fp32 import Ensemble, log_sigmoid
from foretrace.cost.devices.roofline import Roofline, floor_s
from foretrace.cost.model import Chain
from foretrace.errors import ForetraceError
from foretrace.hardware.devices import Device, catalog, named

SIZES = st.integers(min_value=1, max_value=1 << 16)
NVIDIA = [device for device in catalog() if fp32.board(device) is not None]


def product(b: float, m: float, k: float, n: float) -> Call:
    nbytes = 4 * b * (m * k + k * n)
    return Call(
        family=Family.GEMM, b=b, m=m, n=n, k=k, flops=2 * b * m * n * k, read_bytes=nbytes, written_bytes=4 * b * m * n,
        op="aten::bmm" if b > 1 else "aten::addmm",
    )  # fmt: skip


def vector(op: str, family: Family, rows: float, width: float, operands: int = 1) -> Call:
    nbytes = 4 * rows * width
    return Call(family=family, m=rows, n=width, read_bytes=operands * nbytes, written_bytes=nbytes, op=op)


def on(name: str) -> fp32.BoardFeatures:
    board = fp32.board(named(name))
    assert board is not None
    return board


def test_ensemble_is_the_mean_of_its_nets() -> None:
    rng = np.random.RandomState(1)
    arrays: dict[str, np.ndarray] = {
        "x.w0": rng.randn(3, 5, 4), "x.b0": rng.randn(3, 4), "x.w1": rng.randn(3, 4, 4), "x.b1": rng.randn(3, 4),
        "x.w2": rng.randn(3, 4, 2), "x.b2": rng.randn(3, 2), "x.mean": rng.randn(5), "x.std": rng.rand(5) + 0.5,
    }  # fmt: skip
    features = rng.randn(9001, 5)  # more than one block, the last one short

    def silu(x: np.ndarray) -> np.ndarray:
        return np.asarray(x / (1 + np.exp(-x)))

    x = (features - arrays["x.mean"]) / arrays["x.std"]
    outputs = []
    for net in range(3):
        h = silu(silu(x @ arrays["x.w0"][net] + arrays["x.b0"][net]) @ arrays["x.w1"][net] + arrays["x.b1"][net])
        outputs.append(h @ arrays["x.w2"][net] + arrays["x.b2"][net])
    found = Ensemble.of(arrays, "x")
    assert found.nets == 3
    assert len(found.first) == 5
    np.testing.assert_allclose(found(features.astype(np.float32)), np.mean(outputs, axis=0), rtol=2e-4, atol=2e-4)
    with pytest.raises(KeyError):
        Ensemble.of(arrays, "y")


def test_far_values_do_not_overflow() -> None:
    np.testing.assert_allclose(log_sigmoid(np.array([-800.0, 0.0, 800.0])), [-800.0, -np.log(2), 0.0])


def test_features_of_a_known_product() -> None:
    one = np.ones(1)
    # 4096 x 3840 output: 32 x 30 tiles on 108 SMs, 8.89 waves, no padding
    found = fp32.product_features(one, 4096 * one, 1280 * one, 3840 * one, one, 108)[0]
    waves = 960 / 108
    np.testing.assert_allclose(
        found, [np.log2(waves), np.log2(9 / waves), np.log2(1280), 0.0, 1.0, 12.0, np.log2(3840)], rtol=1e-5, atol=1e-6
    )


def test_large_products_reach_what_gpus_reach() -> None:
    """A large square product: no GPU in the catalog goes beyond its peak, or below a tenth of it."""
    calls = Calls.from_rows([product(1, 8192, 8192, 8192)])
    for device in NVIDIA:
        seconds = Learned().predict(calls, device).seconds[0]
        share = calls.flops[0] / seconds / (device.fp32_tflops * 1e12)
        assert 0.1 < share < 1, device.short


def test_power_caps_small_boards_only() -> None:
    """The L4 has 2.4 W per TFLOP/s, the A100 15: what a large product reaches of the peak differs accordingly."""
    one = np.ones(1)
    dims = (one, 8192 * one, 8192 * one, 8192 * one)
    for name, capped in (("L4", True), ("T4", True), ("A100-PCIe-80GB", False), ("H100-SXM5-80GB", False)):
        board = on(name)
        free, joules = fp32.shipped().product_s(*dims, one, board)
        sustained = fp32.shipped().sustained_s(free, joules, board)
        assert (sustained[0] > 1.2 * free[0]) == capped, name
        assert joules[0] / sustained[0] <= board.budget_w * (1 + 1e-9)


def test_short_measurements_come_before_the_power_limit() -> None:
    board = on("T4")
    one = np.ones(1)
    model = isolated.shipped()
    free, joules = model.product_s(one, 512 * one, 512 * one, 512 * one, one, board)
    short = model.measured_s(free, joules, board)[0] / free[0]
    free, joules = model.product_s(one, 8192 * one, 8192 * one, 8192 * one, one, board)
    long = model.measured_s(free, joules, board)[0] / free[0]
    assert short < 1.2
    assert long > 1.6


@settings(max_examples=60)
@given(b=st.integers(1, 512), m=SIZES, k=SIZES, n=SIZES, at=st.integers(0, len(NVIDIA) - 1))
def test_products_are_finite_and_never_below_the_roofline(b: int, m: int, k: int, n: int, at: int) -> None:
    calls = Calls.from_rows([product(b, m, k, n)])
    found = Learned().predict(calls, NVIDIA[at])
    assert np.isfinite(found.seconds).all()
    assert found.seconds[0] >= floor_s(calls, NVIDIA[at])[0] * 0.999
    assert 0 < found.low_s[0] <= found.high_s[0] < np.inf


@settings(max_examples=60)
@given(rows=SIZES, width=SIZES, op=st.sampled_from(["add", "relu", "gelu", "softmax", "native_layer_norm", "copy"]))
def test_vector_operators_are_finite_and_faster_with_bandwidth(rows: int, width: int, op: str) -> None:
    family = {"softmax": Family.SOFTMAX, "native_layer_norm": Family.NORM}.get(op, Family.ELEMENTWISE)
    calls = Calls.from_rows([vector(f"aten::{op}", family, rows, width)])
    device = named("A100-PCIe-80GB")
    seconds = Learned().predict(calls, device).seconds[0]
    assert 0 < seconds < np.inf
    faster = dataclasses.replace(device, memory_gb_s=2 * device.memory_gb_s)
    np.testing.assert_allclose(Learned().predict(calls, faster).seconds[0], seconds / 2, rtol=1e-9)


@settings(max_examples=40)
@given(m=st.integers(128, 8192), k=st.integers(64, 8192), n=st.integers(128, 8192), factor=st.floats(1.01, 3.0))
def test_a_faster_device_is_never_slower(m: int, k: int, n: int, factor: float) -> None:
    """With the same SMs: more peak, bandwidth and power together divide the time, whatever the shape."""
    calls = Calls.from_rows([product(1, m, k, n)])
    device = named("V100-PCIe-32GB")
    slow = Learned().predict(calls, device).seconds[0]
    better = dataclasses.replace(
        device, fp32_tflops=factor * device.fp32_tflops, memory_gb_s=factor * device.memory_gb_s,
        tdp_w=factor * device.tdp_w,
    )  # fmt: skip
    fast = Learned().predict(calls, better).seconds[0]
    assert fast <= slow * (1 + 1e-9)
    assert fast >= slow / factor * 0.9  # idle power does not grow with the factor


def test_doubling_the_batch_does_not_make_it_faster() -> None:
    batches = [1.0, 2.0, 4.0, 8.0, 16.0, 64.0, 256.0]
    for device in NVIDIA:
        seconds = Learned().predict(Calls.from_rows([product(b, 512, 512, 512) for b in batches[1:]]), device).seconds
        assert (np.diff(seconds) > 0).all(), device.short


def test_says_nothing_of_what_it_does_not_know() -> None:
    calls = Calls.from_rows([
        product(1, 64, 64, 64),
        dataclasses.replace(product(1, 64, 64, 64), precision=Precision.FP64),
        Call(family=Family.CONV, m=64, n=64, k=64, flops=1e6, read_bytes=1e4, written_bytes=1e4),
        vector("aten::add", Family.ELEMENTWISE, 64, 64, operands=2),
    ])  # fmt: skip
    found = Learned().predict(calls, named("H100-SXM5-80GB"))
    assert np.isnan(found.seconds).tolist() == [False, True, True, False]
    assert found.source.tolist() == [0, -1, -1, 0]
    for device in ("MI300X", "TPU-v4", "K80-half"):
        assert np.isnan(Learned().predict(calls, named(device)).seconds).all()
    chain = Chain(members=(Learned(), Roofline())).predict(calls, named("H100-SXM5-80GB"))
    assert [chain.sources[i] for i in chain.source] == ["learned", "roofline", "roofline", "learned"]


def test_each_precision_goes_to_its_own_predictor() -> None:
    calls = Calls.from_rows([
        product(1, 4096, 4096, 4096),
        dataclasses.replace(product(1, 4096, 4096, 4096), precision=Precision.BF16),
        dataclasses.replace(vector("aten::add", Family.ELEMENTWISE, 64, 64), precision=Precision.BF16),
    ])  # fmt: skip
    found = Learned().predict(calls, named("H100-SXM5-80GB"))
    assert np.isnan(found.seconds).tolist() == [False, False, True]
    assert found.seconds[1] < found.seconds[0] / 3
    assert found.shares() == pytest.approx({"learned": 1.0})
    assert "16-bit" in found.whys[0]


def test_a_device_of_no_catalog() -> None:
    device = Device(
        name="new", short="new", patterns=(), vendor="NVIDIA", arch="Hopper next", fp32_tflops=100.0, tf32_tflops=0.0,
        fp16_tflops=0.0, bf16_tflops=0.0, memory_gb_s=5000.0, memory_gb=100.0, sms=150, source="test", tdp_w=900.0,
    )  # fmt: skip
    found = Learned().predict(Calls.from_rows([product(1, 4096, 4096, 4096)]), device)
    assert 0.3 < 2 * 4096**3 / found.seconds[0] / 100e12 < 1
    assert np.isnan(
        Learned().predict(Calls.from_rows([product(1, 8, 8, 8)]), dataclasses.replace(device, tdp_w=0.0)).seconds
    ).all()


def test_two_operands_read_more() -> None:
    device = named("A100-PCIe-40GB")
    calls = Calls.from_rows([
        vector("aten::add", Family.ELEMENTWISE, 4096, 4096, operands=2),
        vector("aten::add", Family.ELEMENTWISE, 4096, 4096),
    ])  # fmt: skip
    two, one = Learned().predict(calls, device).seconds
    assert 1.3 < two / one < 1.7


def test_quantiles_give_every_device_the_same_weight() -> None:
    low, high = left_out.weighted_quantiles([np.full(1000, 1.0), np.array([3.0])])
    assert low == pytest.approx(1.0)
    assert high == pytest.approx(3.0, abs=0.5)
    assert left_out.weighted_quantiles([np.array([2.0]), np.array([2.0])]) == (2.0, 2.0)


def test_ranges_hold_what_they_were_made_from() -> None:
    rng = np.random.RandomState(0)
    groups, said, true = [], [], []
    for _ in range(5):
        g = rng.randint(0, 4, 4000)
        s = 10 ** rng.uniform(-5, -1, 4000)
        groups.append(g)
        said.append(s)
        true.append(s * np.exp(rng.normal(0, 0.1 * (1 + g), 4000)))
    table = left_out.table(groups, said, true)
    low, high = fp32.factors(table, groups[0], said[0])
    inside = (true[0] >= low * said[0]) & (true[0] <= high * said[0])
    assert 0.77 < inside.mean() < 0.83
    assert low[groups[0] == 3].mean() < low[groups[0] == 0].mean()
    with pytest.raises(ForetraceError, match="linear"):
        left_out.table([np.zeros(9, np.int64)], [np.ones(9)], [np.ones(9)])


def test_range_covers_devices_that_were_left_out() -> None:
    """What is shipped: factors on both sides of 1 for every group, wider than a few per cent."""
    table = np.array(fp32.shipped().facts["leave_one_device_out"]["intervals"])
    assert table.shape == (len(fp32.GROUPS), len(fp32.REGIMES_S) + 1, 2)
    assert (table[..., 0] < table[..., 1]).all()
    assert (table[..., 1] / table[..., 0] > 1.05).all()
