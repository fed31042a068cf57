"""Utilisation of a device by a model and over a space of networks."""

from __future__ import annotations

import pytest

from foretrace.cost.calls import Call, Calls, Family, Precision
from foretrace.cost.devices.roofline import peak_flops
from foretrace.cost.devices.utilisation import usage
from foretrace.hardware.devices import named

H100 = named("h100")


def test_shares_of_the_peaks_and_the_ridge() -> None:
    calls = Calls.from_rows([
        Call(family=Family.GEMM, precision=Precision.BF16, flops=989e9, read_bytes=2e9, written_bytes=1e9),
        Call(family=Family.GEMM, precision=Precision.FP32, flops=66.9e9, read_bytes=1e6, written_bytes=1e6),
        Call(family=Family.ELEMENTWISE, flops=1e12, read_bytes=350e6, written_bytes=0),
    ])  # fmt: skip
    found = usage(calls, H100, step_s=4e-3, busy_s=3e-3)
    assert found.of_peak_flops == pytest.approx(0.5)  # 1 ms at each of both peaks
    assert found.of_peak_bandwidth == pytest.approx(3.352e9 / 3350e9 / 4e-3)
    assert found.busy == pytest.approx(0.75)
    assert found.precision == Precision.BF16
    assert found.intensity == pytest.approx((989e9 + 66.9e9) / 3.002e9)
    assert found.ridge == pytest.approx(989e12 / 3350e9)
    assert found.bound == "compute"


def test_a_model_without_products_is_bandwidth_bound() -> None:
    found = usage(
        Calls.from_rows([Call(family=Family.MOVE, read_bytes=1e6, written_bytes=1e6)]), H100, step_s=1.0, busy_s=0
    )
    assert (found.of_peak_flops, found.intensity, found.bound) == (0.0, 0.0, "bandwidth")


def test_peaks_of_the_catalog() -> None:
    assert peak_flops(H100, Precision.BF16) == pytest.approx(989e12)
    assert peak_flops(named("v100"), Precision.BF16) >= 15e12
