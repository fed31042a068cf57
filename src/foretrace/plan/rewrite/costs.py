"""What graphs cost: by measuring their operators on this machine, or by a cost model for any device.

Operators are timed alone by `foretrace.cost.operators.bench`, with their sizes and strides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import TYPE_CHECKING, Any

import msgspec

from foretrace.cost.calls import Call, Calls, Family, describe
from foretrace.cost.model import CostModel
from foretrace.cost.operators.arguments import BoundCall
from foretrace.cost.operators.operator import Operator
from foretrace.hardware.devices import Device
from foretrace.model.operator_graph import DTYPE_BYTES
from foretrace.model.texts import RECORDED
from foretrace.plan.rewrite import ops
from foretrace.plan.rewrite.term import Term
from foretrace.plan.rewrite.terms import Graph

if TYPE_CHECKING:
    import torch

_NAME = f"{__name__}:prepare"
_waiting: dict[str, tuple[Term, str]] = {}  # by text, while they are measured
_ATEN = {"concat": "cat", "mul_scalar": "mul", "add_scalar": "add", "avg_pool": "avg_pool2d", "max_pool": "max_pool2d",
         "pad_kernel": "constant_pad_nd"}  # fmt: skip


def signature(term: Term) -> str:
    """Return terms with the same one cost the same: operator, attributes, and sizes, strides and types of the
    inputs.
    """
    attributes = [[key, str(value)] for key, value in term.attributes]
    inputs = [[each.dims, each.strides, each.dtype] for each in term.inputs]
    return msgspec.json.encode([term.op, attributes, inputs]).decode()


class OperatorCosts(ABC):
    """Seconds of operators. Each distinct one is priced once."""

    described = "measured"  # in words, where they come from

    def __init__(self) -> None:
        self.priced: dict[str, float] = {}
        self._of: dict[Term, float] = {}

    def learn(self, graphs: Iterable[Graph]) -> None:
        """Price, together, what these graphs have that is not priced yet."""
        new: dict[str, Term] = {}
        for graph in graphs:
            for term in graph.order():
                if term not in self._of:
                    text = signature(term)
                    if text in self.priced:
                        self._of[term] = self.priced[text]
                    else:
                        new.setdefault(text, term)
        if new:
            self.priced |= self.price(new)

    def of(self, graph: Graph) -> float:
        """Return seconds of a run: its operators one after another."""
        self.learn((graph,))
        return sum(self.of_term(each) for each in graph.order())

    def of_term(self, term: Term) -> float:
        """Return seconds of one operator that was priced."""
        if term not in self._of:
            self._of[term] = self.priced[signature(term)]
        return self._of[term]

    def way(self, term: Term) -> str:
        """Return how to compute an operator."""
        return ops.PLAIN

    @property
    def untimed(self) -> dict[str, str]:
        """Operators without a cost, and why; they count as nothing before and after."""
        return {}

    @abstractmethod
    def price(self, new: dict[str, Term]) -> dict[str, float]:
        """Return seconds by signature of operators that differ."""


class ModelCosts(OperatorCosts):
    """By a cost model on a device. What no model can say is left out on both sides, and counted in `unknown`."""

    def __init__(self, model: CostModel, device: Device) -> None:
        super().__init__()
        self.model, self.device = model, device
        self.described = f"{model.name} on {device.short}"
        self.unknown: dict[str, int] = {}

    @property
    def untimed(self) -> dict[str, str]:
        return dict.fromkeys(self.unknown, "the cost model cannot say")

    def price(self, new: dict[str, Term]) -> dict[str, float]:
        calls = Calls.from_rows([work_of(each) for each in new.values()])
        found = self.model.predict(calls, self.device).seconds.copy()
        found[calls.family == Family.NONE] = 0.0
        seconds = {}
        for (text, term), value in zip(new.items(), found.tolist(), strict=True):
            if isnan(value):
                self.unknown[term.op] = self.unknown.get(term.op, 0) + 1
            seconds[text] = 0.0 if isnan(value) else value
        return seconds


def work_of(term: Term) -> Call:
    """Return FLOPs and bytes of an operator; views have none. An addend is read, too, an activation costs nothing."""
    op, text = call(term)
    found = describe(op, text, (term.dims,))
    added = float(term.size * DTYPE_BYTES.get(term.dtype, 4)) if term.get("added") else 0.0
    return replace(found, read_bytes=found.read_bytes + added)


def call(term: Term) -> tuple[str, str]:
    """Return (operator, inputs as JSON) as a recording has them; an addend that is fused is left out."""
    base = _ATEN.get(term.op, term.op)
    op = f"aten::{base}" if "target" not in term.lookup else term.op.replace(".", "::", 1)
    given = term.inputs
    dims: list[Any] = [list(each.dims) for each in given]
    types = [RECORDED.get(each.dtype, each.dtype) for each in given]
    concrete = [""] * len(dims)
    if term.op == "concat":
        dims, types, concrete = [dims, []], ["TensorList", "Scalar"], ["", str(term["axis"])]
    elif term.op == "slice":
        dims, types, concrete = [*dims, [], [], []], [*types, *["Scalar"] * 3], ["", str(term["axis"]), "", ""]
    elif term.op in ("conv2d", "linear"):
        biased = 2 + bool(term["bias"])
        dims = [*dims[:biased], []][:3]
        types = [*types[:biased], ""][:3]
        concrete = [""] * 3
        if term.op == "conv2d":
            dims += [[]] * 4
            types += [*["ScalarList"] * 3, "Scalar"]
            concrete += [*(str(list(term[key])) for key in ("stride", "padding", "dilation")), str(term["groups"])]
    return op, msgspec.json.encode([dims, types, concrete]).decode()


@dataclass(frozen=True, kw_only=True)
class OperatorTime:
    """Seconds of an operator with its data far and near, and the way that is fastest."""

    far_s: float
    near_s: float
    way: str


class MeasuredCosts(OperatorCosts):
    """By timing every distinct operator on this machine, in each way that it can be computed.

    `near` is the share of the operators' data that is found in a cache: `fit` takes it from one measured run of the
    graph that is to be rewritten, since nothing else tells (Calibration does the same for recorded operators).
    """

    def __init__(self, *, target_s: float = 0.004, near: float = 0.5) -> None:
        super().__init__()
        self.target_s, self.near = target_s, near
        self.timed: dict[str, OperatorTime] = {}
        self.failed: dict[str, str] = {}  # operator -> why it could not be timed

    def price(self, new: dict[str, Term]) -> dict[str, float]:
        for text, (far_s, near_s, way) in timed(new, self.failed, target_s=self.target_s).items():
            self.timed[text] = OperatorTime(far_s=far_s, near_s=near_s, way=way)
        return {text: self._seconds(text) for text in new}

    def _seconds(self, text: str) -> float:
        found = self.timed.get(text)
        return 0.0 if found is None else found.near_s * self.near + found.far_s * (1.0 - self.near)

    def way(self, term: Term) -> str:
        found = self.timed.get(signature(term))
        return ops.PLAIN if found is None else found.way

    @property
    def untimed(self) -> dict[str, str]:
        return dict(self.failed)

    def fresh(self, *graphs: Graph) -> MeasuredCosts:
        """Return timed again, longer, for these graphs only.

        A search picks the operators whose times came out low by chance, so what it says of its choice is too good.
        """
        found = MeasuredCosts(target_s=2 * self.target_s, near=self.near)
        found.learn(graphs)
        return found

    def fit(self, graph: Graph, measured_s: float) -> float:
        """Set `near` so that this graph costs what was measured, as far as a share can; returns it."""
        self.learn((graph,))
        known = [self.timed[text] for each in graph.order() if (text := signature(each)) in self.timed]
        far_s, near_s = sum(each.far_s for each in known), sum(each.near_s for each in known)
        self.near = min(max((far_s - measured_s) / (far_s - near_s), 0.0), 1.0) if far_s > near_s else 0.5
        self.priced = {text: self._seconds(text) for text in self.priced}
        self._of.clear()
        return self.near


def timed(terms: dict[str, Term], failed: dict[str, str], *, target_s: float) -> dict[str, tuple[float, float, str]]:
    """Return (seconds with far data, with near data, way) by signature; what cannot be timed is named in `failed`."""
    from foretrace.cost.operators import bench

    asked: dict[str, list[tuple[str, Operator]]] = {}
    for text, term in terms.items():
        for way in ops.ways(term):
            operator = Operator(_NAME, f"{way} {text}")
            _waiting[operator.text] = (term, way)
            asked.setdefault(text, []).append((way, operator))
    try:
        found = bench.measure((each for pairs in asked.values() for _, each in pairs), target_s=target_s)
    finally:
        _waiting.clear()
    times: dict[str, tuple[float, float, str]] = {}
    for text, pairs in asked.items():
        best: tuple[float, float, str] | None = None
        for way, operator in pairs:
            if operator.key in found.seconds:
                far_s = found.seconds[operator.key]
                this = (far_s, min(found.seconds.get(operator.near_key, far_s), far_s), way)
                if best is None or sum(this[:2]) < sum(best[:2]):
                    best = this
            else:
                failed[terms[text].op] = found.failed.get(operator.key, "it was not timed")
        if best is not None:
            times[text] = best
    return times


def prepare(operator: Operator) -> BoundCall:
    """Return the call to be timed."""
    term, way = _waiting[operator.text]
    tensors = tuple(_tensor(each) for each in term.inputs)
    return _Strided(function=_compiled(term, way), args=tensors, kwargs={})


def _compiled(term: Term, way: str) -> Any:
    """Return the calls of a term as a function without our own overhead, as the rewritten module has them."""
    import torch
    from torch import fx

    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(term.inputs))]
    made: list[fx.Node] = []
    for step in ops.steps(term, way):
        args, kwargs = ops.filled(step.args, inputs, made), ops.filled(dict(step.kwargs), inputs, made)
        made.append(graph.call_function(step.target, args, kwargs))
    graph.output(made[-1])
    return fx.GraphModule(torch.nn.Module(), graph).forward


@dataclass(frozen=True, kw_only=True)
class _Strided(BoundCall):
    """A call whose tensors keep their strides when it is copied, holes included."""

    def cloned(self) -> BoundCall:
        return _Strided(function=self.function, args=tuple(_copy(each) for each in self.args), kwargs=self.kwargs)


def _extent(dims: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((n - 1) * step for n, step in zip(dims, strides, strict=True))


def _tensor(term: Term) -> torch.Tensor:
    """Return random positive numbers; zeros where integers are asked for, which are indices into anything."""
    import torch

    dtype: torch.dtype = getattr(torch, term.dtype)
    count = _extent(term.dims, term.strides) if term.size else 0
    if dtype.is_floating_point:
        base = torch.rand(count, generator=torch.Generator().manual_seed(count)).add_(0.1).to(dtype)
    else:
        base = torch.ones(count, dtype=dtype) if dtype == torch.bool else torch.zeros(count, dtype=dtype)
    return base.as_strided(term.dims, term.strides)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    base = tensor.as_strided((_extent(tensor.shape, tensor.stride()) if tensor.numel() else 0,), (1,)).clone()
    return base.as_strided(tensor.shape, tensor.stride())
