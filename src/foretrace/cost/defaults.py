"""What PyTorch's default settings make of calls on a device: float32 convolutions run in TF32 where it has such units.

`torch.backends.cudnn.allow_tf32` is on by default, `torch.backends.cuda.matmul.allow_tf32` is not: products stay
float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from foretrace.cost.calls import Calls, Family, Precision
from foretrace.cost.model import CostModel, Prediction
from foretrace.hardware.devices import Device

TF32_FAMILIES = (Family.CONV, Family.RECURRENT)  # cuDNN's


def as_run(calls: Calls, device: Device) -> Calls:
    """The calls in the precision that they run in by default on this device."""
    if not device.tf32_tflops:
        return calls
    own = np.isin(calls.family, TF32_FAMILIES) & (calls.precision == Precision.FP32)
    return replace(calls, precision=np.where(own, np.uint8(Precision.TF32), calls.precision))


@dataclass(frozen=True, kw_only=True)
class AsRun(CostModel):
    """`costs` asked of the calls as they run by default."""

    costs: CostModel
    name: str = "as run"

    def predict(self, calls: Calls, device: Device) -> Prediction:
        return self.costs.predict(as_run(calls, device), device)
