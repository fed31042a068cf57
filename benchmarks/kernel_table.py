"""Measured float32 kernels (`data/kernels/kernels.csv.gz`) as columns, for training and for scoring.

Only what is asked for is read: `split` and the devices. Dimensions of products are turned to foretrace's names (k is
the dimension that is summed over).
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.cost.devices.learned.fp32 import VECTOR_OPS, BoardFeatures, board
from foretrace.errors import ForetraceError
from foretrace.hardware.devices import find

TRAINING = (
    "NVIDIA A100-PCIE-40GB", "Tesla P100-PCIE-16GB", "Tesla P4", "Tesla T4", "Tesla V100-PCIE-32GB",
)  # fmt: skip
HELD_OUT = ("NVIDIA A100 80GB PCIe", "NVIDIA L4", "NVIDIA H100 80GB HBM3")
PRODUCTS = ("bmm", "linear")
TWO_OPERANDS = ("add", "mul", "div", "pow")
LARGE_FLOPS = 1e11
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kernels:
    """Rows of one kind; `device` counts `devices`. Vector operators have m rows of width n and k = 0."""

    devices: tuple[str, ...]
    device: Ints
    op: Ints  # products: 0 bmm, 1 linear; vector operators: index into VECTOR_OPS
    b: Floats
    m: Floats
    k: Floats
    n: Floats
    nbytes: Floats
    seconds: Floats

    def __len__(self) -> int:
        return len(self.device)

    @property
    def flops(self) -> Floats:
        """FLOPs of products."""
        return 2.0 * self.b * self.m * self.k * self.n

    def take(self, rows: npt.NDArray[Any]) -> Kernels:
        """The rows of a mask or an index array."""
        columns = {each.name: getattr(self, each.name)[rows] for each in fields(self)[1:]}
        return Kernels(devices=self.devices, **columns)

    def of(self, device: int) -> npt.NDArray[np.bool_]:
        """Which rows are of this device."""
        return np.equal(self.device, device)


def boards(devices: Collection[str]) -> list[BoardFeatures]:
    """Boards by our own catalog, whatever a sheet says; raises ForetraceError for a device that it lacks."""
    found = []
    for name in devices:
        device = find(name)
        each = board(device) if device is not None else None
        if each is None:
            raise ForetraceError(f"device {name!r} is no NVIDIA GPU of the catalog; foretrace devices lists them.")
        found.append(each)
    return found


def read(path: Path, split: str, devices: tuple[str, ...]) -> tuple[Kernels, Kernels]:
    """(products, vector operators) of these devices; raises ForetraceError for a file of another form."""
    rows: tuple[list[tuple[float, ...]], list[tuple[float, ...]]] = ([], [])
    index = {name: i for i, name in enumerate(devices)}
    products = {name: i for i, name in enumerate(PRODUCTS)}
    vectors = {name: i for i, name in enumerate(VECTOR_OPS)}
    try:
        with gzip.open(path, "rt", newline="") as file:
            for row in csv.DictReader(file):
                if row["split"] != split or row["device"] not in index:
                    continue
                at, op, seconds = index[row["device"]], row["op"], float(row["latency_ms"]) / 1e3
                if op in products:
                    b = float(row["B"]) if op == "bmm" else 1.0
                    m, k, n = float(row["M"]), float(row["N"]), float(row["K"])
                    rows[0].append((at, products[op], b, m, k, n, 4 * b * (m * k + k * n + m * n), seconds))
                elif op in vectors:
                    m, n = float(row["B"]), float(row["H"])
                    nbytes = m * n * (12 if op in TWO_OPERANDS else 8)
                    rows[1].append((at, vectors[op], 1.0, m, 0.0, n, nbytes, seconds))
    except (OSError, EOFError, KeyError, ValueError) as error:
        raise ForetraceError(f"{path} is no table of measured kernels: {error!r}.") from error
    return _columns(rows[0], devices), _columns(rows[1], devices)


def _columns(rows: list[tuple[float, ...]], devices: tuple[str, ...]) -> Kernels:
    table = np.array(rows, dtype=np.float64).reshape(-1, 8).T
    device, op = table[0].astype(np.int64), table[1].astype(np.int64)
    b, m, k, n, nbytes, seconds = (np.ascontiguousarray(column) for column in table[2:])
    return Kernels(devices=devices, device=device, op=op, b=b, m=m, k=k, n=n, nbytes=nbytes, seconds=seconds)


def mismeasured(products: Kernels, peaks: Floats) -> list[int]:
    """Devices whose linear rows were measured under some other condition than their bmm rows.

    Rule (found on training rows): among products of at least 1e11 FLOP, the median share of the peak that linear rows
    reach is below 0.9 of that of bmm rows; elsewhere it is above 1.
    """
    share = products.flops / products.seconds / peaks[products.device]
    large = products.flops >= LARGE_FLOPS
    found = []
    for device in range(len(products.devices)):
        medians = [np.median(share[large & products.of(device) & (products.op == op)]) for op in (0, 1)]
        if medians[1] < 0.9 * medians[0]:
            found.append(device)
    return found
