"""Utilisation of a device as a metric of networks, after Kosaian and Phanishayee, A Study on the GPU Utilisation of CNN
Inference: achieved over peak FLOP/s, and aggregate arithmetic intensity against the ridge of the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrace.cost.calls import Calls, Family, Precision
from foretrace.cost.devices.roofline import MATRIX, peak_flops
from foretrace.hardware.devices import Device

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a network makes of a device. Shares are of the device's peaks over the whole step."""

    flops: float  # of products
    nbytes: float  # that all operators read and write, each tensor of a call once
    step_s: float
    ridge: float  # FLOPs per byte of the device from which on FLOPs bound a kernel (compute-to-memory ratio)
    precision: Precision  # in which most FLOPs run
    of_peak_flops: float
    of_peak_bandwidth: float
    busy: float  # share of the step in which the device runs any kernel
    intensity: float  # aggregate: FLOPs over bytes of products alone, everything else fused in

    @property
    def bound(self) -> str:
        """What bounds the network as a whole, by its aggregate intensity: "bandwidth" or "compute"."""
        return "bandwidth" if self.intensity < self.ridge else "compute"


def usage(calls: Calls, device: Device, *, step_s: float, busy_s: float) -> Usage:
    """Return usage of one step of these calls that takes `step_s`, of which the device works `busy_s`."""
    matrix = np.isin(calls.family, MATRIX)
    flops = float(calls.flops[matrix].sum())
    by_precision = np.bincount(calls.precision[matrix], weights=calls.flops[matrix], minlength=len(Precision))
    precision = Precision(int(by_precision.argmax())) if flops else Precision.FP32
    bytes_per_s = device.memory_gb_s * 1e9
    # Products in several precisions: each at its own peak.
    ideal = sum(float(share) / peak_flops(device, Precision(p)) for p, share in enumerate(by_precision) if share > 0)
    own_bytes = float(calls.nbytes[matrix].sum())
    moved = float(calls.nbytes[calls.family != Family.NONE].sum())
    return Usage(
        flops=flops,
        nbytes=moved,
        step_s=step_s,
        ridge=peak_flops(device, precision) / bytes_per_s,
        precision=precision,
        of_peak_flops=ideal / step_s if step_s else 0.0,
        of_peak_bandwidth=moved / bytes_per_s / step_s if step_s else 0.0,
        busy=min(busy_s / step_s, 1.0) if step_s else 0.0,
        intensity=flops / own_bytes if own_bytes else 0.0,
    )
