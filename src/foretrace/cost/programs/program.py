"""The noun: a `TensorProgram`, a tree of loops whose leaves are statements, as tensor compilers (TVM, Triton) make it.

A loop has an extent and a kind. A statement evaluates an expression of its reads, elementwise, and assigns it to its
target or combines it with what the target holds. Every access is affine: an offset plus, per loop variable, a stride
in elements of the buffer. So a program is data: machine code (`emit.py`, `compile.py`) and the caches that are
simulated (`misses.py`) see the same loops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Any

Expression = tuple[Any, ...]
"""("read", i) the i-th read, ("const", value), or (operation, argument...) of `OPERATIONS`."""

OPERATIONS = {"add": 2, "sub": 2, "mul": 2, "div": 2, "max": 2, "exp": 1, "sqrt": 1}
"""Elementwise operations and how many arguments they take."""

DTYPES = {"float32": 4, "float64": 8}
"""Number types of a program's buffers and their bytes."""

MAX_LANES = 64


class LoopKind(StrEnum):
    """How the iterations of a loop run."""

    SERIAL = "serial"
    VECTORISED = "vectorised"  # all at once, as lanes of vectors
    UNROLLED = "unrolled"  # written out one after the other
    PARALLEL = "parallel"  # shared among the threads that the program is run with


class Purpose(StrEnum):
    """Where a buffer comes from."""

    INPUT = "input"
    OUTPUT = "output"
    TEMPORARY = "temporary"  # whole intermediate result, in memory
    LOCAL = "local"  # of one iteration of the outermost loop, on the stack


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A dense row-major array."""

    name: str
    shape: tuple[int, ...]
    role: Purpose

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements from one index to the next, per dimension."""
        return tuple(prod(self.shape[i + 1 :]) for i in range(len(self.shape)))


@dataclass(frozen=True, kw_only=True)
class Access:
    """Element `offset + sum(stride * variable)` of a buffer; a loop that is not named does not move it."""

    buffer: str
    offset: int = 0
    strides: tuple[tuple[str, int], ...] = ()

    def stride(self, variable: str) -> int:
        return dict(self.strides).get(variable, 0)


@dataclass(frozen=True, kw_only=True)
class Statement:
    """target = value(reads), or with `combine` target = combine(target, value(reads))."""

    name: str
    target: Access
    reads: tuple[Access, ...]
    value: Expression
    combine: str = ""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """`variable` runs from 0 to below `extent` around the nodes of `body`, which follow each other."""

    variable: str
    extent: int
    kind: LoopKind
    body: tuple[Loop | Statement, ...]


LoopNest = Loop | Statement


@dataclass(frozen=True, kw_only=True)
class TensorProgram:
    """Nests that run one after the other on named buffers of one number type."""

    task: str
    dtype: str
    buffers: tuple[Buffer, ...]
    nests: tuple[LoopNest, ...]

    def buffer(self, name: str) -> Buffer:
        return next(each for each in self.buffers if each.name == name)

    def having(self, *roles: Purpose) -> tuple[Buffer, ...]:
        return tuple(each for each in self.buffers if each.role in roles)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype]

    @property
    def flops(self) -> int:
        """Operations of all statements; an exponential or a root counts as one."""
        return sum(
            prod(loop.extent for loop in loops) * (operations(leaf.value) + bool(leaf.combine))
            for loops, leaf in leaves(self)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of its inputs and outputs."""
        return self.itemsize * sum(each.elements for each in self.having(Purpose.INPUT, Purpose.OUTPUT))


def operations(value: Expression) -> int:
    """Return how many operations an expression has."""
    return (value[0] in OPERATIONS) + sum(operations(each) for each in value[1:] if isinstance(each, tuple))


def leaves(program: TensorProgram) -> Iterator[tuple[tuple[Loop, ...], Statement]]:
    """Yield statements in program order, each with the loops around it from the outermost in."""
    for nest in program.nests:
        yield from leaves_under(nest, ())


def leaves_under(node: LoopNest, above: tuple[Loop, ...] = ()) -> Iterator[tuple[tuple[Loop, ...], Statement]]:
    """Yield statements of one nest, each with the loops around it."""
    if isinstance(node, Statement):
        yield above, node
    else:
        for each in node.body:
            yield from leaves_under(each, (*above, node))
