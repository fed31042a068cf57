"""The catalog of devices: peak rates and bandwidths of common GPUs, found by the name that a recording gives.

The figures are dense vendor peaks, not what a kernel reaches; `devices.csv` says for each where it is from.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU. Rates are dense TFLOP/s (0 where the device has no such units), bandwidth is GB/s."""

    name: str
    patterns: tuple[str, ...]  # globs over the device name in a recording
    vendor: str
    arch: str
    fp32_tflops: float
    tf32_tflops: float
    fp16_tflops: float
    bf16_tflops: float
    memory_gb_s: float
    memory_gb: float
    sms: int
    source: str

    def matches(self, name: str) -> bool:
        """Whether a recording that names its device so was made on this one."""
        return any(_glob(pattern).fullmatch(name.strip()) is not None for pattern in self.patterns)


@cache
def catalog() -> tuple[Device, ...]:
    """All devices, the more specific patterns first."""
    text = files("foretrace.hardware").joinpath("devices.csv").read_text(encoding="utf-8")
    return tuple(_device(row) for row in csv.DictReader(text.splitlines()))


def find(name: str) -> Device | None:
    """The device that a recording calls `name`, e.g. "Tesla V100-DGXS-32GB"; None if the catalog lacks it."""
    return next((device for device in catalog() if device.matches(name)), None)


def _device(row: dict[str, str]) -> Device:
    return Device(
        name=row["name"],
        patterns=tuple(row["patterns"].split("|")),
        vendor=row["vendor"],
        arch=row["arch"],
        fp32_tflops=float(row["fp32_tflops"]),
        tf32_tflops=float(row["tf32_tflops"] or 0),
        fp16_tflops=float(row["fp16_tflops"] or 0),
        bf16_tflops=float(row["bf16_tflops"] or 0),
        memory_gb_s=float(row["memory_gb_s"]),
        memory_gb=float(row["memory_gb"]),
        sms=int(row["sms"]),
        source=row["source"],
    )


def _glob(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in pattern.split("*")), re.IGNORECASE)
