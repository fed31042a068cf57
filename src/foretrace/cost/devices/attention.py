"""`FusedAttention`: 16-bit attention in one kernel, as FlashAttention-2 computes it (Dao 2023), which PyTorch calls.

    seconds = FLOPs / (peak × share) × (1 + edge / keys)

A causal mask halves the FLOPs but for blocks on the diagonal, which are computed whole: `edge`.
`benchmarks/attention.py` finds share and edge of forward passes in the public tables of aiconfigurator (A100, vLLM's
FlashAttention-2) and prints what is left over. The backward pass reaches 0.86 of the forward pass's rate (Dao 2023,
section 4.1: 63 % of the peak against 73 %). On Hopper the same kernels reach 370 TFLOP/s forward (Shah et al.,
FlashAttention-3, 2024, heads of 128) where they reach 228 on an A100, since they do not use its own matrix
instructions; kernels that do (FlashAttention-3, cuDNN) are up to twice as fast: the low end. The first FlashAttention
takes `FIRST` times as long (Dao 2023, section 4.1: 1.7 to 3.0).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np

from foretrace.cost.calls import Calls, Family, Precision
from foretrace.cost.devices.roofline import peak_flops
from foretrace.cost.model import CostModel, Prediction
from foretrace.hardware.devices import Device

SHARE, EDGE = 0.58, 440.0  # of the peak that Ampere's forward kernels reach; keys
BACKWARD = 0.86
HOPPER = 370 / 228 * 312 / 989  # share on Hopper relative to Ampere's
FIRST, FIRST_RANGE = 1.7, (0.85, 1.3)  # of the first FlashAttention, and its range relative to itself
_START_S = 4e-6
_WIDTHS = {"Ampere": (0.85, 1.25), "Ada": (0.7, 1.4), "Hopper": (0.5, 1.35)}


@dataclass(frozen=True, kw_only=True)
class FusedAttention(CostModel):
    """Answers for flash attention in 16 bit on Ampere, Ada and Hopper."""

    name: str = "attention"

    def predict(self, calls: Calls, device: Device) -> Prediction:
        generation = next((each for each in _WIDTHS if device.arch.startswith(each)), "")
        seconds = np.full(len(calls), np.nan)
        half = np.isin(calls.precision, (Precision.FP16, Precision.BF16))
        rows = np.flatnonzero((calls.family == Family.ATTENTION) & half) if generation else ()
        for row in rows:
            back = "backward" in calls.op[row]
            share = SHARE * (HOPPER if generation == "Hopper" else 1.0) * (BACKWARD if back else 1.0)
            causal = _causal(calls.op[row], calls.text[row])
            work = float(calls.flops[row]) * (0.5 * (1 + EDGE / max(float(calls.n[row]), 1.0)) if causal else 1.0)
            compute = work / (share * peak_flops(device, Precision(int(calls.precision[row]))))
            memory = float(calls.nbytes[row]) / (device.memory_gb_s * 1e9)
            seconds[row] = _START_S + max(compute, memory)
        low, high = _WIDTHS.get(generation, (1.0, 1.0))
        why = f"FlashAttention-2 as measured on A100{', scaled to ' + device.short if generation != 'Ampere' else ''}"
        return self._answer(seconds, np.full(len(calls), low), np.full(len(calls), high), why)


@lru_cache(maxsize=1024)
def _causal(op: str, text: str) -> bool:
    """Return whether a call masks what comes later, by its inputs: PyTorch's flash and memory-efficient attention."""
    try:
        _, types, concrete = msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, TypeError):
        return False
    flags = [value for kind, value in zip(types, concrete, strict=False) if kind == "Scalar"]
    at = (3 if "backward" in op else 1) if "flash" in op else 2  # behind sizes, dropout, what else comes first
    return len(flags) > at and flags[at] == "True"
