"""What `foretrace sparsity` answers: zeros of a training's convolutions, and what an array that skips them gains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from foretrace.cost.accelerators.sparse import BACKWARD, FORWARD, ArrayRun, MaskedConv, SparseArray, simulate
from foretrace.report.blocks import About, Block, listing
from foretrace.report.units import digits, things
from foretrace.report.views import Report

if TYPE_CHECKING:
    from foretrace.training.sparsity import MaskSample

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
            (lambda each: "yes" if each.masked else "no", "skips outputs"), ("speedup", "speed-up", "ratio"),
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
