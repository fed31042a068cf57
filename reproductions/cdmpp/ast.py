"""What a predictor sees of a program: its compact tree and, per leaf, features and a place in the tree.

CDMPP (EuroSys 2024, section 4): of the syntax tree only loops and computation statements stay; the leaves carry
features in the manner of Ansor, and the order of the leaves in the pre-order walk is told by a sinusoidal encoding that
is added to the features. Counts are base-2 logarithms of 1 + count, so that one unit is a factor of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2, prod

import numpy as np
from numpy.typing import NDArray

from foretrace.cost.programs.program import (
    Access,
    Expression,
    Loop,
    LoopKind,
    LoopNest,
    Purpose,
    Statement,
    TensorProgram,
)
from foretrace.cost.programs.program import leaves as leaves_of
from foretrace.errors import ForetraceError

Floats = NDArray[np.float64]
POP = -1
"""In a serialised tree: go up by one node."""

_KINDS = tuple(LoopKind)
_LEAF = len(_KINDS)
_LINE_BYTES = 64
_CAPACITIES = (1 << 11, 1 << 15, 1 << 20, 1 << 23)  # bytes: registers, and caches of a usual processor
_POINTS = 8  # of the intensity curve
_SLOTS = 5  # buffers per leaf: the target, then reads by traffic
_COUNTED = ("add", "mul", "div", "max", "exp", "sqrt")

_OF_LEAF = (
    *(f"{name} operations" for name in _COUNTED), "operations", "executions", "loops", "loop iterations",
    "lanes", "instructions", "unrolled", "unrolled loops", "parallel", "innermost serial", "second serial",
    "third serial", "combines", "constant", "reduced", "in registers", "accumulators", "accumulated",
    "contiguous lanes", "broadcast lanes", "gathered lanes", "itemsize", "leaves", "memory instructions",
    *(f"traffic beyond {each} B" for each in _CAPACITIES), *(f"intensity {i}" for i in range(_POINTS)),
)  # fmt: skip
_OF_BUFFER = (
    "present", "read", "written", "local", "bytes", "unique bytes", "lines", "unique lines", "reused in a loop",
    "reused from before", "not reused", "reuse distance", "reuse distance bytes", "reuse count", "stride",
    "lane stride", "issued",
)  # fmt: skip
FEATURES: tuple[str, ...] = (*_OF_LEAF, *(f"{name} of buffer {i}" for i in range(_SLOTS) for name in _OF_BUFFER))
"""Names of the features of a leaf, in order."""


@dataclass(frozen=True, kw_only=True)
class CompactTree:
    """Loops and leaves in pre-order: per node its code (kind of loop, or leaf) and extent; `sequence` is the walk,
    numbers of nodes and `POP`.
    """

    codes: tuple[int, ...]
    extents: tuple[int, ...]
    sequence: tuple[int, ...]

    @property
    def positions(self) -> tuple[int, ...]:
        """Where the leaves stand in the sequence."""
        return tuple(i for i, node in enumerate(self.sequence) if node != POP and self.codes[node] == _LEAF)

    def nested(self) -> tuple[object, ...]:
        """The tree rebuilt: a loop is (kind, extent, children), a leaf "leaf". Raises ForetraceError if it is none."""
        stack: list[list[object]] = [[]]
        opened: list[int] = []
        for node in self.sequence:
            if node == POP:
                if not opened:
                    raise ForetraceError("the serialised tree pops above its root; serialise the program anew.")
                number, children = opened.pop(), tuple(stack.pop())
                code = self.codes[number]
                found = "leaf" if code == _LEAF else (_KINDS[code].value, self.extents[number], children)
                stack[-1].append(found)
            else:
                opened.append(node)
                stack.append([])
        if opened:
            raise ForetraceError("the serialised tree ends inside a node; serialise the program anew.")
        return tuple(stack[0])


def compact(program: TensorProgram) -> CompactTree:
    """The program's tree, serialised."""
    codes: list[int] = []
    extents: list[int] = []
    sequence: list[int] = []

    def walk(node: LoopNest) -> None:
        sequence.append(len(codes))
        codes.append(_LEAF if isinstance(node, Statement) else _KINDS.index(node.kind))
        extents.append(1 if isinstance(node, Statement) else node.extent)
        for each in () if isinstance(node, Statement) else node.body:
            walk(each)
        sequence.append(POP)

    for nest in program.nests:
        walk(nest)
    return CompactTree(codes=tuple(codes), extents=tuple(extents), sequence=tuple(sequence))


def positional(positions: Sequence[int], width: int) -> Floats:
    """Sinusoids [positions x width]: for even i sin(p / 10000^(2 i / width)), and cos with i + 1 beside it."""
    i = np.arange(width)
    angle = np.asarray(positions, float)[:, None] / 10000.0 ** (2 * i / width)
    return np.where(i % 2 == 0, np.sin(angle), np.cos(angle))


def features(program: TensorProgram) -> Floats:
    """[leaves x features] of the program, in program order (see FEATURES); without positions."""
    found = list(leaves_of(program))
    written: dict[str, int] = {}
    rows = []
    for number, (loops, leaf) in enumerate(found):
        rows.append(_Leaf(program, loops, leaf, written, number, len(found)).row())
        for access in (leaf.target, *leaf.reads):
            written[access.buffer] = number
    return np.array(rows)


def _log(count: float) -> float:
    return log2(1.0 + count)


class _Leaf:
    """Features of one statement under its loops."""

    def __init__(self, program: TensorProgram, loops: tuple[Loop, ...], leaf: Statement, seen: dict[str, int],
                 number: int, count: int) -> None:  # fmt: skip
        self.program, self.loops, self.leaf, self.seen, self.number, self.count = (
            program, loops, leaf, seen, number, count,
        )  # fmt: skip
        self.itemsize = program.itemsize
        self.executions = prod(loop.extent for loop in loops)
        self.lane_loop = next((loop for loop in loops if loop.kind is LoopKind.VECTORISED), None)
        self.lanes = self.lane_loop.extent if self.lane_loop else 1
        reads = sorted(leaf.reads, key=lambda each: -self.issued(each))
        self.accesses = [leaf.target, *reads]
        self.footprints = [[self.footprint(a, d) for a in self.accesses] for d in range(len(loops) + 1)]

    def row(self) -> list[float]:
        found = [*self.of_leaf()]
        for i in range(_SLOTS):
            found += self.of_buffer(i) if i < len(self.accesses) else [0.0] * len(_OF_BUFFER)
        return found

    def footprint(self, access: Access, depth: int) -> tuple[int, int]:
        """Elements and cache lines that an access touches within the loops from `depth` in, each counted once."""
        moves = sorted((abs(access.stride(x.variable)), x.extent) for x in self.loops[depth:])
        run, blocks = 1, 1  # runs of neighbouring elements, and how many of them
        for stride, extent in moves:
            if stride and stride <= run:
                run += stride * (extent - 1)
            elif stride:
                blocks *= extent
        return run * blocks, blocks * (1 + (run - 1) * self.itemsize // _LINE_BYTES)

    def nbytes(self, depth: int) -> int:
        """Of all accesses within the loops from `depth` in, in whole lines."""
        return sum(_LINE_BYTES * lines for _, lines in self.footprints[depth])

    def issued(self, access: Access) -> float:
        """Memory instructions: lanes side by side are one, and what does not move with an inner loop stays where it
        is.
        """
        count = float(self.executions)
        inner = True
        for loop in reversed(self.loops):
            stride = access.stride(loop.variable)
            if loop.kind is LoopKind.VECTORISED:
                count /= loop.extent if stride in (0, 1) else 1
            elif stride == 0 and (inner or loop.kind is LoopKind.UNROLLED):
                count /= loop.extent
            elif loop.kind is not LoopKind.UNROLLED:
                inner = False
        return count

    def of_leaf(self) -> list[float]:
        leaf, loops, executions = self.leaf, self.loops, self.executions
        counts = dict.fromkeys(_COUNTED, 0)
        _count(leaf.value, counts)
        if leaf.combine:
            counts[leaf.combine] += 1
        operations = sum(counts.values())
        serial = [x.extent for x in reversed(loops) if x.kind in (LoopKind.SERIAL, LoopKind.PARALLEL)]
        serial += [1] * (3 - len(serial))
        iterations = sum(
            prod(x.extent for x in loops[: i + 1] if x.kind is not LoopKind.VECTORISED)
            for i, loop in enumerate(loops)
            if loop.kind in (LoopKind.SERIAL, LoopKind.PARALLEL)
        )
        reduced = prod(x.extent for x in loops if leaf.target.stride(x.variable) == 0) if leaf.combine else 1
        in_registers, accumulators, accumulated = self.accumulation()
        strides = [a.stride(self.lane_loop.variable) for a in self.accesses] if self.lane_loop else []
        share = 1.0 / max(len(strides), 1)
        return [
            *(_log(counts[name] * executions) for name in _COUNTED),
            _log(operations * executions), _log(executions), len(loops), _log(iterations), log2(self.lanes),
            _log(max(operations, 1) * executions / self.lanes),
            log2(prod(x.extent for x in loops if x.kind is LoopKind.UNROLLED)),
            sum(x.kind is LoopKind.UNROLLED for x in loops),
            log2(prod(x.extent for x in loops if x.kind is LoopKind.PARALLEL)), *(log2(each) for each in serial[:3]),
            float(bool(leaf.combine)), float(not leaf.reads), log2(reduced), in_registers, accumulators, accumulated,
            share * sum(each == 1 for each in strides), share * sum(each == 0 for each in strides),
            share * sum(each > 1 for each in strides), log2(self.itemsize), _log(self.count),
            _log(sum(self.issued(each) for each in self.accesses)),
            *(_log(self.traffic(each)) for each in _CAPACITIES), *self.intensities(operations),
        ]  # fmt: skip

    def accumulation(self) -> tuple[float, float, float]:
        """Whether results stay in registers over the innermost serial loop, how many there are, and for how long."""
        kept = 1
        for loop in reversed(self.loops):
            stride = self.leaf.target.stride(loop.variable)
            if loop.kind in (LoopKind.VECTORISED, LoopKind.UNROLLED):
                kept *= loop.extent if stride else 1
            else:
                holds = bool(self.leaf.combine) and stride == 0
                return float(holds), log2(kept), log2(loop.extent) if holds else 0.0
        return 0.0, log2(kept), 0.0

    def depth_within(self, capacity: int) -> int:
        """The outermost loop whose data fits."""
        fits = [d for d in range(len(self.loops) + 1) if self.nbytes(d) <= capacity]
        return fits[0] if fits else len(self.loops)

    def traffic(self, capacity: int) -> float:
        """Bytes that pass into a store of this capacity, if what fits is read once."""
        depth = self.depth_within(capacity)
        return float(prod(x.extent for x in self.loops[:depth]) * self.nbytes(depth))

    def intensities(self, operations: int) -> list[float]:
        """Operations per byte of the inner loops, from the innermost one to all, at evenly spaced depths."""
        depths = np.linspace(len(self.loops), 0, _POINTS)
        values = [
            log2(1 + operations * prod(x.extent for x in self.loops[d:]) / max(self.nbytes(d), 1))
            for d in range(len(self.loops) + 1)
        ]
        return [float(each) for each in np.interp(depths, np.arange(len(values)), values)]

    def of_buffer(self, i: int) -> list[float]:
        access = self.accesses[i]
        unique, unique_lines = self.footprints[0][i]
        local = self.program.buffer(access.buffer).role is Purpose.LOCAL
        stationary = [d for d, x in enumerate(self.loops) if access.stride(x.variable) == 0 and x.extent > 1]
        in_loop, before = bool(stationary), access.buffer in self.seen
        distance = distance_bytes = 0.0
        if in_loop:  # the innermost loop that does not move it comes back to the same data
            inside = stationary[-1] + 1
            distance, distance_bytes = prod(x.extent for x in self.loops[inside:]), self.nbytes(inside)
        elif before:
            distance, distance_bytes = self.executions, self.nbytes(0)
        moving = [abs(access.stride(x.variable)) for x in self.loops if access.stride(x.variable)]
        lane_stride = access.stride(self.lane_loop.variable) if self.lane_loop else 0
        lines = min(float(self.executions), self.traffic_lines(i))
        return [
            1.0, float(i > 0 or bool(self.leaf.combine)), float(i == 0), float(local),
            _log(self.executions * self.itemsize), _log(unique * self.itemsize), _log(lines), _log(unique_lines),
            float(in_loop), float(before and not in_loop), float(not in_loop and not before),
            _log(distance), _log(distance_bytes), _log(self.executions / max(unique, 1)),
            _log(min(moving, default=0) * self.itemsize), _log(lane_stride), _log(self.issued(access)),
        ]  # fmt: skip

    def traffic_lines(self, i: int) -> float:
        """Lines that the innermost moving loop touches, over all iterations."""
        depth = max(len(self.loops) - 1, 0)
        return float(prod(x.extent for x in self.loops[:depth]) * self.footprints[depth][i][1])


def _count(value: Expression, counts: dict[str, int]) -> None:
    name = {"sub": "add"}.get(value[0], value[0])
    if name in counts:
        counts[name] += 1
    for each in value[1:]:
        if isinstance(each, tuple):
            _count(each, counts)


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Programs as one table of leaves: features [leaves x features], places in the tree, and where programs start."""

    leaves: Floats
    positions: NDArray[np.int64]
    starts: NDArray[np.int64]  # [programs + 1]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def counts(self) -> NDArray[np.int64]:
        """Leaves per program."""
        return np.diff(self.starts)

    def take(self, which: NDArray[np.int64]) -> Encoded:
        """Some of the programs, in this order."""
        rows = [np.arange(self.starts[i], self.starts[i + 1]) for i in which]
        index = np.concatenate(rows) if rows else np.empty(0, np.int64)
        starts = np.concatenate([[0], np.cumsum(self.counts[which])]).astype(np.int64)
        return Encoded(leaves=self.leaves[index], positions=self.positions[index], starts=starts)

    def summed(self) -> Floats:
        """[programs x features] sums over leaves of what is counted, in logarithms again: one row per program, as
        predictors without a tree take it.
        """
        counts = np.add.reduceat(np.exp2(np.minimum(self.leaves, 60.0)), self.starts[:-1], axis=0)
        return np.log2(counts)


def encode(programs: Sequence[TensorProgram]) -> Encoded:
    """Features of many programs. Raises ForetraceError where there are none."""
    if not programs:
        raise ForetraceError("there are no programs to encode; give at least one.")
    tables = [features(each) for each in programs]
    places = [compact(each).positions for each in programs]
    return Encoded(
        leaves=np.concatenate(tables),
        positions=np.concatenate([np.array(each, np.int64) for each in places]),
        starts=np.concatenate([[0], np.cumsum([len(each) for each in tables])]).astype(np.int64),
    )
