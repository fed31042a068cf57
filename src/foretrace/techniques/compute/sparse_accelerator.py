"""`sparse-accelerator`: convolutions on an array that skips zeros, in place of one as fast that does not.

Every convolution takes the share of its time that `foretrace.cost.accelerators.sparse` finds for its sizes: from masks
of the user's own training (`foretrace sparsity`), or from shares of zeros that are stated, drawn at random.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from foretrace.arrays import Float64
from foretrace.cost.accelerators.sparse import FORWARD, MaskedConv, SparseArray, expected
from foretrace.errors import ForetraceError
from foretrace.graph.edit import scale
from foretrace.graph.select import select
from foretrace.graph.taskgraph import Change, Phase, TaskGraph, TaskKind
from foretrace.graph.work import conv_output, tensors
from foretrace.reading import parse_json, read_text
from foretrace.techniques.base import Prior, Technique, derived, parameter
from foretrace.techniques.compute.classes import WorkClass, classify
from foretrace.trace.trace import told_shapes

_STATED = re.compile(r"(\d*\.?\d+)(?:(?:±|\+-)(\d*\.?\d+))?")
# Cycles with masks of six trained networks over those with as many zeros drawn, all layers alike, lie in 0.9 – 1.15
# (reproductions/sparse_training); wider, as six small networks are few.
CLUSTERED = (1.0, 0.7, 1.4)
_OTHER = 0.1  # how far batches and later steps may lie beyond the checkpoints that were measured
_COINCIDENCE = 0.05  # zeros of gradients that no ReLU made, at most
_NORMS = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")
_BETWEEN = "batch norm makes output gradients dense"

Sizes = tuple[tuple[int, ...], tuple[int, ...]]  # of the weight; of the input without its batch
Cycles = Float64  # (2, 2): forward and backward; dense and skipping


class LayerCycles(msgspec.Struct, frozen=True, kw_only=True):
    """A convolution as `foretrace sparsity` tells it; dense and skipping cycles of its passes."""

    weight: tuple[int, ...]
    input: tuple[int, ...]  # channels and pixels
    dense: dict[str, float]
    sparse: dict[str, float]


class MaskCycles(msgspec.Struct, frozen=True, kw_only=True):
    """A step in which masks were taken."""

    layers: tuple[LayerCycles, ...]


class MaskFile(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of the answer of `foretrace sparsity --json`."""

    samples: tuple[MaskCycles, ...]

    @classmethod
    def read(cls, path: Path) -> MaskFile:
        """Read it from a file. Raises ForetraceError."""
        mend = "write it again by foretrace sparsity --json"
        try:
            found = msgspec.convert(parse_json(read_text(path, mend=mend), str(path), mend=mend), cls)
        except msgspec.ValidationError as error:
            raise ForetraceError(f"{path} is no answer of foretrace sparsity ({error}); {mend}.") from None
        figures = [each for step in found.samples for layer in step.layers for each in (layer.dense, layer.sparse)]
        if not figures or any(FORWARD not in each or not all(0 < v < 1e18 for v in each.values()) for each in figures):
            raise ForetraceError(f"{path} holds no cycles of convolutions above 0; {mend}.")
        return found


@dataclass(frozen=True, kw_only=True)
class SparseAccelerator(Technique):
    """Convolutions on an array that skips zero operands and masked outputs."""

    across = "each"
    summary = "hardware that skips zeros in convolutions, forward and backward, by measured or stated zeros"
    source = "Sarma et al., Exploiting Activation based Gradient Output Sparsity, arXiv 2109.07710"
    not_applied = "such hardware has to be built; foretrace sparsity shows on your model that skipping is exact."

    masks: str = parameter("", doc="answer of foretrace sparsity MODEL --json: zeros of your own training")
    inputs: str = parameter("", key="input", doc="share of zeros of convolutions' inputs, as in input=0.5±0.1")
    gradients: str = parameter("", key="gradient", doc="share of zeros of their output gradients; 0 behind batch norm")
    array: str = parameter("", doc='the array, as in array="lanes=8 dispatch=fixed"; foretrace sparsity --help')
    input_zeros: float | None = derived(unit="share", doc="share of zeros of convolutions' inputs")
    gradient_zeros: float | None = derived(unit="share", doc="share of zeros of their output gradients")
    cycles: float | None = derived(doc="cycles of the array relative to those simulated")

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        """Return how far masks of other steps, or real ones with the zeros that were stated, may be off."""
        if self.masks:
            steps = [sum(map(_summed, step.layers)) for step in self._read().samples]
            totals = [float(each[:, 1].sum() / each[:, 0].sum()) for each in steps]  # type: ignore[index]
            low, high = (end * len(totals) / sum(totals) for end in (min(totals), max(totals)))
            why = (
                f"masks of {len(totals)} steps; other batches and later steps may lie {100 * _OTHER:.0f} % beyond them"
            )
            return {"cycles": Prior(1.0, low * (1 - _OTHER), high * (1 + _OTHER), why=why)}
        why = "zeros of real masks lie together and differ between layers: six small networks, each left out once"
        found = {"cycles": Prior(*CLUSTERED, why=why)}
        for field, text in (("input_zeros", self.inputs), ("gradient_zeros", self.gradients)):
            share, low, high = self._stated(text)
            if low < high and getattr(self, field) is None:
                found[field] = Prior(share, low, high, unit="share", why="as stated")
        return found

    def change(self, graph: TaskGraph) -> TaskGraph:
        if bool(self.masks) == bool(self.inputs or self.gradients):
            raise self.refuse(
                "state zeros by input= and gradient=, as in input=0.5±0.1 gradient=0, or give the answer of foretrace "
                "sparsity MODEL --json by masks=; one of the two."
            )
        rows = np.flatnonzero((classify(graph).work == WorkClass.CONV) & ~graph.gone)
        rows = rows[[not _transposed(graph, row) for row in rows.tolist()]]
        if not len(rows):
            raise self.refuse("the recording shows no convolution, in which alone this array skips zeros.")
        places = [_place(graph, row) for row in rows.tolist()]
        known = {each.sizes: each for each in places if each is not None}
        if not known:
            raise self.refuse("the recording does not tell sizes of convolutions; record with shapes.")
        values, back = self.values(graph), graph.phase[rows] == Phase.BACKWARD
        dense = back.any() and _normalised(graph, len(known))
        found = self._measured(known) if self.masks else self._drawn(known, values, bool(dense))
        whole = _shares(sum(found.values()))
        shares = {sizes: _shares(cycles) for sizes, cycles in found.items()}
        factor = np.array([(whole if each is None else shares[each.sizes]) for each in places])
        factor = np.minimum(factor[np.arange(len(rows)), back.astype(int)] * values["cycles"], 1.0)
        said = f"forward {whole[0]:.2f}, backward {whole[1]:.2f} of the cycles of an array that skips nothing"
        notes = [Change(what=f"convolutions take {said}", tasks=len(rows))]
        if dense:
            remains = "forward and weight gradients skip zero inputs, input gradients skip masked outputs"
            notes.append(Change(what=f"{_BETWEEN}; what remains: {remains}", tasks=0))
        return scale(graph, graph.mask(rows), factor).noted(*notes)

    def _stated(self, text: str) -> tuple[float, float, float]:
        """Return (share, low, high) from "0.5±0.1"; 0 where nothing is said."""
        match = _STATED.fullmatch(text or "0")
        share, around = (float(each or 0) for each in match.groups()) if match else (1.0, 0.0)
        if not 0 <= share < 1:
            raise self.refuse(f"{text} is no share of zeros; write a number from 0 to 1, as in 0.5 or 0.5±0.1.")
        return share, max(share - around, 0.0), min(share + around, 0.99)

    def _read(self) -> MaskFile:
        try:
            return MaskFile.read(Path(self.masks))
        except ForetraceError as error:
            raise self.refuse(str(error)) from None

    def _measured(self, known: Collection[Sizes]) -> dict[Sizes, Cycles]:
        """Return cycles of every size of convolution, from the user's masks."""
        if self.array:
            raise self.refuse("array= is that of the file given by masks=; ask foretrace sparsity --array for another.")
        found: dict[Sizes, Cycles] = {}
        for step in self._read().samples:
            for layer in step.layers:
                key = layer.weight, layer.input
                found[key] = found.get(key, np.zeros((2, 2))) + _summed(layer)
        if unlike := sorted(known - found.keys()):
            weight, sizes = (" × ".join(map(str, each)) for each in unlike[0])
            raise self.refuse(
                f"{self.masks} knows no convolution with a weight of {weight} on inputs of {sizes}, which the "
                "recording shows; measure the model that was recorded, in the same size."
            )
        return {key: found[key] for key in known}

    def _drawn(self, known: Mapping[Sizes, _Place], values: Mapping[str, float], dense: bool) -> dict[Sizes, Cycles]:
        """Return the same from stated zeros; the first convolution of the step reads pictures, which have none."""
        inputs = values.get("input_zeros", self._stated(self.inputs)[0])
        gradients = values.get("gradient_zeros", self._stated(self.gradients)[0])
        if dense and gradients > _COINCIDENCE:
            raise self.refuse(f"every convolution is next to a batch norm, and {_BETWEEN}; state gradient=0.")
        try:
            array = SparseArray.of(self.array)
        except ForetraceError as error:
            raise self.refuse(str(error)) from None
        first = min(known.values(), key=lambda each: each.row)
        return {
            sizes: _cycles(replace(each, row=0), 0.0 if each is first else inputs, gradients, each is not first, array)
            for sizes, each in known.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A convolution in a graph."""

    row: int
    sizes: Sizes
    batch: int
    stride: int


def _transposed(graph: TaskGraph, row: int) -> bool:
    """Return whether it is a transposed convolution, for which there is no such array."""
    name = graph.names[graph.op[row]] if graph.op[row] >= 0 else ""
    at = {"aten::convolution": 6, "aten::_convolution": 6, "aten::convolution_backward": 7}.get(name)
    if at is None or graph.shape[row] < 0:
        return "transpose" in name
    return told_shapes(graph.shapes[graph.shape[row]]).concrete[at : at + 1] == ("True",)


def _place(graph: TaskGraph, row: int) -> _Place | None:
    """Return what the recording tells of a task that is a convolution, forward or backward; None where it
    lacks sizes.
    """
    if min(graph.shape[row], graph.op[row]) < 0:
        return None
    dims = [tuple(each) for each, _ in tensors(told_shapes(graph.shapes[graph.shape[row]]))]
    told = conv_output(graph.names[graph.op[row]], graph.shapes[graph.shape[row]])
    given, weight = told[:2] if told else (*dims, (), ())[:2]
    if len(given) < 3 or len(given) != len(weight) or min(*given, *weight) < 1 or given[1] % weight[1]:
        return None
    if weight[0] % (given[1] // weight[1]):
        return None
    # Multiply-adds per output pixel, each 2 FLOPs and in two products backward, tell how many of these there are.
    outputs = prod(told[2][2:]) if told else graph.flops[row] / (2 * given[0] * prod(weight))
    stride = round((prod(given[2:]) / outputs) ** (1 / (len(given) - 2))) if outputs else 1
    return _Place(row=row, sizes=(weight, given[1:]), batch=given[0], stride=min(max(stride, 1), *given[2:]))


@lru_cache(maxsize=4096)
def _cycles(place: _Place, inputs: float, gradients: float, learns: bool, array: SparseArray) -> Cycles:
    """Return cycles of a convolution with so many zeros."""
    (outputs, of_group, *taps), (channels, *size) = place.sizes
    after = [-(-each // place.stride) for each in size]
    full = np.broadcast_to(np.True_, (place.batch, max(channels, outputs), *size))
    conv = MaskedConv(
        name="", weight=place.sizes[0], stride=(place.stride,) * len(taps), padding=tuple(each // 2 for each in taps),
        dilation=(1,) * len(taps), groups=channels // of_group, inputs=full[:, :channels],
        gradients=full[(slice(None), slice(outputs), *map(slice, after))], input_gradient=learns,
    )  # fmt: skip
    runs = expected(conv, inputs, gradients, array)
    dense, sparse = ({each.what: getattr(each, side).cycles for each in runs} for side in ("dense", "sparse"))
    return _summed(LayerCycles(weight=(), input=(), dense=dense, sparse=sparse))


def _summed(layer: LayerCycles) -> Cycles:
    """Return forward and backward cycles, dense and skipping."""
    sides = (layer.dense, layer.sparse)
    return np.array([
        [sum(cycles for what, cycles in side.items() if (what == FORWARD) == forward) for side in sides]
        for forward in (True, False)
    ])  # fmt: skip


def _shares(cycles: Any) -> tuple[float, float]:
    """Return skipping over dense cycles, forward and backward; 1 where nothing is computed."""
    (forward, skipping), (backward, skipping_back) = cycles.tolist()
    return skipping / forward, skipping_back / backward if backward else 1.0


def _normalised(graph: TaskGraph, convolutions: int) -> bool:
    """Return whether as many batch norms as kinds of convolutions run forward: as good as every one has its own."""
    norms = select(graph, op=_NORMS, ignore_case=False, phase="forward")
    norms &= np.isin(graph.kind, (TaskKind.OPERATOR, TaskKind.KERNEL))
    return int(norms.sum()) >= max(graph.n_steps, 1) * convolutions
