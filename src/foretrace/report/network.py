"""What `foretrace network check`, `calibrate network` and `devices` answer: their sentences and lines."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from math import log
from pathlib import Path
from statistics import median

import msgspec

from foretrace.cost.network.check import CheckedSize, NetworkCheck, Regime, Suspicion
from foretrace.cost.network.collective_table import CollectiveSeries, CollectiveTable
from foretrace.cost.network.network import Network, bus_share
from foretrace.cost.network.tables import of_table
from foretrace.hardware.devices import Device
from foretrace.report.blocks import Block, Column, Headline, Line, Next, listing, notes, table
from foretrace.report.units import binary, digits, seconds, share, span
from foretrace.report.views import Report, Result, taken

SHOWN_SIZES = 24
_WORDS = {"as expected": "as expected", "slower": "slower than expected", "faster": "faster than expected"}


class RegimeView(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that the same thing decides."""

    regime: str
    from_bytes: float
    to_bytes: float
    ratio: float  # median of measured over expected time
    verdict: str
    why: str


class NetworkCheckView(Report, frozen=True, kw_only=True):
    """`foretrace network check`: whether measured collectives are what the machine should give."""

    command: str = "network check"
    ok: bool  # nothing is slower than expected
    kind: str
    workers: int
    per_node: int
    on: str
    regimes: tuple[RegimeView, ...]
    suspicions: tuple[str, ...]
    sizes: tuple[CheckedSize, ...]

    def shown(self, top: int) -> Iterator[Block]:
        where = f", {self.per_node} per machine" if self.per_node < self.workers else ""
        yield f"{self.kind} of {self.workers} workers{where}, expected on {self.on}"
        yield listing(
            self.regimes, "regime", (lambda each: f"{binary(each.from_bytes)} – {binary(each.to_bytes)}", "sizes"),
            ("ratio", "measured / expected", "ratio"), (lambda each: _WORDS[each.verdict], "verdict"),
            ("why", Column("why", wide=True)),
        )  # fmt: skip
        yield from notes(self.suspicions, "suspicion")
        sizes = _spread_out(self.sizes, SHOWN_SIZES)
        yield listing(
            sizes, ("bytes", "size", "binary"), ("measured_s", "measured", "seconds"),
            ("expected_s", "expected", "seconds"),
            (lambda each: span(each.expected_low_s, each.expected_high_s), Column("80 % range", right=True)),
            (lambda each: _rate(each.measured_gb_s), Column("GB/s", right=True)),
            (lambda each: _rate(each.expected_gb_s), Column("expected", right=True)), (_marks, ""),
        )  # fmt: skip
        if len(sizes) < len(self.sizes):
            yield f"{len(sizes)} of {len(self.sizes):,} sizes; --json has all"


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

    def shown(self, top: int) -> Iterator[Block]:
        yield listing(
            self.sizes, ("kind", "collective"), ("bytes", "size", "binary"), ("time_s", "time", "seconds"),
            ("spread", "spread", "share"), (lambda row: _rate(row.bus_gb_s), Column("bus GB/s", right=True)),
        )  # fmt: skip
        yield f"medians of {self.repetitions} repetitions without the slowest fifth; spread: quartile distance"
        if self.left_out_error is not None:
            yield f"a size left out is predicted from the others to {share(self.left_out_error)} on average"
        yield from notes((f"{kind} ({reason})" for kind, reason in self.missing.items()), "not measured")
        yield f"stored in {self.stored}"


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

    def shown(self, top: int) -> Iterator[Block]:
        if len(self.devices) == 1:
            yield from _one_device(self.devices[0])
            return
        yield Headline(f"{len(self.devices)} devices; dense peak rates of vendors, links count both directions.")
        yield listing(
            self.devices, ("short", "device"), ("launch_year", Column("year", right=True)),
            ("bf16_tflops", "bf16 TFLOP/s", "digits"), ("memory_gb", "memory GB", "digits"),
            ("memory_gb_s", "GB/s", "digits"), ("scaleup_gb_s", "links GB/s", "digits"),
            ("pcie_gb_s", "PCIe GB/s", "digits"), ("tdp_w", "W", "digits"),
            (lambda each: each.scaleup_link or None, "links"),
        )  # fmt: skip
        yield Next(f"foretrace devices {self.devices[0].short}")


# --- network check --------------------------------------------------------------------------------------------------

_SUSPICIONS = {
    "pcie": "{measured} GB/s is within what PCIe carries ({pcie} GB/s), far below NVLink: peer access over NVLink is "
    "off, or the devices taken have no NVLink between them",
    "cards": "{reached} of the expected rate is as if {used} of {of} network cards were used",
    "other network": "the machines talk over another network than declared: the management card, or sockets, not RDMA",
    "oversubscription": "a switch that carries {reached} of what the cards send looks like this: oversubscription",
    "rings": "{reached} of the expected rate is as if {used} of {of} rings were used",
    "half": "half of the expected rate: one direction only, half of the links, or two jobs at a time",
    "faster": "large transfers are faster than declared: in-switch reduction (NVLS, SHARP), more cards or rings than "
    "stated, or a rate given too low",
    "late": "small transfers start late: {where}processes that share cores, power saving, debug output, or a first "
    "repetition that was counted",
}


def check(series: CollectiveSeries, expected: Network, *, on: str) -> NetworkCheckView:
    """Return measured times of one collective held against a network, size by size, regime by regime."""
    found = NetworkCheck(series=series, expected=expected)
    suspicions = tuple(_suspicion(each, found) for each in found.suspicions)
    return taken(
        NetworkCheckView,
        found,
        series,
        headline=_headline(found, suspicions),
        ok=not found.slower,
        kind=str(series.kind),
        on=on,
        regimes=tuple(taken(RegimeView, each, why=_why(each, found)) for each in found.regimes),
        suspicions=suspicions,
        notes=(found.why,),
        next="foretrace calibrate network" if found.slower else "foretrace techniques data-parallel",
    )


def _why(regime: Regime, found: NetworkCheck) -> str:
    if regime.regime == "latency":
        more_s = median(each.measured_s - each.expected_s for each in regime.sizes)
        if regime.verdict == "as expected":
            return f"{seconds(median(each.measured_s for each in regime.sizes))} whatever the size: latency decides"
        word, each_s = "longer" if more_s > 0 else "less", abs(more_s) / found.steps
        return f"{seconds(abs(more_s))} {word} than expected, {seconds(each_s)} for each of {found.steps} steps"
    best = regime.best
    text = f"up to {digits(best.measured_gb_s)} GB/s, {digits(best.expected_gb_s)} expected there"
    if dips := [each for each in regime.sizes if each.protocol_switch]:
        text += f"; from {binary(dips[0].bytes)} on less than at smaller sizes: another protocol or algorithm"
    return text


def _suspicion(each: Suspicion, found: NetworkCheck) -> str:
    return _SUSPICIONS[each.cause].format(
        used=each.used, of=each.of, measured=digits(found.best.measured_gb_s),
        reached=share(found.best.measured_gb_s / found.best.expected_gb_s),
        pcie=digits(found.device.pcie_gb_s) if found.device is not None else "",
        where="sockets instead of RDMA between machines, or " if found.series.nodes > 1 else "",
    )  # fmt: skip


def _headline(found: NetworkCheck, suspicions: Sequence[str]) -> str:
    last, best, slower = found.regimes[-1], found.best, found.slower
    low = best.expected_gb_s * best.expected_s / best.expected_high_s
    high = best.expected_gb_s * best.expected_s / best.expected_low_s
    rate = f"{digits(best.measured_gb_s)} GB/s at {binary(best.bytes)}, {digits(low)} – {digits(high)} GB/s expected"
    if not slower:
        if last.verdict == "faster":
            return f"The bus bandwidth is higher than expected: {rate}."
        some = any(each.verdict == "faster" for each in found.regimes)
        return f"The bus bandwidth is right: {rate}.{' Some sizes are faster than expected.' if some else ''}"
    if last.verdict != "slower":
        span = f"{binary(slower[0].from_bytes)} – {binary(slower[-1].to_bytes)}"
        times = digits(median(each.ratio for each in slower))
        return f"Large transfers are right ({rate}), but {span} take {times} times as long as they should."
    reason = f": {suspicions[0]}" if suspicions else ""
    return f"The bus bandwidth is too low, {rate}{reason}."


def _marks(size: CheckedSize) -> str:
    unexpected = size.verdict if size.verdict != "as expected" else ""
    return ", ".join(filter(None, (unexpected, "protocol switch" if size.protocol_switch else "")))


def _spread_out(sizes: Sequence[CheckedSize], rows: int) -> list[CheckedSize]:
    """Return so many sizes at most, at even distances on a logarithmic scale."""
    if len(sizes) <= rows:
        return list(sizes)
    logs = [log(each.bytes) for each in sizes]
    wanted = [logs[0] + (logs[-1] - logs[0]) * at / (rows - 1) for at in range(rows)]
    return [sizes[at] for at in sorted({min(bisect_left(logs, value - 1e-9), len(sizes) - 1) for value in wanted})]


def _rate(gb_s: float) -> str:
    """Return GB/s, two digits however small."""
    return digits(gb_s) if gb_s >= 0.1 else f"{gb_s:.2g}"


# --- calibrate network ----------------------------------------------------------------------------------------------


def calibrated(table: CollectiveTable, path: Path) -> CalibrateNetworkView:
    """Return a table that was just measured."""
    first = table.series[0]
    worst = table.noisiest()
    errors = [error for each in table.series if (error := of_table(table, each.workers).left_out(each)) is not None]
    rows = tuple(
        MeasuredSizeView(
            kind=str(each.kind), bytes=size, time_s=time_s, spread=spread,
            bus_gb_s=bus_share(each.kind, each.workers) * size / time_s / 1e9,
        )
        for each, size, time_s, spread in table.times()
    )  # fmt: skip
    best = max(rows, key=lambda row: row.bus_gb_s)
    return taken(
        CalibrateNetworkView,
        table,
        headline=f"{table.backend} between {first.workers} workers of this machine: {digits(best.bus_gb_s)} GB/s bus "
        f"bandwidth at best ({best.kind}, {binary(best.bytes)}).",
        workers=first.workers,
        stored=str(path),
        noisiest=worst[2] if worst else 0.0,
        left_out_error=sum(errors) / len(errors) if errors else None,
        sizes=rows,
        missing=dict(table.missing),
        next="foretrace techniques data-parallel",
    )


# --- devices --------------------------------------------------------------------------------------------------------


def devices(found: Iterable[Device]) -> DevicesView:
    """Return devices of the catalog."""
    return DevicesView(devices=tuple(_device(each) for each in found))


def _device(each: Device) -> DeviceView:
    """Return figures that do not exist or are not known are 0 in the catalog."""
    optional = [field.name for field in msgspec.structs.fields(DeviceView) if "None" in str(field.type)]
    return taken(
        DeviceView, each, confirmed=dict(each.confirmed), **{name: getattr(each, name) or None for name in optional}
    )


_FIGURES = (
    ("fp32", "fp32_tflops", "TFLOP/s"),
    ("tf32", "tf32_tflops", "TFLOP/s"),
    ("fp16", "fp16_tflops", "TFLOP/s"),
    ("bf16", "bf16_tflops", "TFLOP/s"),
    ("fp8", "fp8_tflops", "TFLOP/s"),
    ("int8", "int8_tops", "TOP/s"),
    ("memory", "memory_gb", "GB"),
    ("memory bandwidth", "memory_gb_s", "GB/s"),
    ("L2", "l2_mb", "MB"),
    ("clock", "boost_mhz", "MHz"),
    ("links, both ways", "scaleup_gb_s", "GB/s"),
    ("PCIe, one way", "pcie_gb_s", "GB/s"),
    ("power", "tdp_w", "W"),
    ("usual machine", "node_devices", "devices"),
    ("network per device", "network_gb_s", "GB/s"),
)


def _one_device(each: DeviceView) -> Iterator[Block]:
    yield Headline(f"{each.name} ({each.arch}, {each.launch_year}), in cluster files: {each.short}")
    rows = []
    for word, field, unit in _FIGURES:
        value = getattr(each, field)
        if value is not None:
            source = each.confirmed.get(field, "")
            said = "vendor's figure, unconfirmed" if each.source != "designed" else "designed"
            said = f"confirmed by {source.replace('+', ', ')}" if source else said
            rows.append((word, str(value) if field == "node_devices" else digits(value), unit, said))
    yield table(["", Column(right=True), "", Column(wide=True)], rows)
    links = [text for text in (each.scaleup_link, f"PCIe {each.pcie}" if each.pcie else "") if text]
    yield Line(", ".join(links), label="links")
    if each.note:
        yield Line(each.note, label="note")
