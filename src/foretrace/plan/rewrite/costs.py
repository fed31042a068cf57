"""What graphs cost: by measuring their operators on this machine, or by a cost model for any device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan
from typing import Any

import msgspec

from foretrace.cost.calls import Family, describe
from foretrace.cost.model import CostModel
from foretrace.graph.taskgraph import Phase
from foretrace.hardware.devices import Device
from foretrace.model.operator_graph import BEFORE, DTYPE_BYTES, Node, OperatorGraph, Role, Storage, Tensor
from foretrace.model.texts import RECORDED
from foretrace.plan.rewrite import ops
from foretrace.plan.rewrite.term import Term
from foretrace.plan.rewrite.terms import Graph

_ATEN = {"concat": "cat", "mul_scalar": "mul", "add_scalar": "add", "avg_pool": "avg_pool2d", "max_pool": "max_pool2d",
         "pad_kernel": "constant_pad_nd"}  # fmt: skip


def signature(term: Term) -> str:
    """Terms with the same one cost the same: operator, attributes, and sizes, strides and types of the inputs."""
    attributes = [[key, str(value)] for key, value in term.attributes]
    inputs = [[each.dims, each.strides, each.dtype] for each in term.inputs]
    return msgspec.json.encode([term.op, attributes, inputs]).decode()


class OperatorCosts(ABC):
    """Seconds of operators. Each distinct one is priced once."""

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
        """Seconds of a run: its operators one after another."""
        self.learn((graph,))
        return sum(self.of_term(each) for each in graph.order())

    def of_term(self, term: Term) -> float:
        """Seconds of one operator that was priced."""
        if term not in self._of:
            self._of[term] = self.priced[signature(term)]
        return self._of[term]

    def way(self, term: Term) -> str:
        """How to compute an operator."""
        return ops.PLAIN

    @abstractmethod
    def price(self, new: dict[str, Term]) -> dict[str, float]:
        """Seconds by signature of operators that differ."""


class ModelCosts(OperatorCosts):
    """By a cost model on a device. What no model can say is left out on both sides, and counted in `unknown`."""

    def __init__(self, model: CostModel, device: Device) -> None:
        super().__init__()
        self.model, self.device = model, device
        self.unknown: dict[str, int] = {}

    def price(self, new: dict[str, Term]) -> dict[str, float]:
        calls = operators(list(new.values()), name="priced").calls
        found = self.model.predict(calls, self.device).seconds.copy()
        found[calls.family == Family.NONE] = 0.0
        seconds = {}
        for (text, term), value in zip(new.items(), found.tolist(), strict=True):
            if isnan(value):
                self.unknown[term.op] = self.unknown.get(term.op, 0) + 1
            seconds[text] = 0.0 if isnan(value) else value
        return seconds


def operators(terms: list[Term], *, name: str) -> OperatorGraph:
    """Operators, inputs before users, as an `OperatorGraph` with FLOPs and bytes; views have none."""
    tensors: list[Tensor] = []
    storages: list[Storage] = []
    index: dict[Term, int] = {}
    last = {each: i for i, term in enumerate(terms) for each in term.inputs}
    made = set(terms)

    def tensor(term: Term, born: int) -> int:
        if term not in index:
            index[term] = len(tensors)
            nbytes = term.size * DTYPE_BYTES.get(term.dtype, 4)
            role = Role.TEMPORARY if term in made else Role.WEIGHT if term.constant else Role.INPUT
            dies = last.get(term, len(terms)) if term in made else len(terms)
            tensors.append(Tensor(dims=term.dims, dtype=term.dtype, storage=len(storages)))
            storages.append(Storage(nbytes=nbytes, role=role, born=born, dies=dies, name=str(term.get("name", ""))))
        return index[term]

    nodes = []
    for i, term in enumerate(terms):
        inputs = tuple(tensor(each, BEFORE) for each in term.inputs)
        op, text = call(term)
        described = describe(op, text, (term.dims,))
        nodes.append(
            Node(
                op=op, inputs=inputs, outputs=(tensor(term, i),), text=text, phase=Phase.FORWARD,
                flops=described.flops, read_bytes=described.read_bytes + _addend_bytes(term),
                written_bytes=described.written_bytes,
            )
        )  # fmt: skip
    return OperatorGraph(
        name=name, nodes=tuple(nodes), tensors=tuple(tensors), storages=tuple(storages), source="rewrite"
    )


def _addend_bytes(term: Term) -> float:
    """Of a convolution or linear layer with an addend: those of the addend. An activation costs it nothing."""
    return float(term.size * DTYPE_BYTES.get(term.dtype, 4)) if term.get("added") else 0.0


def call(term: Term) -> tuple[str, str]:
    """(operator, inputs as JSON) as a recording has them; an addend that is fused is left out."""
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
        from foretrace.plan.rewrite import timing

        for text, (far_s, near_s, way) in timing.measure(new, self.failed, target_s=self.target_s).items():
            self.timed[text] = OperatorTime(far_s=far_s, near_s=near_s, way=way)
        return {text: self._seconds(text) for text in new}

    def _seconds(self, text: str) -> float:
        found = self.timed.get(text)
        return 0.0 if found is None else found.near_s * self.near + found.far_s * (1.0 - self.near)

    def way(self, term: Term) -> str:
        found = self.timed.get(signature(term))
        return ops.PLAIN if found is None else found.way

    def fresh(self, *graphs: Graph) -> MeasuredCosts:
        """Timed again, longer, for these graphs only.

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
