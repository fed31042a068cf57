"""Rules on convolutions: folding what is linear, merging those side by side, and groups."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from foretrace.plan.rewrite.rules import GraphView, Maker, Rule, RuleMatch, column, parts, remade
from foretrace.plan.rewrite.term import Term
from foretrace.plan.rewrite.terms import Graph, Terms

_METAFLOW = "Jia et al., Optimizing DNN Computation with Relaxed Graph Substitutions, MLSys 2019"
_TASO = "Jia et al., TASO, SOSP 2019"
_LARGEST = 7  # rows or columns of a kernel that is enlarged to


def _affine(terms: Terms, conv: Term, scale: Term, shift: Term | None) -> Term:
    """Return a convolution whose result is scaled and shifted by channel, as one convolution."""
    x, w, bias, _ = parts(conv)
    weight = terms.make("mul", (w, column(terms, scale, w.rank)))
    offset = terms.make("mul", (bias, scale)) if bias is not None else None
    if shift is not None:
        offset = terms.make("add", (offset, shift)) if offset is not None else shift
    return remade(terms, conv, x, weight, offset)


def _linear(view: GraphView, term: Term) -> bool:
    """Return whether a convolution that nothing follows yet, and that only one operator reads."""
    return view.private(term, "conv2d") and not term["act"] and not term["added"]


def _batch_norm(view: GraphView) -> Iterator[RuleMatch]:
    make = view.terms.make
    for norm in view.of("batch_norm"):
        conv, gamma, beta, mean, variance = norm.inputs
        if _linear(view, conv):
            scale = make("mul", (gamma, make("rsqrt_eps", (variance,), eps=norm["eps"])))
            less = make("neg", (make("mul", (mean, scale)),))
            yield RuleMatch(((norm, _affine(view.terms, conv, scale, make("add", (beta, less)))),), (norm, conv))


def _batch_norm_sample(m: Maker) -> Graph:
    conv = m.conv(m.image(), act="")
    channels = conv.dims[1]
    variance = m.terms.leaf(f"variance{m.size(0, 9)}", (channels,), dtype="float64", constant=True)
    statistics = (m.weight(channels), m.weight(channels), m.weight(channels), variance)
    return m.graph(m.terms.make("batch_norm", (conv, *statistics), eps=1e-3))


def _scale(view: GraphView) -> Iterator[RuleMatch]:
    for term in view.of("mul_scalar"):
        conv = term.inputs[0]
        if view.private(conv, "conv2d", "linear") and not conv["act"] and not conv["added"]:
            x, w, bias, _ = parts(conv)
            scaled = [
                None if e is None else view.terms.make("mul_scalar", (e,), value=term["value"]) for e in (w, bias)
            ]
            if w.constant and scaled[0] is not None:
                yield RuleMatch(((term, remade(view.terms, conv, x, scaled[0], scaled[1])),), (term, conv))
    for term in view.of("mul"):
        for conv, other in (term.inputs, term.inputs[::-1]):
            if _linear(view, conv) and other.constant and term.dims == conv.dims and _per_channel(other, conv):
                scale = view.terms.make("reshape", (other,), dims=(conv.dims[1],))
                yield RuleMatch(((term, _affine(view.terms, conv, scale, None)),), (term, conv))


def _per_channel(other: Term, conv: Term) -> bool:
    channels = conv.dims[1]
    return other.size == channels and other.dims[-3:] == (channels, 1, 1)


def _scale_sample(m: Maker) -> Graph:
    kind = m.size(0, 2)
    if kind == 0:
        return m.graph(m.terms.make("mul_scalar", (m.linear(m.input(m.size(), m.size())),), value=0.125))
    conv = m.conv(m.image(), act="")
    if kind == 1:
        return m.graph(m.terms.make("mul_scalar", (conv,), value=-1.5))
    return m.graph(m.terms.make("mul", (conv, m.weight(conv.dims[1], 1, 1))))


def _relu(view: GraphView) -> Iterator[RuleMatch]:
    for term in view.of("relu", "gelu"):
        inner = term.inputs[0]
        if not view.private(inner, "conv2d", "linear") or inner["act"]:
            continue
        if term.op == "relu" or (inner.op == "linear" and term["approximate"] == "none"):
            x, w, bias, added = parts(inner)
            yield RuleMatch(((term, remade(view.terms, inner, x, w, bias, added, act=term.op)),), (term, inner))


def _relu_sample(m: Maker) -> Graph:
    if m.pick(True, False):
        return m.graph(m.terms.make("relu", (m.conv(m.image(), act=""),)))
    inner = m.linear(m.input(m.size(), m.size()))
    return m.graph(
        m.terms.make("relu", (inner,)) if m.pick(0, 1) else m.terms.make("gelu", (inner,), approximate="none")
    )


def _add(view: GraphView) -> Iterator[RuleMatch]:
    for term in view.of("add"):
        for inner, other in (term.inputs, term.inputs[::-1]):
            if not view.private(inner, "conv2d", "linear") or inner is other or inner["act"] or inner["added"]:
                continue
            x, w, bias, _ = parts(inner)
            if bias is None and other.constant and _is_bias(other, inner):
                vector = view.terms.make("reshape", (other,), dims=(w.dims[0],))
                yield RuleMatch(((term, remade(view.terms, inner, x, w, vector)),), (term, inner))
            elif other.dims == inner.dims:
                yield RuleMatch(((term, remade(view.terms, inner, x, w, bias, other)),), (term, inner))


def _is_bias(other: Term, inner: Term) -> bool:
    return _per_channel(other, inner) if inner.op == "conv2d" else other.dims == (inner.dims[-1],)


def _add_sample(m: Maker) -> Graph:
    inner = m.conv(m.image(), act="") if m.pick(0, 1) else m.linear(m.input(m.size(), m.size(2, 5), m.size(2, 5)))
    other = m.input(*inner.dims)
    if m.pick(0, 1) and not inner["bias"]:
        other = m.weight(inner.dims[1], 1, 1) if inner.op == "conv2d" else m.weight(inner.dims[-1])
    return m.graph(m.terms.make("add", (inner, other)))


# --- side by side ---------------------------------------------------------------------------------------------------


def _twins(view: GraphView) -> Iterator[list[Term]]:
    """Yield convolutions of the same input and the same geometry; groups of at least two."""
    found: dict[tuple[object, ...], list[Term]] = {}
    for conv in view.of("conv2d"):
        _, w, _, _ = parts(conv)
        if conv["groups"] == 1 and w.constant and not conv["added"]:
            same = (conv.inputs[0], w.dims[2:], conv["stride"], conv["padding"], conv["dilation"], conv["act"])
            found.setdefault(same, []).append(conv)
    yield from (each for each in found.values() if len(each) > 1)


def together(terms: Terms, convs: list[Term], axis: int) -> tuple[tuple[Term, Term], ...]:
    """Return layers of the same input as one with all weights, and slices of it; `axis` is that of the channels."""
    weights = terms.make("concat", [each.inputs[1] for each in convs], axis=0)
    biases: Term | None = None
    if any(each["bias"] for each in convs):
        whole = [parts(each)[2] or zeros(terms, each.inputs[1]) for each in convs]
        biases = terms.make("concat", whole, axis=0)
    merged = remade(terms, convs[0], convs[0].inputs[0], weights, biases)
    pairs, start = [], 0
    for each in convs:
        length = each.inputs[1].dims[0]
        pairs.append((each, terms.make("slice", (merged,), axis=axis, start=start, length=length)))
        start += length
    return tuple(pairs)


def zeros(terms: Terms, w: Term) -> Term:
    """Return a bias that changes nothing."""
    return terms.make("mul_scalar", (terms.make("sum_kernel", (w,)),), value=0.0)


def _merge(view: GraphView) -> Iterator[RuleMatch]:
    for group in _twins(view):
        if len(group) > 2:
            yield RuleMatch(together(view.terms, group, 1), tuple(group))
        for pair in combinations(group, 2):
            yield RuleMatch(together(view.terms, list(pair), 1), pair)


def _merge_sample(m: Maker) -> Graph:
    x = m.image()
    kernel, stride, act = (m.pick(1, 3), 3), m.pick((1, 1), (2, 2)), m.pick("", "relu")
    convs = [m.conv(x, kernel=kernel, stride=stride, padding=(1, 0), act=act) for _ in range(m.size(2, 4))]
    return m.graph(*convs)


def _enlarge(view: GraphView) -> Iterator[RuleMatch]:
    """Enlarge a kernel to that of a neighbour on the same input, so that both can be merged."""
    for conv in view.of("conv2d"):
        x, w, bias, added = parts(conv)
        targets = {
            (other.inputs[1].dims[2:], other["padding"])
            for other in view.users.get(x, ())
            if other.op == "conv2d" and other["stride"] == conv["stride"] and other["groups"] == conv["groups"]
            and other.inputs[0] is x
        }  # fmt: skip
        for (rows, columns), padding in sorted(targets):
            grown = (rows - w.dims[2], columns - w.dims[3])
            if (
                max(grown) <= 0 or min(grown) < 0 or grown[0] % 2 or grown[1] % 2 or max(rows, columns) > _LARGEST
                or conv["dilation"] != (1, 1)
                or padding != (conv["padding"][0] + grown[0] // 2, conv["padding"][1] + grown[1] // 2)
            ):  # fmt: skip
                continue
            larger = view.terms.make("pad_kernel", (w,), rows=grown[0] // 2, columns=grown[1] // 2)
            yield RuleMatch(((conv, remade(view.terms, conv, x, larger, bias, added, padding=padding)),), (conv,))


def _enlarge_sample(m: Maker) -> Graph:
    x, stride = m.image(low=5), m.pick((1, 1), (2, 2))
    kernel = m.pick((3, 3), (3, 1), (5, 5))
    reach = (kernel[0] // 2, kernel[1] // 2)
    return m.graph(
        m.conv(x, kernel=(1, 1), stride=stride, padding=(0, 0)), m.conv(x, kernel=kernel, stride=stride, padding=reach)
    )


def _sum(view: GraphView) -> Iterator[RuleMatch]:
    make = view.terms.make
    for term in view.of("add"):
        one, two = term.inputs
        if one is two or not (_linear(view, one) and _linear(view, two)) or one["groups"] != 1 or two["groups"] != 1:
            continue
        (x1, w1, b1, _), (x2, w2, b2, _) = parts(one), parts(two)
        same = all(one[key] == two[key] for key in ("stride", "padding", "dilation"))
        if not same or w1.dims[2:] != w2.dims[2:] or one.dims != two.dims or x1.dims[2:] != x2.dims[2:]:
            continue
        bias = make("add", (b1, b2)) if b1 is not None and b2 is not None else b1 or b2
        if x1 is x2:
            merged = remade(view.terms, one, x1, make("add", (w1, w2)), bias)
        else:
            weights = make("concat", (w1, w2), axis=1)
            merged = remade(view.terms, one, make("concat", (x1, x2), axis=1), weights, bias)
        yield RuleMatch(((term, merged),), (term, one, two))


def _sum_sample(m: Maker) -> Graph:
    x = m.image()
    other = x if m.pick(True, False, False) else m.input(x.dims[0], m.size(), *x.dims[2:])
    kernel, stride, out = (m.pick(1, 3), 3), m.pick((1, 1), (2, 2)), m.size()
    one, two = (m.conv(e, kernel=kernel, stride=stride, padding=(1, 1), out=out, act="") for e in (x, other))
    return m.graph(m.terms.make("add", (one, two)))


def _residual(view: GraphView) -> Iterator[RuleMatch]:
    make = view.terms.make
    for term in view.of("add"):
        for conv, x in (term.inputs, term.inputs[::-1]):
            if not _linear(view, conv) or conv.inputs[0] is not x or conv["groups"] != 1 or conv.dims != x.dims:
                continue
            _, w, bias, _ = parts(conv)
            rows, columns = w.dims[2:]
            centred = conv["padding"] == (rows // 2, columns // 2) and conv["stride"] == conv["dilation"] == (1, 1)
            if centred and rows % 2 and columns % 2:
                unit = make("unit_kernel", (), channels=w.dims[0], rows=rows, columns=columns, dtype=w.dtype)
                yield RuleMatch(((term, remade(view.terms, conv, x, make("add", (w, unit)), bias)),), (term, conv))


def _residual_sample(m: Maker) -> Graph:
    x = m.image()
    return m.graph(m.terms.make("add", (m.conv(x, out=x.dims[1], same=True, act=""), x)))


def _pointwise_chain(view: GraphView) -> Iterator[RuleMatch]:
    for outer in view.of("conv2d"):
        inner, w2, b2, added = parts(outer)
        if not _linear(view, inner) or inner["groups"] != 1 or outer["groups"] != 1:
            continue
        x, w1, b1, _ = parts(inner)
        simple = inner["stride"] == (1, 1) and inner["padding"] == (0, 0) and w1.dims[2:] == (1, 1)
        if not simple or (b1 is not None and outer["padding"] != (0, 0)):
            continue  # a bias would be missing in the padding
        make = view.terms.make
        weights, bias = make("chain_kernel", (w1, w2)), b2
        if b1 is not None:
            through = make("reshape", (make("mul", (w2, make("reshape", (b1,), dims=(1, b1.dims[0], 1, 1)))),),
                           dims=w2.dims)  # fmt: skip
            more = make("sum_kernel", (through,))
            bias = make("add", (b2, more)) if b2 is not None else more
        yield RuleMatch(((outer, remade(view.terms, outer, x, weights, bias, added)),), (outer, inner))


def _pointwise_chain_sample(m: Maker) -> Graph:
    padded = m.pick(True, False)
    inner = m.conv(m.image(low=4), kernel=(1, 1), stride=(1, 1), padding=(0, 0), act="", bias=not padded)
    return m.graph(m.conv(inner, kernel=(3, 3), padding=(1, 1) if padded else (0, 0)))


RULES = (
    Rule(name="fold-batch-norm", what="batch norm after a convolution folded into its weights", source=_METAFLOW,
         find=_batch_norm, sample=_batch_norm_sample, always=True),
    Rule(name="fold-scale", what="a constant factor after a convolution or linear layer folded into its weights",
         source=_TASO, find=_scale, sample=_scale_sample, always=True),
    Rule(name="fuse-activation", what="ReLU or GELU computed with the convolution or linear layer before it",
         source=_METAFLOW, find=_relu, sample=_relu_sample),
    Rule(name="fuse-add", what="an addend computed with the convolution or linear layer before it, or as its bias",
         source=_METAFLOW, find=_add, sample=_add_sample),
    Rule(name="merge-convolutions", what="convolutions of the same input as one, then slices", source=_METAFLOW,
         find=_merge, sample=_merge_sample),
    Rule(name="enlarge-kernel", what="a kernel padded with zeros to the size of a neighbour's", source=_METAFLOW,
         find=_enlarge, sample=_enlarge_sample),
    Rule(name="sum-of-convolutions", what="two convolutions that are added as one of both inputs", source=_TASO,
         find=_sum, sample=_sum_sample),
    Rule(name="fold-residual", what="the input added to a convolution as a one in its kernel", source=_METAFLOW,
         find=_residual, sample=_residual_sample),
    Rule(name="fold-pointwise", what="a pointwise convolution and the next one as one", source=_TASO,
         find=_pointwise_chain, sample=_pointwise_chain_sample),
)  # fmt: skip
