"""What measuring one float32 kernel alone shows, from what the device takes: the table of kernels was measured so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.cost.devices.learned import fp32
from foretrace.cost.devices.learned.fp32 import BoardFeatures, smooth_maximum

Float64 = npt.NDArray[np.float64]

MEASURED_SHARPNESS = 6.0  # of the smooth maximum of host and device in isolated measurements


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Isolated(fp32.Fp32):
    """The trained model with the host's part of an isolated measurement."""

    product_host_s: Float64  # what measuring one kernel alone takes at least: bmm, linear
    vector_host_s: Float64  # the same per vector operator
    product_launch_s: Float64  # part of an isolated measurement before the kernel begins: bmm, linear
    vector_launch_s: Float64
    window_s: float  # isolated kernels shorter than this were measured before power was capped
    window_slope: float

    def measured_s(self, seconds: Float64, joules: Float64, on: BoardFeatures) -> Float64:
        """Device part of an isolated measurement: power is capped only after a while."""
        capped = self.sustained_s(seconds, joules, on)
        share = 1.0 / (1.0 + (seconds / self.window_s) ** -self.window_slope)
        return seconds * (capped / seconds) ** share

    def isolated_product_s(self, seconds: Float64, joules: Float64, linear: Float64, on: BoardFeatures) -> Float64:
        """Seconds that a product measured alone shows, between two events with the host in between."""
        op = linear.astype(np.int64)
        shown, host = self.measured_s(seconds, joules, on) + self.product_launch_s[op], self.product_host_s[op]
        return np.exp(smooth_maximum(np.log(shown), np.log(host), MEASURED_SHARPNESS))

    def isolated_vector_s(self, seconds: Float64, op: npt.NDArray[np.integer]) -> Float64:
        """Seconds that a vector operator measured alone shows."""
        shown = seconds + self.vector_launch_s[op]
        return np.exp(smooth_maximum(np.log(shown), np.log(self.vector_host_s[op]), MEASURED_SHARPNESS))


def of_arrays(arrays: Mapping[str, npt.NDArray[Any]], facts: Mapping[str, Any]) -> Isolated:
    """The model from what `train_predictor.py` stores; raises KeyError where an array is missing."""
    base = fp32.of_arrays(arrays, facts)
    wide = {key: np.asarray(value, dtype=np.float64) for key, value in arrays.items()}
    return Isolated(
        **{name: getattr(base, name) for name in fp32.Fp32.__dataclass_fields__},
        product_host_s=wide["product.host_s"],
        vector_host_s=wide["vector.host_s"],
        product_launch_s=wide["product.launch_s"],
        vector_launch_s=wide["vector.launch_s"],
        window_s=float(wide["window_s"]),
        window_slope=float(wide["window_slope"]),
    )


def shipped() -> Isolated:
    """The model whose weights come with the package."""
    return of_arrays(*fp32.stored())
