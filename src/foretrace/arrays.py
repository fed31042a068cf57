"""Types of arrays, as the columns of traces and graphs have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
UInt32 = npt.NDArray[np.uint32]
UInt8 = npt.NDArray[np.uint8]
Float64 = npt.NDArray[np.float64]
Float32 = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
