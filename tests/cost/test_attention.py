"""The law of fused attention: masks halve, lengths help, and only what was measured is spoken of."""

from __future__ import annotations

import json

import numpy as np
import pytest

from foretrace.cost.calls import Calls
from foretrace.cost.devices.attention import FusedAttention
from foretrace.hardware.devices import named

FORWARD = "aten::_scaled_dot_product_flash_attention"


def call(length: int, *, causal: bool, kind: str = "c10::BFloat16", op: str = FORWARD) -> Calls:
    dims = [[4, 16, length, 128]] * 3 + [[]] * 4
    types = [kind] * 3 + ["Scalar", "Scalar", "Scalar", ""]
    return Calls.of([(op, json.dumps([dims, types, ["", "", "", "0.", str(causal), "False", ""]]))])


def seconds(calls: Calls, device: str = "a100") -> float:
    return float(FusedAttention().predict(calls, named(device)).seconds[0])


def test_a_mask_saves_half_of_long_sequences() -> None:
    assert seconds(call(65_536, causal=True)) == pytest.approx(seconds(call(65_536, causal=False)) / 2, rel=0.02)
    assert seconds(call(512, causal=True)) < seconds(call(512, causal=False))


def test_time_is_about_that_of_the_public_table() -> None:
    # A100, FlashAttention-2, causal, heads of 128: 251, 297, 324 TFLOP/s (whole) at 1024, 2048, 4096 keys.
    for length, rate in ((1024, 251e12), (2048, 297e12), (4096, 324e12)):
        work = 4.0 * 4 * 16 * length**2 * 128
        assert work / seconds(call(length, causal=True)) == pytest.approx(rate, rel=0.08)


def test_what_was_not_measured_is_left_to_others() -> None:
    law = FusedAttention()
    assert np.isnan(law.predict(call(1024, causal=True, kind="float"), named("a100")).seconds).all()
    for device in ("v100", "mi300x", "b200"):
        assert np.isnan(law.predict(call(1024, causal=True), named(device)).seconds).all()
    found = law.predict(call(1024, causal=True), named("h100"))
    assert found.low_s[0] < found.seconds[0] < found.high_s[0]
