"""`product-quantisation`: inference whose convolutions and linear layers look their products up in tables.

On a processor this is mostly slower: patches are copied out, distances are small products, and the nearest prototype
is searched in memory, where oneDNN multiplies at full rate. It may pay in hardware of its own (`foretrace plan
look-ups`). Both forms of a layer are timed alone, or the new one is counted by the numbers that it touches, with a wide
range.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import prod

import numpy as np

from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import Operator
from foretrace.errors import ForetraceError, NotApplicableError
from foretrace.graph.edit import retime
from foretrace.graph.taskgraph import Phase, TaskGraph
from foretrace.graph.work import is_product, operator_work
from foretrace.techniques.base import Prior, Technique, parameter, prior
from foretrace.training.training import Training

_TIMED = "foretrace.training.product_quantised:prepared_layer"
_CALLS = {"aten::conv2d": "Conv2d", "aten::convolution": "Conv2d", "aten::linear": "Linear"}
_LEARNED = 16  # batches that prototypes are learned from
# ns on one core, per number of what is read or written: measured with PyTorch 2.13 on a core with AVX-512
_COPIED_NS, _COMPARED_NS, _MULTIPLIED_NS, _SUMMED_NS, _CALLED_NS = 1.2, 0.9, 0.03, 0.25, 9e4


@dataclass(frozen=True, kw_only=True)
class RecordedProduct:
    """A call of a convolution or linear layer in a recording."""

    row: int  # of the task that carries its work
    call: Operator  # `aten::convolution` (`aten::conv2d` where there is none) or `aten::linear`

    @cached_property
    def inputs(self) -> int:
        """Of one product."""
        return prod(self.call.tensor(1)[1:])

    @cached_property
    def outputs(self) -> int:
        return self.call.tensor(1)[0]

    @cached_property
    def rows(self) -> int:
        """Products of a call with the same weights: samples times positions."""
        return round(operator_work(self.call.name, self.call.text)[1] / (2 * self.inputs * self.outputs))

    def timed(self, what: str) -> Operator:
        """Return the layer, to be timed alone."""
        call = self.call
        return Operator.of(_TIMED, [*call.dims, []], [*call.types, ""], [*call.concrete, what], call.layout)

    def counted_ns(self, length: int, prototypes: int) -> float:
        """Return what a look-up takes by the numbers that it touches."""
        spaces = -(-self.inputs // length)
        return _CALLED_NS + self.rows * (
            _COPIED_NS * self.inputs
            + spaces * prototypes * (_COMPARED_NS + length * _MULTIPLIED_NS)
            + _SUMMED_NS * spaces * self.outputs
        )


@dataclass(frozen=True, kw_only=True)
class ProductQuantisation(Technique):
    """Replace inputs of products by the nearest prototypes, and products by sums of table entries."""

    across = "each"
    summary = "inference that looks products up in tables instead of multiplying"
    source = "AbouElhamayed et al., PQA (TRETS 2024); Jégou et al., product quantization (TPAMI 2011)"
    effort = "layers replaced; to be trained again, accuracy to check"
    needs = "a job that runs its model forward alone, on a processor"

    length: int = parameter(9, doc="numbers of a sub-vector", unit="numbers", least=1)
    prototypes: int = parameter(16, doc="prototypes of each sub-space", least=1)
    distance: str = parameter("l2", doc="how the nearest prototype is found", choices=("l1", "l2"))
    first: bool = parameter(False, doc="replace the first layer that runs, too")
    measured: float | None = prior(
        1.0, 0.8, 1.35, doc="a look-up in a step relative to what it takes timed alone",
        why="alone its tables stay in a cache, and the allocator has other blocks to give",
    )  # fmt: skip
    counted: float | None = prior(
        1.5, 0.35, 5.0, doc="a look-up relative to the numbers that it touches",
        why="it was not timed but counted, and took 2 to 3 times as long with AVX2; foretrace calibrate run times it",
    )  # fmt: skip

    def wants(self, graph: TaskGraph) -> tuple[Operator, ...]:
        try:
            found = self._calls(graph)
        except NotApplicableError:
            return ()
        return tuple(dict.fromkeys(each.timed(what) for each in found for what in ("plain", self._what)))

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        found = dict(super().priors(graph))
        try:
            known = {self._seconds(graph, each) is not None for each in self._calls(graph)}
        except NotApplicableError:
            known = {False}
        if True not in known:
            del found["measured"]
        if False not in known:
            del found["counted"]
        return found

    def change(self, graph: TaskGraph) -> TaskGraph:
        found, values = self._calls(graph), self.values(graph)
        dur = graph.dur.astype(np.float64)
        for each in found:
            timed = self._seconds(graph, each)
            if timed is not None:
                dur[each.row] = max(dur[each.row] + 1e9 * (timed[1] * values["measured"] - timed[0]), 0.0)
            else:
                dur[each.row] = values["counted"] * each.counted_ns(self.length, self.prototypes)
        mask = graph.mask(np.array([each.row for each in found], dtype=np.int64))
        larger = 1.0 * sum(-(-each.inputs // self.length) * self.prototypes * each.outputs for each in found)
        larger /= sum(each.inputs * each.outputs for each in found)
        return retime(graph, mask, dur[mask], what=f"{{}} looked up in tables of {larger:.2g} × the numbers of weights")

    @property
    def _what(self) -> str:
        return f"{self.length} {self.prototypes} {self.distance}"

    def _seconds(self, graph: TaskGraph, each: RecordedProduct) -> tuple[float, float] | None:
        """Return seconds of the layer as it is, and looked up, each timed alone."""
        known = Calibration.of(graph)
        plain, new = known.time_s(each.timed("plain")), known.time_s(each.timed(self._what))
        return None if plain is None or new is None else (plain, new)

    def _calls(self, graph: TaskGraph) -> list[RecordedProduct]:
        if graph.info.platform != "cpu":
            raise self.refuse("what a look-up takes on a device was never measured; record on a processor.")
        if np.any((graph.phase == Phase.BACKWARD) & ~graph.gone):
            raise self.refuse(
                "it is for inference, and the recording shows a backward pass; record a job that runs forward alone."
            )
        found = recorded_products(graph)
        if not self.first and found:
            left = graph.layer[found[0].row]
            found = [each for each in found if graph.layer[each.row] != left]
        if not found:
            raise self.refuse("the recording shows no Linear or Conv2d of one group with its sizes, but the first.")
        if self.prototypes > (most := _LEARNED * min(each.rows for each in found)):
            raise self.refuse(
                f"{self.prototypes} prototypes need as many samples, and a layer meets {most} in the {_LEARNED} "
                "batches that they are learned from; give fewer prototypes or larger batches."
            )
        return found

    def realise(self, training: Training) -> Training:
        import torch

        from foretrace.training.product_quantised import Quantiser, quantise

        batches = list(islice(training.batches(), _LEARNED))
        if not batches:
            raise self.refuse("the loader gives no batch to learn prototypes from.")
        model = training.model
        before = [each._version for each in model.parameters()]
        quantiser = Quantiser(length=self.length, prototypes=self.prototypes, distance=self.distance)  # type: ignore[arg-type]
        try:
            with torch.random.fork_rng(devices=[]):  # looking must not move dropout masks
                if training.run is None:
                    raise ForetraceError("its step trains; give a job whose step runs the model forward alone.")
                training.step(batches[0])
                if [each._version for each in model.parameters()] != before:
                    raise ForetraceError("its step changes weights; give a job that runs the model forward alone.")
                quantise(model, lambda: [training.step(each) for each in batches], quantiser, first=self.first)
                training.step(batches[0])
        except ForetraceError as error:
            raise self.refuse(str(error)) from None
        except AttributeError as error:
            raise self.refuse(f"the model reads weights of its layers itself ({error}).") from error
        return training


def recorded_products(graph: TaskGraph) -> list[RecordedProduct]:
    """Return calls of modules Conv2d of one group and Linear, in program order."""
    names = np.array(graph.names)
    outer = np.isin(graph.op, np.flatnonzero(np.isin(names, list(_CALLS)))) & (graph.shape >= 0)
    work = np.array([is_product(name) for name in graph.names], dtype=np.bool_)[graph.op] & (graph.op >= 0)
    work &= graph.flops > 0
    kinds = [path.rpartition(".")[2].rpartition("_")[0] for path in graph.layers]
    found, last = [], dict[int, Operator]()
    for row in np.flatnonzero((outer | work) & (graph.layer >= 0) & ~graph.gone).tolist():
        if outer[row]:
            last[int(graph.lane[row])] = Operator(graph.names[graph.op[row]], graph.shapes[graph.shape[row]])
        call = last.get(int(graph.lane[row]))
        if work[row] and call is not None and _CALLS[call.name] == kinds[graph.layer[row]]:
            x, weight = call.tensor(0), call.tensor(1)
            one = len(weight) == 2 or (len(weight) == len(x) == 4 and weight[1] == x[1])
            if one and call.type(0) == "float" and min(*x, *weight) > 0:
                found.append(RecordedProduct(row=row, call=call))
    return found
