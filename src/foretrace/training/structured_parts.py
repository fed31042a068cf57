"""The parts of an LSTM layer that structured dropout changes, each as something to be timed alone.

A part is what one layer does for one connection in one training step, with the code of `structured_lstm`: once with
masks of ordinary dropout, once with its products compacted, gathers and scattered additions included. What stays the
same, the gates' pointwise work, is in none of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from foretrace.cost.operators.operator import Operator

if TYPE_CHECKING:
    from foretrace.training.structured_lstm import Drop

DRAW, FORWARD, BACKWARD, WEIGHT = "draw", "forward", "backward", "weight"
INPUT, RECURRENT = "input", "recurrent"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPart:
    """One part of a layer over a sequence."""

    what: str  # draw a mask or units; products forward; backward, to what was fed; to the weight
    connection: str  # input: one product over all time steps; recurrent: one per time step
    time_steps: int
    batch: int
    units: int  # that may be dropped: of the input, or hidden
    gates: int  # 4 hidden

    def operator(self, p: float, span: int | None) -> Operator:
        """The part with dropout of probability p: ordinary (span None), or structured with units redrawn per span."""
        settings = json.dumps({**asdict(self), "p": p, "span": span}, sort_keys=True)
        dims = [[self.time_steps, self.batch, self.units], [self.gates, self.units], []]
        return Operator.of(f"{__name__}:prepared_part", dims, ["float", "float", ""], ["", "", settings])


def prepared_part(operator: Operator) -> Callable[[], object]:
    """What `LayerPart.operator` stands for, ready to be called."""
    settings = json.loads(operator.concrete[2])
    p, span = settings.pop("p"), settings.pop("span")
    part = LayerPart(**settings)
    drop = _draw(part, p, span)
    if part.what == DRAW:
        return drop
    if part.what == WEIGHT:
        return _weight(part, drop())
    if part.connection == INPUT:
        return _input(part, drop())
    return _recurrent(part, drop())


def _draw(part: LayerPart, p: float, span: int | None) -> Callable[[], Drop]:
    import torch

    from foretrace.training.structured_lstm import keep_elements, keep_units

    like = torch.empty(0)
    if span is None:
        return lambda: keep_elements((part.time_steps, part.batch, part.units), p, like)
    return lambda: keep_units(part.units, part.time_steps, p, span or part.time_steps)


def _weight(part: LayerPart, drop: Drop) -> Callable[[], object]:
    import torch

    from foretrace.training.structured_lstm import Kept, weight_gradient

    width = drop.columns.shape[1] if isinstance(drop, Kept) else part.units
    fed = torch.randn(part.time_steps, part.batch, width)
    d_gates = torch.randn(part.time_steps, part.batch, part.gates)
    return lambda: weight_gradient(d_gates, fed, drop, part.units)


def _input(part: LayerPart, drop: Drop) -> Callable[[], object]:
    import torch

    from foretrace.training.structured_lstm import input_gradient, project, smaller_weights

    weight, bias = torch.randn(part.gates, part.units), torch.randn(part.gates)
    if part.what == FORWARD:
        x = torch.randn(part.time_steps, part.batch, part.units)
        return lambda: project(x, weight, bias, drop)
    smaller = smaller_weights(weight, drop, part.time_steps)
    d_gates = torch.randn(part.time_steps, part.batch, part.gates)
    return lambda: input_gradient(d_gates, smaller, drop, part.units)


def _recurrent(part: LayerPart, drop: Drop) -> Callable[[], object]:
    import torch

    from foretrace.training.structured_lstm import Kept, feed_back, pass_back, smaller_weights

    weight = torch.randn(part.gates, part.units)
    h = torch.randn(part.time_steps, part.batch, part.units).unbind(0)
    gates = torch.randn(part.time_steps, part.batch, part.gates).unbind(0)

    def forward() -> None:
        smaller = smaller_weights(weight, drop, part.time_steps)
        width = drop.columns.shape[1] if isinstance(drop, Kept) else part.units
        fed = torch.empty(part.time_steps, part.batch, width)
        for t, (each, into) in enumerate(zip(h, gates, strict=True)):
            feed_back(into, each, t, smaller, drop, fed)

    smaller = smaller_weights(weight, drop, part.time_steps)

    def backward() -> None:
        for t, (into, each) in enumerate(zip(h, gates, strict=True)):
            pass_back(into, each, t, smaller, drop)

    return forward if part.what == FORWARD else backward
