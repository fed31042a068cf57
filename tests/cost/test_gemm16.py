"""16-bit products: the law's known answers, what must hold on any chip, fitting, few-shot, and the shipped weights."""

from __future__ import annotations

import importlib
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.cost.calls import Call, Calls, Family, Precision
from foretrace.cost.devices.learned import gemm16_law as law
from foretrace.cost.devices.learned.gemm16 import Gemm16, features
from foretrace.errors import ForetraceError
from foretrace.hardware.devices import Device, catalog, named
from gemm16_fit import MeasuredProducts, adapt, fit_together, solve

CHIP = law.Chip(peak=300e12, bandwidth=2e12, sms=100, l2_bytes=40e6, clock_hz=1.5e9)
THETA = law.START | law.FOLLOW
SIZES = st.integers(1, 40_000)
H100, B200 = "H100-SXM5-80GB", "B200-SXM"


def one(chip: law.Chip, m: float, n: float, k: float, b: float | None = None, **shift: float) -> float:
    theta = {**THETA, **{name: THETA[name] + by for name, by in shift.items()}}
    times = None if b is None else np.array([float(b)])
    return float(law.seconds(theta, chip, np.array([float(m)]), np.array([float(n)]), np.array([float(k)]), times)[0])


# --- the law -----------------------------------------------------------------------------------------------------


def test_a_tiny_product_costs_the_floor() -> None:
    """In cycles: half the clock is twice the time."""
    floor = np.exp(THETA["floor"]) / CHIP.clock_hz
    assert one(CHIP, 2, 2, 32) == pytest.approx(floor, rel=0.35)
    slow = replace(CHIP, clock_hz=CHIP.clock_hz / 2)
    assert one(slow, 2, 2, 32) > 1.5 * one(CHIP, 2, 2, 32)


def test_a_huge_square_product_costs_its_flops() -> None:
    size = 16384.0
    ideal = 2 * size**3 / CHIP.peak
    assert 0.5 < ideal / one(CHIP, size, size, size) < 1.0
    quick = replace(CHIP, peak=2 * CHIP.peak)
    assert one(CHIP, size, size, size) / one(quick, size, size, size) == pytest.approx(2, rel=0.1)


def test_a_product_with_few_rows_costs_its_bytes() -> None:
    m, n, k = 8.0, 16384.0, 16384.0
    ideal = 2 * (m * n + n * k + m * k) / CHIP.bandwidth
    assert 0.5 < ideal / one(CHIP, m, n, k) < 1.0
    narrow, narrower = (replace(CHIP, bandwidth=CHIP.bandwidth / by) for by in (3, 6))
    assert one(narrower, m, n, k) / one(narrow, m, n, k) == pytest.approx(2, rel=0.05)


def test_one_tile_more_than_a_wave_costs_another_wave() -> None:
    """100 SMs, tiles of 128 x 256 at best: 100 of them are one wave, and k is too short to split it."""
    full, more = one(CHIP, 1280, 2560, 2048), one(CHIP, 1280, 2560 + 256, 2048)
    assert more > 1.05 * full
    half = one(CHIP, 1280, 1280, 2048)
    assert full < 1.9 * half  # a part-filled wave costs nearly as much as a full one


def test_what_fits_the_cache_is_fed_from_it() -> None:
    """A chip with little bandwidth and a large cache, the same product with and without that cache."""
    small = replace(CHIP, bandwidth=3e11, l2_bytes=1e6)
    large = replace(small, l2_bytes=200e6)
    assert one(large, 16, 3072, 3072) < 0.8 * one(small, 16, 3072, 3072)
    assert one(large, 16, 30720, 30720) == pytest.approx(one(small, 16, 30720, 30720))


def test_a_large_product_is_not_done_before_its_energy_is_drawn() -> None:
    """Also where the matrix units are free; a small one, or a chip without a known limit, does not notice."""
    costs = float(np.log(2.0)) - THETA["energy"]  # 2 pJ per FLOP
    limited = replace(CHIP, power_w=CHIP.peak * 1e-12)  # watts for half of the peak at that
    assert one(limited, 8192, 8192, 8192, energy=costs) == pytest.approx(4 * 8192.0**3 / CHIP.peak, rel=0.02)
    for chip, size in ((CHIP, 8192), (limited, 64)):
        assert one(chip, size, size, size, energy=costs) == one(CHIP, size, size, size)


def test_units_that_do_more_per_cycle_draw_as_much_per_cycle() -> None:
    """So the limit of the board allows them more FLOP in proportion; other vendors' limits say nothing."""
    for name, watts in (("l40s", 350), ("t4", 70), ("a100", 400)):
        assert law.Chip.of(named(name)).power_w == pytest.approx(watts, rel=1e-3)
    hopper = law.Chip.of(named(H100))
    assert hopper.power_w == pytest.approx(700 * hopper.peak / hopper.sms / hopper.clock_hz / 2048)
    assert law.Chip.of(named("mi300x")).power_w == np.inf


def test_many_equal_products_fill_the_chip() -> None:
    """Sixteen small products cost less than sixteen times one, and not less than one."""
    alone, together = one(CHIP, 128, 128, 512), one(CHIP, 128, 128, 512, b=16)
    assert alone <= together < 8 * alone
    assert one(CHIP, 128, 128, 512, b=1) == alone


@given(SIZES, SIZES, SIZES, st.integers(40, 300), st.floats(500, 5000), st.floats(5e9, 30e9))
@settings(max_examples=50)
def test_any_product_on_any_chip(m: int, n: int, k: int, sms: int, rate: float, bandwidth: float) -> None:
    """Finite and never faster than its data sheet allows; a better chip is not slower; more work is hardly faster.

    Chips have SMs of half to twice what was built yet: FLOP per cycle and bytes per second of each.
    """
    chip = replace(CHIP, peak=sms * rate * CHIP.clock_hz, bandwidth=sms * bandwidth, sms=sms)
    seconds = one(chip, m, n, k)
    assert np.isfinite(seconds)
    assert seconds > 2.0 * m * n * k / chip.peak / 2
    better = replace(chip, peak=1.5 * chip.peak, bandwidth=1.5 * chip.bandwidth)
    assert one(better, m, n, k) <= seconds * 1.0001
    # twice of one dimension is twice the work; another kernel may be picked, but the time hardly falls. One row or
    # column has kernels of its own, so the step from there is left out.
    if min(m, n) > 1:
        assert min(one(chip, 2 * m, n, k), one(chip, m, 2 * n, k), one(chip, m, n, 2 * k)) > 0.85 * seconds


def test_a_data_sheet_without_what_is_needed() -> None:
    device = named("tpu-v4")
    with pytest.raises(ForetraceError, match="number of SMs"):
        law.Chip.of(replace(device, sms=0))
    assert law.Chip.of(replace(device, boost_mhz=0.0, sms=100)).guessed[0] == "clock"


# --- fitting -----------------------------------------------------------------------------------------------------


def measured(theta: dict[str, float], chip: law.Chip, count: int, seed: int) -> MeasuredProducts:
    rng = np.random.default_rng(seed)
    m, n, k = (np.exp2(rng.uniform(5, 14, count)).round() for _ in range(3))
    return MeasuredProducts(chip=chip, m=m, n=n, k=k, seconds=law.seconds(theta, chip, m, n, k))


def test_solve_finds_the_median_line_in_spite_of_outliers() -> None:
    x = np.linspace(0, 1, 50)
    target = 2 + 3 * x
    target[::10] += 5
    found = solve(lambda p: p[0] + p[1] * x, target, np.zeros(2), np.full(2, 100.0))
    assert found == pytest.approx([2, 3], abs=0.05)


def test_few_measurements_move_what_they_say_something_about() -> None:
    """A board that reaches two thirds of the usual share of its peak is found from 30 products."""
    truth = {**THETA, "compute": THETA["compute"] - 0.4}
    spread = {"compute": 0.3, "memory": 0.2, "floor": 0.2}
    found = adapt(THETA, spread, measured(truth, CHIP, 30, 1))
    check = measured(truth, CHIP, 300, 2)
    off = [np.abs(law.seconds(t, CHIP, check.m, check.n, check.k) / check.seconds - 1).mean() for t in (THETA, found)]
    assert off[1] < off[0] / 4
    assert found["compute"] == pytest.approx(truth["compute"], abs=0.1)
    assert adapt(THETA, spread, check.take(np.arange(0))) == THETA


def test_a_device_of_its_own_is_told_from_what_all_share() -> None:
    slow = {**THETA, "compute": THETA["compute"] - 0.3}
    other = replace(CHIP, sms=150, peak=500e12)
    shared, shifts = fit_together(
        THETA, [measured(THETA, CHIP, 200, 1), measured(slow, other, 200, 2)], {"compute": 0.3},
        spread=0.2, fixed=[name for name in law.START if name != "compute"], iterations=15,
    )  # fmt: skip
    assert shifts[0]["compute"] - shifts[1]["compute"] == pytest.approx(0.3, abs=0.03)
    assert shared["memory"] == THETA["memory"]


# --- the shipped model ---------------------------------------------------------------------------------------------


def calls(*rows: Call) -> Calls:
    return Calls.from_rows(rows)


def gemm(**columns: float) -> Call:
    return Call(**({"family": Family.GEMM, "precision": Precision.BF16, "m": 512, "n": 512, "k": 512} | columns))  # type: ignore[arg-type]


def test_predicts_16_bit_products_and_nothing_else() -> None:
    rows = calls(
        gemm(), gemm(precision=Precision.FP16), gemm(precision=Precision.FP32), gemm(family=Family.CONV), gemm(m=0)
    )
    for device in (named(H100), named(B200)):
        found = Gemm16.load().predict(rows, device)
        assert np.isnan(found.seconds).tolist() == [False, False, True, True, True]
        assert found.source.tolist() == [0, 0, -1, -1, -1]
        assert (found.low_s[:2] < found.seconds[:2]).all() and (found.seconds[:2] < found.high_s[:2]).all()
        assert device.name in found.whys[0]


def test_a_device_without_a_16_bit_peak_is_not_spoken_of() -> None:
    found = Gemm16.load().predict(calls(gemm()), replace(named(B200), bf16_tflops=0.0, fp16_tflops=0.0))
    assert np.isnan(found.seconds).all()
    assert "16-bit peak" in found.whys[0]


def test_every_gpu_of_the_catalog_gets_a_time_in_reason() -> None:
    """Between the data sheet's own bound and thirty times that, for a large product."""
    size = 8192.0
    for device in catalog():
        if device.sms < 10 or not (device.bf16_tflops or device.fp16_tflops):
            continue
        seconds = float(Gemm16.load().seconds(device, size, size, size)[0])
        ideal = 2 * size**3 / law.Chip.of(device).peak
        assert 0.8 * ideal < seconds < 30 * ideal, device.name


def test_ranges_are_wider_where_less_is_known() -> None:
    model, times = Gemm16.load(), np.array([5e-6, 50e-6, 500e-6])

    def width(device: Device, b: float = 1) -> np.ndarray:
        low, high = model.factors(device, times, np.full(3, b))
        assert (low < 1).all() and (high > 1).all()
        return np.asarray(high / low)

    assert (width(named(B200)) > width(named(H100))).all()
    assert (width(named(B200), 4) > width(named(B200))).all()
    assert (width(named("mi300x")) > width(named(B200))).all()
    # a data sheet further from the measured ones than any family was from the others
    odd = replace(named(B200), short="odd", l2_mb=1.0)
    assert (width(odd) > width(named(B200))).all()
    assert law.apart(law.Chip.of(odd).traits, model.traits) > model.reach


def test_beyond_the_measurements_the_law_goes_on() -> None:
    """Twice the rows of the largest measured product take about twice as long, on a measured GPU too."""
    first, second = Gemm16.load().seconds(named(H100), [32768, 65536], [8192, 8192], [8192, 8192])
    assert second / first == pytest.approx(2, rel=0.1)


def test_few_shot_learns_a_slower_board() -> None:
    model, device = replace(Gemm16.load(), known={}), named(B200)
    rng = np.random.default_rng(4)
    m, n, k = (np.exp2(rng.uniform(8, 14, 40)).round() for _ in range(3))
    truth = 1.5 * model.seconds(device, m, n, k)
    moved = model.few_shot(device, m[:25], n[:25], k[:25], truth[:25])
    before, after = (np.abs(x.seconds(device, m[25:], n[25:], k[25:]) / truth[25:] - 1).mean() for x in (model, moved))
    assert after < before / 2
    assert "25 products" in moved.why(device)
    other = named(H100)
    assert np.array_equal(moved.seconds(other, m, n, k), model.seconds(other, m, n, k))


@given(SIZES, SIZES, SIZES)
@settings(max_examples=40)
def test_measured_gpus_answer_any_size(m: int, n: int, k: int) -> None:
    model = Gemm16.load()
    for short in model.known:
        seconds = float(model.seconds(named(short), m, n, k)[0])
        assert 1e-7 < seconds < 1e4


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (([0.0], [8.0], [8.0]), "m of product 0"),
        (([8.0], [np.inf], [8.0]), "n of product 0"),
        (([8.0, 8.0], [8.0], [8.0]), "one length"),
    ],
)
def test_sizes_that_are_none(columns: tuple[list[float], ...], said: str) -> None:
    with pytest.raises(ForetraceError, match=said):
        Gemm16.load().seconds(named(H100), *columns)


@pytest.mark.parametrize(("times", "said"), [([1e-5], "one time"), ([1e-5, 0.0], "above 0")])
def test_measurements_that_are_none(times: list[float], said: str) -> None:
    with pytest.raises(ForetraceError, match=said):
        Gemm16.load().few_shot(named(B200), [64.0, 64.0], [64.0, 64.0], [64.0, 64.0], times)
    with pytest.raises(ForetraceError, match="at least two"):
        Gemm16.load().few_shot(named(B200), [64.0], [64.0], [64.0], [1e-5])


def test_weights_of_another_kind(tmp_path: Path) -> None:
    packed = io.BytesIO()
    np.savez(packed, names=np.array(["floor"]))
    path = tmp_path / "weights.npz"
    path.write_bytes(packed.getvalue())
    with pytest.raises(ForetraceError, match=r"weights\.npz lacks 'known'"):
        Gemm16.load(path)


def test_features_are_finite_and_as_many_as_the_nets_take() -> None:
    model = Gemm16.load()
    found = features(np.array([1e-5, 1.0, 1e-4]), CHIP, *(np.array([1.0, 32768.0, 17.0]) for _ in range(3)))
    assert np.isfinite(found).all()
    assert {known.weights[0][0].shape[1] for known in model.known.values()} == {len(found)}


def test_shipped_weights_reach_what_they_did(shared_data: Path) -> None:
    """On shapes held out, and on a GPU that the law never saw, a sample of the shared table."""
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(shared_data / "gemm" / "gemm_bf16.parquet")
    rows = np.flatnonzero(np.array(table["system"].to_pylist()) == "h100_sxm")[::7]
    m, n, k, times = (np.array(table[name].to_pylist(), np.float64)[rows] for name in ("m", "n", "k", "latency_ms"))
    model = Gemm16.load()
    off = [
        np.abs(x.seconds(named(H100), m, n, k) / (times / 1e3) - 1).mean() for x in (model, replace(model, known={}))
    ]
    assert off[0] < 0.06
    assert off[1] < 0.18


def test_tables_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    table = importlib.import_module("gemm_table")
    text = tmp_path / "text.parquet"
    text.write_text("no table")
    with pytest.raises(ForetraceError, match=r"text\.parquet cannot be read as a parquet table"):
        table.read(text, None)
    columns = {"system": ["l40s", "l40s"], "m": [64, None], "n": [64, 64], "k": [64, 64], "latency_ms": [0.1, 0.2]}
    good = tmp_path / "good.parquet"
    arrow.parquet.write_table(arrow.table(columns), good)
    systems, notes = table.read(good, None)
    assert len(systems["l40s"]) == 1 and notes[0].startswith("1 rows")
    arrow.parquet.write_table(arrow.table(columns | {"m": ["x", "y"]}), good)
    with pytest.raises(ForetraceError, match="must be numbers"):
        table.read(good, None)
    arrow.parquet.write_table(arrow.table(columns), good)
    sheet = tmp_path / "sheet.csv"
    sheet.write_text("name\nNVIDIA L4\n")
    with pytest.raises(ForetraceError, match="has no column 'fp16_tflops'"):
        table.read(good, sheet)
    with pytest.raises(ForetraceError, match="cannot be read as a device sheet"):
        table.read(good, tmp_path / "nowhere.csv")
