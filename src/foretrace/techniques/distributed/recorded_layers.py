"""Layers of a recording that K-FAC preconditions: their sizes, and what each reads in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from foretrace.cost.operators.operator import Operator
from foretrace.errors import NotApplicableError
from foretrace.graph.taskgraph import TaskGraph
from foretrace.graph.work import operator_work
from foretrace.techniques.memory.blocks import layer_prefixes, recorded_modules
from foretrace.training.second_order.grid import BYTES, FactoredLayer, factored, skips, unsupported
from foretrace.training.second_order.timed import FACTORS, INVERSES, PACKING, part_operator

_CALLS = {"Linear": "aten::linear", "Conv2d": "aten::conv2d"}
# Operations of a matrix product that take as long as a number in what is no product, as measured on a core.
_DECOMPOSED, _SQUARED, _PACKED, _TOUCHED, _CALLED = 9, 3000, 300, 30, 2e6


@dataclass(frozen=True, kw_only=True)
class RecordedLayer:
    """A layer that is preconditioned, as a recording shows it."""

    layer: FactoredLayer
    weight: tuple[int, ...]
    bias: bool
    forward: Operator | None  # its call in the forward pass; None where the recording shows none
    calls: int  # in a step

    @property
    def window(self) -> tuple[str, ...]:
        """As `part_operator` takes it."""
        found = ("bias" if self.bias else "",)
        return found + tuple(self.forward.concrete[3:6]) if self.forward and len(self.weight) == 4 else found

    @property
    def rows(self) -> float:
        """Rows of what it reads in one call, as a matrix: samples, or positions of all samples."""
        return operator_work(self.forward.name, self.forward.text)[1] / (2 * prod(self.weight)) if self.forward else 0.0

    @property
    def read_bytes(self) -> int:
        """Bytes of these rows, and of the gradients of what it writes."""
        return round(BYTES * self.rows * (self.layer.inputs + self.layer.outputs))

    def operations(self, part: str) -> float:
        """Return what a part takes, in operations of a matrix product that take as long."""
        return _CALLED + self._operations(part)

    def _operations(self, part: str) -> float:
        a, g = self.layer.inputs, self.layer.outputs
        if part == FACTORS:
            return self.calls * (2 * self.rows * (a**2 + g**2) + _TOUCHED * (self.rows * (a + g) + a**2 + g**2))
        if part == PACKING:
            return float(_PACKED * (a**2 + g**2))
        if part == INVERSES:
            return float(_DECOMPOSED * (a**3 + g**3) + _SQUARED * (a**2 + g**2))
        return float(4 * a * g * (a + g) + _TOUCHED * a * g)


def operator_of(layers: Sequence[RecordedLayer], part: str) -> Operator:
    """Return a part of K-FAC on all of these layers, to be timed alone."""
    reads = [each.forward.tensor(0) if each.forward else () for each in layers]
    return part_operator(part, reads, [each.weight for each in layers], [each.window for each in layers])


def factored_layers(graph: TaskGraph, skip: str = "") -> tuple[RecordedLayer, ...]:
    """Return the linear layers and convolutions of a recorded model that are trained, but those that `skip` names.

    Raises NotApplicableError where the recording names no parameters, has no such layer, or one without two factors.
    """
    facts = graph.info.recording
    parameters = {(each["root"], each["name"]): each for each in facts.get("parameters", [])}
    modules = [each for each in recorded_modules(facts.get("modules", [])) if each.kind in _CALLS]
    if not parameters:
        raise NotApplicableError("the recording does not name its layers; record with foretrace record.")
    names = [each.path.removeprefix("module.") for each in modules]  # of DistributedDataParallel
    for pattern in filter(None, skip.split(",")):
        if not any(skips(pattern, name) for name in names):
            raise NotApplicableError(f"skip must name layers, got {pattern}; choose of {', '.join(names[:8])}.")
    found = []
    for name, module, inside in zip(names, modules, layer_prefixes(modules, facts, graph.layers), strict=True):
        weight: dict[str, Any] = parameters.get((module.root, f"{module.path}.weight"), {})
        if module.root or not weight.get("trained") or skips(skip, name):
            continue
        shape = tuple(map(int, weight["shape"]))
        bias = (module.root, f"{module.path}.bias") in parameters
        forward = _forward(graph, _CALLS[module.kind], shape, inside)
        if forward is not None and len(shape) == 4 and (groups := (forward.tensor(0) or shape)[1] // shape[1]) > 1:
            raise NotApplicableError(unsupported(name, f"{groups} groups"))
        numbers = [i for i, each in enumerate(facts["modules"]) if (each["root"], each["name"]) == (0, module.path)]
        calls = sum(facts.get("module_calls", []).count(i) for i in numbers)
        layer = factored(name, shape, bias=bias)
        found.append(RecordedLayer(layer=layer, weight=shape, bias=bias, forward=forward, calls=max(calls, 1)))
    if not found:
        raise NotApplicableError("the model has no linear layer and no convolution that is trained.")
    return tuple(found)


def _forward(graph: TaskGraph, name: str, weight: tuple[int, ...], inside: list[int]) -> Operator | None:
    """Return the call of an operator with such a weight, of these layers of the graph where it names them."""
    rows = np.array([each == name for each in graph.names], dtype=np.bool_)[graph.name] & (graph.shape >= 0)
    rows &= np.isin(graph.layer, inside) if inside else True
    for text in dict.fromkeys(graph.shape[rows & ~graph.gone].tolist()):
        operator = Operator(name, graph.shapes[text])
        if operator.tensor(1) == weight and operator.tensor(0):
            return operator
    return None
