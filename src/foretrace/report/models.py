"""Answers about models that did not run: `foretrace operators`, `utilisation`, and `sparsity` in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from foretrace.cost.accelerators.sparse import BACKWARD, FORWARD, ArrayRun, MaskedConv, SparseArray, simulate
from foretrace.model.groups import OperatorBlock, OperatorGroup, OperatorGroups
from foretrace.model.operator_graph import OperatorGraph, Role
from foretrace.report.blocks import About, Block, Line, listing, table
from foretrace.report.estimate import LEVEL
from foretrace.report.units import digits, nbytes, scaled, seconds, share, things, within
from foretrace.report.views import Report, taken

if TYPE_CHECKING:
    from foretrace.model.estimate import ModelUsage
    from foretrace.training.sparsity import MaskSample


class OperatorsView(Report, frozen=True, kw_only=True):
    """`foretrace operators`: a model's step as operators."""

    command: str = "operators"
    name: str
    source: str
    batch: int | None
    operators: int
    fused: bool
    flops: float
    nbytes: float = msgspec.field(name="bytes")
    intensity: float | None
    parameters: int
    weight_bytes: float
    activation_bytes: float
    families: tuple[OperatorGroup, ...]
    calls: tuple[OperatorGroup, ...]
    phases: tuple[OperatorGroup, ...]
    layers: tuple[OperatorGroup, ...]
    blocks: tuple[OperatorBlock, ...]
    unknown: dict[str, int]
    unknown_bytes_share: float

    def shown(self, top: int, by: str = "family") -> Iterator[Block]:
        rows = {"family": self.families, "operator": self.calls, "phase": self.phases, "layer": self.layers}[by]
        yield listing(
            rows, (lambda row: _short(row.name), by), ("calls", "calls", "count"), ("flops", "FLOP", "FLOP"),
            ("read_bytes", "read", "bytes"), ("written_bytes", "written", "bytes"), ("intensity", "FLOP/B", "digits"),
            top=top, how="--top",
        )  # fmt: skip
        intensity = digits(self.intensity) if self.intensity is not None else "–"
        yield (
            f"{things(self.operators, 'kernel' if self.fused else 'operator')}, {scaled(self.parameters)} parameters, "
            f"activations {nbytes(self.activation_bytes)}, {intensity} FLOP per byte; from {self.source}"
        )
        for block in sorted(self.blocks, key=lambda each: -each.length * (each.times - 1))[:3]:
            where = f" from {block.layer}" if block.layer else ""
            yield Line(
                f"{things(block.length, 'operator')}, {block.times} times, node {block.first} on{where}", label="block"
            )
        if self.unknown:
            named = ", ".join(f"{op} ({times})" for op, times in list(self.unknown.items())[:4])
            yield f"known by their bytes only, {share(self.unknown_bytes_share)} of the bytes: {named}"


def operators(graph: OperatorGraph, *, fused: bool = False, next: str = "") -> OperatorsView:
    """Return the answer for one graph."""
    groups = OperatorGroups(graph=graph)
    return taken(
        OperatorsView, groups, graph, headline=_headline(graph, groups.families), batch=graph.batch or None,
        operators=len(graph), fused=fused, weight_bytes=groups.held_bytes(Role.WEIGHT),
        activation_bytes=groups.held_bytes(Role.ACTIVATION), unknown=graph.unknown(),
        next=next,
    )  # fmt: skip


def _headline(graph: OperatorGraph, families: tuple[OperatorGroup, ...]) -> str:
    moved = graph.nbytes
    heavy = max(families, key=lambda each: each.flops)
    most = max(families, key=lambda each: each.moved_bytes)
    of_flops = f"{heavy.name} has {share(heavy.flops / graph.flops)} of the FLOPs" if graph.flops else "no FLOPs"
    who = " and" if most is heavy and graph.flops else f", {most.name}"
    of_bytes = f"{who} {share(most.moved_bytes / moved)} of the bytes" if moved else ""
    samples = f" with {graph.batch} samples" if graph.batch else ""
    return (
        f"A step of {graph.name}{samples} computes {scaled(graph.flops, 'FLOP')} and moves {nbytes(moved)}: "
        f"{of_flops}{of_bytes}."
    )


def _short(name: str) -> str:
    name = name or "–"
    return name if len(name) <= 44 else f"…{name[-43:]}"


class ModelUsageView(msgspec.Struct, frozen=True, kw_only=True):
    """What one model makes of a device, without having run. Shares are of the device's peaks over the whole step."""

    model: str
    device: str
    precision: str  # in which most FLOPs run
    training: bool
    batch: int  # samples per step; 0 if unknown
    flops: float  # of products, per step
    nbytes: float = msgspec.field(name="bytes")  # read and written by all operators, per step
    step_time_s: float
    interval_s: tuple[float, float]
    interval_level: float
    of_peak_flops: float
    of_peak_flops_range: tuple[float, float]
    of_peak_bandwidth: float
    busy: float  # share of the step in which the device runs any kernel
    intensity: float  # aggregate: FLOPs over bytes of products
    ridge: float  # FLOPs per byte of the device
    bound: str  # "bandwidth" or "compute", by intensity against ridge
    cost_sources: dict[str, float]


class UtilisationView(Report, frozen=True, kw_only=True):
    """`foretrace utilisation`."""

    command: str = "utilisation"
    usage: ModelUsageView

    def shown(self, top: int) -> Iterator[Block]:
        found = self.usage
        roofline = f"{digits(found.intensity)}, ridge {digits(found.ridge)}: {found.bound}-bound as a whole"
        rows = [
            ("step", within(found.step_time_s, found.interval_s)),
            (f"peak FLOP/s ({found.precision})", share(found.of_peak_flops)),
            ("peak bandwidth", share(found.of_peak_bandwidth)),
            ("device busy", share(found.busy)),
            ("FLOPs per byte", roofline),
            ("costs from", ", ".join(f"{name} {share(part)}" for name, part in found.cost_sources.items())),
        ]
        yield table(["", ""], rows)


def utilisation(found: ModelUsage, *, model: str, training: bool, next: str) -> UtilisationView:
    """Return the view of one model."""
    used, step = found.usage, found.step
    low, high = found.of_peak_flops_range
    side = "below" if used.bound == "bandwidth" else "above"
    sentence = (
        f"{model} is predicted to reach {share(used.of_peak_flops)} ({share(low)} – {share(high)}) of the peak of "
        f"{found.device.short}: a step takes {seconds(step.step_time_s)}, the device works in "
        f"{share(used.busy)} of it, and {digits(used.intensity)} FLOPs per byte are {side} its ridge of "
        f"{digits(used.ridge)}."
    )
    return UtilisationView(
        headline=sentence,
        usage=taken(
            ModelUsageView, used, step, found.operators, model=model, device=found.device.name,
            precision=used.precision.name.lower(), training=training, interval_level=LEVEL,
            of_peak_flops_range=found.of_peak_flops_range, ridge=used.ridge,
            cost_sources=dict(step.cost_sources),
        ),
        notes=found.notes, next=next,
    )  # fmt: skip


_PARTS = {"forward": (FORWARD,), "backward": BACKWARD, "iteration": (FORWARD, *BACKWARD)}


class SparseLayerView(msgspec.Struct, frozen=True, kw_only=True):
    """A convolution in a step: where it has zeros, and cycles of its passes on the dense and the skipping array."""

    name: str
    weight: tuple[int, ...]
    input: tuple[int, ...]  # channels and pixels
    input_zeros: float
    gradient_zeros: float
    masked: bool  # whether a ReLU masks the gradient of its input, which skips outputs
    dense: dict[str, float]  # by pass: forward, input gradient, weight gradient
    sparse: dict[str, float]
    speedup: float  # of all its passes


class SparseSampleView(msgspec.Struct, frozen=True, kw_only=True):
    """Masks of one step, on the array."""

    step: int
    loss: float
    input_zeros: float  # share of all inputs but pictures
    gradient_zeros: float
    speedup: dict[str, float]  # forward, backward, iteration; memory included
    bound: dict[str, float]  # if no multiplier were ever idle
    memory_bound: float  # share of the skipping array's cycles in passes that wait for memory
    energy_ratio: float  # of the skipping over the dense array
    layers: tuple[SparseLayerView, ...]


class SparsityView(Report, frozen=True, kw_only=True):
    """`foretrace sparsity`: zeros in training, and an array that skips them."""

    command: str = "sparsity"
    model: str
    array: str  # what was said of it
    images: int
    exact: bool | None  # all parameter gradients bit-identical in float64 when skipped; null where it cannot be tried
    samples: tuple[SparseSampleView, ...]

    def shown(self, top: int) -> Iterator[Block]:
        yield About((self.model, f"masks of {things(self.images, 'sample')}", self.array or "256 PEs of 16 lanes"))
        yield listing(
            self.samples,
            ("step", "step", "count"), ("loss", "loss", "digits"), ("input_zeros", "zeros of inputs", "share"),
            ("gradient_zeros", "of gradients", "share"),
            (lambda each: each.speedup["forward"], "forward", "ratio"),
            (lambda each: each.speedup["backward"], "backward", "ratio"),
            (lambda each: each.speedup["iteration"], "iteration", "ratio"),
            (lambda each: each.bound["iteration"], "bound", "ratio"), ("energy_ratio", "energy", "share"),
        )  # fmt: skip
        yield listing(
            sorted(self.samples[-1].layers, key=lambda each: -sum(each.sparse.values())),
            ("name", "convolution", "name"),
            (lambda each: "×".join(map(str, each.weight)), "weight"),
            ("input_zeros", "zeros of inputs", "share"), ("gradient_zeros", "of gradients", "share"),
            ("masked", "skips outputs", "yes"), ("speedup", "speed-up", "ratio"),
            top=top, noun="convolution", how="--top",
        )  # fmt: skip


def sample(taken: MaskSample, array: SparseArray) -> SparseSampleView:
    """Return the answer about the masks of one step."""
    run, convs = simulate(taken.convs, array), taken.convs
    parts = {name: run.of(*passes) for name, passes in _PARTS.items()}
    waits = [each.sparse.cycles for each in run.passes if each.sparse.cycles > each.sparse.compute]
    inner = [each.inputs for each in convs if each.input_gradient]
    zeros = [
        1 - float(sum(each.sum() for each in masks) / max(sum(each.size for each in masks), 1))
        for masks in (inner, [each.gradients for each in convs])
    ]
    return SparseSampleView(
        step=taken.step, loss=taken.loss, input_zeros=zeros[0] if inner else 0.0, gradient_zeros=zeros[1],
        speedup={name: part.speedup for name, part in parts.items()},
        bound={name: part.bound for name, part in parts.items()},
        memory_bound=sum(waits) / run.sum("cycles"), energy_ratio=run.energy_ratio,
        layers=tuple(_layer(each, run.of(layer=each.name)) for each in convs),
    )  # fmt: skip


def _layer(conv: MaskedConv, run: ArrayRun) -> SparseLayerView:
    inputs, gradients = conv.zeros
    return SparseLayerView(
        name=conv.name, weight=conv.weight, input=conv.inputs.shape[1:], input_zeros=inputs, gradient_zeros=gradients,
        masked=conv.maskable and conv.input_gradient, dense={each.what: each.dense.cycles for each in run.passes},
        sparse={each.what: each.sparse.cycles for each in run.passes}, speedup=run.speedup,
    )  # fmt: skip


def sparsity(
    samples: Sequence[SparseSampleView],
    *,
    model: str,
    size: str,
    array: SparseArray,
    images: int,
    exact: bool | None,
    unchecked: str,
) -> SparsityView:
    """Return the whole answer."""
    last, notes = samples[-1], []
    if exact:
        notes.append("skipping is exact here: all parameter gradients are bit-identical in float64")
    elif exact is None:
        notes.append(f"whether skipping is exact was not tried: {unchecked}")
    else:
        notes.append("skipping is not exact here: parameter gradients differ in float64; speed-ups do not hold")
    if last.gradient_zeros < 0.05:
        notes.append(
            "output gradients are dense, as behind batch norm; what remains: forward and weight gradients skip zero "
            "inputs, input gradients skip masked outputs"
        )
    if not last.step:
        notes.append("masks of untrained weights; train first by --steps")
    return SparsityView(
        headline=f"An array that skips zeros takes {digits(last.speedup['iteration'])} times fewer cycles for the "
        f"convolutions of a training step, {digits(last.speedup['backward'])} times fewer backward.",
        model=model, array=str(array), images=images, exact=exact, samples=tuple(samples), notes=tuple(notes),
        next=f"foretrace estimate {model} --device h100{'' if model.endswith('.py') else f' --size {size}'}",
    )  # fmt: skip
