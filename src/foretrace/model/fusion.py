"""Fusion as compilers do it, as a pass over an `OperatorGraph`.

One kernel does the work of several operators, and what passes between them stays in registers. Rules, each by name:

- pointwise: operators that compute one element of the result from one of each input, over the same elements;
- epilogue: pointwise work on the result of a product or convolution that nobody else reads;
- norm: pointwise work behind (or before) a normalisation or softmax over the same elements;
- reduction: a sum with the pointwise work that makes its input.

They are those of XLA's and TorchInductor's schedulers, without horizontal fusion and without recomputing. A value that
others read, or that outlives the step, is still written. Nothing is fused across a phase: what the backward pass reads
is saved, so it is memory anyway. FLOPs are conserved; bytes are those at the boundary, and never more than before.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import prod

from foretrace.cost.calls import Family
from foretrace.model.operator_graph import BEFORE, Node, OperatorGraph, Storage
from foretrace.model.texts import TensorType, text_of_values

_SEARCHED = 400  # groups looked at for a way around; beyond that the two are not fused


class FusionRule(StrEnum):
    """What may become one kernel."""

    POINTWISE = "pointwise"
    EPILOGUE = "epilogue"
    NORM = "norm"
    REDUCTION = "reduction"


ALL = tuple(FusionRule)

# Operators that compute one element from one of each input (without "aten::" and "_" behind).
_POINTWISE = frozenset([
    "abs", "acos", "add", "addcdiv", "addcmul", "asin", "atan", "atan2", "bernoulli", "bitwise_and", "bitwise_not",
    "bitwise_or", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clone", "contiguous", "copy", "cos", "cosh",
    "div", "dropout", "elu", "elu_backward", "eq", "erf", "exp", "expm1", "fill", "floor", "floor_divide", "fmod",
    "ge", "gelu", "gelu_backward", "glu", "gt", "hardsigmoid", "hardsigmoid_backward", "hardswish",
    "hardswish_backward", "hardtanh", "hardtanh_backward", "isinf", "isnan", "le", "leaky_relu",
    "leaky_relu_backward", "lerp", "log", "log1p", "logical_and", "logical_not", "logical_or", "lt", "masked_fill",
    "maximum", "minimum", "mish", "mish_backward", "mul", "native_dropout", "native_dropout_backward", "ne", "neg",
    "ones_like", "pow", "prelu", "reciprocal", "relu", "remainder", "round", "rsqrt", "rsub", "sigmoid",
    "sigmoid_backward", "sign", "silu", "silu_backward", "sin", "sinh", "softplus", "softplus_backward", "sqrt",
    "square", "sub", "tan", "tanh", "tanh_backward", "threshold", "threshold_backward", "tril", "triu", "where",
    "zeros_like", "_to_copy", "zero", "full_like", "nan_to_num", "xlogy", "selu",
])  # fmt: skip
# Kinds of groups, of which the first may take in the second.
_RULES = {
    ("pointwise", "pointwise"): FusionRule.POINTWISE,
    ("product", "pointwise"): FusionRule.EPILOGUE,
    ("rows", "pointwise"): FusionRule.NORM,
    ("pointwise", "rows"): FusionRule.NORM,
    ("channels", "pointwise"): FusionRule.NORM,
    ("pointwise", "reduction"): FusionRule.REDUCTION,
    ("reduction", "pointwise"): FusionRule.REDUCTION,
    ("reduction", "reduction"): FusionRule.REDUCTION,
}
_ROWS = (Family.NORM, Family.SOFTMAX)
_PRODUCTS = (Family.GEMM, Family.CONV)


@dataclass
class _Group:
    """Nodes that become one kernel."""

    members: list[int]
    anchor: int = -1  # product, normalisation or reduction among them
    kind: str = "pointwise"  # pointwise, product, rows, reduction, other
    elements: int = 0  # of the loop
    reduced: int = 0  # elements behind a reduction, 0 if there is none
    before: set[int] = field(default_factory=set)  # groups that must come first, maybe by an old name


def fuse(graph: OperatorGraph, rules: Collection[FusionRule | str] = ALL) -> OperatorGraph:
    """Return the graph as fused kernels. A fused node keeps the name of its product, norm or sum, else it is
    fused::pointwise.

    Blocks are dropped (find them again); a note counts what was fused. Raises ValueError for an unknown rule.
    """
    fuser = _Fuser(graph, frozenset(FusionRule(each) for each in rules))
    fuser.group()
    return fuser.rebuilt()


class _Fuser:
    def __init__(self, graph: OperatorGraph, rules: frozenset[FusionRule]) -> None:
        self.graph, self.rules = graph, rules
        self._family = [Family(each) for each in graph.calls.family.tolist()]
        self._root = self._roots()
        self._made_by = {i: at for at, node in enumerate(graph.nodes) for i in node.outputs}
        self._all_read = {i for node in graph.nodes for i in node.inputs}
        self._readers = self._reading()
        self._groups: dict[int, _Group] = {}
        self._into: list[int] = list(range(len(graph)))  # node -> group, by way of those that it was merged into
        self._used: Counter[FusionRule] = Counter()

    # --- what depends on what ---

    def _roots(self) -> list[int]:
        """Return per tensor the tensor whose elements it holds, views of all of them looked through."""
        tensors = self.graph.tensors
        root = list(range(len(tensors)))
        for at, node in enumerate(self.graph.nodes):
            if self._family[at] != Family.NONE or not node.inputs:
                continue
            first = node.inputs[0]
            for i in node.outputs:
                same = tensors[i].storage == tensors[first].storage and tensors[i].dtype == tensors[first].dtype
                if same and prod(tensors[i].dims) == prod(tensors[first].dims):
                    root[i] = root[first]
        return root

    def _reading(self) -> dict[int, list[int]]:
        """Return per root tensor the nodes that read it or its views; of the views, those that are results."""
        found: dict[int, list[int]] = defaultdict(list)
        for at, node in enumerate(self.graph.nodes):
            for i in dict.fromkeys(self._root[i] for i in node.inputs):
                if not self._looks_through(at) or self._all_read.isdisjoint(node.outputs):
                    found[i].append(at)
        return found

    def _looks_through(self, at: int) -> bool:
        node = self.graph.nodes[at]
        return bool(node.outputs) and all(self._root[i] != i for i in node.outputs)

    def _before(self) -> list[set[int]]:
        """Return per node those that must run before it, by data and by memory that is written in place."""
        nodes, tensors = self.graph.nodes, self.graph.tensors
        before: list[set[int]] = [set() for _ in nodes]
        written: dict[int, int] = {}  # storage -> node that wrote it last
        since: dict[int, list[int]] = defaultdict(list)  # storage -> nodes that read it since
        for at, node in enumerate(nodes):
            for i in node.inputs:
                for each in (i, self._root[i]):
                    if (maker := self._made_by.get(each, -1)) >= 0 and not self._looks_through(maker):
                        before[at].add(maker)
                storage = tensors[i].storage
                if storage in written:
                    before[at].add(written[storage])
                since[storage].append(at)
            view = self._family[at] == Family.NONE
            for i in node.outputs:
                storage = tensors[i].storage
                if view and any(tensors[each].storage == storage for each in node.inputs):
                    continue
                before[at].update(since.pop(storage, ()))
                if storage in written:
                    before[at].add(written[storage])
                written[storage] = at
            before[at].discard(at)
        return before

    # --- grouping ---

    def group(self) -> None:
        """Put every node into the group of a producer where a rule allows it, in program order."""
        before = self._before()
        for at in range(len(self.graph)):
            mine = self._alone(at)
            mine.before = set(before[at])
            self._groups[at] = mine
            if mine.kind == "other":
                continue
            producers = dict.fromkeys(
                self._find(self._made_by[root])
                for root in (self._root[i] for i in self.graph.nodes[at].inputs)
                if root in self._made_by
            )
            for producer in sorted(producers, reverse=True):  # the latest first: what is nearest is cheapest to keep
                self._try(producer, self._find(at), at)

    def _find(self, at: int) -> int:
        while self._into[at] != at:
            self._into[at] = self._into[self._into[at]]
            at = self._into[at]
        return at

    def _alone(self, at: int) -> _Group:
        """Return a node by itself."""
        node, family = self.graph.nodes[at], self._family[at]
        base = node.op.removeprefix("aten::").rstrip("_")
        sizes = [prod(self.graph.tensors[i].dims) for i in node.inputs]
        made = [prod(self.graph.tensors[i].dims) for i in node.outputs]
        if not made:
            return _Group(members=[at], kind="other")
        if node.op == "fused::pointwise" or (node.op.startswith("aten::") and base in _POINTWISE):
            return _Group(members=[at], elements=max(made))
        if family in _PRODUCTS and "backward" not in base:
            return _Group(members=[at], anchor=at, kind="product", elements=made[0])
        if family in _ROWS and "batch_norm" not in base and "backward" not in base and sizes:
            return _Group(members=[at], anchor=at, kind="rows", elements=max(sizes))
        if family == Family.NORM and "backward" not in base and sizes:  # statistics of a whole channel come first
            return _Group(members=[at], anchor=at, kind="channels", elements=max(sizes))
        if family == Family.REDUCTION and sizes and base not in ("nll_loss_forward", "nll_loss2d_forward"):
            return _Group(members=[at], anchor=at, kind="reduction", elements=max(sizes), reduced=max(made))
        return _Group(members=[at], kind="other")

    def _rule(self, first: _Group, second: _Group) -> FusionRule | None:
        """Return the rule by which a group may take in the one that reads its result."""
        kinds, fits = (first.kind, second.kind), first.elements == second.elements
        if kinds == ("reduction", "pointwise"):
            fits = second.elements in (first.elements, first.reduced)
        elif kinds == ("reduction", "reduction"):
            fits = fits and first.reduced == second.reduced
        return _RULES.get(kinds) if fits else None

    def _try(self, producer: int, reader: int, at: int) -> None:
        first, second = self._groups[producer], self._groups[reader]
        if producer == reader or self.graph.nodes[first.members[0]].phase != self.graph.nodes[at].phase:
            return
        rule = self._rule(first, second)
        if rule is None or rule not in self.rules:
            return
        if rule == FusionRule.EPILOGUE and not self._read_inside(first, {*first.members, *second.members}):
            return
        if self._around(producer, reader):
            return
        first.members += second.members
        first.before |= second.before
        if second.kind in ("rows", "reduction"):
            first.anchor, first.kind, first.reduced = second.anchor, second.kind, second.reduced or first.reduced
            first.elements = max(first.elements, second.elements)
        self._into[reader] = producer
        del self._groups[reader]
        self._used[rule] += 1

    def _read_inside(self, group: _Group, inside: set[int]) -> bool:
        """Return whether only these nodes read what the group makes, and it dies within the step."""
        for at in group.members:
            for i in self.graph.nodes[at].outputs:
                readers = self._readers.get(i, [])
                if readers and (self._lives_on(i) or any(each not in inside for each in readers)):
                    return False
        return True

    def _lives_on(self, tensor: int) -> bool:
        storage = self.graph.storages[self.graph.tensors[tensor].storage]
        return storage.dies >= len(self.graph) or storage.born == BEFORE

    def _around(self, producer: int, reader: int) -> bool:
        """Return whether the reader waits for the producer through other groups, too: one kernel cannot be both."""
        floor = min(self._groups[producer].members)
        pending = [each for each in self._needed(reader) if each != producer]
        seen = set(pending)
        while pending:
            each = pending.pop()
            for above in self._needed(each):
                if above == producer:
                    return True
                if above not in seen and max(self._groups[above].members) > floor:
                    seen.add(above)
                    pending.append(above)
            if len(seen) > _SEARCHED:
                return True
        return False

    def _needed(self, group: int) -> set[int]:
        return {found for each in self._groups[group].before if (found := self._find(each)) != group}

    # --- the new graph ---

    def rebuilt(self) -> OperatorGraph:
        """Return kernels in an order in which they can run, and only the tensors and storages that are left."""
        order = self._ordered()
        rows = [(group, self._node(self._groups[group])) for group in order]
        rows = self._without_idle_views(rows)
        return self._packed(rows)

    def _ordered(self) -> list[int]:
        needs = {group: self._needed(group) | self._views_of(group) for group in self._groups}
        after: dict[int, list[int]] = defaultdict(list)
        for group, needed in needs.items():
            for each in needed:
                after[each].append(group)
        left = {group: len(needed) for group, needed in needs.items()}
        ready = [(max(self._groups[group].members), group) for group, count in left.items() if not count]
        heapq.heapify(ready)
        order = []
        while ready:
            _, group = heapq.heappop(ready)
            order.append(group)
            for each in after[group]:
                left[each] -= 1
                if not left[each]:
                    heapq.heappush(ready, (max(self._groups[each].members), each))
        if len(order) != len(self._groups):
            raise AssertionError("fused groups wait for each other")
        return order

    def _views_of(self, group: int) -> set[int]:
        """Return views that a kernel reads from outside; while grouping, what they look at stands for them."""
        members = self._groups[group].members
        own = {i for at in members for i in self.graph.nodes[at].outputs}
        read = {i for at in members for i in self.graph.nodes[at].inputs if self._root[i] not in own}
        found = {self._find(self._made_by[i]) for i in read if i in self._made_by}
        return found - {group}

    def _node(self, group: _Group) -> Node:
        """Return the kernel of a group, over the tensors at its boundary."""
        nodes = self.graph.nodes
        if len(group.members) == 1:
            return nodes[group.members[0]]
        members = sorted(group.members)
        inside = set(members)
        own = {i for at in members for i in nodes[at].outputs}
        inputs = dict.fromkeys(i for at in members for i in nodes[at].inputs if self._root[i] not in own)
        kept = [i for at in members for i in nodes[at].outputs if self._wanted(i, inside)]
        read, written = self._boundary(members, own, set(kept))
        anchor = nodes[group.anchor if group.anchor >= 0 else members[0]]
        text = anchor.text
        if group.anchor < 0:
            values = (self.graph.tensors[i] for i in inputs)
            text = text_of_values(TensorType(dims=each.dims, dtype=each.dtype) for each in values)
        return Node(
            op=anchor.op if group.anchor >= 0 else "fused::pointwise",
            inputs=tuple(inputs),
            outputs=tuple(kept),
            text=text,
            phase=anchor.phase,
            layer=anchor.layer,
            flops=sum(nodes[at].flops for at in members),
            read_bytes=read,
            written_bytes=written,
        )

    def _wanted(self, tensor: int, inside: set[int]) -> bool:
        """Return whether a value must be in memory: others read it, it outlives the step, or it is a result."""
        readers = self._readers.get(tensor, [])
        return not readers or self._lives_on(tensor) or any(each not in inside for each in readers)

    def _boundary(self, members: list[int], own: set[int], kept: set[int]) -> tuple[float, float]:
        """Return bytes read from outside and written for others: every tensor once, as the call that moves most."""
        read: dict[object, float] = {}
        written = 0.0
        for at in members:
            node = self.graph.nodes[at]
            inputs = list(dict.fromkeys(node.inputs))
            for i, share in _shares(self.graph, inputs):
                if self._root[i] not in own:
                    once = min(node.read_bytes * share, float(self.graph.tensors[i].nbytes))  # `x * x` names it twice
                    read[self._root[i]] = max(read.get(self._root[i], 0.0), once)
            if not inputs:
                read["", at] = node.read_bytes
            for i, share in _shares(self.graph, list(node.outputs)):
                if i in kept:
                    written += node.written_bytes * share
        return sum(read.values()), written

    def _without_idle_views(self, rows: list[tuple[int, Node]]) -> list[tuple[int, Node]]:
        """Return views whose readers now take the value from inside their own kernel are gone."""
        read = Counter(i for _, node in rows for i in node.inputs)
        idle: set[int] = set()
        for at, (group, node) in reversed(list(enumerate(rows))):
            if len(self._groups[group].members) > 1 or not self._looks_through(group) or node.flops:
                continue
            if not self._all_read.isdisjoint(node.outputs) and not any(read[i] for i in node.outputs):
                idle.add(at)
                read.subtract(node.inputs)
        return [row for at, row in enumerate(rows) if at not in idle]

    def _packed(self, rows: list[tuple[int, Node]]) -> OperatorGraph:
        graph = self.graph
        place = {at: new for new, (group, _) in enumerate(rows) for at in self._groups[group].members}
        touched = {i for _, node in rows for i in (*node.inputs, *node.outputs)}
        mentioned = {i for node in graph.nodes for i in (*node.inputs, *node.outputs)}
        kept = [i for i in range(len(graph.tensors)) if i in touched or i not in mentioned]
        named = {graph.tensors[i].storage for i in mentioned}  # others exist whatever is fused
        used = {graph.tensors[i].storage for i in kept}
        storages = [i for i in range(len(graph.storages)) if i in used or i not in named]
        tensor_at = {old: new for new, old in enumerate(kept)}
        storage_at = {old: new for new, old in enumerate(storages)}
        touches: dict[int, list[int]] = defaultdict(list)
        nodes = []
        for at, (_, node) in enumerate(rows):
            for i in (*node.inputs, *node.outputs):
                touches[graph.tensors[i].storage].append(at)
            moved = replace(
                node,
                inputs=tuple(tensor_at[i] for i in node.inputs),
                outputs=tuple(tensor_at[i] for i in node.outputs),
            )
            nodes.append(moved)
        tensors = [graph.tensors[i] for i in kept]
        return replace(
            graph,
            nodes=tuple(nodes),
            tensors=tuple(replace(each, storage=storage_at[each.storage]) for each in tensors),
            storages=tuple(self._lifetime(i, touches.get(i, []), len(rows), place) for i in storages),
            blocks=(),
            notes=(*graph.notes, *self._note(len(rows))),
        )

    def _lifetime(self, storage: int, touches: list[int], total: int, place: dict[int, int]) -> Storage:
        """Return births and deaths at the kernels that stand for those nodes; what was kept lives to its reader."""
        old = self.graph.storages[storage]
        born = old.born if old.born == BEFORE else min([*touches, place.get(old.born, total - 1)])
        if old.dies >= len(self.graph):
            return replace(old, born=born, dies=total)
        last = place.get(old.dies, born)
        return replace(old, born=born, dies=max([*touches, last, born]))

    def _note(self, kernels: int) -> list[str]:
        if not self._used:
            return []
        named = ", ".join(f"{count} by {rule}" for rule, count in sorted(self._used.items()))
        return [f"fusion makes {kernels} kernels of {len(self.graph)} operators: {named}."]


def _shares(graph: OperatorGraph, tensors: list[int]) -> list[tuple[int, float]]:
    """Return how the bytes of a call are spread over its tensors: by their size."""
    sizes = [graph.tensors[i].nbytes for i in tensors]
    total = sum(sizes)
    return [(i, size / total if total else 1 / len(tensors)) for i, size in zip(tensors, sizes, strict=True)]
