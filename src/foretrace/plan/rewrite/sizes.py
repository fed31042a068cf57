"""Random sizes that fit both sides of a pattern: linear equations between the dimensions of its inputs, solved."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import product

from foretrace.plan.rewrite.shapes import UnfitError
from foretrace.plan.rewrite.taso import Pattern, PatternOp, Ref

Variable = tuple[int, int]  # (input, axis)
Sum = dict[Variable | None, int]  # variable -> factor; None is the constant
Shape = list[Sum]
Row = dict[Variable | None, Fraction]
_LARGEST, _TRIES = 5, 200


class SymbolicSizes:
    """The dimensions of a pattern's inputs as unknowns.

    A convolution has as many groups as the channels of its data are times those of its weights; `groups` says it of
    every operator of the target. Convolutions of the source have one.
    """

    def __init__(self, pattern: Pattern, groups: tuple[int, ...]) -> None:
        self.groups = groups
        self.rank = _ranks(pattern)
        self.equations: list[Sum] = []
        self._walk(pattern.source, (1,) * len(pattern.source))
        self._walk(pattern.target, groups)
        self.variables = [(at, axis) for at, rank in sorted(self.rank.items()) for axis in range(rank)]
        self.pivots = _eliminated(self.equations)

    @classmethod
    def of(cls, pattern: Pattern) -> SymbolicSizes:
        """Make it with the fewest groups that let sizes fit. Raises UnfitError where none do, or no ranks."""
        choices = [(1, 2) if op.kind == "conv2d" else (1,) for op in pattern.target]
        why = UnfitError("sizes do not fit.")
        for groups in sorted(product(*choices), key=sum):
            try:
                found = cls(pattern, groups)
                found.drawn(random.Random(0))
                return found
            except UnfitError as error:
                why = error
        raise why

    def drawn(self, draw: random.Random) -> dict[int, tuple[int, ...]]:
        """Return sizes of every input, drawn at random among those that fit."""
        variables, pivots = self.variables, self.pivots
        free = [each for each in variables if each not in pivots]
        for _ in range(_TRIES):
            value: Row = {each: Fraction(draw.randint(1, _LARGEST)) for each in free}
            value[None] = Fraction(1)
            for pivot, row in reversed(pivots.items()):
                value[pivot] = sum((factor * value[each] for each, factor in row.items()), Fraction(0))
            if all(value[each] >= 1 and value[each].denominator == 1 for each in variables):
                return {
                    at: tuple(int(value[at, axis]) for axis in range(rank)) for at, rank in sorted(self.rank.items())
                }
        raise UnfitError("sizes do not fit: no small sizes suit both sides of the rule.")

    def _walk(self, ops: Sequence[PatternOp], groups: Sequence[int]) -> None:
        made: list[list[Shape]] = []
        for op, count in zip(ops, groups, strict=True):
            made.append(self._of(op, [self._shape(each, made) for each in op.inputs], count))

    def _shape(self, ref: Ref, made: list[list[Shape]]) -> Shape:
        if ref.op >= 0:
            return made[ref.op][ref.out]
        return [{(ref.op, axis): 1} for axis in range(self.rank[ref.op])]

    def _of(self, op: PatternOp, inputs: list[Shape], groups: int) -> list[Shape]:
        first = inputs[0]
        if op.kind == "relu":
            return [first]
        if op.kind in ("add", "mul"):
            self._equal(first, inputs[1])
            return [first]
        if op.kind == "concat":
            for each in inputs[1:]:
                self._equal(
                    [n for i, n in enumerate(first) if i != op.axis], [n for i, n in enumerate(each) if i != op.axis]
                )
            total: Sum = {}
            for each in inputs:
                for variable, factor in each[op.axis].items():
                    total[variable] = total.get(variable, 0) + factor
            return [[total if i == op.axis else n for i, n in enumerate(first)]]
        if op.kind == "matmul":
            self._equal([first[1]], [inputs[1][0]])
            return [[first[0], inputs[1][1]]]
        if op.kind == "split":
            # Both parts have sizes that only the seams know; what reads them must suit the numbers that are drawn.
            return [first, first]
        weight = inputs[1]
        channels = {variable: groups * factor for variable, factor in weight[1].items()}
        self._equal([first[1], *weight[2:]], [channels, {None: op.kernel[0]}, {None: op.kernel[1]}])
        return [[first[0], weight[0], first[2], first[3]]]

    def _equal(self, one: Shape, other: Shape) -> None:
        for a, b in zip(one, other, strict=True):
            row = dict(a)
            for variable, factor in b.items():
                row[variable] = row.get(variable, 0) - factor
            self.equations.append(row)


def _ranks(pattern: Pattern) -> dict[int, int]:
    """Return dimensions of every input: 4 at convolutions, 2 at products, else what concatenations say, else 2."""
    found: dict[int, int] = {}
    changed = True
    sides = (pattern.source, pattern.target)
    known: list[list[int]] = [[0] * len(side) for side in sides]
    while changed:
        changed = False
        for side, ranks in zip(sides, known, strict=True):
            for i, op in enumerate(side):
                fixed = {"conv2d": 4, "matmul": 2}.get(op.kind, op.rank)
                near = [ranks[e.op] if e.op >= 0 else found.get(e.op, 0) for e in op.inputs]
                rank = fixed or ranks[i] or max(near, default=0)
                changed = changed or ranks[i] != rank
                ranks[i] = rank
                for each in op.inputs:
                    if rank and each.op < 0 and found.get(each.op) != rank:
                        if each.op in found:
                            raise UnfitError(
                                f"sizes do not fit: an input of both {found[each.op]} and {rank} dimensions."
                            )
                        found[each.op], changed = rank, True
                    elif rank and each.op >= 0 and not ranks[each.op]:
                        ranks[each.op], changed = rank, True
    inputs = {each.op for side in sides for op in side for each in op.inputs if each.op < 0}
    return {at: found.get(at, 2) for at in sorted(inputs)}


def _eliminated(equations: Sequence[Sum]) -> dict[Variable, Row]:
    """Return variables that follow from others: each as a sum of variables that are free or eliminated later."""
    rows: list[Row] = [{key: Fraction(value) for key, value in row.items() if value} for row in equations]
    pivots: dict[Variable, Row] = {}
    while rows:
        row = rows.pop(0)
        choices = [each for each in row if each is not None]
        if not choices:
            if row:
                raise UnfitError("sizes do not fit: the two sides of the rule contradict each other.")
            continue
        # One that is a sum of the others with positive factors is positive whatever they are.
        signs = {each: sum(row[other] * row[each] > 0 for other in row) for each in choices}
        variable = min(choices, key=lambda each: (signs[each], each))
        factor = row.pop(variable)
        solved = {key: -value / factor for key, value in row.items()}
        pivots[variable] = solved
        for other in rows:
            share = other.pop(variable, None)
            if share is not None:
                for key, value in solved.items():
                    total = other.get(key, 0) + share * value
                    if total:
                        other[key] = total
                    else:
                        other.pop(key, None)
    return pivots
