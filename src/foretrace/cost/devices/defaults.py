"""The default chain of cost models, and what PyTorch's default settings make of calls: float32 convolutions run in TF32
where a device has such units.

`torch.backends.cudnn.allow_tf32` is on by default, `torch.backends.cuda.matmul.allow_tf32` is not: products stay
float32.

Convolutions on tensor cores want channels last (NVIDIA, Deep Learning Performance: Convolutional Layers, section on
tensor layouts): cuDNN moves what is laid out otherwise there and back, which is once more to read and to write for each
of its tensors.

In a training, kernels are slower than those that tables have timed alone, in two places that the eight-GPU rows of
`benchmarks/training_figures.py` show (marked there; its other rows were held out):

- backward passes of layer normalisation and sums over rows, of which no table has any, reach 1 / 1.5 of what forward
  ones do: what is summed over all rows is a second pass;
- 16-bit products on Hopper take 1.08 of the time: the board's power, not its clock, is the limit of a long run.

Of convolutions the tables have forward passes. Backward ones vary more (DeepBench, V100 and P100): `CONV_BACK_RANGE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretrace.cost.calls import Calls, Family, Float64, Precision
from foretrace.cost.devices.attention import FIRST, FIRST_RANGE, FusedAttention
from foretrace.cost.devices.designed import Designed
from foretrace.cost.devices.learned import Learned
from foretrace.cost.devices.roofline import Roofline
from foretrace.cost.model import Chain, CostModel, Prediction
from foretrace.hardware.devices import Device

ROWS_BACK, ROWS_BACK_RANGE = 1.5, (0.67, 1.4)  # and the range of it, relative to itself
CONV_BACK_RANGE = (0.8, 1.4)
LONG_RUN, LONG_RUN_RANGE = {"Hopper": 1.08}, (0.93, 1.12)
_TENSOR_CORES = (Precision.TF32, Precision.FP16, Precision.BF16)
_REACHED = 0.8  # share of the bandwidth that a kernel which transposes reaches; as copies do
_MOVED = (0.3, 1.2)  # what it takes, relative: some kernels read channels first themselves
TF32_FAMILIES = (Family.CONV, Family.RECURRENT)  # cuDNN's


def standard(first: Sequence[CostModel] = ()) -> Chain:
    """Return `first`, e.g. measured ones, then what is designed, the learned ones, fused attention, and the roofline.

    The last one knows every call.
    """
    return Chain(members=(*first, Designed(), Learned(), FusedAttention(), Roofline()))


def as_run(calls: Calls, device: Device) -> Calls:
    """Return the calls in the precision that they run in by default on this device."""
    if not device.tf32_tflops:
        return calls
    own = np.isin(calls.family, TF32_FAMILIES) & (calls.precision == Precision.FP32)
    return replace(calls, precision=np.where(own, np.uint8(Precision.TF32), calls.precision))


@dataclass(frozen=True, kw_only=True)
class AsRun(CostModel):
    """`costs` asked of the calls as they run by default."""

    costs: CostModel
    channels_last: bool = False
    first_attention: bool = False  # the first FlashAttention, not the second
    name: str = "as run"

    def predict(self, calls: Calls, device: Device) -> Prediction:
        calls = as_run(calls, device)
        found = _in_training(calls, device, self.costs.predict(calls, device))
        if self.first_attention:
            fused = calls.family == Family.ATTENTION
            found = _times(found, *(np.where(fused, each, 1.0) for each in (FIRST, *FIRST_RANGE)))
        if self.channels_last or not device.fp16_tflops > device.fp32_tflops:
            return found
        rows = (calls.family == Family.CONV) & np.isin(calls.precision, _TENSOR_CORES) & (calls.b == 1)
        moved = np.where(rows, 2 * calls.nbytes / (_REACHED * device.memory_gb_s * 1e9), 0.0)
        return replace(found, seconds=found.seconds + moved, low_s=found.low_s + _MOVED[0] * moved,
                       high_s=found.high_s + _MOVED[1] * moved)  # fmt: skip


def _in_training(calls: Calls, device: Device, found: Prediction) -> Prediction:
    """Return what calls take among others, of what they take alone."""
    half = np.isin(calls.precision, (Precision.FP16, Precision.BF16))
    factor, low, high = (np.ones(len(calls)) for _ in range(3))
    back = np.array(["layer_norm_backward" in op or "rms_norm_backward" in op for op in calls.op], dtype=np.bool_)
    rows = back | (calls.family == Family.REDUCTION)
    factor[rows], low[rows], high[rows] = ROWS_BACK, *ROWS_BACK_RANGE
    back = np.array(["backward" in op for op in calls.op], dtype=np.bool_)
    rows = back & (calls.family == Family.CONV)
    low[rows], high[rows] = CONV_BACK_RANGE
    rows = (calls.family == Family.GEMM) & half
    long_run = next((each for name, each in LONG_RUN.items() if device.arch.startswith(name)), 1.0)
    factor[rows], low[rows], high[rows] = long_run, *LONG_RUN_RANGE
    return _times(found, factor, low, high)


def _times(found: Prediction, factor: Float64, low: Float64, high: Float64) -> Prediction:
    """Return the costs times a factor, whose own range is relative to itself."""
    return replace(found, seconds=found.seconds * factor, low_s=found.low_s * factor * low,
                   high_s=found.high_s * factor * high)  # fmt: skip
