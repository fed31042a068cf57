"""What `foretrace network check`, `calibrate network` and `devices` answer: their sentences and lines."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import median

import msgspec

from foretrace.cost.network.collective_table import CollectiveSeries, CollectiveTable
from foretrace.cost.network.link_network import LinkNetwork, ring_shape
from foretrace.cost.network.nccl import NcclNetwork
from foretrace.cost.network.network import Cost, Network, bus_share
from foretrace.cost.network.tables import of_table
from foretrace.hardware.cluster import Cluster
from foretrace.hardware.devices import Device, named
from foretrace.report.blocks import Block, Column, Headline, Line, Next, notes, shown, table
from foretrace.report.units import digits, seconds, share
from foretrace.report.views import Result, taken

_ALMOST_FLAT = 1.5  # times the expected time of the smallest size: up to there latency decides
_NEAR_PEAK = 0.8  # of the largest expected bus bandwidth: from there on the link decides
_DIP = 0.9  # of the bus bandwidth at a smaller size: a change of protocol or algorithm
_ALIKE = 0.12  # two rates are the same within this
SHOWN_SIZES = 24
_WORDS = {
    "as expected": "as expected",
    "slower": "slower than expected",
    "faster": "faster than expected",
}


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


# --- network check --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    """What is known of the machine beside the times it should give."""

    device: Device | None
    cluster: Cluster | None
    nics: int
    inside_nvlink: bool


def check(series: CollectiveSeries, expected: Network, *, on: str, source: str) -> NetworkCheckView:
    """Measured times of one collective held against a network, size by size, regime by regime."""
    found = _sizes(series, expected)
    regimes = tuple(_regimes(found, series))
    suspicions = tuple(_suspicions(found, regimes, series, _facts(expected)))
    slower = [each for each in regimes if each.verdict == "slower"]
    return NetworkCheckView(
        headline=_headline(found, regimes, suspicions),
        ok=not slower,
        kind=str(series.kind),
        workers=series.workers,
        per_node=series.per_node,
        on=on,
        regimes=regimes,
        suspicions=suspicions,
        sizes=found,
        notes=(expected.cost(series.kind, series.nbytes[-1], workers=series.workers).why,),
        next="foretrace calibrate network" if slower else "foretrace techniques data-parallel",
    )


def _sizes(series: CollectiveSeries, expected: Network) -> tuple[SizeView, ...]:
    costs = [expected.cost(series.kind, size, workers=series.workers) for size in series.nbytes]
    factor = bus_share(series.kind, series.workers) / 1e9
    rates = [factor * size / cost.seconds for size, cost in zip(series.nbytes, costs, strict=True)]
    flat, peak = _ALMOST_FLAT * costs[0].seconds, _NEAR_PEAK * max(rates)
    found, best = [], 0.0
    for at, (size, cost) in enumerate(zip(series.nbytes, costs, strict=True)):
        time_s = series.seconds[at]
        rate = factor * size / time_s
        # With rates near the peak everywhere (large sizes only), all of them are bound by the link.
        regime = "link" if rates[at] >= peak else "latency" if cost.seconds <= flat else "ramp"
        found.append(
            SizeView(
                bytes=size,
                regime=regime,
                measured_s=time_s,
                expected_s=cost.seconds,
                expected_low_s=cost.low_s,
                expected_high_s=cost.high_s,
                measured_gb_s=rate,
                expected_gb_s=rates[at],
                verdict=_verdict(time_s, cost),
                protocol_switch=rate < _DIP * best,
            )
        )
        best = max(best, rate)
    return tuple(found)


def _verdict(time_s: float, cost: Cost) -> str:
    return "slower" if time_s > cost.high_s else "faster" if time_s < cost.low_s else "as expected"


def _regimes(sizes: Sequence[SizeView], series: CollectiveSeries) -> Iterator[RegimeView]:
    for regime in ("latency", "ramp", "link"):
        mine = [each for each in sizes if each.regime == regime]
        if not mine:
            continue
        verdicts = [each.verdict for each in mine]
        verdict = max(("as expected", "slower", "faster"), key=verdicts.count)
        ratio = median(each.measured_s / each.expected_s for each in mine)
        yield RegimeView(
            regime=regime,
            from_bytes=mine[0].bytes,
            to_bytes=mine[-1].bytes,
            ratio=ratio,
            verdict=verdict,
            why=_why(regime, verdict, mine, series),
        )


def _why(regime: str, verdict: str, mine: Sequence[SizeView], series: CollectiveSeries) -> str:
    if regime == "latency":
        steps = max(ring_shape(series.kind, series.workers)[0], 1)
        more_s = median(each.measured_s - each.expected_s for each in mine)
        if verdict == "as expected":
            return f"{seconds(median(each.measured_s for each in mine))} whatever the size: latency decides"
        word = "longer" if more_s > 0 else "less"
        return f"{seconds(abs(more_s))} {word} than expected, {seconds(abs(more_s) / steps)} for each of {steps} steps"
    best = max(mine, key=lambda each: each.measured_gb_s)
    text = f"up to {digits(best.measured_gb_s)} GB/s, {digits(best.expected_gb_s)} expected there"
    if dips := [each for each in mine if each.protocol_switch]:
        text += f"; from {size_text(dips[0].bytes)} on less than at smaller sizes: another protocol or algorithm"
    return text


def _facts(expected: Network) -> _Machine:
    cluster = expected.cluster if isinstance(expected, LinkNetwork) else None
    name = cluster.device if cluster is not None else ""
    nvlink = cluster is not None and "NVLink" in cluster.inside.name
    if isinstance(expected, NcclNetwork):
        name, nvlink = expected.name.removeprefix("nccl:"), expected.comm.link == "nvlink"
    return _Machine(
        device=named(name) if name else None,
        cluster=cluster,
        nics=cluster.nics if cluster is not None else expected.nics if isinstance(expected, NcclNetwork) else 1,
        inside_nvlink=nvlink,
    )


def _suspicions(
    sizes: Sequence[SizeView], regimes: Sequence[RegimeView], series: CollectiveSeries, facts: _Machine
) -> Iterator[str]:
    """What the shape of a miss looks like; nothing where the link is as expected."""
    by_name = {each.regime: each for each in regimes}
    link, latency = by_name.get("link"), by_name.get("latency")
    if link is not None and link.verdict == "slower":
        best = max((each for each in sizes if each.regime == "link"), key=lambda each: each.measured_gb_s)
        yield from _slow_link(best.measured_gb_s, best.expected_gb_s, series, facts)
    if link is not None and link.verdict == "faster":
        yield (
            "large transfers are faster than declared: in-switch reduction (NVLS, SHARP), more cards or rings than "
            "stated, or a rate given too low"
        )
    if latency is not None and latency.verdict == "slower":
        where = "sockets instead of RDMA between machines, or " if series.nodes > 1 else ""
        yield (
            f"small transfers start late: {where}processes that share cores, power saving, debug output, or a first "
            "repetition that was counted"
        )


def _slow_link(measured: float, expected: float, series: CollectiveSeries, facts: _Machine) -> Iterator[str]:
    reached = measured / expected
    explained = False
    device = facts.device
    if series.nodes == 1 and facts.inside_nvlink and device is not None and measured <= device.pcie_gb_s < expected / 2:
        explained = True
        yield (
            f"{digits(measured)} GB/s is within what PCIe carries ({digits(device.pcie_gb_s)} GB/s), far below NVLink: "
            "peer access over NVLink is off, or the devices taken have no NVLink between them"
        )
    if series.nodes > 1:
        for cards in range(1, facts.nics):
            if abs(reached * facts.nics / cards - 1) < _ALIKE:
                explained = True
                yield f"{share(reached)} of the expected rate is as if {cards} of {facts.nics} network cards were used"
                break
        if reached < 0.3 and not explained:
            explained = True
            yield "the machines talk over another network than declared: the management card, or sockets, not RDMA"
        if facts.cluster is not None and facts.cluster.oversubscription == 1.0 and 0.3 <= reached < 0.7:
            yield f"a switch that carries {share(reached)} of what the cards send looks like this: oversubscription"
    elif not explained and facts.cluster is not None and facts.cluster.wiring is not None:
        rings = facts.cluster.wiring.rings(series.workers)
        for fewer in range(1, rings):
            if abs(reached * rings / fewer - 1) < _ALIKE:
                explained = True
                yield f"{share(reached)} of the expected rate is as if {fewer} of {rings} rings were used"
                break
    if not explained and abs(reached - 0.5) < 0.5 * _ALIKE:
        yield "half of the expected rate: one direction only, half of the links, or two jobs at a time"


def _headline(sizes: Sequence[SizeView], regimes: Sequence[RegimeView], suspicions: Sequence[str]) -> str:
    last = regimes[-1]
    best = max((each for each in sizes if each.regime == last.regime), key=lambda each: each.measured_gb_s)
    low = best.expected_gb_s * best.expected_s / best.expected_high_s
    high = best.expected_gb_s * best.expected_s / best.expected_low_s
    rate = f"{digits(best.measured_gb_s)} GB/s at {size_text(best.bytes)}, {digits(low)} – {digits(high)} GB/s expected"
    slower = [each for each in regimes if each.verdict == "slower"]
    if not slower:
        if last.verdict == "faster":
            return f"The bus bandwidth is higher than expected: {rate}."
        faster = " Some sizes are faster than expected." if any(each.verdict == "faster" for each in regimes) else ""
        return f"The bus bandwidth is right: {rate}.{faster}"
    if last.verdict != "slower":
        span = f"{size_text(slower[0].from_bytes)} – {size_text(slower[-1].to_bytes)}"
        return (
            f"Large transfers are right ({rate}), but {span} take "
            f"{digits(median(each.ratio for each in slower))} times as long as they should."
        )
    reason = f": {suspicions[0]}" if suspicions else ""
    return f"The bus bandwidth is too low, {rate}{reason}."


@shown.register
def _(view: NetworkCheckView, top: int) -> Iterator[Block]:
    where = f", {view.per_node} per machine" if view.per_node < view.workers else ""
    yield Headline(view.headline)
    yield ""
    yield f"{view.kind} of {view.workers} workers{where}, expected on {view.on}"
    yield ""
    yield table(
        ["regime", "sizes", Column("measured / expected", right=True), "verdict", Column("why", wide=True)],
        [
            (each.regime, f"{size_text(each.from_bytes)} – {size_text(each.to_bytes)}", f"{each.ratio:.2f}×",
             _WORDS[each.verdict], each.why)
            for each in view.regimes
        ],
    )  # fmt: skip
    yield from notes(view.suspicions, "suspicion")
    yield ""
    sizes = _spread_out(view.sizes, SHOWN_SIZES)
    yield table(
        [
            Column("size", right=True), Column("measured", "seconds"), Column("expected", "seconds"),
            Column("80 % range", right=True), Column("GB/s", right=True), Column("expected", right=True), "",
        ],
        [
            (
                size_text(each.bytes), each.measured_s, each.expected_s,
                f"{seconds(each.expected_low_s)} – {seconds(each.expected_high_s)}", _rate(each.measured_gb_s),
                _rate(each.expected_gb_s),
                _marks(each),
            )
            for each in sizes
        ],
    )  # fmt: skip
    if len(sizes) < len(view.sizes):
        yield f"{len(sizes)} of {len(view.sizes):,} sizes; --json has all"
    yield from notes(view.notes, "expected")


def _marks(size: SizeView) -> str:
    unexpected = size.verdict if size.verdict != "as expected" else ""
    return ", ".join(filter(None, (unexpected, "protocol switch" if size.protocol_switch else "")))


def _spread_out(sizes: Sequence[SizeView], rows: int) -> list[SizeView]:
    """So many sizes at most, at even distances on a logarithmic scale."""
    if len(sizes) <= rows:
        return list(sizes)
    logs = [log(each.bytes) for each in sizes]
    wanted = [logs[0] + (logs[-1] - logs[0]) * at / (rows - 1) for at in range(rows)]
    return [sizes[at] for at in sorted({min(bisect_left(logs, value - 1e-9), len(sizes) - 1) for value in wanted})]


def _rate(gb_s: float) -> str:
    """GB/s, two digits however small."""
    return digits(gb_s) if gb_s >= 0.1 else f"{gb_s:.2g}"


def size_text(nbytes: float) -> str:
    """As in "64 MiB": a number of bytes in the binary unit that reads 1 to 1,023."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{digits(nbytes) if nbytes != round(nbytes) else f'{nbytes:.0f}'} {unit}"
        nbytes /= 1024
    return f"{digits(nbytes)} GiB"


# --- calibrate network ----------------------------------------------------------------------------------------------


def calibrated(table: CollectiveTable, path: Path) -> CalibrateNetworkView:
    """A table that was just measured."""
    first = table.series[0]
    worst = table.noisiest()
    errors = [error for each in table.series if (error := of_table(table, each.workers).left_out(each)) is not None]
    rows = tuple(
        MeasuredSizeView(
            kind=str(each.kind),
            bytes=size,
            time_s=time_s,
            spread=spread,
            bus_gb_s=bus_share(each.kind, each.workers) * size / time_s / 1e9,
        )
        for each in table.series
        for size, time_s, spread in zip(
            each.nbytes, each.seconds, each.spread or (0.0,) * len(each.nbytes), strict=True
        )
    )
    best = max(rows, key=lambda row: row.bus_gb_s)
    return CalibrateNetworkView(
        headline=f"{table.backend} between {first.workers} workers of this machine: {digits(best.bus_gb_s)} GB/s bus "
        f"bandwidth at best ({best.kind}, {size_text(best.bytes)}).",
        backend=table.backend,
        workers=first.workers,
        repetitions=table.repetitions,
        measured=table.measured,
        stored=str(path),
        noisiest=worst[2] if worst else 0.0,
        left_out_error=sum(errors) / len(errors) if errors else None,
        sizes=rows,
        missing=dict(table.missing),
        next="foretrace techniques data-parallel",
    )


@shown.register
def _(view: CalibrateNetworkView, top: int) -> Iterator[Block]:
    yield Headline(view.headline)
    yield ""
    yield table(
        [
            "collective", Column("size", right=True), Column("time", "seconds"), Column("spread", "share"),
            Column("bus GB/s", right=True),
        ],
        [(row.kind, size_text(row.bytes), row.time_s, row.spread, _rate(row.bus_gb_s)) for row in view.sizes],
    )  # fmt: skip
    yield ""
    yield f"medians of {view.repetitions} repetitions without the slowest fifth; spread: quartile distance"
    if view.left_out_error is not None:
        yield f"a size left out is predicted from the others to {share(view.left_out_error)} on average"
    yield from notes((f"{kind} ({reason})" for kind, reason in view.missing.items()), "not measured")
    yield f"stored in {view.stored}"


# --- devices --------------------------------------------------------------------------------------------------------


def devices(found: Iterable[Device]) -> DevicesView:
    """Devices of the catalog."""
    return DevicesView(devices=tuple(_device(each) for each in found))


def _device(each: Device) -> DeviceView:
    """Figures that do not exist or are not known are 0 in the catalog."""
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


@shown.register
def _(view: DevicesView, top: int) -> Iterator[Block]:
    if len(view.devices) == 1:
        yield from _one_device(view.devices[0])
        return
    yield Headline(f"{len(view.devices)} devices; dense peak rates of vendors, links count both directions.")
    yield ""
    figures = {
        "bf16 TFLOP/s": "bf16_tflops", "memory GB": "memory_gb", "GB/s": "memory_gb_s", "links GB/s": "scaleup_gb_s",
        "PCIe GB/s": "pcie_gb_s", "W": "tdp_w",
    }  # fmt: skip
    yield table(
        ["device", Column("year", right=True), *(Column(title, "digits") for title in figures), "links"],
        [
            (
                each.short, each.launch_year, *(getattr(each, field) for field in figures.values()),
                each.scaleup_link or None,
            )
            for each in view.devices
        ],
    )  # fmt: skip
    yield ""
    yield Next(f"foretrace devices {view.devices[0].short}")


def _one_device(each: DeviceView) -> Iterator[Block]:
    yield Headline(f"{each.name} ({each.arch}, {each.launch_year}), in cluster files: {each.short}")
    yield ""
    rows = []
    for word, field, unit in _FIGURES:
        value = getattr(each, field)
        if value is not None:
            source = each.confirmed.get(field, "")
            said = f"confirmed by {source.replace('+', ', ')}" if source else "vendor's figure, unconfirmed"
            rows.append((word, str(value) if field == "node_devices" else digits(value), unit, said))
    yield table(["", Column(right=True), "", Column(wide=True)], rows)
    links = [text for text in (each.scaleup_link, f"PCIe {each.pcie}" if each.pcie else "") if text]
    yield Line(", ".join(links), label="links")
    if each.note:
        yield Line(each.note, label="note")
