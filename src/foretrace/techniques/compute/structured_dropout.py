"""`structured-dropout`: the same units dropped for a whole batch, so that the products of an LSTM shrink.

Ordinary dropout multiplies with masks and leaves the products as large as they were. Where a unit is dropped for all
samples of a batch, its column of the weight takes part in none of the three products of a connection (forward, gradient
of what was fed, gradient of the weight). Gathering the kept columns and scattering gradients costs a little; the gates'
pointwise work stays.

The recording must be of `foretrace.training.structured_lstm.DropoutLSTM`, an LSTM with ordinary dropout whose products
appear one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from foretrace.arrays import Int64
from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import Operator
from foretrace.errors import NotApplicableError
from foretrace.graph.edit import scale
from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.techniques.base import Prior, Technique, parameter, prior
from foretrace.training.structured_parts import BACKWARD, DRAW, FORWARD, INPUT, RECURRENT, WEIGHT, LayerPart
from foretrace.training.training import Training

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class StructuredDropout(Technique):
    """Replace ordinary dropout of LSTMs by one whose products are compacted to the kept units."""

    across = "each"
    summary = "LSTM dropout of the same units for a whole batch: products shrink to the kept units"
    source = "Sarma et al., Structured in Space, Randomized in Time, NeurIPS 2021, sections 3 and 4"
    effort = "modules replaced; dropout of other units, accuracy to check"

    p: float = parameter(0.5, doc="probability that a unit is dropped", above=0, below=1)
    connections: str = parameter(
        "both",
        doc="what is dropped this way: input of every layer, or both input and recurrent",
        choices=("input", "both"),
    )
    span: int = parameter(
        0, doc="time steps after which units are redrawn; 0: once per sequence and training step", unit="time steps",
        least=0,
    )  # fmt: skip
    measured: float | None = prior(
        1.0,
        0.9,
        1.1,
        doc="compacted products in a step relative to what they take timed alone",
        why="alone, activations come from a cache that other layers use meanwhile in a step",
    )
    efficiency: float | None = prior(
        1.15,
        1.0,
        1.4,
        doc="time of a compacted product relative to its share of the work, gathers included",
        why="gathers take 5 to 20 % of a product over many time steps, and small products are less efficient",
    )

    def wants(self, graph: TaskGraph) -> tuple[Operator, ...]:
        try:
            found = self._places(graph)
        except NotApplicableError:
            return ()
        parts = dict.fromkeys(each.part for each in found)
        return tuple(each for part in parts for each in self._pair(part))

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        found = dict(super().priors(graph))
        try:
            known = {self._ratio(Calibration.of(graph), each.part) is not None for each in self._places(graph)}
        except NotApplicableError:
            known = {False}
        if False not in known:
            del found["efficiency"]
        elif True not in known:
            del found["measured"]
        return found

    def change(self, graph: TaskGraph) -> TaskGraph:
        found = self._places(graph)
        values, calibration = self.values(graph), Calibration.of(graph)
        factor = np.ones(len(graph))
        for place in found:
            ratio = self._ratio(calibration, place.part)
            if ratio is not None:
                by = ratio * values["measured"]
            elif place.part.what == DRAW:
                by = 1.0 / place.part.batch  # one number per unit, not per unit and sample
            elif self.span:
                raise self.refuse(
                    f"what redrawing units with span={self.span} costs is known from measurements only; run foretrace "
                    "calibrate run on the recording, or ask for span=0."
                )
            else:
                by = (1.0 - self.p) * values["efficiency"]
            factor[place.rows] = by
        mask = graph.mask(np.concatenate([each.rows for each in found]))
        mask &= ~graph.gone
        return scale(graph, mask, factor[mask])

    def realise(self, training: Training) -> Training:
        from foretrace.training.structured_lstm import DropoutLSTM, StructuredDropoutLSTM

        mine = [
            (name, module)
            for name, module in training.model.named_modules()
            if isinstance(module, DropoutLSTM) and not isinstance(module, StructuredDropoutLSTM)
        ]
        if not mine:
            raise self.refuse(
                "the model has no LSTM with ordinary dropout; use foretrace.training.structured_lstm.DropoutLSTM "
                "where it has torch.nn.LSTM."
            )
        model = training.model
        for name, module in mine:
            if self.connections == "both" and module.connections == "input":
                raise self.refuse(f"{name or 'the model'} has no dropout on its recurrent connections; {_ONLY_INPUT}")
            if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
                raise self.refuse(f"{name or 'the model'} has hooks, which would be lost; remove them first.")
            model = _with(
                model,
                name,
                StructuredDropoutLSTM.taking_over(
                    module, p=self.p, connections=module.connections, structured=self.connections, span=self.span
                ),
            )
        return replace(training, model=model)

    def _places(self, graph: TaskGraph) -> list[LstmCall]:
        """Return where the recording shows what shrinks; refuses where there is nothing."""
        found = places(graph)
        if not found:
            raise self.refuse(
                "the recording shows no LSTM with ordinary dropout (foretrace.training.structured_lstm.DropoutLSTM, "
                "recorded with shapes); torch.nn.LSTM hides its products in one operator."
            )
        if self.connections == INPUT:
            return [each for each in found if each.part.connection == INPUT]
        if all(each.part.connection == INPUT for each in found):
            raise self.refuse(f"the recorded LSTM has no dropout on its recurrent connections; {_ONLY_INPUT}")
        return found

    def _pair(self, part: LayerPart) -> tuple[Operator, Operator]:
        """Return the part with ordinary and with structured dropout, to be timed alone."""
        return part.operator(self.p, None), part.operator(self.p, self.span)

    def _ratio(self, calibration: Calibration, part: LayerPart) -> float | None:
        before, after = (calibration.time_s(each) for each in self._pair(part))
        return after / before if before and after else None


_ONLY_INPUT = "ask for connections=input."


def _with(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Return the model with another module of this dotted name; the module itself where the name is empty."""
    if not name:
        return module
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
    return model


_FORWARD, _BACKWARD = "LSTMLayer", "LSTMLayerBackward"
_DRAWN = ("aten::rand", "aten::uniform_", "aten::lt_", "aten::mul_")
_X, _W_IH, _MASK_X, _MASK_H = 0, 3, 6, 7  # arguments of LSTMLayer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LstmCall:
    """One part of one layer in one step, and its tasks."""

    part: LayerPart
    rows: Int64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One call of a layer, by its sizes."""

    time_steps: int
    batch: int
    inputs: int
    hidden: int
    drops_input: bool
    drops_recurrent: bool

    @classmethod
    def of(cls, operator: Operator) -> _Layer | None:
        """Make it from the recorded arguments; None where they are not those of a layer with a mask."""
        dims = operator.dims
        if len(dims) <= _MASK_H or len(dims[_X]) != 3 or len(dims[_W_IH]) != 2:
            return None
        (time_steps, batch, inputs), (gates, _) = dims[_X], dims[_W_IH]
        drops = len(dims[_MASK_X]) == 3, len(dims[_MASK_H]) == 3
        if not any(drops):
            return None
        return cls(
            time_steps=time_steps,
            batch=batch,
            inputs=inputs,
            hidden=gates // 4,
            drops_input=drops[0],
            drops_recurrent=drops[1],
        )

    def part(self, what: str, connection: str) -> LayerPart:
        return LayerPart(
            what=what,
            connection=connection,
            time_steps=self.time_steps,
            batch=self.batch,
            units=self.inputs if connection == INPUT else self.hidden,
            gates=4 * self.hidden,
        )


def places(graph: TaskGraph) -> list[LstmCall]:
    """Return all parts with ordinary dropout that structured dropout would change, in program order."""
    found: list[LstmCall] = []
    names = {name: i for i, name in enumerate(graph.names)}
    marked = [names[each] for each in (_FORWARD, _BACKWARD) if each in names]
    for lane in np.unique(graph.lane[np.isin(graph.op, marked)]).tolist():
        found += _Thread(graph, lane).places()
    return found


class _Thread:
    """The tasks of one thread, cut into runs between stretches of Python."""

    def __init__(self, graph: TaskGraph, lane: int) -> None:
        self.graph = graph
        self.rows = np.flatnonzero((graph.lane == lane) & ~graph.gone)
        python = graph.kind[self.rows] == TaskKind.PYTHON
        bounds = np.flatnonzero(np.diff(np.concatenate([[True], python, [True]]).astype(np.int8)))
        self.runs = [self.rows[begin:end] for begin, end in bounds.reshape(-1, 2).tolist()]

    def places(self) -> list[LstmCall]:
        """Return parts of all layers; a backward pass belongs to the last forward pass of its sizes that had
        none yet.
        """
        found: list[LstmCall] = []
        waiting: list[_Layer] = []
        drawn: list[Int64] = []
        for run in self.runs:
            names = [self._op(row) for row in run]
            if _FORWARD in names:
                layer = _Layer.of(self._operator(int(run[names.index(_FORWARD)])))
                if layer is not None:
                    waiting.append(layer)
                    found += self._drawn(layer, drawn) + self._forward(layer, run)
                drawn = []
            elif _BACKWARD in names:
                sizes = self._operator(int(run[names.index(_BACKWARD)])).dims[0]
                for layer in reversed(waiting):
                    if [layer.time_steps, layer.batch, layer.hidden] == sizes:
                        waiting.remove(layer)
                        found += self._backward(layer, run)
                        break
            elif any(name in _DRAWN for name in names):
                drawn.append(run)
        return found

    def _drawn(self, layer: _Layer, runs: list[Int64]) -> list[LstmCall]:
        """Return drawing the masks, which comes before the layer: three runs of operators for each."""
        wanted = [(INPUT, layer.drops_input), (RECURRENT, layer.drops_recurrent)]
        connections = [connection for connection, drops in wanted if drops]
        mine = runs[len(runs) - 3 * len(connections) :] if len(runs) >= 3 * len(connections) else []
        return [
            LstmCall(part=layer.part(DRAW, connection), rows=np.concatenate(mine[3 * i : 3 * i + 3]))
            for i, connection in enumerate(connections)
            if mine
        ]

    def _forward(self, layer: _Layer, run: Int64) -> list[LstmCall]:
        """Return one product over all time steps, with the mask before it; then one per time step, each with
        its mask.
        """
        calls = self._calls(run)
        names = [name for name, _ in calls]
        if "aten::addmm" not in names:
            return []
        first = len(names) - 1 - names[::-1].index("aten::addmm")  # in pieces: it copies the bias
        found = []
        if layer.drops_input:
            found.append(self._place(layer, FORWARD, INPUT, [row for _, row in calls[: first + 1]]))
        if layer.drops_recurrent:
            rows = []
            for i in range(first + 1, len(calls)):
                if names[i] == "aten::addmm_":
                    rows += [calls[i - 1][1], calls[i][1]]
            found.append(self._place(layer, FORWARD, RECURRENT, rows))
        return found

    def _backward(self, layer: _Layer, run: Int64) -> list[LstmCall]:
        """Return one product per time step, each with its mask; then the input's gradient if wanted, and the
        weights'.
        """
        calls = self._calls(run)
        products = [i for i, (name, _) in enumerate(calls) if name in ("aten::mm", "aten::addmm_")]
        steps, after = products[: layer.time_steps], products[layer.time_steps :]
        if len(steps) < layer.time_steps or len(after) not in (2, 3):
            return []
        found = []
        if layer.drops_recurrent:
            rows = [row for i in steps for _, row in calls[i : i + 2]]
            found.append(self._place(layer, BACKWARD, RECURRENT, rows))
            found.append(self._place(layer, WEIGHT, RECURRENT, [calls[after[-1]][1]]))
        if layer.drops_input:
            if len(after) == 3:
                found.append(self._place(layer, BACKWARD, INPUT, [row for _, row in calls[after[0] : after[0] + 2]]))
            found.append(self._place(layer, WEIGHT, INPUT, [calls[after[-2]][1]]))
        return found

    def _place(self, layer: _Layer, what: str, connection: str, rows: list[int]) -> LstmCall:
        return LstmCall(part=layer.part(what, connection), rows=np.array(rows, dtype=np.int64))

    def _calls(self, run: Int64) -> list[tuple[str, int]]:
        """Return operators inside the layer that compute, in their order, with their tasks."""
        found = [(self._op(row), int(row)) for row in run]
        return [(name, row) for name, row in found if name.startswith("aten::") and name not in _VIEWS]

    def _op(self, row: int) -> str:
        return self.graph.names[self.graph.op[row]] if self.graph.op[row] >= 0 else ""

    def _operator(self, row: int) -> Operator:
        shape = int(self.graph.shape[row])
        return Operator(self._op(row), self.graph.shapes[shape] if shape >= 0 else "[[],[],[]]")


_VIEWS = ("aten::flatten", "aten::unbind", "aten::split", "aten::chunk", "aten::reshape", "aten::select", "aten::slice")
