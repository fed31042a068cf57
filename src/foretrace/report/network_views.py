"""What `foretrace network check`, `calibrate network` and `devices` answer: the structs of the JSON contract."""

from __future__ import annotations

import msgspec

from foretrace.report.views import Result


class SizeView(msgspec.Struct, frozen=True, kw_only=True):
    """One size. Bus bandwidths are GB/s (10^9 bytes)."""

    bytes: float
    regime: str  # latency, ramp, link
    measured_s: float
    expected_s: float
    expected_low_s: float
    expected_high_s: float
    measured_gb_s: float
    expected_gb_s: float
    verdict: str  # as expected, slower, faster
    protocol_switch: bool  # bus bandwidth falls here though the size grows


class RegimeView(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that the same thing decides."""

    regime: str
    from_bytes: float
    to_bytes: float
    ratio: float  # median of measured over expected time
    verdict: str
    why: str


class NetworkCheckView(Result, frozen=True, kw_only=True):
    """`foretrace network check`: whether measured collectives are what the machine should give."""

    command: str = "network check"
    headline: str
    ok: bool  # nothing is slower than expected
    kind: str
    workers: int
    per_node: int
    on: str
    regimes: tuple[RegimeView, ...]
    suspicions: tuple[str, ...]
    sizes: tuple[SizeView, ...]
    notes: tuple[str, ...]
    next: str


class MeasuredSizeView(msgspec.Struct, frozen=True, kw_only=True):
    """One time of a calibration."""

    kind: str
    bytes: float
    time_s: float
    spread: float  # quartile distance of the repetitions over their median
    bus_gb_s: float


class CalibrateNetworkView(Result, frozen=True, kw_only=True):
    """`foretrace calibrate network`: collectives between processes of this machine."""

    command: str = "calibrate network"
    headline: str
    backend: str
    workers: int
    repetitions: int
    measured: str  # date, UTC
    stored: str
    noisiest: float  # largest spread
    left_out_error: float | None  # mean error of the curve at sizes left out; null with too few sizes
    sizes: tuple[MeasuredSizeView, ...]
    missing: dict[str, str]  # kind -> why it was not measured
    next: str


class DeviceView(msgspec.Struct, frozen=True, kw_only=True):
    """One device of the catalog; null where a figure does not exist or is not known."""

    name: str
    short: str
    vendor: str
    arch: str
    launch_year: int
    fp32_tflops: float | None
    tf32_tflops: float | None
    fp16_tflops: float | None
    bf16_tflops: float | None
    fp8_tflops: float | None
    int8_tops: float | None
    memory_gb: float | None
    memory_gb_s: float | None
    l2_mb: float | None
    sms: int
    boost_mhz: float | None
    scaleup_link: str
    scaleup_gb_s: float | None  # both directions
    pcie: str
    pcie_gb_s: float | None  # one direction
    tdp_w: float | None
    node_devices: int | None  # of a usual machine
    network_gb_s: float | None  # one direction, to other machines, for each device
    confirmed: dict[str, str]  # figure -> device tables that give the same; the others are unconfirmed
    source: str
    note: str


class DevicesView(Result, frozen=True, kw_only=True):
    """`foretrace devices`: the catalog, or the device that was named."""

    command: str = "devices"
    devices: tuple[DeviceView, ...]
