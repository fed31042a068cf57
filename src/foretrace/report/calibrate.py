"""Times of operators and collectives, as answers: `foretrace calibrate` measures them, `network check` judges them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from math import log
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from foretrace.cost.network.check import CheckedSize, NetworkCheck, Regime, Suspicion
from foretrace.cost.network.collective_table import CollectiveSeries, CollectiveTable
from foretrace.cost.network.network import Network, bus_share
from foretrace.cost.network.tables import of_table
from foretrace.cost.operators.grid import timed_classes
from foretrace.model.effects import is_effect
from foretrace.report.blocks import Block, Column, Headline, Line, Next, listing, notes
from foretrace.report.units import binary, digits, seconds, share
from foretrace.report.views import Report, Result, taken

if TYPE_CHECKING:
    from foretrace.cost.devices.learned.gpu_products import GpuCalibration
    from foretrace.experiment.calibrate import KeptTimes


class CalibratedMachineView(msgspec.Struct, frozen=True, kw_only=True):
    """What times hold for; null where the system does not tell."""

    cpu: str | None
    architecture: str | None
    cores: int | None
    torch: str | None
    threads: int | None
    thread_cores: float | None  # cores that these threads can have, at most as many as threads
    instruction_sets: list[str] | None  # that libraries of the process may use
    capability: str | None  # of PyTorch's own kernels
    device: str | None
    allocator: dict[str, str]  # environment variables


class CalibrateView(Result, frozen=True, kw_only=True):
    """`foretrace calibrate device` and `run`: seconds per call, and what could not be timed."""

    command: str = "calibrate"
    of: str  # "device" or "run"
    machine: CalibratedMachineView
    stored: str  # file
    seconds: dict[str, float]  # "NAME JSON" of a call -> seconds; "near NAME JSON" with warm caches
    failed: dict[str, str]  # call -> why it has no time

    def shown(self, top: int, said: Sequence[str] = (), source: str = "", following: str = "") -> Iterator[Block]:
        """Show the times; `said` is what is known of the processor's rates instead of the table, headline first."""
        machine = self.machine
        threads = f"{machine.threads} thread{'' if machine.threads == 1 else 's'}"
        where = f"{machine.cpu} with {threads}, PyTorch {machine.torch}"
        if self.of == "run":
            nothing = (
                "Nothing to time: these techniques ask for no operator of this recording, or all they ask for is known."
            )
            yield Headline(f"Timed {len(self.seconds)} operators of {source} on {where}." if self.seconds else nothing)
        else:
            yield Headline(said[0] if said else _processor_headline(self.seconds))
            count = sum(not (key.startswith("near ") or is_effect(key)) for key in self.seconds)
            yield f"{count} operators timed on {where}"
            yield ""
            yield from said[1:] if said else _classes(self.seconds)
        yield from _failed(self.failed)
        if self.seconds:
            yield ""
            yield Line(f"stored in {self.stored}", whole=True)
        if following:
            yield Next(following)


class CalibrateGpuView(Result, frozen=True, kw_only=True):
    """`foretrace calibrate device --gpu`: the 16-bit products worth timing on a GPU, and their times."""

    command: str = "calibrate device"
    gpu: str  # as the catalog calls it
    stored: str  # file
    products: list[tuple[int, int, int]]  # m, n, k; those worth most first
    seconds: list[float] | None  # of each; None where they are still to be timed

    def shown(self, top: int, device: str = "") -> Iterator[Block]:
        if self.seconds is None:
            yield Headline(f"{len(self.products)} products, those worth most first, are to be timed on {device}.")
            yield Line(f"written to {self.stored}: fill in the column us (microseconds)", whole=True)
            yield Next(f"foretrace calibrate device --gpu {self.gpu} --times {self.stored}")
        else:
            kept = f"{len(self.products)} products of {device} kept"
            yield Headline(f"{kept}: 16-bit products are now predicted from them, too.")
            yield Line(f"stored in {self.stored}", whole=True)
            yield Next(f"foretrace estimate gpt2 --device {self.gpu} --precision bf16")


def calibrated(of: str, found: KeptTimes) -> CalibrateView:
    """Return what was timed on a machine."""
    where = CalibratedMachineView(**found.machine)
    return CalibrateView(
        of=of, machine=where, stored=str(found.stored), seconds=dict(found.seconds), failed=dict(found.failed)
    )


def products(found: GpuCalibration) -> CalibrateGpuView:
    """Return the products of a GPU, timed or still to be."""
    times = None if found.seconds is None else found.seconds.tolist()
    return CalibrateGpuView(
        gpu=found.device.short, stored=str(found.stored), products=found.rows.tolist(), seconds=times
    )


def _processor_headline(seconds: Mapping[str, float]) -> str:
    """Return what bfloat16 does to matrix work here, the first thing to know of a processor."""
    found, classes = [], timed_classes(seconds)
    for word, families in (("matrix products", ("mm", "addmm", "bmm")), ("convolutions", ("convolution",))):
        if ratios := [ratio for each in classes if each.family in families for ratio in each.bfloat16]:
            found.append(f"{median(ratios):.2f}× the time of float32 in {word}")
    return f"bfloat16 takes {' and '.join(found)} here." if found else "No operator could be timed."


def _classes(seconds: Mapping[str, float]) -> Iterator[Block]:
    """Yield, per class, time in float32, ratios of its twins, share that does not grow with the batch."""
    yield listing(
        timed_classes(seconds), ("family", "class"), (lambda each: _ends(each.float32_s), "float32", "seconds"),
        (lambda each: _ends(each.bfloat16), "bfloat16", "ratio"),
        (lambda each: _ends(each.channels_last), "channels_last", "ratio"),
        ("fixed", Column("fixed", "share", unknown="")),
    )  # fmt: skip
    yield "float32: fastest to slowest of the sizes; ratios: time relative to that, from size to size;"
    yield "fixed: share of the time that stays when the batch grows (median over the sizes)"


def _ends(found: Sequence[float]) -> tuple[float, float] | None:
    return (found[0], found[-1]) if found else None


def _failed(failed: Mapping[str, str]) -> Iterator[Block]:
    """Yield what was not timed, by reason."""
    reasons: dict[str, list[str]] = {}
    for key, reason in failed.items():
        reasons.setdefault(reason, []).append(key.partition(" ")[0])
    for reason, names in reasons.items():
        few = ", ".join(list(dict.fromkeys(names))[:3])
        yield Line(f"{len(names)} calls ({few}{', ...' if len(set(names)) > 3 else ''}): {reason}", label="not timed")


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
            ("spread", "spread", "share"), (lambda row: 1e9 * row.bus_gb_s, "bus", "B/s"),
        )  # fmt: skip
        yield f"medians of {self.repetitions} repetitions without the slowest fifth; spread: quartile distance"
        if self.left_out_error is not None:
            yield f"a size left out is predicted from the others to {share(self.left_out_error)} on average"
        yield from notes((f"{kind} ({reason})" for kind, reason in self.missing.items()), "not measured")
        yield f"stored in {self.stored}"


def calibrated_network(table: CollectiveTable, path: Path) -> CalibrateNetworkView:
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
        CalibrateNetworkView, table,
        headline=f"{table.backend} between {first.workers} workers of this machine: {digits(best.bus_gb_s)} GB/s bus "
        f"bandwidth at best ({best.kind}, {binary(best.bytes)}).",
        workers=first.workers, stored=str(path), noisiest=worst[2] if worst else 0.0,
        left_out_error=sum(errors) / len(errors) if errors else None, sizes=rows, missing=dict(table.missing),
        next="foretrace techniques data-parallel",
    )  # fmt: skip


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
            ("ratio", "time / expected", "ratio"), (lambda each: _WORDS[each.verdict], "verdict"),
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
