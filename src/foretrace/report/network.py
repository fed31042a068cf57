"""What `foretrace network check`, `calibrate network` and `devices` answer: their sentences and lines."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import median

from foretrace.cost.network.collective_table import CollectiveSeries, CollectiveTable
from foretrace.cost.network.link_network import LinkNetwork, ring_shape
from foretrace.cost.network.nccl import NcclNetwork
from foretrace.cost.network.network import Cost, Network, bus_share
from foretrace.cost.network.tables import of_table
from foretrace.hardware.cluster import Cluster
from foretrace.hardware.devices import Device, named
from foretrace.report.network_views import (
    CalibrateNetworkView,
    DevicesView,
    DeviceView,
    MeasuredSizeView,
    NetworkCheckView,
    RegimeView,
    SizeView,
)
from foretrace.report.units import digits, seconds, share

_ALMOST_FLAT = 1.5  # times the expected time of the smallest size: up to there latency decides
_NEAR_PEAK = 0.8  # of the largest expected bus bandwidth: from there on the link decides
_DIP = 0.9  # of the bus bandwidth at a smaller size: a change of protocol or algorithm
_ALIKE = 0.12  # two rates are the same within this
_WORDS = {
    "as expected": "as expected",
    "slower": "slower than expected",
    "faster": "faster than expected",
}


# --- network check --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
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


def _facts(expected: Network) -> _Facts:
    cluster = expected.cluster if isinstance(expected, LinkNetwork) else None
    name = cluster.device if cluster is not None else ""
    nvlink = cluster is not None and "NVLink" in cluster.inside.name
    if isinstance(expected, NcclNetwork):
        name, nvlink = expected.name.removeprefix("nccl:"), expected.comm.link == "nvlink"
    return _Facts(
        device=named(name) if name else None,
        cluster=cluster,
        nics=cluster.nics if cluster is not None else expected.nics if isinstance(expected, NcclNetwork) else 1,
        inside_nvlink=nvlink,
    )


def _suspicions(
    sizes: Sequence[SizeView], regimes: Sequence[RegimeView], series: CollectiveSeries, facts: _Facts
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


def _slow_link(measured: float, expected: float, series: CollectiveSeries, facts: _Facts) -> Iterator[str]:
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


def check_lines(view: NetworkCheckView, rows: int = 24) -> Iterator[str]:
    """The view as text, headline first."""
    where = f", {view.per_node} per machine" if view.per_node < view.workers else ""
    yield f"{view.headline}\n"
    yield f"  {view.kind} of {view.workers} workers{where}, expected on {view.on}\n"
    yield f"  {'regime':<8} {'sizes':<20} {'measured / expected':>19}  {'verdict':<21} why"
    for each in view.regimes:
        span = f"{size_text(each.from_bytes)} – {size_text(each.to_bytes)}"
        yield f"  {each.regime:<8} {span:<20} {each.ratio:>18.2f}×  {_WORDS[each.verdict]:<21} {each.why}"
    for line in view.suspicions:
        yield f"  suspicion: {line}"
    yield f"\n  {'size':>10} {'measured':>10} {'expected':>10} {'80 % range':>21} {'GB/s':>8} {'expected':>9}"
    shown = _spread_out(view.sizes, rows)
    for size in shown:
        span = f"{seconds(size.expected_low_s)} – {seconds(size.expected_high_s)}"
        mark = "" if size.verdict == "as expected" else f"  {size.verdict}"
        mark += "  protocol switch" if size.protocol_switch else ""
        yield (
            f"  {size_text(size.bytes):>10} {seconds(size.measured_s):>10} {seconds(size.expected_s):>10} {span:>21} "
            f"{_rate(size.measured_gb_s):>8} {_rate(size.expected_gb_s):>9}{mark}"
        )
    if len(shown) < len(view.sizes):
        yield f"  {len(shown)} of {len(view.sizes):,} sizes; --json has all"
    for note in view.notes:
        yield f"  expected: {note}"
    yield f"  next: {view.next}"


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


def calibrated_lines(view: CalibrateNetworkView) -> Iterator[str]:
    """The view as text."""
    yield f"{view.headline}\n"
    yield f"  {'collective':<15} {'size':>10} {'time':>10} {'spread':>8} {'bus GB/s':>9}"
    for row in view.sizes:
        yield (
            f"  {row.kind:<15} {size_text(row.bytes):>10} {seconds(row.time_s):>10} {share(row.spread):>8} "
            f"{_rate(row.bus_gb_s):>9}"
        )
    yield f"\n  medians of {view.repetitions} repetitions without the slowest fifth; spread: quartile distance"
    if view.left_out_error is not None:
        yield f"  a size left out is predicted from the others to {share(view.left_out_error)} on average"
    for kind, reason in view.missing.items():
        yield f"  not measured: {kind} ({reason})"
    yield f"  stored in {view.stored}"
    yield f"  next: {view.next}"


# --- devices --------------------------------------------------------------------------------------------------------


def devices(found: Iterable[Device]) -> DevicesView:
    """Devices of the catalog."""
    return DevicesView(devices=tuple(_device(each) for each in found))


def _device(each: Device) -> DeviceView:
    return DeviceView(
        name=each.name,
        short=each.short,
        vendor=each.vendor,
        arch=each.arch,
        launch_year=each.launch_year,
        fp32_tflops=each.fp32_tflops or None,
        tf32_tflops=each.tf32_tflops or None,
        fp16_tflops=each.fp16_tflops or None,
        bf16_tflops=each.bf16_tflops or None,
        fp8_tflops=each.fp8_tflops or None,
        int8_tops=each.int8_tops or None,
        memory_gb=each.memory_gb or None,
        memory_gb_s=each.memory_gb_s or None,
        l2_mb=each.l2_mb or None,
        sms=each.sms,
        boost_mhz=each.boost_mhz or None,
        scaleup_link=each.scaleup_link,
        scaleup_gb_s=each.scaleup_gb_s or None,
        pcie=each.pcie,
        pcie_gb_s=each.pcie_gb_s or None,
        tdp_w=each.tdp_w or None,
        node_devices=each.node_devices or None,
        network_gb_s=each.network_gb_s or None,
        confirmed=dict(each.confirmed),
        source=each.source,
        note=each.note,
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


def devices_lines(view: DevicesView) -> Iterator[str]:
    """The catalog as a table, or one device with the source of every figure."""
    if len(view.devices) == 1:
        yield from _one_device(view.devices[0])
        return
    yield f"{len(view.devices)} devices; dense peak rates of vendors, links count both directions.\n"
    header = ("bf16 TFLOP/s", "memory GB", "GB/s", "links GB/s", "PCIe GB/s", "W")
    fields = ("bf16_tflops", "memory_gb", "memory_gb_s", "scaleup_gb_s", "pcie_gb_s", "tdp_w")
    width = max(len(each.short) for each in view.devices)
    yield f"  {'device':<{width}}  {'year':>4}  {'  '.join(f'{word:>12}' for word in header)}  links"
    for each in view.devices:
        cells = (getattr(each, field) for field in fields)
        row = "  ".join(f"{'–' if cell is None else digits(cell):>12}" for cell in cells)
        yield f"  {each.short:<{width}}  {each.launch_year:>4}  {row}  {each.scaleup_link or '–'}"
    yield f"\n  next: foretrace devices {view.devices[0].short}" if len(view.devices) > 1 else ""


def _one_device(each: DeviceView) -> Iterator[str]:
    yield f"{each.name} ({each.arch}, {each.launch_year}), in cluster files: {each.short}\n"
    for word, field, unit in _FIGURES:
        value = getattr(each, field)
        if value is not None:
            source = each.confirmed.get(field, "")
            said = f"confirmed by {source.replace('+', ', ')}" if source else "vendor's figure, unconfirmed"
            yield f"  {word:<18} {value if field == 'node_devices' else digits(value):>8} {unit:<8} {said}"
    links = [text for text in (each.scaleup_link, f"PCIe {each.pcie}" if each.pcie else "") if text]
    yield f"  {'links':<18} {', '.join(links)}"
    if each.note:
        yield f"  note: {each.note}"
