"""`SoapOperator`: an operator as its shape says it; `SoapModel`: operators in an order in which they can run.

Every tensor has four dimensions: sample, height (or time), width, channel. What an operator needs of an input is an
affine window per dimension, so that the elements that a part needs, and where they are, follow from numbers alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from foretrace.errors import ForetraceError

Sizes = tuple[int, int, int, int]


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
    """One operator; figures are per element of its output unless they say otherwise."""

    name: str
    layer: str  # operators of one layer share its weights
    sizes: Sizes  # of its output
    splits: str  # dimensions that may be split, of "shwc"
    flops: float
    inputs: tuple[Input, ...] = ()
    weights: int = 0  # parameters per channel of the output
    reads_weights: bool = True  # all of them; an embedding reads a few rows
    launches: int = 1  # kernels one after another


class SoapModel:
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
            if other.layer == operator.layer and (other.weights, other.sizes[3]) != (
                operator.weights,
                operator.sizes[3],
            ):
                raise ForetraceError(
                    f"operators {other.name} and {operator.name} must hold the same weights; name two layers."
                )
        self.operators.append(operator)
        return len(self.operators) - 1

    @property
    def parameters(self) -> int:
        """Elements of all weights; what several operators share counts once."""
        return sum({each.layer: each.weights * each.sizes[3] for each in self.operators}.values())
