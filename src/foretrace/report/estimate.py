"""What `foretrace estimate` answers: its view, its sentences and its text for people."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from foretrace.cost.calls import Family, Precision
from foretrace.cost.devices.defaults import as_run
from foretrace.cost.devices.roofline import MATRIX
from foretrace.report.blocks import About, Block, Column, Headline, notes, shown, table
from foretrace.report.units import between, count, digits, in_unit, seconds, share, unit_for
from foretrace.report.views import Result

if TYPE_CHECKING:
    from foretrace.model.estimate import Estimate

# Kinds of memory that are shown even where nothing of them is there at the peak, and what people call them.
_KINDS = {"weights": "parameters", "gradients": "gradients", "optimizer": "optimizer state",
          "activations": "activations", "workspace": "workspace"}  # fmt: skip
LEVEL = 0.8  # how often the ranges are meant to hold
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_COUNTS = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6))


class SourceView(msgspec.Struct, frozen=True, kw_only=True):
    """A cost model that spoke: its share of the kernel time, and where its numbers come from."""

    model: str
    share: float
    why: str


class FamilyView(msgspec.Struct, frozen=True, kw_only=True):
    """Operators of one family together."""

    family: str
    calls: int
    flops: float
    bytes: float
    time_s: float  # sum of their kernels


class ChoiceView(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of the recipe, and whether nobody made it."""

    name: str  # "precision", "optimizer", "recomputation", "micro-batches", "tensor", "pipeline", "data", "ZeRO", ...
    value: str
    default: bool


class EstimateView(Result, frozen=True, kw_only=True):
    """`foretrace estimate`: a step of a model on a device, from the model alone."""

    command: str = "estimate"
    headline: str
    model: str
    device: str
    recipe: tuple[ChoiceView, ...]
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
    exposed_exchange_s: float  # of it, what a network that takes no time would save
    device_busy_s: float  # sum of the kernels
    host_busy_s: float
    launch_bound: bool
    utilisation: float  # achieved over peak FLOP/s, recomputation counted
    peak_memory_bytes: int
    memory_bytes: dict[str, int]  # at the peak, by category
    reserved_memory_bytes: int  # what the caching allocator holds at most; 0 on a processor
    device_memory_bytes: int
    fits: str  # "fits", "tight" or "does not fit"
    needed_memory_bytes: tuple[int, int]  # with what is assumed of the process, least and most
    memory_assumptions: tuple[str, ...]
    parameters: int
    flops: float  # per step
    operators: int
    repeated_blocks: int
    cost_sources: dict[str, float]  # share of kernel time by model
    sources: tuple[SourceView, ...]
    families: tuple[FamilyView, ...]
    techniques: tuple[str, ...]  # that were applied to the step
    warnings: tuple[str, ...]
    next: str


def estimate(found: Estimate, *, model: str, again: str, chosen: frozenset[str] = frozenset()) -> EstimateView:
    """The view of an estimate. `again` is the command to continue with, `chosen` names the choices of the
    recipe that the user made.
    """
    step, graph, memory = found.step, found.operators, found.memory
    workers, tokens = found.sharding.workers, found.tokens_per_sample
    devices = workers * found.sharding.tensor
    samples_per_s = graph.batch * workers / step.step_time_s
    return EstimateView(
        headline=headline(found),
        model=model,
        device=found.device.name,
        recipe=tuple(_recipe(found, chosen)),
        devices=devices,
        batch=graph.batch,
        precision=_precision(found),
        training=found.training,
        step_time_s=step.step_time_s,
        interval_s=step.interval_s,
        interval_level=LEVEL,
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * tokens,
        tokens_per_s_per_device=samples_per_s * tokens / devices,
        mfu=found.mfu,
        model_flops=found.model_flops,
        exchange_s=step.exchange_s,
        exposed_exchange_s=step.exposed_s,
        device_busy_s=step.device_busy_s,
        host_busy_s=step.host_busy_s,
        launch_bound=step.launch_bound,
        utilisation=step.utilisation,
        peak_memory_bytes=memory.peak_bytes,
        memory_bytes={name: nbytes for name, nbytes in memory.by_category.items() if nbytes},
        reserved_memory_bytes=memory.reserved_bytes,
        device_memory_bytes=round(found.room_bytes),
        fits=found.fit.verdict,
        needed_memory_bytes=(round(found.fit.needed_bytes[0]), round(found.fit.needed_bytes[1])),
        memory_assumptions=found.fit.assumptions,
        parameters=graph.parameters,
        flops=graph.flops,
        operators=len(graph),
        repeated_blocks=sum(block.times for block in graph.blocks),
        cost_sources=dict(step.cost_sources),
        sources=tuple(
            SourceView(model=name, share=part, why=step.whys[name]) for name, part in step.cost_sources.items()
        ),
        families=_families(found),
        techniques=found.techniques,
        warnings=(*step.warnings, *found.warnings),
        next=again,
    )


def _precision(found: Estimate) -> str:
    """Those that products run in, the most work first: "bf16, fp32"."""
    calls = as_run(found.operators.calls, found.device)
    work: dict[str, float] = {}
    for each in np.unique(calls.precision).tolist():
        mine = (calls.precision == each) & np.isin(calls.family, MATRIX)
        if calls.flops[mine].sum():
            work[Precision(each).name.lower()] = float(calls.flops[mine].sum())
    return ", ".join(sorted(work, key=lambda name: -work[name])) or "no products"


def _recipe(found: Estimate, chosen: frozenset[str]) -> Iterator[ChoiceView]:
    """What the step was taken to be. A training by its own code is no default: its code chose."""
    graph, sharding = found.operators, found.sharding

    def choice(name: str, value: str, *given: str) -> ChoiceView:
        return ChoiceView(name=name, value=value, default=not chosen & set(given))

    weights = graph.recipe.get("weights", "")
    kept = "float32 beside 16-bit copies" if sharding.master else weights
    yield choice("precision", _precision(found) + (f", weights in {kept}" if kept else ""), "precision", "do")
    if "layout" in graph.recipe:
        yield choice("layout", graph.recipe["layout"], "do")
    for name in ("attention", "loss", "dropout"):
        if name in graph.recipe:
            yield choice(name, graph.recipe[name], name)
    if found.training:
        if "optimizer" in graph.recipe:
            yield choice("optimizer", graph.recipe["optimizer"], "optimizer", "do")
        every = {0: "none", 1: "every block"}.get(found.recompute, f"every {found.recompute} blocks, one")
        far = ", to its end" if found.reentrant else ", as far as read" if found.recompute else ""
        yield choice("recomputation", every + far, "recompute", "recompute-every", "do")
        yield choice("micro-batches", str(found.accumulate), "accumulate", "do")
    yield choice("tensor", str(sharding.tensor), "tensor")
    yield ChoiceView(name="pipeline", value="1", default=True)
    yield choice("data", str(sharding.workers), "workers")
    if found.training:
        yield choice("ZeRO", str(sharding.stage), "zero")
    if found.networks:
        yield choice("network", " and ".join(dict.fromkeys(found.networks)), "network")


def headline(found: Estimate) -> str:
    """As in "A step of resnet50 takes 58.1 ms (51.0 – 66.2) on H100-SXM5-80GB; 9.10 GB at the peak fits in 80 GB"."""
    step = found.step
    unit = unit_for(step.step_time_s)
    low, high = step.interval_s
    bound = "; the host launches more slowly than the device computes" if step.launch_bound else ""
    what = "A step" if found.training else "A forward pass"
    does = {"tight": "may not fit"}.get(found.fit.verdict, found.fit.verdict)
    room = f"{nbytes(found.memory.peak_bytes)} of tensors at the peak {does} in {nbytes(found.room_bytes)}"
    return (
        f"{what} of {found.operators.name} takes {in_unit(step.step_time_s, unit)} {unit.name} "
        f"({between(low, high, unit)}) on {found.device.short}; {room}{bound}."
    )


def _families(found: Estimate) -> tuple[FamilyView, ...]:
    calls, time = found.operators.calls, found.step.lowered.costs.seconds
    rows = []
    for family in Family:
        mine = calls.family == family
        if family != Family.NONE and mine.any():
            rows.append(
                FamilyView(
                    family=family.name.lower(),
                    calls=int(mine.sum()),
                    flops=float(calls.flops[mine].sum()),
                    bytes=float(calls.nbytes[mine].sum()),
                    time_s=float(np.nansum(time[mine])),
                )
            )
    return tuple(sorted(rows, key=lambda row: -row.time_s))


def nbytes(value: float) -> str:
    """As in "9.10 GB"; decimal units, as devices are sold."""
    for unit, size in _UNITS:
        if abs(value) >= size:
            return f"{digits(value / size)} {unit}"
    return f"{value:.0f} B"


def _many(value: float) -> str:
    for unit, size in _COUNTS:
        if abs(value) >= size:
            return f"{digits(value / size)} {unit}"
    return count(round(value)) if value >= 1000 or value == round(value) else digits(value)


@shown.register
def _(view: EstimateView, top: int) -> Iterator[Block]:
    several = view.devices > 1
    batch = f"batch {count(view.batch)}{' per worker' if several else ''}" if view.batch else ""
    device = f"{count(view.devices)} × {view.device}" if several else view.device
    facts = (view.model, "training" if view.training else "inference", batch, view.precision, device)
    yield About(tuple(filter(None, facts)))
    yield " · ".join(f"{each.name} {each.value}{' (default)' if each.default else ''}" for each in view.recipe)
    yield ""
    yield Headline(view.headline)
    yield ""
    if view.samples_per_s:
        words = f", {_many(view.tokens_per_s)} tokens/s" if view.tokens_per_s else ""
        apiece = f" ({_many(view.tokens_per_s_per_device)} a device)" if words and several else ""
        mfu = (
            f"; MFU {share(view.mfu)}, of {'three times ' if view.training else ''}the products of the forward pass "
            f"({_many(view.model_flops)}FLOP, causal attention whole) at the dense peak of their precision"
        )
        yield f"{_many(view.samples_per_s)} samples/s{words}{apiece}{mfu if view.mfu else ''}"
    if view.exchange_s:
        yield f"messages {seconds(view.exchange_s)}, of which {seconds(view.exposed_exchange_s)} is waited for"
    blocks = f", {count(view.repeated_blocks)} of them repeated blocks" if view.repeated_blocks else ""
    yield (
        f"{count(view.operators)} operators{blocks}, {_many(view.parameters)} parameters, {_many(view.flops)}FLOP: "
        f"{share(view.utilisation)} of the device's peak"
    )
    yield f"kernels {seconds(view.device_busy_s)}, host {seconds(view.host_busy_s)}"
    yield ""
    total = sum(each.time_s for each in view.families) or 1.0
    yield table(
        [
            "operators", Column("calls", "count"), Column("FLOP", right=True), Column("moved", right=True),
            Column("time", "time"), Column("share", "share"),
        ],
        [
            (row.family, row.calls, _many(row.flops), nbytes(row.bytes), row.time_s, row.time_s / total)
            for row in view.families
        ],
        top=top, how="--top",
    )  # fmt: skip
    yield ""
    kinds = {name: view.memory_bytes.get(name, 0) for name in _KINDS} if view.training else {}
    sizes = sorted((kinds | view.memory_bytes).items(), key=lambda each: -each[1])
    yield table(
        ["memory at the peak" + (" of each device" if several else ""), Column("size", right=True)],
        [
            *((_KINDS.get(name, name), nbytes(size)) for name, size in sizes),
            ("together", nbytes(view.peak_memory_bytes)),
        ],
    )
    low, high = view.needed_memory_bytes
    room = nbytes(view.device_memory_bytes)
    yield f"with what the process needs beside them {nbytes(low)} to {nbytes(high)} of {room}: {view.fits}"
    yield from notes(view.memory_assumptions, "assumed")
    yield ""
    for source in view.sources:
        yield f"{share(source.share)} of the kernel time by {source.model}: {source.why}"
    for technique in view.techniques:
        yield f"with {technique}"
    yield from notes(view.warnings, "note")


def again(words: list[str]) -> str:
    """A command, quoted for a shell."""
    return " ".join(shlex.quote(word) for word in words)
