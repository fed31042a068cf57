"""What a graph shows of LSTM layers with ordinary dropout: which tasks are which part of which layer.

A layer is one operator `LSTMLayer` with everything inside it, and one `LSTMLayerBackward`. Nothing of Python lies
between the tasks of either, since the time of a Python function that autograd calls belongs to its operator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrace.cost.operators.operator import Operator
from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.training.structured_parts import BACKWARD, DRAW, FORWARD, INPUT, RECURRENT, WEIGHT, LayerPart

Int64 = npt.NDArray[np.int64]

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
        """From the recorded arguments; None where they are not those of a layer with a mask."""
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
    """All parts with ordinary dropout that structured dropout would change, in program order."""
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
        """Parts of all layers; a backward pass belongs to the last forward pass of its sizes that had none yet."""
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
        """Drawing the masks, which comes before the layer: three runs of operators for each."""
        wanted = [(INPUT, layer.drops_input), (RECURRENT, layer.drops_recurrent)]
        connections = [connection for connection, drops in wanted if drops]
        mine = runs[len(runs) - 3 * len(connections) :] if len(runs) >= 3 * len(connections) else []
        return [
            LstmCall(part=layer.part(DRAW, connection), rows=np.concatenate(mine[3 * i : 3 * i + 3]))
            for i, connection in enumerate(connections)
            if mine
        ]

    def _forward(self, layer: _Layer, run: Int64) -> list[LstmCall]:
        """One product over all time steps, with the mask before it; then one per time step, each with its mask."""
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
        """One product per time step, each with its mask; then the input's gradient if wanted, and the weights'."""
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
        """Operators inside the layer that compute, in their order, with their tasks."""
        found = [(self._op(row), int(row)) for row in run]
        return [(name, row) for name, row in found if name.startswith("aten::") and name not in _VIEWS]

    def _op(self, row: int) -> str:
        return self.graph.names[self.graph.op[row]] if self.graph.op[row] >= 0 else ""

    def _operator(self, row: int) -> Operator:
        shape = int(self.graph.shape[row])
        return Operator(self._op(row), self.graph.shapes[shape] if shape >= 0 else "[[],[],[]]")


_VIEWS = ("aten::flatten", "aten::unbind", "aten::split", "aten::chunk", "aten::reshape", "aten::select", "aten::slice")
