"""`Device`: what is known of one accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

DESIGNED = "accelerator:"  # begins the text of a device that need not exist (`accelerators.py`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator. Rates are dense TFLOP/s, bandwidth is GB/s; 0 where it has no such units or none is known.

    `scaleup_gb_s` counts both directions of all links to other devices of the machine together, `pcie_gb_s` one.
    """

    name: str
    short: str  # as a cluster file names it
    patterns: tuple[str, ...] = ()  # globs over the device name in a recording
    vendor: str
    arch: str
    fp32_tflops: float = 0.0
    tf32_tflops: float = 0.0
    fp16_tflops: float = 0.0
    bf16_tflops: float = 0.0
    memory_gb_s: float
    memory_gb: float
    sms: int
    source: str
    launch_year: int = 0
    fp8_tflops: float = 0.0
    int8_tops: float = 0.0
    l2_mb: float = 0.0
    boost_mhz: float = 0.0
    scaleup_link: str = ""  # "NVLink3", ...; "" where there is none
    scaleup_gb_s: float = 0.0
    pcie: str = ""  # generation and lanes
    pcie_gb_s: float = 0.0
    tdp_w: float = 0.0
    node_devices: int = 0  # of a usual machine
    network_gb_s: float = 0.0  # one direction, that such a machine has to others for each device
    confirmed: Mapping[str, str] = field(default_factory=dict)  # figure -> device tables that give the same
    note: str = ""

    def matches(self, name: str) -> bool:
        """Return whether a recording that names its device so was made on this one."""
        return any(fnmatchcase(name.strip().lower(), pattern.lower()) for pattern in self.patterns)
