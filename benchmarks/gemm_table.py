"""The table of measured 16-bit products that training and scoring read, its split, and the devices that it names."""

from __future__ import annotations

import csv
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.cost.devices.learned.gemm16_law import Chip
from foretrace.errors import ForetraceError, MissingExtraError
from foretrace.hardware.devices import Device, named
from gemm16_fit import MeasuredProducts

Floats = npt.NDArray[np.float64]
COLUMNS = ("system", "m", "n", "k", "latency_ms")
SHORT = {
    "a100_sxm": "A100-SXM4-80GB",
    "a100_pcie": "A100-PCIe-80GB",
}  # where a table's name is not a unique part of the catalog's
HELD_OUT = 0.2
ANCHOR = {"a100_sxm": 6.9, "h100_sxm": 6.8, "h200_sxm": 7.3, "l40s": 9.7, "rtx_pro_6000_server": 7.8}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class System:
    """The measured products of one GPU, sorted by m, n, k."""

    name: str
    device: Device
    m: Floats
    n: Floats
    k: Floats
    seconds: Floats
    held_out: npt.NDArray[np.bool_]  # the triples that P2a scores

    def __len__(self) -> int:
        return len(self.m)

    def measured(self, rows: npt.NDArray[np.int64] | None = None) -> MeasuredProducts:
        """As the law is fitted to them."""
        at = np.arange(len(self)) if rows is None else rows
        return MeasuredProducts(
            chip=Chip.of(self.device), m=self.m[at], n=self.n[at], k=self.k[at], seconds=self.seconds[at]
        )


def fingerprint(systems: Mapping[str, System]) -> str:
    """Of all triples: the held-out ones are the same only where this is."""
    parts = [np.stack([each.m, each.n, each.k], axis=1) for each in systems.values()]
    triples = np.unique(np.concatenate(parts), axis=0) if parts else np.empty((0, 3))
    return f"{len(triples)} {zlib.crc32(triples.astype('<i8').tobytes()):08x}"


def read(path: Path, devices: Path | None) -> tuple[dict[str, System], list[str]]:
    """Systems of a parquet table by name, and sentences about those left out.

    The held-out triples are `RandomState(0).rand(distinct triples) < 0.2`, triples sorted by m, n, k: the same on every
    GPU. Rows that are no finite time above 0 of sizes of at least 1 are left out.
    """
    columns = _parquet(path)
    try:
        sizes = np.stack([columns[c].astype(np.float64) for c in "mnk"], axis=1)  # missing ones are NaN
        times = columns["latency_ms"].astype(np.float64) / 1e3
    except ValueError as error:
        raise ForetraceError(f"{path}: m, n, k and latency_ms must be numbers ({error}); mend the table.") from None
    good = np.isfinite(times) & (times > 0) & (sizes >= 1).all(axis=1)
    sizes = np.where(np.isfinite(sizes), sizes, 0).astype(np.int64)
    notes = [f"{int((~good).sum())} rows without a usable time or size were left out."] if not good.all() else []
    triples, member = np.unique(sizes, axis=0, return_inverse=True)
    chosen = np.random.RandomState(0).rand(len(triples)) < HELD_OUT
    sheet = _sheet(devices) if devices is not None else {}
    systems = {}
    for name in sorted({str(x) for x in columns["system"]}):
        device = find(name, sheet)
        if device is None:
            notes.append(f"{name} names no single device of the sheet or the catalog and was left out.")
            continue
        rows = np.flatnonzero((columns["system"] == name) & good)
        rows = rows[np.lexsort(sizes[rows].T[::-1])]
        m, n, k = sizes[rows].astype(np.float64).T
        systems[name] = System(
            name=name, device=device, m=m, n=n, k=k, seconds=times[rows], held_out=chosen[member.reshape(-1)[rows]]
        )
    return systems, notes


def find(name: str, sheet: Mapping[str, Device]) -> Device | None:
    """The device that a table names so: from the sheet, else from the catalog; None if neither knows it."""
    short = SHORT.get(name, name)
    plain = _plain(short)
    near = [device for key, device in sheet.items() if _plain(key).startswith(plain)]
    if len(near) == 1:
        return near[0]
    try:
        return named(short)
    except ForetraceError:
        return None


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _sheet(path: Path) -> dict[str, Device]:
    """Devices of a sheet: what the catalog knows of them, with the sheet's figures."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            return {row["name"]: _device(row, path) for row in reader}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ForetraceError(f"{path} cannot be read as a device sheet ({error}); name one with --devices.") from None
    except KeyError as error:
        raise ForetraceError(f"{path} has no column {error}; give a sheet as data/hardware/hardware.csv.") from None
    except (TypeError, ValueError) as error:
        raise ForetraceError(f"{path} line {reader.line_num}: {error}; mend that line.") from None


def _device(row: dict[str, str], path: Path) -> Device:
    figures = {
        "fp16_tflops": row["fp16_tflops"], "bf16_tflops": row["bf16_tflops"], "memory_gb_s": row["mem_bw_gbs"],
        "l2_mb": row["l2_mb"], "boost_mhz": row["boost_mhz"], "fp32_tflops": row["fp32_tflops"],
    }  # fmt: skip
    values: dict[str, Any] = {key: float(value or 0) for key, value in figures.items()}
    try:
        known = named(row["name"])
    except ForetraceError:
        return Device(
            name=row["name"], short=row["name"], patterns=(), vendor=row["vendor"], arch=row["arch"], tf32_tflops=0.0,
            memory_gb=float(row["mem_gb"] or 0), sms=int(float(row["sms"] or 0)), source=str(path), **values,
        )  # fmt: skip
    return replace(known, sms=int(float(row["sms"] or 0)), **values)


def _parquet(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError(
            'reading a parquet table needs pyarrow; install it with pip install "foretrace[dev]".'
        ) from None
    if not path.is_file():
        raise ForetraceError(f"{path} is no file; name the table of measured products with --gemm.")
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are both
        raise ForetraceError(f"{path} cannot be read as a parquet table ({error}); copy it again.") from None
    missing = [name for name in COLUMNS if name not in table.column_names]
    if missing:
        raise ForetraceError(f"{path} has no column {missing[0]!r}; it needs {', '.join(COLUMNS)}.")
    return {name: np.asarray(table[name].to_pylist()) for name in COLUMNS}
