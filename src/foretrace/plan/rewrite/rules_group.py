"""Rules on convolutions in groups, on pooling, and on elementwise operators around slices and concatenations."""

from __future__ import annotations

from collections.abc import Iterator

from foretrace.plan.rewrite.rules import GraphView, Maker, Rule, RuleMatch, column, parts, remade
from foretrace.plan.rewrite.rules_conv import zeros
from foretrace.plan.rewrite.shapes import UNARY
from foretrace.plan.rewrite.term import Term
from foretrace.plan.rewrite.terms import Graph

_TASO = "Jia et al., TASO, SOSP 2019"
_METAFLOW = "Jia et al., Optimizing DNN Computation with Relaxed Graph Substitutions, MLSys 2019"
_SHARES = (2, 4, 8)  # groups concatenated at once
_MOST_GROUPS = 64


def _merge_groups(view: GraphView) -> Iterator[RuleMatch]:
    for conv in view.of("conv2d"):
        x, w, bias, added = parts(conv)
        groups = conv["groups"]
        if groups == 1 or not w.constant or w.dims[1] == 1:  # depthwise ones have kernels of their own
            continue
        for share in (*_SHARES, groups):
            if groups % share == 0 and (share < groups or share not in _SHARES or groups == share):
                into = groups // share
                dense = view.terms.make("grouped_kernel", (w,), groups=groups, into=into)
                yield RuleMatch(((conv, remade(view.terms, conv, x, dense, bias, added, groups=into)),), (conv,))


def _merge_groups_sample(m: Maker) -> Graph:
    groups = m.pick(2, 4, 8)
    return m.graph(m.conv(m.image(channels=groups * m.size(2, 3)), groups=groups))


def _group(view: GraphView) -> Iterator[RuleMatch]:
    """Yield convolutions of all slices of a tensor that, concatenated again, are one convolution in groups."""
    for term in view.of("concat"):
        convs = list(term.inputs)
        if term["axis"] != 1 or not all(each.op == "conv2d" and view.private(each) for each in convs):
            continue
        first = convs[0]
        if any(_geometry(each) != _geometry(first) for each in convs) or any(each["added"] for each in convs):
            continue
        source = view.terms.make("concat", [each.inputs[0] for each in convs], axis=1)
        groups = sum(each["groups"] for each in convs)
        weights = view.terms.make("concat", [each.inputs[1] for each in convs], axis=0)
        bias = None
        if any(each["bias"] for each in convs):
            bias = view.terms.make(
                "concat", [parts(each)[2] or zeros(view.terms, each.inputs[1]) for each in convs], axis=0
            )
        if groups <= _MOST_GROUPS:
            yield RuleMatch(((term, remade(view.terms, first, source, weights, bias, groups=groups)),), (term, *convs))


def _geometry(conv: Term) -> tuple[object, ...]:
    keys = ("stride", "padding", "dilation", "act", "groups")
    return (conv.inputs[0].dims[1:], conv.inputs[1].dims, *(conv[key] for key in keys))


def _group_sample(m: Maker) -> Graph:
    count, each = m.size(2, 3), m.size(1, 3)
    sliced = m.pick(True, False)
    whole = m.image(channels=count * each)
    inputs = [
        m.terms.make("slice", (whole,), axis=1, start=i * each, length=each) if sliced else m.input(*_of(whole, each))
        for i in range(count)
    ]
    out, act = m.size(1, 3), m.pick("", "relu")
    convs = [m.conv(e, out=out, kernel=(3, 3), stride=(1, 1), padding=(1, 1), act=act) for e in inputs]
    return m.graph(m.terms.make("concat", convs, axis=1))


def _of(image: Term, channels: int) -> tuple[int, ...]:
    return (image.dims[0], channels, *image.dims[2:])


def _ungroup(view: GraphView) -> Iterator[RuleMatch]:
    """Yield a convolution in few groups as one for every slice of the channels."""
    make = view.terms.make
    for conv in view.of("conv2d"):
        x, w, bias, added = parts(conv)
        groups = conv["groups"]
        if not 1 < groups <= 4 or added is not None or w.dims[1] == 1:
            continue
        wide, out = w.dims[1], w.dims[0] // groups
        pieces = []
        for i in range(groups):
            own = make("slice", (x,), axis=1, start=i * wide, length=wide)
            weight = make("slice", (w,), axis=0, start=i * out, length=out)
            offset = None if bias is None else make("slice", (bias,), axis=0, start=i * out, length=out)
            pieces.append(remade(view.terms, conv, own, weight, offset, groups=1))
        yield RuleMatch(((conv, make("concat", pieces, axis=1)),), (conv,))


def _ungroup_sample(m: Maker) -> Graph:
    groups = m.pick(2, 3, 4)
    return m.graph(m.conv(m.image(channels=groups * m.size(2, 3)), groups=groups))


def _split_input(view: GraphView) -> Iterator[RuleMatch]:
    """Yield a convolution of a concatenation as a sum of convolutions of its parts."""
    make = view.terms.make
    for conv in view.of("conv2d"):
        x, w, bias, added = parts(conv)
        if x.op != "concat" or x["axis"] != 1 or conv["groups"] != 1 or added is not None or len(x.inputs) != 2:
            continue
        if not view.private(x):
            continue
        cut = x.inputs[0].dims[1]
        first = make("slice", (w,), axis=1, start=0, length=cut)
        second = make("slice", (w,), axis=1, start=cut, length=w.dims[1] - cut)
        one = remade(view.terms, conv, x.inputs[0], first, bias, act="")
        yield RuleMatch(((conv, remade(view.terms, conv, x.inputs[1], second, None, one)),), (conv, x))


def _split_input_sample(m: Maker) -> Graph:
    x = m.image()
    other = m.input(x.dims[0], m.size(), *x.dims[2:])
    return m.graph(m.conv(m.terms.make("concat", (x, other), axis=1)))


def _pool_after(view: GraphView) -> Iterator[RuleMatch]:
    """Yield average pooling after a pointwise convolution instead of before it: fewer channels, and a neighbour to
    merge.
    """
    make = view.terms.make
    for conv in view.of("conv2d"):
        pool, w, bias, added = parts(conv)
        if not view.private(pool, "avg_pool") or w.dims[2:] != (1, 1) or conv["stride"] != (1, 1) or added is not None:
            continue
        if conv["padding"] != (0, 0):
            continue
        inner = remade(view.terms, conv, pool.inputs[0], w, None, act="")
        value = make("avg_pool", (inner,), **pool.lookup)
        if bias is not None:
            value = make("add", (value, column(view.terms, bias, 3)))
        if conv["act"]:
            value = make(conv["act"], (value,))
        yield RuleMatch(((conv, value),), (conv, pool))


def _pool(m: Maker, x: Term) -> Term:
    return m.terms.make(
        "avg_pool", (x,), kernel=(3, 3), stride=m.pick((1, 1), (2, 2)), padding=m.pick((0, 0), (1, 1)), ceil=False,
        count_padding=m.pick(True, False),
    )  # fmt: skip


def _pool_after_sample(m: Maker) -> Graph:
    return m.graph(m.conv(_pool(m, m.image()), kernel=(1, 1), stride=(1, 1), padding=(0, 0)))


def _hoist(view: GraphView) -> Iterator[RuleMatch]:
    """Yield an elementwise operator on all slices of a tensor as one on the tensor."""
    make = view.terms.make
    for source, users in view.users.items():
        slices = [each for each in users if each.op == "slice"]
        if len(slices) < 2 or len(slices) != len(users) or not view.runs(source):
            continue
        if sum(each.dims[each["axis"]] for each in slices) != source.dims[slices[0]["axis"]]:
            continue
        after = [view.users.get(each, []) for each in slices]
        if any(not view.alone(each) for each in slices) or any(each[0].op not in UNARY for each in after):
            continue
        first = after[0][0]
        if any(each[0].op != first.op or each[0].attributes != first.attributes for each in after):
            continue
        whole = make(first.op, (source,), **first.lookup)
        pairs = tuple(
            (each[0], make("slice", (whole,), **piece.lookup)) for each, piece in zip(after, slices, strict=True)
        )
        yield RuleMatch(pairs, (*slices, *(each[0] for each in after)))


def _hoist_sample(m: Maker) -> Graph:
    x, cut = m.image(channels=5), m.size(1, 4)
    source = m.conv(x, out=6)
    pieces = [
        m.terms.make("slice", (source,), axis=1, start=start, length=length)
        for start, length in ((0, cut), (cut, 6 - cut))
    ]
    op = m.pick("relu", "tanh", "sigmoid", "silu")
    return m.graph(*(m.terms.make(op, (each,)) for each in pieces))


def _after_concat(view: GraphView) -> Iterator[RuleMatch]:
    """Yield the same elementwise operator on all parts of a concatenation as one on the whole."""
    for term in view.of("concat"):
        first = term.inputs[0]
        if first.op in UNARY and all(
            each.op == first.op and each.attributes == first.attributes and view.private(each) for each in term.inputs
        ):
            whole = view.terms.make("concat", [each.inputs[0] for each in term.inputs], axis=term["axis"])
            new = view.terms.make(first.op, (whole,), **first.lookup)
            yield RuleMatch(((term, new),), (term, *term.inputs))


def _after_concat_sample(m: Maker) -> Graph:
    x, op = m.image(), m.pick("relu", "tanh", "neg")
    other = m.input(x.dims[0], m.size(), *x.dims[2:])
    return m.graph(m.terms.make("concat", [m.terms.make(op, (each,)) for each in (x, other)], axis=1))


RULES = (
    Rule(name="merge-groups", what="a convolution in groups as one in fewer groups, with zeros between", source=_TASO,
         find=_merge_groups, sample=_merge_groups_sample),
    Rule(name="group-convolutions", what="convolutions of several inputs, concatenated, as one in groups", source=_TASO,
         find=_group, sample=_group_sample),
    Rule(name="ungroup-convolution", what="a convolution in two to four groups as one for every slice", source=_TASO,
         find=_ungroup, sample=_ungroup_sample),
    Rule(name="split-input", what="a convolution of a concatenation as a sum of convolutions", source=_TASO,
         find=_split_input, sample=_split_input_sample),
    Rule(name="pool-after-pointwise", what="average pooling moved behind a pointwise convolution", source="",
         find=_pool_after, sample=_pool_after_sample),
    Rule(name="activation-before-slices", what="one activation on the whole instead of one on every slice",
         source=_METAFLOW, find=_hoist, sample=_hoist_sample),
    Rule(name="activation-after-concat", what="one activation on a concatenation instead of one on every part",
         source=_METAFLOW, find=_after_concat, sample=_after_concat_sample),
)  # fmt: skip
