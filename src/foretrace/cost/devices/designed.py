"""`Designed`: operator calls on an accelerator that need not exist, by closed forms of its parts.

Products, convolutions (as implicit products) and attention run on the systolic arrays, whatever their precision: in
bf16, which is what XLA makes of float32 products on TPUs unless told otherwise. All else runs on the vector cores. The
range is between ends that are assumed, not measured: ports of the buffer without end and vector operators of half the
work; ports as PHAZE gives them to its mapper and twice that work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from foretrace.arrays import Float64
from foretrace.cost.accelerators import kernels
from foretrace.cost.accelerators.kernels import product_cycles
from foretrace.cost.calls import ELEMENT_BYTES, Calls, Family, Precision
from foretrace.cost.devices.roofline import MATRIX
from foretrace.cost.model import CostModel, Prediction
from foretrace.hardware.accelerators import MAPPED_PORTS, Accelerator, AcceleratorDevice
from foretrace.hardware.devices import Device

# Operations of a lane for each number that a family touches.
WORK = {
    Family.SOFTMAX: kernels.SOFTMAX[0], Family.NORM: kernels.NORM[0], Family.OPTIMIZER: 12.0, Family.LOOKUP: 0.0,
    Family.MOVE: 0.0, Family.POOL: 4.0,
}  # fmt: skip
OTHERWISE = 4.0
NO_PORTS, DOUBT = 1 << 40, 2.0


@dataclass(frozen=True, kw_only=True)
class Designed(CostModel):
    """Answers for every call on a design, and for none on other devices."""

    name: str = "designed"

    def predict(self, calls: Calls, device: Device) -> Prediction:
        if not isinstance(device, AcceleratorDevice):
            none = np.full(len(calls), np.nan)
            return self._answer(none, none, none, "")
        at = device.design
        ends = ((NO_PORTS, 1 / DOUBT), (at.ports, 1.0), (min(at.ports, MAPPED_PORTS), DOUBT))
        low, seconds, high = (_seconds(calls, at, *each) for each in ends)
        whole = np.where(seconds > 0, seconds, 1.0)
        why = "closed forms of systolic arrays, vector lanes and a buffer; nothing was measured"
        below, above = (np.where(seconds > 0, each / whole, 1.0) for each in (low, high))
        return self._answer(seconds, below, above, why)


def _seconds(calls: Calls, design: Accelerator, ports: int, times: float) -> Float64:
    """Return seconds of each call with so many ports and vector operators of so many times the work."""
    at = replace(design, ports=ports)
    clock, memory = at.clock_ghz * 1e9, at.hbm_gb_s * 1e9
    size = np.array([ELEMENT_BYTES[each] for each in Precision], dtype=np.float64)[calls.precision]
    numbers = np.maximum(calls.read_bytes, calls.written_bytes) / size
    work = np.array([WORK.get(each, OTHERWISE) for each in Family])[calls.family]
    cycles, moved = np.zeros(len(calls)), calls.nbytes.copy()
    if len(rows := np.flatnonzero(np.isin(calls.family, MATRIX))):
        b, m, n, k = (np.maximum(each[rows], 1.0) for each in (calls.b, calls.m, calls.n, calls.k))
        attention = calls.family[rows] == Family.ATTENTION  # scores, then what they weigh; and a softmax between
        found = product_cycles(b, m, n, k, [at])[0]
        both = found[:, 0] + np.where(attention, product_cycles(b, m, k, n, [at])[0, :, 0], 0.0)
        # A backward call has its products in its FLOPs.
        once, flops = 2 * b * m * n * k * np.where(attention, 2, 1), calls.flops[rows]
        cycles[rows] = both * np.where(flops > 0, flops / once, 1.0)
        tiled = np.where(attention | (calls.family[rows] != Family.GEMM), 0.0, found[:, 2] * size[rows])
        moved[rows] = np.maximum(moved[rows], tiled)
        numbers[rows], work[rows] = np.where(attention, b * m * n, 0.0), kernels.SOFTMAX[0]
    busy = cycles / clock + numbers * work * times / (at.vector_cores * at.lanes * clock)
    return np.asarray(np.where(calls.family == Family.NONE, 0.0, np.maximum(busy, moved / memory)), dtype=np.float64)
