"""The parts of an LSTM layer that structured dropout changes, each as something to be timed alone.

A part is what one layer does for one connection in one training step, with the code of `structured_lstm`: once with
masks of ordinary dropout, once with its products compacted, gathers and scattered additions included. What stays the
same, the gates' pointwise work, is in none of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from foretrace.cost.operators.operator import Operator

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
        """Return the part with dropout of probability p: ordinary (span None), or structured with units redrawn per
        span.
        """
        settings = json.dumps({**asdict(self), "p": p, "span": span}, sort_keys=True)
        dims = [[self.time_steps, self.batch, self.units], [self.gates, self.units], []]
        return Operator.of(f"{__name__}:prepared_part", dims, ["float", "float", ""], ["", "", settings])


def prepared_part(operator: Operator) -> Callable[[], object]:
    """Return what `LayerPart.operator` stands for, ready to be called."""
    import torch

    from foretrace.training import structured_lstm as lstm

    settings = json.loads(operator.concrete[2])
    p, span = settings.pop("p"), settings.pop("span")
    part = LayerPart(**settings)
    steps, batch, units = part.time_steps, part.batch, part.units
    like = torch.empty(0)

    def draw() -> lstm.Drop:
        if span is None:
            return lstm.keep_elements((steps, batch, units), p, like)
        return lstm.keep_units(units, steps, p, span or steps)

    if part.what == DRAW:
        return draw
    drop = draw()
    width = drop.columns.shape[1] if isinstance(drop, lstm.Kept) else units
    fed, x = torch.randn(steps, batch, width), torch.randn(steps, batch, units)
    gates, weight, bias = torch.randn(steps, batch, part.gates), torch.randn(part.gates, units), torch.randn(part.gates)
    smaller = lstm.smaller_weights(weight, drop, steps)
    if part.what == WEIGHT:
        return lambda: lstm.weight_gradient(gates, fed, drop, units)
    if part.connection == INPUT and part.what == FORWARD:
        return lambda: lstm.project(x, weight, bias, drop)
    if part.connection == INPUT:
        return lambda: lstm.input_gradient(gates, smaller, drop, units)
    pairs = list(zip(gates.unbind(0), x.unbind(0), strict=True))

    def forward() -> None:
        gathered, into = lstm.smaller_weights(weight, drop, steps), torch.empty(steps, batch, width)
        for t, (of_step, h) in enumerate(pairs):
            lstm.feed_back(of_step, h, t, gathered, drop, into)

    def backward() -> None:
        for t, (of_step, h) in enumerate(pairs):
            lstm.pass_back(h, of_step, t, smaller, drop)

    return forward if part.what == FORWARD else backward
