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
from math import prod
from typing import NamedTuple

import numpy as np

from foretrace.cost.calls import ELEMENT_BYTES, Calls, Family, Float64, Precision
from foretrace.cost.model import CostModel, Prediction
from foretrace.hardware.devices import Device
from foretrace.trace.trace import told_shapes

MATRIX = (Family.GEMM, Family.CONV, Family.ATTENTION, Family.RECURRENT)


# float64 products over float32 ones, by architecture: half, or as many on matrix units; where there are few units for
# them, so that code runs at all, a thirty-second or a sixty-fourth (vendors' white papers).
_FP64 = {
    "Kepler": 1 / 3, "Pascal GP100": 1 / 2, "Pascal": 1 / 32, "Volta": 1 / 2, "Turing": 1 / 32, "Ampere GA100": 1,
    "Ampere": 1 / 64, "Ada": 1 / 64, "Hopper": 1, "Blackwell GB202": 1 / 64, "Blackwell Ultra": 1 / 64,
}  # fmt: skip
_WITHOUT_MATRIX = ("Kepler", "Pascal")  # 16-bit products add up in float32, at its rate
_MATRIX_FP32 = {"CDNA1": 2.0, "CDNA2": 2.0}  # float32 products on matrix units, over the rate of vectors


def peak_flops(device: Device, precision: Precision) -> float:
    """Return FLOP/s of products in this precision; the next wider one where the device has no units for it."""
    fp32 = device.fp32_tflops
    matrix = fp32 * _MATRIX_FP32.get(device.arch.split()[0], 1.0)
    no_half = device.arch.startswith(_WITHOUT_MATRIX)
    half = fp32 if no_half else max(device.fp16_tflops, fp32)  # libraries compute in float32 where that is faster
    brain = max(device.bf16_tflops, fp32)
    rates = {
        Precision.FP32: matrix,
        Precision.TF32: max(device.tf32_tflops, matrix),
        Precision.FP16: half,
        Precision.BF16: brain,
        Precision.FP8: device.fp8_tflops or brain,
        Precision.INT8: device.int8_tops or brain,
        Precision.FP64: fp32 * next((share for arch, share in _FP64.items() if device.arch.startswith(arch)), 1 / 2),
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
# How much less of their peak products of precisions that no table has may reach: int8 of a library without matrix units
# for it, as DeepBench has on T4.
_NARROW = {Precision.FP8: 1.5, Precision.INT8: 4.0}


@cache
def share_of(family: Family, precision: Precision) -> Share:
    """Return the share of the roofline that kernels of a family reach; 16-bit rows are those of all narrow
    precisions.
    """
    table = _table()
    of, wider = _RELATED.get(family, (family, 1.0))
    half = precision in (Precision.FP16, Precision.BF16, Precision.FP8, Precision.INT8, Precision.TF32)
    row = table.get(f"{of.name.lower()} {'half' if half else 'fp32'}") or table[f"{of.name.lower()} fp32"]
    slower = _NARROW.get(precision, 1.0) if family in MATRIX else 1.0
    return Share(row["low"] / wider / slower, row["middle"], row["high"] * wider)


@cache
def _table() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads(
        files("foretrace.cost.devices").joinpath("roofline.json").read_text(encoding="utf-8")
    )
    return found


# A step of a recurrent layer is a product of few rows and its gates, behind the step before (Appleyard et al.,
# Optimizing Performance of Recurrent Neural Networks on GPUs, 2016). It reads weights again that neither half of the L2
# cache nor the registers hold (Diamos et al., Persistent RNNs, 2016).
_STEP_S, _STREAMED, _CACHED, _REGISTERS = 6e-6, 0.8, 0.5, 0.25e6


def _one_after_another(text: str, precision: Precision, device: Device) -> tuple[float, float]:
    """Return steps of all layers of a cuDNN call, and bytes of weights that it reads again; 0 where it is another's."""
    dims = told_shapes(text).dims
    if len(dims) < 5 or not isinstance(dims[4], list) or len(dims[4]) != 3:
        return 0.0, 0.0
    x, (layers, samples, _) = dims[0], dims[4]
    matrices = [each for each in dims[1] if len(each) == 2]
    steps, each_layer = prod(x[:-1]) / max(samples, 1), max(len(matrices) // max(layers, 1), 1)
    nbytes = [prod(each) * ELEMENT_BYTES[precision] for i, each in enumerate(matrices) if i % each_layer]
    kept = max(_CACHED * device.l2_mb * 1e6, _REGISTERS * device.sms)
    return steps * layers, (steps - 1) * sum(each for each in nbytes if each > kept)


@dataclass(frozen=True, kw_only=True)
class Roofline(CostModel):
    """Time at the usual share of the roofline. Answers for every call; wide ranges, no tiles, no waves."""

    name: str = "roofline"
    start_s: float = 2e-6  # of a kernel, however small

    def predict(self, calls: Calls, device: Device) -> Prediction:
        shares = np.ones((len(calls), 3))
        # Without units for 16 bit, products are float32's kernels.
        least = peak_flops(device, Precision.FP32)
        wide = [each for each in (Precision.FP16, Precision.BF16) if peak_flops(device, each) <= least]
        kinds = calls.family.astype(np.int64) * 256 + np.where(
            np.isin(calls.precision, wide), Precision.FP32, calls.precision
        )
        for kind in np.unique(kinds).tolist():
            if kind // 256 != Family.NONE:
                shares[kinds == kind] = share_of(Family(kind // 256), Precision(kind % 256))
        floor = floor_s(calls, device)
        seconds = self.start_s + floor / shares[:, 1]
        low, high = (self.start_s / 2 + floor / shares[:, 2]), (self.start_s * 2 + floor / shares[:, 0])
        for row in np.flatnonzero(calls.family == Family.RECURRENT):
            steps, reread = _one_after_another(calls.text[row], Precision(int(calls.precision[row])), device)
            stream_s = (calls.nbytes[row] + reread) / (_STREAMED * device.memory_gb_s * 1e9)
            seconds[row] = max(seconds[row], self.start_s + stream_s) + steps * _STEP_S
            low[row] = max(low[row], stream_s / 1.3) + steps * _STEP_S / 3
            high[row] = max(high[row], 2 * seconds[row])
        why = f"peak FLOP/s and bandwidth of {device.short}, at the share of them that measured kernels reach"
        return self._answer(seconds, low / seconds, high / seconds, why)
