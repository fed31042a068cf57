"""The noun: a `TensorProgram`, a tree of loops whose leaves are statements, as tensor compilers (TVM, Triton) make it.

A loop has an extent and a kind. A statement evaluates an expression of its reads, elementwise, and assigns it to its
target or combines it with what the target holds. Every access is affine: an offset plus, per loop variable, a stride
in elements of the buffer. So a program is data: machine code (`emit.py`, `compile.py`) and the caches that are
simulated (`misses.py`) see the same loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Any

from foretrace.errors import ForetraceError

Expression = tuple[Any, ...]
"""("read", i) the i-th read, ("const", value), or (operation, argument...) of `OPERATIONS`."""

OPERATIONS = {"add": 2, "sub": 2, "mul": 2, "div": 2, "max": 2, "exp": 1, "sqrt": 1}
"""Elementwise operations and how many arguments they take."""

COMBINERS = ("add", "max")
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

    def __post_init__(self) -> None:
        _check(self)

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


# --- what must hold of a program ---------------------------------------------------------------------------------


def _check(program: TensorProgram) -> None:
    """Raise ForetraceError where the program is not one that can run."""
    if program.dtype not in DTYPES:
        raise ForetraceError(f"{program.task}: number type {program.dtype!r} is unknown; take one of {[*DTYPES]}.")
    if len({each.name for each in program.buffers}) < len(program.buffers):
        raise ForetraceError(f"{program.task}: two buffers have the same name; give each its own.")
    named = {each.name: each for each in program.buffers}
    users: dict[str, int] = {}
    for number, nest in enumerate(program.nests):
        _check_node(program.task, nest, (), named)
        for _, leaf in leaves_under(nest, ()):
            for each in (leaf.target.buffer, *(read.buffer for read in leaf.reads)):
                if named[each].role is Purpose.LOCAL and users.setdefault(each, number) != number:
                    raise ForetraceError(f"{program.task}: {each} is local but two nests use it; make it temporary.")


def _check_node(task: str, node: LoopNest, above: tuple[Loop, ...], named: Mapping[str, Buffer]) -> None:
    if isinstance(node, Statement):
        _check_statement(task, node, above, named)
        return
    if node.extent < 1 or not node.body or node.variable in {each.variable for each in above}:
        raise ForetraceError(
            f"{task}: loop {node.variable} has extent {node.extent} and {len(node.body)} nodes; "
            "give it at least one of each and a variable that no loop around it has."
        )
    if node.kind is LoopKind.VECTORISED and (
        node.extent > MAX_LANES or node.extent & (node.extent - 1) or any(isinstance(each, Loop) for each in node.body)
    ):
        raise ForetraceError(
            f"{task}: loop {node.variable} of extent {node.extent} cannot be vectorised; "
            f"that takes an innermost loop of a power of two up to {MAX_LANES}."
        )
    if node.kind is LoopKind.PARALLEL and above:
        raise ForetraceError(f"{task}: loop {node.variable} is parallel but not outermost; only outermost ones can be.")
    for each in node.body:
        _check_node(task, each, (*above, node), named)


def _check_statement(task: str, leaf: Statement, above: tuple[Loop, ...], named: Mapping[str, Buffer]) -> None:
    if leaf.combine and leaf.combine not in COMBINERS:
        raise ForetraceError(f"{task}: {leaf.name} combines by {leaf.combine!r}; take one of {list(COMBINERS)}.")
    _check_value(f"{task}: {leaf.name}", leaf.value, len(leaf.reads))
    for access in (leaf.target, *leaf.reads):
        if access.buffer not in named:
            raise ForetraceError(
                f"{task}: {leaf.name} uses {access.buffer}, which is no buffer; add it to the buffers."
            )
        moves = [access.stride(loop.variable) * (loop.extent - 1) for loop in above]
        low, high = access.offset + sum(min(m, 0) for m in moves), access.offset + sum(max(m, 0) for m in moves)
        if low < 0 or high >= named[access.buffer].elements:
            raise ForetraceError(
                f"{task}: {leaf.name} reaches elements {low} to {high} of {access.buffer}, "
                f"which has {named[access.buffer].elements}; correct its strides or the buffer."
            )
        if set(dict(access.strides)) - {each.variable for each in above}:
            raise ForetraceError(f"{task}: {leaf.name} names a loop that is not around it; correct its strides.")
    if above and above[-1].kind is LoopKind.VECTORISED and leaf.target.stride(above[-1].variable) == 0:
        raise ForetraceError(
            f"{task}: {leaf.name} writes one element from all lanes of {above[-1].variable}; use rfactor."
        )


def _check_value(where: str, value: Expression, reads: int) -> None:
    head, arguments = value[0], value[1:]
    right = (
        (head == "read" and len(arguments) == 1 and arguments[0] in range(reads))
        or (head == "const" and len(arguments) == 1 and isinstance(arguments[0], (int, float)))
        or (len(arguments) == OPERATIONS.get(head, -1) and all(isinstance(each, tuple) for each in arguments))
    )
    if not right:
        raise ForetraceError(f"{where} has the expression {value!r}; use read, const and {', '.join(OPERATIONS)}.")
    if head in OPERATIONS:
        for each in arguments:
            _check_value(where, each, reads)
