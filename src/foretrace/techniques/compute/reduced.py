"""What every operator of a float32 CPU recording would run on under autocast, worked out from names and sizes alone.

A recording says which sizes an operator took, not which tensors. So the forward pass is walked in program order, and
the type of the latest tensor of every size is remembered. Operators of autocast's lower-precision list cast their
float32 inputs; those of its float32 list cast back; all others follow their inputs, by PyTorch's type promotion. The
sum of two tensors of one size joins the latest with the running sum of that size (a residual stream): 16 bit where
the stream began with a convolution, float32 where it began with an embedding. A backward operator runs on the types of
the forward operator that it belongs to, found by name and layer, last one first; gradients return through the casts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from foretrace.arrays import Int64
from foretrace.cost.operators.operator import Operator
from foretrace.cost.operators.twins import Twins
from foretrace.graph.taskgraph import Phase, TaskGraph, TaskKind
from foretrace.graph.work import operator_work
from foretrace.techniques.compute.autocast import CPU_LOWER, CPU_SINGLE
from foretrace.techniques.compute.batching import parameter_shapes

SINGLE, LIST = "float", "TensorList"
_NODE = re.compile(r"(?:autograd::engine::evaluate_function: )?(?:torch::autograd::)?(\w+?)(?:Backward\d*)?$")
_NORMS = ("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "_batch_norm_impl_index")
_SUMS = frozenset(["add", "add_", "sub", "sub_"])
_MIXING = _SUMS | {"rsub", "mul", "mul_", "div", "div_", "where"}
_TABLES = ("embedding", "index_select", "randn", "rand", "zeros", "ones", "full", "arange", "scalar_tensor")
_MATH_ATTENTION = "_scaled_dot_product_attention_math"  # computes in float32 whatever it is given
_CASTS = ("to", "_to_copy")
_FLOAT_CODE = "6"  # c10::ScalarType of float32, as recorded


@dataclass(frozen=True, kw_only=True)
class Cast:
    """One cast that autocast adds."""

    row: int  # the task it comes before (forward) or after (backward)
    dims: tuple[int, ...]
    source: str  # recorded types
    target: str
    backward: bool


@dataclass(kw_only=True)
class _Call:
    """One operator call of the walk."""

    name: str  # without "aten::"
    operator: Operator
    types: list[str]
    lower: bool = False  # in 16 bit by autocast's list, or inside such an operator
    single: bool = False  # in float32 by autocast's list, or inside such an operator
    result: str = SINGLE
    given: str = SINGLE  # type of its first input before any cast
    back: list[tuple[tuple[int, ...], str, str]] = field(default_factory=list)  # casts that its gradients go through


@dataclass(frozen=True, kw_only=True, eq=False)
class Reduced:
    """Autocast as inferred on one graph."""

    twins: Twins  # tasks that do the work of their operator, and what they become
    casts: tuple[Cast, ...]
    entered: Int64  # tasks that begin an operator of autocast's lists
    types: dict[int, Operator]  # what changed operators become, by row, those that only hand on among them


@lru_cache(maxsize=2)
def reduce(graph: TaskGraph, half: str) -> Reduced:
    """Return autocast to the recorded type `half` on the forward and backward pass of a CPU recording."""
    return _Walk(graph, half).run()


class _Walk:
    def __init__(self, graph: TaskGraph, half: str) -> None:
        self.graph, self.half = graph, half
        self.operators: dict[tuple[int, int], Operator] = {}
        self.parameters = parameter_shapes(graph)
        self.own_time: dict[tuple[int, int], float] = defaultdict(float)
        self.whole_time: dict[tuple[int, int], float] = defaultdict(float)
        self.found: list[tuple[int, tuple[int, int], Operator | None]] = []
        self.casts: list[Cast] = []
        self.entered: list[int] = []
        self._begin()

    def _begin(self) -> None:
        """Begin a new forward pass: autocast's cache is empty."""
        self.state: dict[int, str] = {}
        self.stream: dict[int, str] = {}
        self.latest = ""
        self.cached: set[tuple[Any, ...]] = set()
        self.calls: dict[str, list[tuple[int, _Call]]] = defaultdict(list)
        self.gradient = SINGLE
        self.going_back = False

    def run(self) -> Reduced:
        graph = self.graph
        stack: list[tuple[tuple[int, int], _Call | None]] = []
        node: tuple[_Call | None, int] = (None, -1)
        for row in np.flatnonzero(~graph.gone & ~graph.on_device).tolist():
            op, phase = int(graph.op[row]), int(graph.phase[row])
            if graph.kind[row] != TaskKind.OPERATOR or op < 0:
                self._leave(node)
                stack, node = [], (None, -1)
                continue
            if phase not in (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD):
                continue
            if phase == Phase.FORWARD and self.going_back:
                self._begin()
            key = (op, int(graph.shape[row]))
            place = next((i for i, (each, _) in enumerate(stack) if each == key), None)
            if place is not None:
                del stack[place + 1 :]
            else:
                parents = [call for _, call in stack if call is not None]
                if phase == Phase.BACKWARD:
                    self.going_back = True
                    if graph.names[op].startswith("autograd::engine::evaluate_function"):
                        self._leave(node)
                        stack, node = [], (self._node(graph.names[op], int(graph.layer[row])), row)
                    call = self._backward(row, key, node[0])
                else:
                    call = self._forward(row, key, parents)
                stack.append((key, call))
            if node[1] >= 0:
                node = (node[0], row)
            call = stack[-1][1]
            if key[1] >= 0:
                changed = call is not None and call.types != call.operator.types
                after = call.operator.with_types(call.types) if call is not None and changed else None
                self.found.append((row, key, after))
                self.own_time[key] += float(graph.dur[row])
            for each in {each for each, _ in stack}:
                self.whole_time[each] += float(graph.dur[row])
        self._leave(node)
        return Reduced(
            twins=self._twins(),
            casts=tuple(self.casts),
            entered=np.array(self.entered, dtype=np.int64),
            types={row: twin for row, _, twin in self.found if twin is not None},
        )

    def _twins(self) -> Twins:
        """Return changed operators, at the tasks that do their work: what only hands on to others is dispatch."""
        pairs: dict[tuple[Operator, Operator | None], int] = {}
        index: list[int] = []
        for _, key, twin in self.found:
            mine = twin if self.own_time[key] >= 0.5 * self.whole_time[key] else None
            index.append(pairs.setdefault((self._operator(key), mine), len(pairs)))
        before, after = zip(*pairs, strict=True) if pairs else ((), ())
        rows = np.array([row for row, _, _ in self.found], dtype=np.int64)
        return Twins.paired(self.graph, rows, np.array(index, dtype=np.int64), before, after)

    def _operator(self, key: tuple[int, int]) -> Operator:
        if key not in self.operators:
            text = self.graph.shapes[key[1]] if key[1] >= 0 else "[[],[],[]]"
            self.operators[key] = Operator(self.graph.names[key[0]], text)
        return self.operators[key]

    def _forward(self, row: int, key: tuple[int, int], parents: list[_Call]) -> _Call | None:
        operator = self._operator(key)
        if not operator.name.startswith("aten::"):
            return None
        name = operator.name.removeprefix("aten::")
        call = _Call(name=name, operator=operator, types=operator.types)
        outer = next((each for each in reversed(parents) if each.lower or each.single), None)
        if name == _MATH_ATTENTION and outer is not None and outer.lower:
            self._attention_in_single(row, call, outer)
        elif outer is not None:
            call.lower, call.single, call.result = outer.lower, outer.single, outer.result
            call.given, call.back = outer.given, outer.back
            if call.lower:
                call.types = [self._halved(each) for each in call.types]
        elif name in CPU_LOWER:
            self._lower(row, call)
        elif name in CPU_SINGLE or (not parents and _to_float(operator)):
            self._single(row, call)
        else:
            self._follow(call, parents)
        self.calls[_plain(name)].append((int(self.graph.layer[row]), call))
        return call

    def _lower(self, row: int, call: _Call) -> None:
        """Lower an operator that autocast gives 16-bit inputs."""
        self.entered.append(row)
        call.lower, call.result = True, self.half
        dims = call.operator.dims
        first = next((i for i, each in enumerate(call.operator.types) if each == SINGLE and len(dims[i]) > 1), -1)
        for i, each in enumerate(call.operator.types):
            if each != SINGLE or not dims[i]:
                continue
            size = tuple(dims[i])
            if i != first and size in self.parameters:
                weight = (int(self.graph.layer[row]), call.name, i, size)
                if weight in self.cached:
                    continue
                self.cached.add(weight)
                produced = True
            else:
                produced = self.latest != ""
                kind = self._kind(size)
                if i == first:
                    call.given = kind
                if kind == self.half:
                    continue
            self.casts.append(Cast(row=row, dims=size, source=SINGLE, target=self.half, backward=False))
            if produced:
                call.back.append((size, self.half, SINGLE))
        call.types = [self._halved(each) for each in call.types]
        self._made(_output(call.operator), self.half)

    def _single(self, row: int, call: _Call) -> None:
        """Cast for an operator that autocast gives float32 inputs."""
        call.single = True
        for size, each in zip(call.operator.dims, call.operator.types, strict=True):
            if each == SINGLE and size and self._kind(tuple(size)) == self.half:
                self.casts.append(Cast(row=row, dims=tuple(size), source=self.half, target=SINGLE, backward=False))
                call.back.append((tuple(size), SINGLE, self.half))
                call.given = self.half
        self._made(_output(call.operator), SINGLE)

    def _attention_in_single(self, row: int, call: _Call, outer: _Call) -> None:
        """Cast for attention without a kernel of its own: its inputs are cast back, and its result once more."""
        call.single, call.result, call.given = True, SINGLE, self.half
        sizes = [tuple(size) for size in call.operator.dims[:3]]
        for size, source, target in [*((size, self.half, SINGLE) for size in sizes), (sizes[0], SINGLE, self.half)]:
            self.casts.append(Cast(row=row, dims=size, source=source, target=target, backward=False))
            outer.back.append((size, target, source))

    def _follow(self, call: _Call, parents: list[_Call]) -> None:
        """Follow an operator that runs on what it is given, or on what the operator around it was given."""
        dims, types = call.operator.dims, call.operator.types
        tensors = [i for i, each in enumerate(types) if each == SINGLE and dims[i]]
        if call.name.startswith(_TABLES):
            self._made(_output(call.operator) if call.name == "embedding" else 0, SINGLE)
            return
        given = {
            prod(size): kind
            for parent in parents
            for size, kind in zip(parent.operator.dims, parent.types, strict=True)
            if size and kind in (SINGLE, self.half)
        }
        kinds = {i: given.get(prod(dims[i]), self._kind(tuple(dims[i]))) for i in tensors}
        if any(norm in call.name for norm in _NORMS):
            kinds = {i: kind if i == tensors[0] else SINGLE for i, kind in kinds.items()}
            call.result = kinds[tensors[0]] if tensors else SINGLE
        else:
            pair = call.name in _SUMS and len(tensors) > 1 and prod(dims[tensors[0]]) == prod(dims[tensors[1]])
            if pair and not parents:
                size = prod(dims[tensors[0]])
                kinds[tensors[0]] = self.stream.get(size, kinds[tensors[0]])
            lists = [i for i, each in enumerate(types) if each == LIST and dims[i]]
            for i in lists:
                kinds[i] = _wider([self._kind(tuple(each)) for each in dims[i] if each], self.half)
            call.result = _wider(list(kinds.values()), self.half) if kinds else SINGLE
            if call.name.endswith("_") and tensors:
                call.result = kinds[tensors[0]]
            mixed = [i for i in tensors if kinds[i] == self.half] if call.result != self.half else []
            call.back.extend((tuple(dims[i]), SINGLE, self.half) for i in mixed if call.name in _MIXING)
        if tensors:
            call.given = kinds[tensors[0]]
        halves = [i for i, kind in kinds.items() if kind == self.half]
        call.types = [self._halved(each) if i in halves else each for i, each in enumerate(types)]
        if kinds:
            size = _output(call.operator)
            self._made(size, call.result)
            if call.name in _SUMS and len(tensors) > 1:
                self.stream[size] = call.result

    def _kind(self, size: tuple[int, ...]) -> str:
        """Return the type of the latest tensor of this size."""
        if prod(size) in self.state:
            return self.state[prod(size)]
        return SINGLE if size in self.parameters else self.latest or SINGLE

    def _made(self, size: int, kind: str) -> None:
        if size > 1:
            self.state[size] = kind
            self.stream.setdefault(size, kind)
        self.latest = kind

    def _halved(self, kind: str) -> str:
        return self.half if kind == SINGLE else f"{LIST}:{self.half}" if kind == LIST else kind

    def _node(self, name: str, layer: int) -> _Call | None:
        """Return the forward call that a node of the backward pass belongs to, taken off the list."""
        match = _NODE.match(name)
        plain = _plain(match.group(1)) if match else ""
        calls = self.calls.get(plain) or self.calls.get("_" + plain) or []
        if not calls:
            if name.endswith("AccumulateGrad"):
                return None
            return _Call(
                name="", operator=Operator("", "[[],[],[]]"), types=[], result=self.gradient, given=self.gradient
            )
        place = next((i for i in range(len(calls) - 1, -1, -1) if calls[i][0] == layer), len(calls) - 1)
        return calls.pop(place)[1]

    def _backward(self, row: int, key: tuple[int, int], node: _Call | None) -> _Call | None:
        operator = self._operator(key)
        if node is None or not operator.name.startswith("aten::"):
            return None
        call = _Call(name=operator.name.removeprefix("aten::"), operator=operator, types=operator.types)
        if node.lower:
            exact = 5 if "attention" in call.name and call.name.endswith("_backward") else -1  # logsumexp
            call.types = [each if i == exact else self._halved(each) for i, each in enumerate(call.types)]
        elif node.result == self.half and not node.single:
            tensors = [i for i, each in enumerate(call.types) if each == SINGLE and operator.dims[i]]
            if any(norm in call.name for norm in _NORMS):
                tensors = tensors[:2]  # gradient and input; statistics and weights are float32
            call.types = [self._halved(each) if i in tensors else each for i, each in enumerate(call.types)]
        return call

    def _leave(self, node: tuple[_Call | None, int]) -> None:
        """Leave a node of the backward pass: its gradients continue through the casts of its inputs."""
        call, row = node
        if call is None or row < 0:
            return
        for dims, source, target in call.back:
            self.casts.append(Cast(row=row, dims=dims, source=source, target=target, backward=True))
        call.back.clear()
        self.gradient = call.given


def _to_float(operator: Operator) -> bool:
    """Return whether a script needs float32, which is what it has in the recording."""
    asked = operator.name.removeprefix("aten::") in _CASTS and operator.concrete[1:2] == [_FLOAT_CODE]
    return asked and operator.types[:1] == [SINGLE]


def _wider(kinds: list[str], half: str) -> str:
    return half if kinds and all(kind == half for kind in kinds) else SINGLE


def _plain(name: str) -> str:
    """Return a name as forward operators and backward nodes share it: "_log_softmax" and "LogSoftmaxBackward0"."""
    inner = "_" if name.startswith("_") else ""
    return inner + name.replace("_", "").lower().removesuffix("forward")


def _output(operator: Operator) -> int:
    """Return elements of the result, as far as inputs tell; 0 where they do not."""
    name, dims = operator.name.removeprefix("aten::"), operator.dims
    sizes: list[list[int]] = [each for each in dims if each and all(isinstance(n, int) for n in each)]
    if name == "cat" and dims and dims[0]:
        return int(sum(prod(each) for each in dims[0]))
    if name == "embedding":
        return int(prod(dims[1]) * dims[0][-1])
    if len(sizes) >= 2:
        if name == "linear":
            return prod(sizes[0][:-1]) * (sizes[1][0] if len(sizes[1]) > 1 else 1)
        if "conv" in name and "transpose" not in name:
            return round(operator_work(operator.name, operator.text)[1] / 2 / max(prod(sizes[1][1:]), 1))
        if name in ("mm", "bmm", "matmul", "addmm", "baddbmm"):
            a, b = (sizes[-2], sizes[-1]) if name in ("addmm", "baddbmm") else sizes[:2]
            return prod(a[:-1]) * (b[-1] if len(b) > 1 else 1)
        if name.startswith(("scaled_dot_product", "_scaled_dot_product")):
            return prod(sizes[0][:-1]) * sizes[2][-1] if len(sizes) > 2 else prod(sizes[0])
        if name == "mkldnn_rnn_layer":
            return prod(sizes[0][:-1]) * sizes[2][-1]
    if name == "unbind" and sizes:
        axis = operator.concrete[1] if len(operator.concrete) > 1 else "0"
        return prod(sizes[0]) // max(sizes[0][int(axis or 0)], 1)
    if name in ("expand", "repeat"):
        return 0
    return max((prod(each) for each in sizes), default=0)
