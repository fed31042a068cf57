"""Rules on linear layers, matrix products and permutations."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

from foretrace.plan.rewrite.rules import GraphView, Maker, Rule, RuleMatch, parts, remade
from foretrace.plan.rewrite.rules_conv import together
from foretrace.plan.rewrite.shapes import UNARY
from foretrace.plan.rewrite.term import Term
from foretrace.plan.rewrite.terms import Graph

_METAFLOW = "Jia et al., Optimizing DNN Computation with Relaxed Graph Substitutions, MLSys 2019"
_TASO = "Jia et al., TASO, SOSP 2019"


def _merge_linear(view: GraphView) -> Iterator[RuleMatch]:
    found: dict[tuple[Term, str], list[Term]] = {}
    for term in view.of("linear"):
        if term.inputs[1].constant and not term["added"]:
            found.setdefault((term.inputs[0], term["act"]), []).append(term)
    for group in found.values():
        if len(group) > 2:
            yield RuleMatch(together(view.terms, group, group[0].rank - 1), tuple(group))
        for pair in combinations(group, 2):
            yield RuleMatch(together(view.terms, list(pair), pair[0].rank - 1), pair)


def _merge_linear_sample(m: Maker) -> Graph:
    x = m.input(*(m.size() for _ in range(m.size(1, 3))))
    act = m.pick("", "relu")
    return m.graph(*(m.linear(x, act=act) for _ in range(m.size(2, 4))))


def _linear_chain(view: GraphView) -> Iterator[RuleMatch]:
    make = view.terms.make
    for outer in view.of("linear"):
        inner, w2, b2, added = parts(outer)
        if not view.private(inner, "linear") or inner["act"] or inner["added"]:
            continue
        x, w1, b1, _ = parts(inner)
        if not (w1.constant and w2.constant):
            continue
        bias = b2
        if b1 is not None:
            through = make("reshape", (make("matmul", (w2, make("reshape", (b1,), dims=(b1.dims[0], 1)))),),
                           dims=(w2.dims[0],))  # fmt: skip
            bias = make("add", (b2, through)) if b2 is not None else through
        yield RuleMatch(((outer, remade(view.terms, outer, x, make("matmul", (w2, w1)), bias, added)),), (outer, inner))


def _linear_chain_sample(m: Maker) -> Graph:
    return m.graph(m.linear(m.linear(m.input(m.size(), m.size())), act=m.pick("", "relu")))


def _associate(view: GraphView) -> Iterator[RuleMatch]:
    make = view.terms.make
    for term in view.of("matmul"):
        left, right = term.inputs
        if view.private(left, "matmul"):
            a, b = left.inputs
            yield RuleMatch(((term, make("matmul", (a, make("matmul", (b, right))))),), (term, left))
        if view.private(right, "matmul"):
            b, c = right.inputs
            yield RuleMatch(((term, make("matmul", (make("matmul", (left, b)), c))),), (term, right))


def _matrices(m: Maker, *sizes: int) -> list[Term]:
    batch = m.pick((), (2,))
    return [m.input(*batch, *pair) for pair in pairwise(sizes)]


def _associate_sample(m: Maker) -> Graph:
    a, b, c = _matrices(m, *(m.size() for _ in range(4)))
    make = m.terms.make
    if m.pick(True, False):
        return m.graph(make("matmul", (make("matmul", (a, b)), c)))
    return m.graph(make("matmul", (a, make("matmul", (b, c)))))


def _distribute(view: GraphView) -> Iterator[RuleMatch]:
    make = view.terms.make
    for term in view.of("add"):
        one, two = term.inputs
        if one is two or not (view.private(one, "matmul") and view.private(two, "matmul")) or one.dims != two.dims:
            continue
        (a, b), (c, d) = one.inputs, two.inputs
        seen = (term, one, two)
        if a is c and b.dims == d.dims:
            yield RuleMatch(((term, make("matmul", (a, make("add", (b, d))))),), seen)
        elif b is d and a.dims == c.dims:
            yield RuleMatch(((term, make("matmul", (make("add", (a, c)), b))),), seen)
        elif a.rank == b.rank == c.rank == d.rank and a.dims[:-2] == b.dims[:-2] == c.dims[:-2] == d.dims[:-2]:
            wide = make("concat", (a, c), axis=a.rank - 1)
            yield RuleMatch(((term, make("matmul", (wide, make("concat", (b, d), axis=b.rank - 2)))),), seen)


def _distribute_sample(m: Maker) -> Graph:
    rows, inner, columns = m.size(), m.size(), m.size()
    kind = m.size(0, 2)
    a, b = m.input(rows, inner), m.input(inner, columns)
    other = inner if kind else m.size()
    c = a if kind == 1 else m.input(rows, other)
    d = b if kind == 2 else m.input(other, columns)
    one, two = m.terms.make("matmul", (a, b)), m.terms.make("matmul", (c, d))
    return m.graph(m.terms.make("add", (one, two)))


def _as_product(view: GraphView) -> Iterator[RuleMatch]:
    """Yield a linear layer as a product and a sum, as rules on products want it."""
    make = view.terms.make
    for term in view.of("linear"):
        x, w, bias, added = parts(term)
        if term["act"] or added is not None or x.rank < 2:
            continue
        value = make("matmul", (x, make("permute", (w,), order=(1, 0))))
        yield RuleMatch(((term, value if bias is None else make("add", (value, bias))),), (term,))


def _as_product_sample(m: Maker) -> Graph:
    return m.graph(m.linear(m.input(*(m.size() for _ in range(m.size(2, 3))))))


def _as_linear(view: GraphView) -> Iterator[RuleMatch]:
    make = view.terms.make
    for term in view.of("matmul"):
        x, w = term.inputs
        if w.constant and w.rank == 2:
            weight = make("permute", (w,), order=(1, 0))
            yield RuleMatch(((term, make("linear", (x, weight), bias=False, added=False, act="")),), (term,))


def _as_linear_sample(m: Maker) -> Graph:
    inner = m.size()
    x = m.input(*(m.size() for _ in range(m.size(1, 2))), inner)
    return m.graph(m.terms.make("matmul", (x, m.weight(inner, m.size()))))


def _permute_unary(view: GraphView) -> Iterator[RuleMatch]:
    """Yield an elementwise operator before a view of its input instead of after it."""
    for term in view.of(*UNARY):
        inner = term.inputs[0]
        if view.private(inner, "permute", "reshape"):
            moved = view.terms.make(term.op, inner.inputs, **term.lookup)
            yield RuleMatch(((term, view.terms.make(inner.op, (moved,), **inner.lookup)),), (term, inner))


def _permute_unary_sample(m: Maker) -> Graph:
    x = m.input(m.size(), m.size(), 4)
    kinds = {"order": (2, 0, 1)}, {"dims": (*x.dims[:2], 2, 2)}
    view = m.terms.make("permute", (x,), **kinds[0]) if m.pick(0, 1) else m.terms.make("reshape", (x,), **kinds[1])
    return m.graph(m.terms.make("mul_scalar", (view,), value=0.5) if m.pick(0, 1) else m.terms.make("relu", (view,)))


def _permute_binary(view: GraphView) -> Iterator[RuleMatch]:
    for term in view.of("add", "mul"):
        one, two = term.inputs
        if (
            one is not two
            and all(view.private(each, "permute") for each in (one, two))
            and one["order"] == two["order"]
        ):
            inner = view.terms.make(term.op, (one.inputs[0], two.inputs[0]))
            if inner.rank == term.rank:
                yield RuleMatch(((term, view.terms.make("permute", (inner,), order=one["order"])),), (term, one, two))


def _permute_binary_sample(m: Maker) -> Graph:
    dims = [m.size() for _ in range(3)]
    views = [m.terms.make("permute", (m.input(*dims),), order=(1, 2, 0)) for _ in range(2)]
    return m.graph(m.terms.make(m.pick("add", "mul"), views))


def _product_of_permuted(view: GraphView) -> Iterator[RuleMatch]:
    """Yield a'B' = (BA)'."""
    make = view.terms.make
    for term in view.of("matmul"):
        one, two = term.inputs
        if not all(each.op == "permute" and _swaps(each) for each in (one, two)) or one.rank != two.rank:
            continue
        inner = make("matmul", (two.inputs[0], one.inputs[0]))
        yield RuleMatch(((term, make("permute", (inner,), order=_last_two(term.rank))),), (term,))


def _last_two(rank: int) -> tuple[int, ...]:
    return (*range(rank - 2), rank - 1, rank - 2)


def _swaps(term: Term) -> bool:
    return bool(term["order"] == _last_two(term.rank))


def _product_of_permuted_sample(m: Maker) -> Graph:
    rows, inner, columns = m.size(), m.size(), m.size()
    batch = m.pick((), (2,))
    a, b = m.input(*batch, inner, rows), m.input(*batch, columns, inner)
    order = _last_two(len(batch) + 2)
    views = [m.terms.make("permute", (each,), order=order) for each in (a, b)]
    return m.graph(m.terms.make("matmul", views))


def _slices_of_linear(view: GraphView) -> Iterator[RuleMatch]:
    """Yield slices of a merged layer with one reader each as layers of their own again."""
    make = view.terms.make
    for term, users in view.users.items():
        if not view.runs(term, "linear", "conv2d") or term["added"] or term.get("groups", 1) != 1:
            continue
        axis = 1 if term.op == "conv2d" else term.rank - 1
        if len(users) < 2 or any(each.op != "slice" or each["axis"] != axis for each in users):
            continue
        x, w, bias, _ = parts(term)
        pairs = []
        for each in users:
            cut = {"axis": 0, "start": each["start"], "length": each["length"]}
            offset = None if bias is None else make("slice", (bias,), **cut)
            pairs.append((each, remade(view.terms, term, x, make("slice", (w,), **cut), offset)))
        if view.private(users[0]) or len(users) > 1:
            yield RuleMatch(tuple(pairs), (term, *users))


def _slices_of_linear_sample(m: Maker) -> Graph:
    whole = m.linear(m.input(m.size(), m.size()), 6) if m.pick(0, 1) else m.conv(m.image(), out=6)
    axis = whole.rank - 1 if whole.op == "linear" else 1
    cut = m.size(1, 5)
    slices = [
        m.terms.make("slice", (whole,), axis=axis, start=start, length=length)
        for start, length in ((0, cut), (cut, 6 - cut))
    ]
    return m.graph(*slices)


RULES = (
    Rule(name="merge-linear", what="linear layers of the same input as one, then slices (queries, keys, values)",
         source=_METAFLOW, find=_merge_linear, sample=_merge_linear_sample),
    Rule(name="linear-chain", what="two linear layers with nothing between as one", source=_TASO,
         find=_linear_chain, sample=_linear_chain_sample),
    Rule(name="associate-products", what="(AB)C = A(BC)", source=_TASO,
         find=_associate, sample=_associate_sample),
    Rule(name="distribute-products", what="AB + AC = A(B + C); AB + CB = (A + C)B; AB + CD = [A C][B; D]",
         source=_TASO, find=_distribute, sample=_distribute_sample),
    Rule(name="linear-as-product", what="a linear layer as a matrix product and a sum", source=_TASO,
         find=_as_product, sample=_as_product_sample),
    Rule(name="product-as-linear", what="a product with weights as a linear layer", source=_TASO,
         find=_as_linear, sample=_as_linear_sample),
    Rule(name="split-merged", what="slices of one layer as layers of their own", source=_TASO,
         find=_slices_of_linear, sample=_slices_of_linear_sample),
    Rule(name="elementwise-before-view", what="an elementwise operator moved before a permutation or reshape",
         source=_TASO, find=_permute_unary, sample=_permute_unary_sample),
    Rule(name="permute-after-elementwise", what="one permutation after a sum or product instead of two before it",
         source=_TASO, find=_permute_binary, sample=_permute_binary_sample),
    Rule(name="product-of-permuted", what="A'B' = (BA)'", source=_TASO,
         find=_product_of_permuted, sample=_product_of_permuted_sample),
)  # fmt: skip
