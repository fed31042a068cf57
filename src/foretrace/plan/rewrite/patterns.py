"""Rules from patterns: where a pattern stands in a graph, what is built instead, and random sizes that fit it.

Where a tensor is cut by a split is not written in a rule: it is cut where it was concatenated. So building a pattern
keeps, beside every tensor and for each axis, the tree of its seams, as TASO does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from foretrace.plan.rewrite.rules import GraphView, Maker, Rule, RuleMatch
from foretrace.plan.rewrite.shapes import UnfitError
from foretrace.plan.rewrite.sizes import SymbolicSizes
from foretrace.plan.rewrite.taso import Pattern, PatternOp, Ref
from foretrace.plan.rewrite.term import Term
from foretrace.plan.rewrite.terms import Graph, Terms

_SOURCE = "Jia et al., TASO, SOSP 2019, generated"


@dataclass(frozen=True)
class Seam:
    """Where a tensor was concatenated along an axis, and the seams inside both parts."""

    at: int
    left: Seam | None
    right: Seam | None


@dataclass(frozen=True)
class Value:
    """A tensor while a pattern is built."""

    term: Term
    seams: tuple[Seam | None, ...]


def as_rule(pattern: Pattern) -> Rule:
    """Return the rule of a pattern. The verifier says whether it is right. Raises UnfitError where no sizes fit both
    sides.
    """
    sizes = SymbolicSizes.of(pattern)

    def find(view: GraphView) -> Iterator[RuleMatch]:
        for matched, given in _matches(pattern, view):
            try:
                made = build(view.terms, pattern.target, given, sizes.groups)
            except UnfitError:
                continue
            pairs = [(matched[old.op, old.out], made[new.op][new.out].term) for old, new in pattern.outputs]
            if all(old.dims == new.dims for old, new in pairs):
                yield RuleMatch(tuple(pairs), tuple(dict.fromkeys(matched.values())))

    def both(maker: Maker) -> tuple[Graph, Graph]:
        given = {at: maker.input(*each) for at, each in sorted(sizes.drawn(maker.draw).items())}
        made = build(maker.terms, pattern.source, given)
        new = build(maker.terms, pattern.target, given, sizes.groups)
        return (
            maker.graph(*(made[old.op][old.out].term for old, _ in pattern.outputs)),
            maker.graph(*(new[ref.op][ref.out].term for _, ref in pattern.outputs)),
        )

    return Rule(
        name=pattern.name, what="imported", source=_SOURCE, find=find, sample=lambda maker: both(maker)[0], both=both
    )


# --- building -------------------------------------------------------------------------------------------------------


def build(
    terms: Terms, ops: Sequence[PatternOp], given: Mapping[int, Term], groups: Sequence[int] = ()
) -> list[list[Value]]:
    """Return every operator's outputs on these inputs (by their negative numbers). Raises UnfitError.

    `groups`: of every operator that is a convolution, 1 where it says nothing.
    """
    made: list[list[Value]] = []

    def value(ref: Ref) -> Value:
        if ref.op >= 0:
            return made[ref.op][ref.out]
        term = given[ref.op]
        return Value(term, (None,) * term.rank)

    for i, op in enumerate(ops):
        made.append(_built(terms, op, [value(each) for each in op.inputs], groups[i] if groups else 1))
    return made


def _built(terms: Terms, op: PatternOp, inputs: list[Value], groups: int) -> list[Value]:
    first = inputs[0]
    values = [each.term for each in inputs]
    if op.rank and first.term.rank != op.rank:
        raise UnfitError(f"sizes do not fit: a {op.kind} of {op.rank} dimensions.")
    if op.kind == "split":
        return _split(terms, op, first)
    if op.kind == "relu":
        return [Value(terms.make("relu", values), first.seams)]
    if op.kind in ("add", "mul"):
        if values[0].dims != values[1].dims:
            raise UnfitError("sizes do not fit: a sum or product of unequal sizes.")
        seams = tuple(
            a if b is None else b if a is None else a for a, b in zip(*(e.seams for e in inputs), strict=True)
        )
        return [Value(terms.make(op.kind, values), seams)]
    if op.kind == "concat":
        return [_joined(terms, op, inputs)]
    if op.kind == "matmul":
        if any(each.rank != 2 for each in values) or op.act:
            raise UnfitError("sizes do not fit: a product of other than matrices.")
        return [Value(terms.make("matmul", values), (inputs[0].seams[0], inputs[1].seams[1]))]
    seam = inputs[1].seams[0]
    if groups > 1 and (groups != 2 or seam is None or 2 * seam.at != values[1].dims[0]):
        # The published rule does not say it: unequal halves would be shared out among the groups wrongly.
        raise UnfitError("sizes do not fit: groups that do not end where the weights were concatenated.")
    made = terms.make(
        "conv2d", values, stride=op.stride, padding=_padding(op), dilation=(1, 1), groups=groups, bias=False,
        added=False, act=op.act,
    )  # fmt: skip
    if values[1].dims[2:] != op.kernel:
        raise UnfitError("sizes do not fit: another kernel.")
    return [Value(made, (inputs[0].seams[0], inputs[1].seams[0], None, None))]


def _padding(op: PatternOp) -> tuple[int, int]:
    if not op.same:
        return 0, 0
    if op.stride != (1, 1) or not (op.kernel[0] % 2 and op.kernel[1] % 2):
        raise UnfitError("sizes do not fit: the padding would differ between the sides of an image.")
    return op.kernel[0] // 2, op.kernel[1] // 2


def _joined(terms: Terms, op: PatternOp, inputs: list[Value]) -> Value:
    term = terms.make("concat", [each.term for each in inputs], axis=op.axis)
    seams: list[Seam | None] = []
    for axis in range(term.rank):
        if axis != op.axis:
            seams.append(inputs[0].seams[axis])
            continue
        tree = inputs[0].seams[axis]
        at = inputs[0].term.dims[axis]
        for each in inputs[1:]:
            tree = Seam(at, tree, each.seams[axis])
            at += each.term.dims[axis]
        seams.append(tree)
    return Value(term, tuple(seams))


def _split(terms: Terms, op: PatternOp, whole: Value) -> list[Value]:
    seam = whole.seams[op.axis]
    if seam is None or op.outputs != 2:
        raise UnfitError("sizes do not fit: a split of what was not concatenated.")
    total = whole.term.dims[op.axis]
    found = []
    for start, length, inner in ((0, seam.at, seam.left), (seam.at, total - seam.at, seam.right)):
        term = terms.make("slice", (whole.term,), axis=op.axis, start=start, length=length)
        seams = tuple(inner if axis == op.axis else each for axis, each in enumerate(whole.seams))
        found.append(Value(term, seams))
    return found


# --- matching -------------------------------------------------------------------------------------------------------

Matched = dict[tuple[int, int], Term]


def _matches(pattern: Pattern, view: GraphView) -> Iterator[tuple[Matched, dict[int, Term]]]:
    """Yield (term of every source output, term of every input), each place once."""
    kinds = {each.kind for each in pattern.source}
    if any(not view.of("slice" if kind == "split" else kind) for kind in kinds):
        return
    seen: set[tuple[tuple[tuple[int, int], int], ...]] = set()
    for matched, given in _extended(pattern, view, {}, {}):
        key = tuple(sorted((at, term.number) for at, term in matched.items()))
        if key not in seen:
            seen.add(key)
            yield matched, given


def _extended(
    pattern: Pattern, view: GraphView, matched: Matched, given: dict[int, Term]
) -> Iterator[tuple[Matched, dict[int, Term]]]:
    """Match the last operator that is not matched yet, in every way, and continue."""
    open_ops = [i for i in range(len(pattern.source)) if (i, 0) not in matched]
    if not open_ops:
        yield matched, given
        return
    at = open_ops[-1]
    op = pattern.source[at]
    if op.kind == "split":
        return  # a source that begins with a split of an unknown tensor: no published rule has one
    for term in view.of(op.kind):
        for found in _assigned(pattern, view, at, 0, term, matched, given):
            yield from _extended(pattern, view, *found)


def _assigned(
    pattern: Pattern, view: GraphView, at: int, out: int, term: Term, matched: Matched, given: dict[int, Term]
) -> Iterator[tuple[Matched, dict[int, Term]]]:
    """Take `term` for an output of a source operator, and its inputs for those of the operator."""
    known = matched.get((at, out))
    if known is not None:
        if known is term:
            yield matched, given
        return
    op = pattern.source[at]
    if op.kind == "split" or not view.runs(term) or term in matched.values() or not _suits(op, term):
        return
    orders: Iterable[tuple[Term, ...]] = (term.inputs,)
    if op.kind in ("add", "mul") and term.inputs[0] is not term.inputs[1]:
        orders = (term.inputs, term.inputs[::-1])
    for inputs in orders:
        states = [({**matched, (at, out): term}, given)]
        for ref, each in zip(op.inputs, inputs, strict=True):
            states = [new for state in states for new in _bound(pattern, view, ref, each, *state)]
        yield from states


def _bound(
    pattern: Pattern, view: GraphView, ref: Ref, term: Term, matched: Matched, given: dict[int, Term]
) -> Iterator[tuple[Matched, dict[int, Term]]]:
    if ref.op >= 0:
        yield from _assigned(pattern, view, ref.op, ref.out, term, matched, given)
    elif ref.op not in given:
        yield matched, {**given, ref.op: term}
    elif given[ref.op] is term:
        yield matched, given


def _suits(op: PatternOp, term: Term) -> bool:
    """Return whether an operator of a graph is one of this pattern."""
    if term.op != op.kind or len(term.inputs) != len(op.inputs) or (op.rank and term.rank != op.rank):
        return False
    if op.kind in ("add", "mul"):
        return term.inputs[0].dims == term.inputs[1].dims
    if op.kind == "concat":
        return bool(term["axis"] == op.axis)
    if op.kind == "matmul":
        return all(each.rank == 2 for each in term.inputs)
    if op.kind == "conv2d":
        try:
            padding = _padding(op)
        except UnfitError:
            return False
        return (
            term["groups"] == 1 and not term["bias"] and not term["added"] and term["act"] == op.act
            and term["stride"] == op.stride and term["dilation"] == (1, 1) and term["padding"] == padding
            and term.inputs[1].dims[2:] == op.kernel
        )  # fmt: skip
    return True
