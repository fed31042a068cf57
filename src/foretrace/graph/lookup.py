"""`at`: values of a table by index, where an index below 0 stands for none; the table may be empty."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def at(table: npt.NDArray[Any], index: npt.NDArray[Any], default: Any) -> npt.NDArray[Any]:
    """`table[index]`, `default` where the index is below 0."""
    if not len(table):
        return np.full(len(index), default, dtype=table.dtype)
    found: npt.NDArray[Any] = np.where(index >= 0, table[np.maximum(index, 0)], default)
    return found
