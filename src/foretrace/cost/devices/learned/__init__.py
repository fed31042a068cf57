"""`Learned`: trained predictors, shipped as weights of a few kilobytes and evaluated with numpy alone.

Learned().predict(calls, named("h100"))     # device seconds, as a stream of queued kernels pays them

float32 products and vector operators: `fp32.py`, trained by `benchmarks/train_predictor.py` on kernels of five GPUs.
16-bit products: `gemm16.py`. What neither covers (convolutions, vector operators in 16 bit, devices that are no GPU
of a known generation) is NaN, for the next member of a `Chain`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from foretrace.cost.calls import Calls, Family, Float64, Precision
from foretrace.cost.devices.learned import fp32
from foretrace.cost.devices.roofline import peak_flops
from foretrace.cost.model import Chain, CostModel, Prediction
from foretrace.hardware.devices import Device

Mask = npt.NDArray[np.bool_]
_SINGLE = (Precision.FP32, Precision.FP16)
_VECTOR = (Family.ELEMENTWISE, Family.MOVE, Family.SOFTMAX, Family.NORM)
_SAME = {"sub": "add", "rsub": "add", "threshold": "relu", "gelu_backward": "mul", "tanh_backward": "mul",
         "threshold_backward": "mul", "silu": "gelu", "sigmoid": "tanh"}  # fmt: skip
# Further range of products, as tables of the same GPUs differ (DeepBench, NeuSight): those with few rows or columns,
# which libraries split in several ways; on boards of little power, whose clock depends on their cooling, and on Pascal.
_THIN, _THIN_ROWS = (0.5, 1.6), 100
_UNSTEADY, _FEW_W = (0.8, 1.4), 100.0
_TWO = 1.5  # a kernel that reads so many times what it writes has two operands


@dataclass(frozen=True, kw_only=True)
class Learned(CostModel):
    """All trained predictors as one member: each call goes to the one that knows its precision."""

    name: str = "learned"

    def predict(self, calls: Calls, device: Device) -> Prediction:
        """Return device seconds; ranges from devices that were left out in training."""
        members: list[CostModel] = [LearnedFp32()]
        if (np.isin(calls.precision, (Precision.FP16, Precision.BF16)) & (calls.family == Family.GEMM)).any():
            from foretrace.cost.devices.learned import gpu_products  # it stands on this package

            members.append(gpu_products.calibrated())
        found = Chain(members=members).predict(calls, device)
        whys = [why for i, why in enumerate(found.whys) if (found.source == i).any()] or found.whys[:1]
        source = np.where(found.source < 0, -1, 0).astype(np.int16)
        return replace(found, source=source, sources=(self.name,), whys=("; ".join(whys),))


@dataclass(frozen=True, kw_only=True)
class LearnedFp32(CostModel):
    """float32 kernels by trained nets under physical laws. Times hold under the board's power limit."""

    name: str = "learned"

    def predict(self, calls: Calls, device: Device) -> Prediction:
        """Return device seconds; range from devices that were left out in training."""
        n = len(calls)
        seconds, low, high = (np.full(n, np.nan) for _ in range(3))
        on = fp32.board(device)
        why = f"{device.short}: no trained predictor knows such a device"
        if on is not None:
            model = fp32.shipped()
            half = peak_flops(device, Precision.FP16) <= on.peak_flops  # whose kernels are then float32's, too
            products = calls.precision == Precision.FP32 if not half else np.isin(calls.precision, _SINGLE)
            products &= calls.family == Family.GEMM
            group = self._fill(calls, products, model, on, seconds)
            known = ~np.isnan(seconds)
            table = model.facts["leave_one_device_out"]["intervals"]
            low[known], high[known] = fp32.factors(table, group[known], seconds[known])
            unsteady = (group < 2) & (on.tdp_w < _FEW_W or on.generation == 0)
            thin = products & (np.minimum(calls.m, calls.n) < _THIN_ROWS)
            for rows, (less, more) in ((thin, _THIN), (unsteady, _UNSTEADY)):
                low[rows], high[rows] = low[rows] * less, high[rows] * more
            worst = max(row["networks"] for row in model.facts["leave_one_device_out"]["table"].values())
            why = (
                f"nets trained on {len(model.facts['devices'])} GPUs; {device.short} enters by peak, bandwidth, SMs "
                f"and power alone; a GPU left out in training is off by up to {worst:.0f} % on bags of large kernels"
            )
        return self._answer(seconds, low, high, why)

    def _fill(
        self, calls: Calls, products: Mask, model: fp32.Fp32, on: fp32.BoardFeatures, seconds: Float64
    ) -> npt.NDArray[np.int64]:
        """Fill seconds of the rows that can be told; returns the group of every row (see `fp32.GROUPS`)."""
        group = np.full(len(calls), 2, dtype=np.int64)
        rows = np.flatnonzero(products & (calls.b * calls.m * calls.n * calls.k > 0))
        if len(rows):
            b, m, k, n = (column[rows] for column in (calls.b, calls.m, calls.k, calls.n))
            linear = (b == 1).astype(np.float64)
            seconds[rows] = model.sustained_s(*model.product_s(b, m, k, n, linear, on), on)
            group[rows] = linear.astype(np.int64)
        single = calls.precision == Precision.FP32
        rows = np.flatnonzero(single & np.isin(calls.family, _VECTOR) & (calls.nbytes > 0))
        if len(rows):
            op = np.array([_operator(calls, row) for row in rows.tolist()], dtype=np.int64)
            found, _ = model.vector_s(op, calls.m[rows], calls.n[rows], calls.nbytes[rows], on)
            seconds[rows] = found
            group[rows] = 2 + (op >= len(fp32.VECTOR_OPS) - len(fp32.ROW_OPS))
        return group


def _operator(calls: Calls, row: int) -> int:
    """Return the measured operator that a call is most like, as an index into `fp32.VECTOR_OPS`."""
    family = calls.family[row]
    if family in (Family.SOFTMAX, Family.NORM):
        return fp32.VECTOR_OPS.index("softmax" if family == Family.SOFTMAX else "ln")
    base = calls.op[row].removeprefix("aten::").rstrip("_")
    base = _SAME.get(base, base)
    two = calls.read_bytes[row] > _TWO * calls.written_bytes[row]
    if base in ("add", "mul", "div", "pow"):
        return fp32.VECTOR_OPS.index(base if two else f"{base}u")
    if base in ("relu", "gelu", "tanh"):
        return fp32.VECTOR_OPS.index(base)
    return fp32.VECTOR_OPS.index("add" if two else "addu")
