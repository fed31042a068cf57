"""`foretrace calibrate` as answers: what operators and collectives take on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from foretrace.cost.network.collective_table import CollectiveTable
from foretrace.cost.network.network import bus_share
from foretrace.cost.network.tables import of_table
from foretrace.cost.operators.grid import timed_classes
from foretrace.model.effects import is_effect
from foretrace.report.blocks import Block, Column, Headline, Line, Next, listing, notes
from foretrace.report.units import binary, digits, share
from foretrace.report.views import Result, taken

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
            yield Headline(said[0] if said else _headline(self.seconds))
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


def _headline(seconds: Mapping[str, float]) -> str:
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


def network(table: CollectiveTable, path: Path) -> CalibrateNetworkView:
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
