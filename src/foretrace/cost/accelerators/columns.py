"""Products on accelerators that need not exist: columns of sizes in, columns of cycles and words out."""

from __future__ import annotations

import numpy as np

from foretrace.arrays import Float64
from foretrace.cost.accelerators import kernels
from foretrace.hardware.accelerators import Accelerator


def machine_columns(design: Accelerator) -> Float64:
    """Return a design as `kernels` takes it, without what planners add."""
    return np.array([0.0, design.hbm_gb_s * 1e9, 0.0, 0.0, 0.0, 0.0, 0.0, *design.array()])


def product_cycles(b: Float64, m: Float64, n: Float64, k: Float64, designs: list[Accelerator]) -> Float64:
    """Return (designs, products, 3): cycles of all cores, words across the ports, words across the memory.

    `b`, `m`, `n`, `k` (products): sizes of each.
    """
    out = np.zeros((len(designs), len(m), 3))
    machines = np.array([machine_columns(each) for each in designs]).reshape(-1, kernels.CLOCK + 1)
    kernels.product_columns(np.stack([b, m, n, k], axis=1).astype(np.float64), machines, out)
    return out


def systolic_cycles(flow: str, m: Float64, n: Float64, k: Float64, rows: Float64, columns: Float64) -> Float64:
    """Return when one array is done with each product, in cycles from 0 as SCALE-Sim counts them; `flow`: os,
    ws or is.
    """
    out = np.zeros(len(m))
    kernels.systolic(("os", "ws", "is").index(flow), m, n, k, rows, columns, out)
    return out
