"""`SoapOperator`: an operator as its shape says it; `SoapModel`: operators in their order, with times of their parts.

Every tensor has four dimensions: sample, height (or time), width, channel. What an operator needs of an input is an
affine window per dimension, so that the elements that a part needs, and where they are, follow from numbers alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError

Sizes = tuple[int, int, int, int]
Degrees = tuple[int, int, int, int]  # parts per dimension
DIMENSIONS = "shwc"


class Needed(NamedTuple):
    """Elements `stride` · lo + `offset` ... `stride` · (hi − 1) + `offset` + `extent` − 1 are needed for lo ... hi − 1.

    What lies outside of the input is padding, and needs nothing.
    """

    stride: int
    offset: int
    extent: int


SAME = Needed(1, 0, 1)


class Input(NamedTuple):
    """An operator that is read, and what is needed of it, per dimension."""

    source: int
    needed: tuple[Needed, Needed, Needed, Needed]


@dataclass(frozen=True, kw_only=True)
class SoapOperator:
    """One operator."""

    name: str
    layer: str  # operators of one layer share its weights
    sizes: Sizes  # of its output
    splits: str  # dimensions that may be split, of "shwc"
    inputs: tuple[Input, ...] = ()
    weight_bytes: int = 0  # per channel of the output
    kept_bytes: int = 0  # the same with its gradient and the optimizer's state
    element_bytes: int = 4  # of what it sends
    saved_bytes: int = 0  # of all its parts, kept for the backward pass
    recurrent: bool = False


class SoapOperators:
    """Operators, each behind those that it reads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.operators: list[SoapOperator] = []

    def add(self, operator: SoapOperator) -> int:
        """Append an operator; returns its place. Raises ForetraceError where it cannot follow."""
        if any(not 0 <= each.source < len(self.operators) for each in operator.inputs):
            raise ForetraceError(f"operator {operator.name} must read earlier operators; put them first.")
        if min(operator.sizes) < 1:
            raise ForetraceError(f"operator {operator.name} must have sizes of 1 or more, got {operator.sizes}.")
        for other in self.operators:
            if other.layer == operator.layer and (
                (other.weight_bytes, other.sizes[3]) != (operator.weight_bytes, operator.sizes[3])
                if "c" in other.splits + operator.splits
                else other.weight_bytes * other.sizes[3] != operator.weight_bytes * operator.sizes[3]
            ):
                raise ForetraceError(
                    f"operators {other.name} and {operator.name} must hold the same weights; name two layers."
                )
        self.operators.append(operator)
        return len(self.operators) - 1

    @property
    def weight_bytes(self) -> int:
        """Of all weights; what several operators share counts once."""
        return sum({each.layer: each.weight_bytes * each.sizes[3] for each in self.operators}.values())

    def parts_of(self, op: int, ways: Sequence[Degrees]) -> Float64:
        """Return sizes of the largest part over those of the whole, for each way and dimension (ways x 4)."""
        sizes = np.array(self.operators[op].sizes)
        return np.asarray(-(-sizes // np.array(ways)) / sizes, dtype=np.float64)


class SoapModel(SoapOperators, ABC):
    """Operators whose parts have times."""

    @abstractmethod
    def times(self, op: int, ways: Sequence[Degrees]) -> tuple[Float64, Float64]:
        """Return seconds of the largest part, forward and backward, for each way to split an operator."""
