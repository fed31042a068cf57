"""`Roofline`: the larger of FLOPs over peak and bytes over bandwidth, with what kernels usually reach of both.

Williams, Waterman and Patterson, Roofline, CACM 2009. The shares of the peaks that kernels reach, and their spread, are
those of the public tables of measured kernels that `benchmarks/roofline.py` reads; it prints them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.cost.calls import Calls, Family, Precision
from foretrace.cost.model import CostModel, Float64, Prediction
from foretrace.hardware.devices import Device

MATRIX = (Family.GEMM, Family.CONV, Family.ATTENTION, Family.RECURRENT)


def peak_flops(device: Device, precision: Precision) -> float:
    """FLOP/s of products in this precision; the next wider one where the device has no units for it."""
    fp32, half = device.fp32_tflops, max(device.fp16_tflops, device.bf16_tflops)
    rates = {
        Precision.TF32: device.tf32_tflops or fp32,
        Precision.FP16: device.fp16_tflops or fp32,
        Precision.BF16: device.bf16_tflops or half or fp32,
        Precision.FP8: device.fp8_tflops or half or fp32,
        Precision.INT8: device.int8_tops or half or fp32,
        Precision.FP64: fp32 / 2,
    }
    return rates.get(precision, fp32) * 1e12


def floor_s(calls: Calls, device: Device) -> Float64:
    """Seconds below which no call can be (n rows): FLOPs at peak, bytes at full bandwidth."""
    compute = np.zeros(len(calls))
    for precision in np.unique(calls.precision).tolist():
        rows = calls.precision == precision
        matrix = np.isin(calls.family, MATRIX)
        compute[rows & matrix] = calls.flops[rows & matrix] / peak_flops(device, Precision(precision))
    vector = ~np.isin(calls.family, MATRIX)
    compute[vector] = calls.flops[vector] / (device.fp32_tflops * 1e12)
    return np.maximum(compute, calls.nbytes / (device.memory_gb_s * 1e9))


@dataclass(frozen=True, kw_only=True)
class Roofline(CostModel):
    """Time at a usual share of the peaks. Speaks of every call; wide ranges, no tiles, no waves."""

    name: str = "roofline"
    compute_share: float = 0.6  # of peak FLOP/s that large products reach
    memory_share: float = 0.75  # of bandwidth that large elementwise kernels reach
    start_s: float = 2e-6  # of a kernel, however small
    low: float = 0.7
    high: float = 1.8

    def predict(self, calls: Calls, device: Device) -> Prediction:
        compute = np.zeros(len(calls))
        matrix = np.isin(calls.family, MATRIX)
        for precision in np.unique(calls.precision).tolist():
            rows = matrix & (calls.precision == precision)
            compute[rows] = calls.flops[rows] / (peak_flops(device, Precision(precision)) * self.compute_share)
        compute[~matrix] = calls.flops[~matrix] / (device.fp32_tflops * 1e12 * self.compute_share)
        memory = calls.nbytes / (device.memory_gb_s * 1e9 * self.memory_share)
        seconds = self.start_s + np.maximum(compute, memory)
        n = len(calls)
        why = (
            f"{self.compute_share:.0%} of the peak FLOP/s or {self.memory_share:.0%} of the bandwidth of {device.short}"
        )
        return self._answer(seconds, np.full(n, self.low), np.full(n, self.high), why)
