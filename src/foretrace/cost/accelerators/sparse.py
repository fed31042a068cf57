"""An array of multipliers that skips zeros in the convolutions of a training step, cycle by cycle from real masks.

Three products per convolution (Sarma et al., Exploiting Activation based Gradient Output Sparsity, arXiv 2109.07710):

| pass | sum over | zero operands skipped | whole outputs skipped |
|---|---|---|---|
| forward | taps, input channels | inputs | none |
| input gradient | taps, output channels | output gradients | where the input is 0: its ReLU masks the gradient |
| weight gradient | images, pixels | inputs and output gradients | none |

A processing element (PE) computes one output at a time with `lanes` multipliers: its cycles are the non-zeros of every
tap over the lanes, rounded up. PEs wait for each other after `barrier` outputs each. The dense array is the same one
without skipping; products of padding are left out in both. Arrays are numpy; sizes are those of PyTorch: inputs
(images, channels, *pixels), output gradients (images, output channels, *pixels), any number of dimensions of pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from math import inf, prod
from typing import Any

import numpy as np

from foretrace.arrays import Array, Int64, Mask
from foretrace.compiled import njit
from foretrace.errors import ForetraceError
from foretrace.names import numbers

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "forward", "input gradient", "weight gradient"
BACKWARD = (INPUT_GRADIENT, WEIGHT_GRADIENT)
_CHOICES = {
    "order": ("channels", "pixels", "blocked"), "packing": ("tap", "sum"),
    "dispatch": ("unmasked", "fixed", "redistributed"), "bitmaps": ("yes", "no"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SparseArray:
    """The array.

    - `dispatch`: which outputs PEs are given. "fixed": each its places, masked or not; "unmasked": those alone that no
      ReLU masks; "redistributed": work in any pieces, an upper bound.
    - `order`: neighbouring PEs take neighbouring "channels" of a pixel or "pixels" of a channel; "blocked": a PE takes
      outputs that follow each other, channels first.
    - `packing`: non-zeros share lanes within one "tap" (weight gradients: one image), or in the whole "sum".
    - `bitmaps`: tensors lie in memory as a bit per number and the non-zeros, where that is less than all numbers.

    Energy per operation: 45 nm, 16 bit (Horowitz, Computing's energy problem, ISSCC 2014, figure 1.1.9).
    """

    pes: int = 256
    lanes: int = 16
    barrier: int = 16  # outputs of a PE between two barriers
    order: str = "channels"
    packing: str = "tap"
    dispatch: str = "unmasked"
    bitmaps: str = "yes"
    buffer_kib: float = 512.0  # on the chip, for both operands
    bandwidth: float = 256.0  # bytes a cycle from memory
    word: int = 2  # bytes of a number
    multiply_pj: float = 1.5  # multiplication and addition
    buffer_pj: float = 2.5  # per byte read
    memory_pj: float = 160.0  # per byte read or written

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in _CHOICES and value not in _CHOICES[each.name]:
                wanted = ", ".join(_CHOICES[each.name])
                raise ForetraceError(f"array: {each.name} must be one of {wanted}, got {value}; choose one.")
            if each.name not in _CHOICES and not 0 < value < 1e9:
                raise ForetraceError(f"array: {each.name} must be above 0 and below 1e9, got {value:g}; change it.")
        tile = 2 * self.lanes * self.pes * self.word / 1024
        if self.buffer_kib < tile:
            raise ForetraceError(
                f"array: buffer_kib must hold one tile, which is {tile:g} KiB for {self.pes} PEs of {self.lanes} "
                f"lanes, got {self.buffer_kib:g}; give it that or take fewer PEs."
            )

    @classmethod
    def of(cls, text: str) -> SparseArray:
        """Parse words such as "lanes=8 dispatch=fixed"; what is not said is as usual. Raises ForetraceError."""
        usual: dict[str, Any] = {each.name: each.default for each in fields(cls)}
        return cls(**numbers(text.split(), usual, "array"))

    def __str__(self) -> str:
        """Return the text that `of` reads: what is not as usual."""
        values = ((each.name, getattr(self, each.name), each.default) for each in fields(self))
        return " ".join(f"{name}={value}" for name, value, default in values if value != default)


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedConv:
    """A convolution in a training step: its sizes, and where its operands are not 0."""

    name: str
    weight: tuple[int, ...]  # (output channels, input channels of a group, *taps)
    stride: tuple[int, ...]
    padding: tuple[int, ...]  # before the first pixel
    dilation: tuple[int, ...]
    groups: int
    inputs: Mask  # (images, channels, *pixels)
    gradients: Mask  # (images, output channels, *pixels)
    input_gradient: bool = True  # whether anything before it learns
    maskable: bool = True  # whether what ReLUs gave is its input, so that gradients of its zeros are masked

    @property
    def zeros(self) -> tuple[float, float]:
        """Shares of inputs and of output gradients that are 0."""
        return 1 - float(self.inputs.mean()), 1 - float(self.gradients.mean())

    @property
    def passes(self) -> tuple[str, ...]:
        """The products that a step computes."""
        return (FORWARD, *BACKWARD) if self.input_gradient else (FORWARD, WEIGHT_GRADIENT)

    def full(self) -> MaskedConv:
        """Return the same one without zeros."""
        return replace(self, inputs=np.ones_like(self.inputs), gradients=np.ones_like(self.gradients))

    def taps(self) -> Iterator[tuple[Any, ...]]:
        """Yield per tap where the outputs' inputs lie among (..., *padded pixels)."""
        sizes = (self.dilation, self.stride, self.gradients.shape[2:])
        for tap in np.ndindex(self.weight[2:]):
            yield (..., *(slice(t * d, t * d + s * (o - 1) + 1, s) for t, d, s, o in zip(tap, *sizes, strict=True)))

    @property
    def padded(self) -> tuple[int, ...]:
        """Pixels with the padding that the taps reach."""
        return tuple(
            max(s * (o - 1) + (k - 1) * d + 1, p + size)
            for s, o, k, d, p, size in zip(
                self.stride, self.gradients.shape[2:], self.weight[2:], self.dilation, self.padding,
                self.inputs.shape[2:], strict=True,
            )
        )  # fmt: skip

    @property
    def inside(self) -> tuple[Any, ...]:
        """Where the pixels lie among (..., *padded ones)."""
        return (..., *(slice(p, p + size) for p, size in zip(self.padding, self.inputs.shape[2:], strict=True)))

    def pad(self, values: Array) -> Array:
        """Return values (..., *pixels) with zeros around."""
        found = np.zeros((*values.shape[: -len(self.padding)], *self.padded), values.dtype)
        found[self.inside] = values
        return found


def drawn(conv: MaskedConv, inputs: float, gradients: float, *, seed: int = 0) -> MaskedConv:
    """Return the convolution with zeros drawn independently of each other, so many of inputs and of output
    gradients.
    """
    random = np.random.default_rng(seed)
    return replace(
        conv,
        inputs=random.random(conv.inputs.shape, np.float32) >= inputs,
        gradients=random.random(conv.gradients.shape, np.float32) >= gradients,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """What one product of one convolution takes on an array."""

    compute: int  # cycles of the PEs
    cycles: float  # of the PEs or of the memory, whichever takes longer
    multiplications: int
    nbytes: float  # from and to memory
    energy_j: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRun:
    """A product of a convolution on the dense and on the skipping array."""

    layer: str
    what: str  # FORWARD, INPUT_GRADIENT or WEIGHT_GRADIENT
    dense: PassCost
    sparse: PassCost


@dataclass(frozen=True, kw_only=True)
class ArrayRun:
    """All convolutions of a step on an array, dense and skipping."""

    array: SparseArray
    passes: tuple[PassRun, ...]

    def of(self, *what: str, layer: str | None = None) -> ArrayRun:
        """Return only these passes (all, if none is named) of one layer or of all."""
        kept = (each for each in self.passes if each.what in (what or (each.what,)) and layer in (None, each.layer))
        return replace(self, passes=tuple(kept))

    def sum(self, name: str, *, dense: bool = False) -> float:
        """Return a figure of `PassCost` summed up."""
        return float(sum(getattr(each.dense if dense else each.sparse, name) for each in self.passes))

    @property
    def speedup(self) -> float:
        """Dense cycles over skipping ones, memory included; 1 where there is nothing to do."""
        return self.sum("cycles", dense=True) / (self.sum("cycles") or inf) or 1.0

    @property
    def bound(self) -> float:
        """The compute speed-up of an array whose multipliers are never idle: no skipping of these zeros exceeds it."""
        least = self.sum("multiplications") / (self.array.pes * self.array.lanes)
        return self.sum("compute", dense=True) / (least or inf) or 1.0

    @property
    def energy_ratio(self) -> float:
        """Energy of the skipping array over that of the dense one."""
        return self.sum("energy_j") / (self.sum("energy_j", dense=True) or inf)


def simulate(convs: Iterable[MaskedConv], array: SparseArray) -> ArrayRun:
    """Run the convolutions of a step on the array."""
    passes = (_run(conv, conv, what, array, conv.zeros) for conv in convs for what in conv.passes)
    return ArrayRun(array=array, passes=tuple(passes))


def expected(conv: MaskedConv, inputs: float, gradients: float, array: SparseArray) -> tuple[PassRun, ...]:
    """Return the passes of a convolution of which only sizes and shares of zeros are known: zeros are drawn, on a part
    of it.

    Of `conv`, masks are not looked at: `numpy.broadcast_to(True, sizes)` takes no memory.
    """
    parts = {what: _part(conv, channels=_PART if what == WEIGHT_GRADIENT else 0) for what in conv.passes}
    zeros = inputs, gradients
    return tuple(_run(drawn(part, *zeros), conv, what, array, zeros) for what, part in parts.items())


_PART = 32  # pixels a side, or channels, of the part of a convolution that stands for all of it


def _part(conv: MaskedConv, *, channels: int) -> MaskedConv:
    """Return fewer of the channels, or the first image and a corner of it, with masks that hold all."""
    outputs, of_group, *taps = conv.weight
    groups, per_group = conv.groups, outputs // conv.groups
    size, images = conv.inputs.shape[2:], conv.inputs.shape[0]
    if channels:
        groups, of_group = min(groups, channels), min(of_group, channels)
        per_group = max(min(per_group, channels // groups), 1)
    else:
        size, images = tuple(min(each, _PART) for each in size), 1
    room = zip(size, taps, conv.stride, conv.padding, conv.dilation, strict=True)
    pixels = [max((each + 2 * p - d * (k - 1) - 1) // s + 1, 1) for each, k, s, p, d in room]
    return replace(
        conv, weight=(groups * per_group, of_group, *taps), groups=groups,
        inputs=np.ones((min(images, 2), groups * of_group, *size), np.bool_),
        gradients=np.ones((min(images, 2), groups * per_group, *pixels), np.bool_),
    )  # fmt: skip


def _run(part: MaskedConv, whole: MaskedConv, what: str, array: SparseArray, zeros: tuple[float, float]) -> PassRun:
    """Return a product dense and skipping: what the PEs do from a part of the convolution, memory from the whole."""
    dispatch = "redistributed" if array.dispatch == "redistributed" else "fixed"
    plain = replace(array, bitmaps="no", dispatch=dispatch)
    return PassRun(
        layer=whole.name, what=what, dense=_cost(part.full(), whole, what, plain, (0.0, 0.0), bits=0),
        sparse=_cost(part, whole, what, array, zeros, bits=2 if what == WEIGHT_GRADIENT else 1),
    )  # fmt: skip


def _cost(
    part: MaskedConv, whole: MaskedConv, what: str, array: SparseArray, zeros: tuple[float, float], *, bits: int
) -> PassCost:
    """Return one product on the array, which reads so many bits per product of the dense array to skip."""
    counts = _weight_gradient(part, array) if what == WEIGHT_GRADIENT else _sums(part, what, array)
    times = (whole.gradients.size * whole.weight[1]) / (part.gradients.size * part.weight[1])
    compute, multiplications, possible = (round(each * times) for each in counts)
    nbytes = sum(_traffic(whole, what, array, zeros))
    picojoules = (
        multiplications * (array.multiply_pj + 2 * array.word * array.buffer_pj)
        + possible * bits / 8 * array.buffer_pj
        + nbytes * array.memory_pj
    )
    return PassCost(
        compute=compute, cycles=max(compute, nbytes / array.bandwidth), multiplications=multiplications,
        nbytes=nbytes, energy_j=1e-12 * picojoules,
    )  # fmt: skip


def _sums(conv: MaskedConv, what: str, array: SparseArray) -> tuple[int, int, int]:
    """Return (cycles, multiplications, those of a dense array) of the forward pass or of the input gradient.

    All outputs of a pixel that belong to one group read the same non-zeros.
    """
    forward = what == FORWARD
    operand = conv.inputs if forward else conv.gradients
    images, channels, *pixels = operand.shape
    grouped = operand.reshape(images, conv.groups, channels // conv.groups, *pixels)
    counts = grouped.sum(2, dtype=np.int32)  # (images, groups, *pixels)
    spread = _gather if forward else _scatter
    every = spread(conv, np.full_like(counts[:1, :1], channels // conv.groups))  # products of one group without zeros
    possible = int(every.sum(dtype=np.int64)) * images * conv.groups
    if operand.all():
        counts = counts[:1, :1]
    products = spread(conv, counts)
    work = -(-products // array.lanes) if array.packing == "sum" else spread(conv, -(-counts // array.lanes))
    each = (conv.weight[0] if forward else conv.inputs.shape[1]) // conv.groups  # outputs of a group
    shape = (images, conv.groups, prod(work.shape[2:]))
    work, products = (np.broadcast_to(a.reshape(*a.shape[:2], -1), shape) for a in (work, products))
    possible *= each
    if forward or not conv.maskable:
        keep = np.ones((0, 0, 0), np.bool_)
        kept = np.full(products.shape, each)
    else:
        keep = np.ascontiguousarray(conv.inputs.reshape(images, conv.groups * each, -1))
        kept = conv.inputs.reshape(images, conv.groups, each, -1).sum(2)
    multiplications = int((products.astype(np.int64) * kept).sum())
    if array.dispatch == "redistributed":
        return -(-int((work.astype(np.int64) * kept).sum()) // array.pes), multiplications, possible
    return _scheduled(work, keep, each, array), multiplications, possible


def _weight_gradient(conv: MaskedConv, array: SparseArray) -> tuple[int, int, int]:
    """Return (cycles, multiplications, those of a dense array): masks of inputs times masks of gradients count both.

    Counts are whole numbers in float32: exact up to 2^24 pixels of an image.
    """
    images, outputs = conv.gradients.shape[:2]
    groups = images, conv.groups
    each = conv.gradients.reshape(*groups, outputs // conv.groups, -1).astype(np.float32)
    padded, once = conv.pad(conv.inputs.astype(np.float32)), conv.pad(np.ones_like(conv.inputs[:1, :1]))
    work, total, valid = np.zeros((outputs, conv.weight[1], prod(conv.weight[2:])), np.int64), 0, 0
    for at, tap in enumerate(conv.taps()):
        given = padded[tap].reshape(*groups, conv.weight[1], -1)
        held = (each @ given.swapaxes(2, 3)).astype(np.int64).reshape(images, *work.shape[:2])
        work[..., at] = -(-held.sum(0) // array.lanes) if array.packing == "sum" else (-(-held // array.lanes)).sum(0)
        total, valid = total + int(held.sum()), valid + int(once[tap].sum())
    possible = valid * images * outputs * conv.weight[1]
    if array.dispatch == "redistributed":
        return -(-int(work.sum()) // array.pes), total, possible
    flat = np.ascontiguousarray(work if array.order == "pixels" else work.transpose(2, 1, 0)).reshape(1, -1, 1)
    return _scheduled(flat, np.ones((0, 0, 0), np.bool_), 1, array), total, possible


def _gather(conv: MaskedConv, values: Array) -> Array:
    """Return per output pixel the sum of the values of the input pixels under its taps summed up."""
    padded = conv.pad(values)
    found = np.zeros((*values.shape[:2], *conv.gradients.shape[2:]), values.dtype)
    for tap in conv.taps():
        found += padded[tap]
    return found


def _scatter(conv: MaskedConv, values: Array) -> Array:
    """Return per input pixel the sum of the values of the output pixels under whose taps it lies."""
    padded = np.zeros((*values.shape[:2], *conv.padded), values.dtype)
    for tap in conv.taps():
        padded[tap] += values
    return np.asarray(padded[conv.inside])


def _scheduled(work: Array, keep: Mask, each: int, array: SparseArray) -> int:
    """Return cycles of outputs whose work (images, groups, pixels) is that of each of `each` channels of a group."""
    return int(
        _schedule(
            np.ascontiguousarray(work, np.int64), keep, each, array.pes, array.barrier, array.order == "pixels",
            array.order == "blocked", array.dispatch == "unmasked",
        )
    )  # fmt: skip


@njit()
def _schedule(
    work: Int64, keep: Mask, each: int, pes: int, barrier: int, pixels_first: bool, blocked: bool, only_unmasked: bool
) -> int:  # pragma: no cover - compiled
    images, groups, pixels = work.shape
    load = np.zeros(pes, np.int64)
    cycles, pe, row, masked = 0, 0, 0, keep.size > 0
    outer, inner = (groups * each, pixels) if pixels_first else (pixels, groups * each)
    for n in range(images):
        for a in range(outer):
            group = a // each
            left = each
            for b in range(inner):
                if pixels_first:
                    channel, pixel = a, b
                else:
                    channel, pixel = b, a
                    if b == 0:
                        group, left = 0, each
                    elif left == 0:
                        group, left = group + 1, each
                    left -= 1
                wanted = True
                if masked:
                    wanted = keep[n, channel, pixel]
                    if only_unmasked and not wanted:
                        continue
                if wanted:
                    load[pe] += work[n, group, pixel]
                # The next PE, or the next output of this one; after the last of all, everyone waits for the slowest.
                if blocked:
                    row += 1
                    if row == barrier:
                        row, pe = 0, pe + 1
                else:
                    pe += 1
                    if pe == pes:
                        pe, row = 0, row + 1
                if (blocked and pe == pes) or (not blocked and row == barrier):
                    cycles += load.max()
                    load[:] = 0
                    pe, row = 0, 0
    return int(cycles + load.max())


def _traffic(conv: MaskedConv, what: str, array: SparseArray, zeros: tuple[float, float]) -> tuple[float, float]:
    """Return bytes (read, written): operands once where half of the buffer holds one of them, else again per half."""
    sizes, word = (conv.inputs.size, conv.gradients.size), array.word
    weights = float(prod(conv.weight) * word)
    inputs, gradients = (
        min(size * word, size / 8 + size * (1 - share) * word) if array.bitmaps == "yes" else float(size * word)
        for size, share in zip(sizes, zeros, strict=True)
    )
    first, second, written = {
        FORWARD: (inputs, weights, float(sizes[1] * word)),
        INPUT_GRADIENT: (gradients, weights, float(sizes[0] * word)),
        WEIGHT_GRADIENT: (inputs, gradients, weights),
    }[what]
    half = 512 * array.buffer_kib
    read = min(first + second * -(-first // half), second + first * -(-second // half))
    if what == INPUT_GRADIENT and conv.maskable and array.dispatch != "fixed" and zeros[0]:
        return read + sizes[0] / 8, written * (1 - zeros[0])
    return read, written
