"""`Roofline`: the larger of FLOPs over peak and bytes over bandwidth, over the share of that which kernels reach.

Williams, Waterman and Patterson, Roofline, CACM 2009. The shares and their 80 % ranges are those of public tables of
measured kernels by family and precision (`roofline.json`, written by `benchmarks/roofline.py`); families that no table
has take those of a related one, with a wider range (`_RELATED`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from foretrace.cost.calls import Calls, Family, Float64, Precision
from foretrace.cost.model import CostModel, Prediction
from foretrace.hardware.devices import Device

MATRIX = (Family.GEMM, Family.CONV, Family.ATTENTION, Family.RECURRENT)


def peak_flops(device: Device, precision: Precision) -> float:
    """Return FLOP/s of products in this precision; the next wider one where the device has no units for it."""
    fp32 = device.fp32_tflops
    half = max(device.fp16_tflops, fp32)  # where 16-bit units are slower than float32, libraries compute in float32
    brain = max(device.bf16_tflops, fp32)
    rates = {
        Precision.TF32: max(device.tf32_tflops, fp32),
        Precision.FP16: half,
        Precision.BF16: brain,
        Precision.FP8: device.fp8_tflops or brain,
        Precision.INT8: device.int8_tops or brain,
        Precision.FP64: fp32 / 2,
    }
    return rates.get(precision, fp32) * 1e12


def floor_s(calls: Calls, device: Device) -> Float64:
    """Return seconds below which no call can be (n rows): FLOPs at peak, bytes at full bandwidth."""
    compute = np.zeros(len(calls))
    for precision in np.unique(calls.precision).tolist():
        rows = calls.precision == precision
        matrix = np.isin(calls.family, MATRIX)
        compute[rows & matrix] = calls.flops[rows & matrix] / peak_flops(device, Precision(precision))
    vector = ~np.isin(calls.family, MATRIX)
    compute[vector] = calls.flops[vector] / (device.fp32_tflops * 1e12)
    return np.maximum(compute, calls.nbytes / (device.memory_gb_s * 1e9))


class Share(NamedTuple):
    """Of the roofline: 10th, 50th and 90th percentile over kernels."""

    low: float
    middle: float
    high: float


# What no table has: as this family, its low and high ends moved further out by the factor.
_RELATED = {
    Family.ATTENTION: (Family.GEMM, 1.5), Family.RECURRENT: (Family.GEMM, 3.0), Family.REDUCTION: (Family.NORM, 1.5),
    Family.POOL: (Family.NORM, 1.5), Family.LOOKUP: (Family.NORM, 2.0), Family.MOVE: (Family.ELEMENTWISE, 1.3),
    Family.OPTIMIZER: (Family.ELEMENTWISE, 1.3), Family.OTHER: (Family.NORM, 3.0),
}  # fmt: skip


@cache
def share_of(family: Family, precision: Precision) -> Share:
    """Return the share of the roofline that kernels of a family reach; 16-bit rows are those of all narrow
    precisions.
    """
    table = _table()
    of, wider = _RELATED.get(family, (family, 1.0))
    half = precision in (Precision.FP16, Precision.BF16, Precision.FP8, Precision.INT8, Precision.TF32)
    row = table.get(f"{of.name.lower()} {'half' if half else 'fp32'}") or table[f"{of.name.lower()} fp32"]
    return Share(row["low"] / wider, row["middle"], row["high"] * wider)


@cache
def _table() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads(
        files("foretrace.cost.devices").joinpath("roofline.json").read_text(encoding="utf-8")
    )
    return found


@dataclass(frozen=True, kw_only=True)
class Roofline(CostModel):
    """Time at the usual share of the roofline. Answers for every call; wide ranges, no tiles, no waves."""

    name: str = "roofline"
    start_s: float = 2e-6  # of a kernel, however small

    def predict(self, calls: Calls, device: Device) -> Prediction:
        shares = np.ones((len(calls), 3))
        kinds = calls.family.astype(np.int64) * 256 + calls.precision
        for kind in np.unique(kinds).tolist():
            if kind // 256 != Family.NONE:
                shares[kinds == kind] = share_of(Family(kind // 256), Precision(kind % 256))
        floor = floor_s(calls, device)
        seconds = self.start_s + floor / shares[:, 1]
        low, high = (self.start_s / 2 + floor / shares[:, 2]), (self.start_s * 2 + floor / shares[:, 0])
        why = f"peak FLOP/s and bandwidth of {device.short}, at the share of them that measured kernels reach"
        return self._answer(seconds, low / seconds, high / seconds, why)
