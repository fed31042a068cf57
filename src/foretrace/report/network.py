"""What `foretrace network check`, `calibrate network` and `devices` answer: their sentences and lines."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from math import log
from statistics import median

import msgspec

from foretrace.cost.network.check import CheckedSize, NetworkCheck, Regime, Suspicion
from foretrace.cost.network.collective_table import CollectiveSeries
from foretrace.cost.network.network import Network
from foretrace.report.blocks import Block, Column, listing, notes
from foretrace.report.units import binary, digits, seconds, share
from foretrace.report.views import Report, taken

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
            self.regimes, "regime", ("from_bytes to_bytes", "sizes", "binary"),
            ("ratio", "measured / expected", "ratio"), (lambda each: _WORDS[each.verdict], "verdict"),
            ("why", Column("why", wide=True)),
        )  # fmt: skip
        yield from notes(self.suspicions, "suspicion")
        sizes = _spread_out(self.sizes, SHOWN_SIZES)
        yield listing(
            sizes, ("bytes", "size", "binary"), ("measured_s", "measured", "seconds"),
            ("expected_s", "expected", "seconds"),
            ("expected_low_s expected_high_s", "80 % range", "seconds"),
            (lambda each: 1e9 * each.measured_gb_s, "bus", "B/s"),
            (lambda each: 1e9 * each.expected_gb_s, "expected", "B/s"), (_marks, ""),
        )  # fmt: skip
        if len(sizes) < len(self.sizes):
            yield f"{len(sizes)} of {len(self.sizes):,} sizes; --json has all"


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
        NetworkCheckView, found, series, headline=_headline(found, suspicions), ok=not found.slower,
        kind=str(series.kind), on=on,
        regimes=tuple(taken(RegimeView, each, why=_why(each, found)) for each in found.regimes), suspicions=suspicions,
        notes=(found.why,),
        next="foretrace calibrate network" if found.slower else "foretrace techniques data-parallel",
    )  # fmt: skip


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
