"""An accelerator that looks products up, beside an array of multipliers: area, cycles, and performance per area.

    setting = MeasuredQuantisation(
        length=9, prototypes=16, distance="l1", bits=8, dense=0.94, accuracy=0.93, samples=2500
    )
    design = best_design(products, setting)
    design.over_dense, design.measured.loss

Encoder: units that compute the distance of one sub-vector to one prototype per cycle, prototypes in registers while
rows pass. Look-up: banks of tables, each of which reads one word of several outputs per cycle, and an accumulator for
each. The array of multipliers holds weights in registers while rows pass (weight-stationary). Both keep the weights or
tables of the largest layer and the activations of one image on the chip, read the rest from memory once per batch,
overlap that with their work, and are given the sizes that suit them best.

Areas of arithmetic are those of a 45 nm process (Horowitz, ISSCC 2014; Sze et al., Proceedings of the IEEE 2017,
section VII), of a register NanGate's; bits and ports of memories are estimates with a range. Publications that leave
ports out find more, as `AreaCosts.ends` shows. Not modelled: wires, control, the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import numpy as np

from foretrace.arrays import Int64
from foretrace.errors import ForetraceError

_MOST = 1 << 14  # units, or outputs of all banks
Sizes = int | Int64  # one, or one per point
Areas = Any  # float, or float64 one per point


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProduct:
    """The matrix product of layers that are alike, for one sample: (rows, inputs) times (inputs, outputs)."""

    rows: int
    inputs: int
    outputs: int
    count: int = 1  # layers


@dataclass(frozen=True, slots=True, kw_only=True)
class AreaCosts:
    """Areas in µm²; those of 8 bits scale with the square of the width (multiplier) or with the width."""

    multiplier_um2: float = 282.0  # 8 bits
    adder_um2: float = 36.0  # 8 bits
    register_um2: float = 4.5  # a bit
    bit_um2: float = 0.6  # of a memory, with what surrounds the cell
    port_um2: float = 20.0  # per bit that is read in a cycle: sense amplifier, column
    word_um2: float = 3.0  # per word: decoder, driver of its line

    @property
    def ends(self) -> tuple[AreaCosts, AreaCosts, AreaCosts]:
        """These; what suits look-ups most, dear multipliers and cheap memories whose ports are free; and least."""
        most = replace(
            self, multiplier_um2=1.3 * self.multiplier_um2, bit_um2=self.bit_um2 / 1.5, port_um2=0.0, word_um2=0.0
        )  # fmt: skip
        least = replace(
            self, multiplier_um2=self.multiplier_um2 / 1.3, bit_um2=self.bit_um2 / 0.6, port_um2=2.5 * self.port_um2,
            word_um2=2.5 * self.word_um2,
        )  # fmt: skip
        return self, most, least


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredQuantisation:
    """Accuracy that was measured for one setting of product quantisation, and of the dense model."""

    length: int  # v, numbers of a sub-vector
    prototypes: int  # K of each sub-space
    distance: str  # "l1" or "l2"
    bits: int  # of inputs, prototypes and tables
    dense: float  # from 0 to 1
    accuracy: float  # from 0 to 1, at this setting
    samples: int  # test samples

    def __post_init__(self) -> None:
        for name in ("length", "prototypes", "bits", "samples"):
            if getattr(self, name) < 1:
                raise ForetraceError(f"{name} must be 1 or more, got {getattr(self, name)}.")
        for name in ("dense", "accuracy"):
            if not (isfinite(getattr(self, name)) and 0 <= getattr(self, name) <= 1):
                raise ForetraceError(f"{name} must be a share from 0 to 1, got {getattr(self, name)}.")
        if self.distance not in ("l1", "l2"):
            raise ForetraceError(f"distance must be l1 or l2, got {self.distance}.")

    @property
    def loss(self) -> float:
        """Accuracy that quantisation costs."""
        return self.dense - self.accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What is around both accelerators."""

    bytes_per_cycle: float = 16.0  # from memory
    batch: int = 1  # samples for which weights or tables are read once
    all_on_chip: bool = False  # weights or tables of all layers: nothing is read

    def __post_init__(self) -> None:
        if not (0 < self.bytes_per_cycle < 1e15 and self.batch >= 1):
            raise ForetraceError(
                f"bytes per cycle must be above 0 and below 1e15 and the batch 1 or more, got {self.bytes_per_cycle} "
                f"and {self.batch}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUpDesign:
    """An accelerator for one setting; it cannot be without the accuracy that was measured at this very setting."""

    measured: MeasuredQuantisation
    units: int  # distances per cycle
    banks: int  # of tables
    word: int  # outputs that a bank reads per cycle
    parts_um2: dict[str, float]
    cycles: float  # for one sample
    over_dense: float  # performance per area, relative to the best array of multipliers
    over_dense_interval: tuple[float, float]  # with the areas of `AreaCosts.ends`


def dense_array(
    products: Sequence[LayerProduct], high: Sizes, wide: Sizes, *,
    costs: AreaCosts, around: Surroundings, bits: int = 8,
) -> tuple[Areas, Areas]:  # fmt: skip
    """Return area (µm²) and cycles for one sample of an array of `high` inputs × `wide` outputs that multiplies."""
    cycles: Areas = 0.0
    for each in products:
        work = each.rows * _ceil(each.inputs, high) * _ceil(each.outputs, wide)
        cycles += each.count * np.maximum(work, _read(each.inputs * each.outputs * bits, around))
    unit = _multiplier(costs, bits) + _adder(costs, 2 * bits) + 3 * bits * costs.register_um2
    held = _held(((each.inputs * each.outputs, each.count) for each in products), around)
    area = high * wide * unit + _memory(held * bits, wide * bits, 1, costs)
    return area + _activations(products, high, bits, costs), cycles


def look_up_parts(
    products: Sequence[LayerProduct], setting: MeasuredQuantisation, units: Sizes, banks: Sizes, word: Sizes, *,
    costs: AreaCosts, around: Surroundings,
) -> tuple[dict[str, Areas], Areas]:  # fmt: skip
    """Return areas (µm²) of the parts of an accelerator that looks products up, and its cycles for one sample."""
    v, k, bits, wide = setting.length, setting.prototypes, setting.bits, 2 * setting.bits
    cycles: Areas = 0.0
    tables, prototypes = [], []
    for each in products:
        spaces = -(-each.inputs // v)
        work = np.maximum(_ceil(spaces * k, units), _ceil(each.outputs, word) * _ceil(spaces, banks))
        read = _read(spaces * k * (each.outputs + v) * bits, around)
        cycles += each.count * np.maximum(each.rows * work, read)
        tables.append((spaces * k * each.outputs, each.count))
        prototypes.append((spaces * k * v, each.count))
    multiplied = setting.distance == "l2"
    difference = _adder(costs, bits) + (_multiplier(costs, bits) if multiplied else _adder(costs, bits))
    unit = v * (difference + _adder(costs, wide) + bits * costs.register_um2) + _adder(costs, wide)
    parts = {
        "encoder": units * unit,
        "accumulators": banks * word * (_adder(costs, wide) + wide * costs.register_um2),
        "tables": _memory(_held(tables, around) * bits, word * bits, banks, costs),
        "prototypes": _memory(_held(prototypes, around) * bits, v * bits, 1, costs),
        "activations": _activations(products, _ceil(units, k) * v, bits, costs),
    }
    return parts, cycles


def _ceil(a: Sizes, b: Sizes) -> Sizes:
    return -(-a // b)


def _multiplier(costs: AreaCosts, bits: int) -> float:
    return costs.multiplier_um2 * (bits / 8) ** 2


def _adder(costs: AreaCosts, bits: int) -> float:
    return costs.adder_um2 * bits / 8


def _read(bits: float, around: Surroundings) -> float:
    """Return cycles for which memory is busy, per sample."""
    return 0.0 if around.all_on_chip else bits / 8 / around.bytes_per_cycle / around.batch


def _held(sizes: Iterable[tuple[int, int]], around: Surroundings) -> int:
    return sum(size * count for size, count in sizes) if around.all_on_chip else max(size for size, _ in sizes)


def _memory(bits: int, word_bits: Sizes, banks: Sizes, costs: AreaCosts) -> Areas:
    """Return banks that hold `bits` together, each of which reads a word in a cycle."""
    words = _ceil(bits, banks * word_bits)
    return banks * (words * (word_bits * costs.bit_um2 + costs.word_um2) + word_bits * costs.port_um2)


def _activations(products: Sequence[LayerProduct], per_cycle: Sizes, bits: int, costs: AreaCosts) -> Areas:
    """Return what layers read and write for one sample, of which so many numbers are read in a cycle."""
    held = 2 * max(each.rows * each.outputs for each in products)
    return _memory(held * bits, per_cycle * bits, 1, costs)


def _all_sizes(parts: int) -> Int64:
    """Return powers of two for each of so many parts (parts, points): all there are."""
    return np.stack(np.meshgrid(*[2 ** np.arange(13)] * parts, indexing="ij")).reshape(parts, -1)


def _look_up_sizes() -> Int64:
    """Return units, banks and words (3, points) that are compared."""
    found = _all_sizes(3)
    return found[:, np.maximum(found[0], found[1] * found[2]) <= _MOST]


LOOK_UP_DESIGNS = _look_up_sizes().shape[1]  # that are compared for one setting


def best_design(
    products: Sequence[LayerProduct], setting: MeasuredQuantisation, *,
    costs: AreaCosts | None = None, around: Surroundings | None = None,
) -> LookUpDesign:  # fmt: skip
    """Return the accelerator for a setting with the most performance per area, of `LOOK_UP_DESIGNS`; the best array
    beside it.

    All sizes are priced: none of them is better within this model.
    """
    costs, around = costs or AreaCosts(), around or Surroundings()
    sizes, arrays = _look_up_sizes(), _all_sizes(2)
    arrays = arrays[:, arrays.prod(0) <= _MOST]
    parts, cycles = look_up_parts(products, setting, *sizes, costs=costs, around=around)
    units, banks, word = sizes[:, int(np.argmin(sum(parts.values()) * cycles))].tolist()
    over = []
    for each in costs.ends:
        area, taken = dense_array(products, *arrays, costs=each, around=around, bits=setting.bits)
        parts, cycles = look_up_parts(products, setting, units, banks, word, costs=each, around=around)
        over.append(float((area * taken).min() / (sum(parts.values()) * cycles)))
    parts, cycles = look_up_parts(products, setting, units, banks, word, costs=costs, around=around)
    return LookUpDesign(
        measured=setting, units=units, banks=banks, word=word,
        parts_um2={name: float(each) for name, each in parts.items()}, cycles=float(cycles),
        over_dense=over[0], over_dense_interval=(min(over), max(over)),
    )  # fmt: skip
