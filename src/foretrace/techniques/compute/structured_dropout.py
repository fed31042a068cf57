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
import numpy.typing as npt

from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import Operator
from foretrace.errors import NotApplicableError
from foretrace.graph.edit import scale
from foretrace.graph.taskgraph import TaskGraph
from foretrace.techniques.base import Prior, Technique, parameter, prior
from foretrace.techniques.compute.lstm_calls import LstmCall, places
from foretrace.training.structured_parts import DRAW, INPUT, LayerPart

if TYPE_CHECKING:
    from torch import nn

    from foretrace.training.training import Training

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class StructuredDropout(Technique):
    """Replace ordinary dropout of LSTMs by one whose products are compacted to the kept units."""

    across = "each"
    summary = "LSTM dropout of the same units for a whole batch: products shrink to the kept units"
    source = "Sarma et al., Structured in Space, Randomized in Time, NeurIPS 2021, sections 3 and 4"
    effort = "modules replaced; dropout of other units, accuracy to check"

    p: float = parameter(0.5, doc="probability that a unit is dropped")
    connections: str = parameter(
        "both",
        doc="what is dropped this way: input of every layer, or both input and recurrent",
        choices=("input", "both"),
    )
    span: int = parameter(
        0, doc="time steps after which units are redrawn; 0: once per sequence and training step", unit="time steps"
    )
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
        return scale(graph, mask, factor[mask], technique=self.name)

    def realise(self, training: Training) -> Training:
        from foretrace.training.structured_lstm import DropoutLSTM, StructuredDropoutLSTM

        self._check()
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

    def _check(self) -> None:
        if not 0.0 < self.p < 1.0:
            raise self.refuse(f"p={self.p} drops nothing or everything; give a p between 0 and 1.")
        if self.span < 0:
            raise self.refuse(f"span={self.span} is below 0; give a number of time steps, or 0 for the whole sequence.")

    def _places(self, graph: TaskGraph) -> list[LstmCall]:
        """Where the recording shows what shrinks; refuses where there is nothing."""
        self._check()
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
        """The part with ordinary and with structured dropout, to be timed alone."""
        return part.operator(self.p, None), part.operator(self.p, self.span)

    def _ratio(self, calibration: Calibration, part: LayerPart) -> float | None:
        before, after = (calibration.time_s(each) for each in self._pair(part))
        return after / before if before and after else None


_ONLY_INPUT = "ask for connections=input."


def _with(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """The model with another module of this dotted name; the module itself where the name is empty."""
    if not name:
        return module
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
    return model
