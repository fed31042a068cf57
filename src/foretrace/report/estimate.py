"""What `foretrace estimate` answers: its view, its sentences and its text for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from foretrace.model.recipe import Choice, CostSource, FamilyWork, families, precisions, recipe, sources
from foretrace.model.target import HERE
from foretrace.report import shared
from foretrace.report.blocks import About, Block, Column, listing, notes, table
from foretrace.report.names import command
from foretrace.report.shared import EnergyView
from foretrace.report.units import count, nbytes, scaled, seconds, share, within
from foretrace.report.views import Result, taken

if TYPE_CHECKING:
    from foretrace.model.estimate import Estimate

# Kinds of memory that are shown even where nothing of them is there at the peak, and what people call them.
_KINDS = {"weights": "parameters", "gradients": "gradients", "optimizer": "optimizer state",
          "activations": "activations", "workspace": "workspace"}  # fmt: skip
LEVEL = 0.8  # how often the ranges are meant to hold


class EstimateView(Result, frozen=True, kw_only=True):
    """`foretrace estimate`: a step of a model on a device, from the model alone."""

    command: str = "estimate"
    headline: str
    model: str
    device: str
    recipe: tuple[Choice, ...]
    devices: int  # of the whole job
    batch: int  # samples per step and data-parallel worker; 0 if unknown
    precision: str
    training: bool  # forward, backward and update; else the forward pass alone
    step_time_s: float
    interval_s: tuple[float, float]
    interval_level: float
    samples_per_s: float  # of all workers; 0 if unknown
    tokens_per_s: float  # of all workers; 0 where the inputs are no words
    tokens_per_s_per_device: float
    mfu: float  # model FLOPs over peak, per device
    model_flops: float  # that count for it, per step and device
    exchange_s: float  # sum of the messages to other devices
    exposed_s: float = msgspec.field(name="exposed_exchange_s")  # of it, what a network that takes no time would save
    device_busy_s: float  # sum of the kernels
    host_busy_s: float
    launch_bound: bool
    utilisation: float  # achieved over peak FLOP/s, recomputation counted
    energy: EnergyView | None  # of all devices; null where there is no power model
    peak_memory_bytes: int
    memory_bytes: dict[str, int]  # at the peak, by category
    reserved_memory_bytes: int  # what the caching allocator holds at most; 0 on a processor
    device_memory_bytes: int
    verdict: str = msgspec.field(name="fits")  # "fits", "tight" or "does not fit"
    needed_memory_bytes: tuple[int, int]  # with what is assumed of the process, least and most
    assumptions: tuple[str, ...] = msgspec.field(name="memory_assumptions")
    parameters: int
    flops: float  # per step
    operators: int
    repeated_blocks: int
    cost_sources: dict[str, float]  # share of kernel time by model
    sources: tuple[CostSource, ...]
    families: tuple[FamilyWork, ...]
    techniques: tuple[str, ...]  # that were applied to the step
    warnings: tuple[str, ...]
    next: str

    def shown(self, top: int) -> Iterator[Block]:
        several = self.devices > 1
        batch = f"batch {count(self.batch)}{' per worker' if several else ''}" if self.batch else ""
        device = f"{count(self.devices)} × {self.device}" if several else self.device
        facts = (self.model, "training" if self.training else "inference", batch, self.precision, device)
        yield About(tuple(filter(None, facts)))
        yield About(tuple(f"{each.name} {each.value}{' (default)' if each.default else ''}" for each in self.recipe))
        if self.samples_per_s:
            words = f", {scaled(self.tokens_per_s)} tokens/s" if self.tokens_per_s else ""
            apiece = f" ({scaled(self.tokens_per_s_per_device)} a device)" if words and several else ""
            mfu = (
                f"; MFU {share(self.mfu)}, of {'3 times ' if self.training else ''}the products of the forward pass "
                f"({scaled(self.model_flops, 'FLOP')}, causal attention whole) at the dense peak of their precision"
            )
            yield f"{scaled(self.samples_per_s)} samples/s{words}{apiece}{mfu if self.mfu else ''}"
        if self.exchange_s:
            yield f"messages {seconds(self.exchange_s)}, of which {seconds(self.exposed_s)} is waited for"
        blocks = f", {count(self.repeated_blocks)} of them repeated blocks" if self.repeated_blocks else ""
        yield (
            f"{count(self.operators)} operators{blocks}, {scaled(self.parameters)} parameters, "
            f"{scaled(self.flops, 'FLOP')}: "
            f"{share(self.utilisation)} of the device's peak"
        )
        yield f"kernels {seconds(self.device_busy_s)}, host {seconds(self.host_busy_s)}"
        yield from shared.energy_lines(self.energy)
        total = sum(each.time_s for each in self.families) or 1.0
        yield listing(
            self.families, ("family", "operators"), ("calls", "calls", "count"), ("flops", "FLOP", "FLOP"),
            ("bytes", "moved", "bytes"), ("time_s", "time", "time"), (lambda row: row.time_s / total, "share", "share"),
            top=top, how="--top",
        )  # fmt: skip
        kinds = {name: self.memory_bytes.get(name, 0) for name in _KINDS} if self.training else {}
        sizes = sorted((kinds | self.memory_bytes).items(), key=lambda each: -each[1])
        yield table(
            ["memory at the peak" + (" of each device" if several else ""), Column("size", "bytes")],
            [*((_KINDS.get(name, name), size) for name, size in sizes), ("together", self.peak_memory_bytes)],
        )
        low, high = self.needed_memory_bytes
        room = nbytes(self.device_memory_bytes)
        yield f"with what the process needs beside them {nbytes(low)} to {nbytes(high)} of {room}: {self.verdict}"
        yield from notes(self.assumptions, "assumed")
        yield ""
        for source in self.sources:
            yield f"{share(source.share)} of the kernel time by {source.model}: {source.why}"
        for technique in self.techniques:
            yield f"with {technique}"
        yield from notes(self.warnings, "note")


def estimate(
    found: Estimate,
    *,
    model: str,
    asked: Mapping[str, object] | None = None,
    out: Path | None = None,
    grid: float | None = None,
) -> EstimateView:
    """Return the view of an estimate; `asked` are the options that were given, `out` the task graph's file."""
    step, graph, memory, fit = found.step, found.operators, found.memory, found.fit
    asked = {name.replace("_", "-"): given for name, given in (asked or {}).items()}
    workers, tokens = found.sharding.workers, found.tokens_per_sample
    devices = workers * found.sharding.tensor
    samples_per_s = graph.batch * workers / step.step_time_s
    return taken(
        EstimateView, found, step, graph, fit, headline=headline(found), model=model, device=found.device.name,
        recipe=tuple(recipe(found, frozenset(asked))), devices=devices, precision=precisions(found),
        interval_level=LEVEL, samples_per_s=samples_per_s, tokens_per_s=samples_per_s * tokens,
        tokens_per_s_per_device=samples_per_s * tokens / devices,
        energy=shared.energy(found.device, step.step_time_s, step.interval_s, step.device_busy_s, devices, grid),
        peak_memory_bytes=memory.peak_bytes,
        memory_bytes={name: nbytes for name, nbytes in memory.by_category.items() if nbytes},
        reserved_memory_bytes=memory.reserved_bytes, device_memory_bytes=round(found.room_bytes),
        needed_memory_bytes=(round(fit.needed_bytes[0]), round(fit.needed_bytes[1])), operators=len(graph),
        repeated_blocks=sum(block.times for block in graph.blocks), cost_sources=dict(step.cost_sources),
        sources=sources(found), families=families(found), warnings=(*step.warnings, *found.warnings),
        next=_further(model, asked, out, launches=found.device.short != HERE),
    )  # fmt: skip


def _further(model: str, asked: Mapping[str, object], out: Path | None, *, launches: bool) -> str:
    """Return what to ask next: this very step as a task graph, or a change of that graph."""
    if out is None:
        return command("estimate", model, **asked, out="step.graph")
    return command("whatif", out, do="cuda-graphs") if launches else command("blame", out)


def headline(found: Estimate) -> str:
    """Return text such as "A step of resnet50 takes 58.1 ms (51.0 – 66.2) on H100; 9.10 GB at the peak fits ..."."""
    step = found.step
    bound = "; the host launches more slowly than the device computes" if step.launch_bound else ""
    what = "A step" if found.training else "A forward pass"
    does = {"tight": "may not fit"}.get(found.fit.verdict, found.fit.verdict)
    room = f"{nbytes(found.memory.peak_bytes)} of tensors at the peak {does} in {nbytes(found.room_bytes)}"
    return (
        f"{what} of {found.operators.name} takes {within(step.step_time_s, step.interval_s)} on {found.device.short}; "
        f"{room}{bound}."
    )
