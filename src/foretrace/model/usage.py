"""What a model alone makes of a device: `foretrace.cost.devices.utilisation.usage` of its simulated step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretrace.cost.devices.standard import standard
from foretrace.cost.devices.utilisation import Usage, usage
from foretrace.cost.model import CostModel
from foretrace.hardware.devices import Device
from foretrace.model.estimate import StepEstimate, estimate_step
from foretrace.model.operator_graph import OperatorGraph


@dataclass(frozen=True, kw_only=True)
class ModelUsage:
    """A model on a device: its usage, the ends of its range, and the estimate that it rests on."""

    operators: OperatorGraph
    device: Device
    usage: Usage
    of_peak_flops_range: tuple[float, float]
    step: StepEstimate
    notes: tuple[str, ...]


def model_usage(operators: OperatorGraph, *, device: Device, known: Sequence[CostModel] = ()) -> ModelUsage:
    """Simulate one step of `operators` on `device`; what is `known`, as measured times, is preferred to predictions.

    Raises ForetraceError as `estimate_step` does.
    """
    step = estimate_step(operators, device=device, costs=standard(known))
    unheard = known and not {each.name for each in known} & set(step.cost_sources)
    said = ("no call of the model is among the measured ones: operator and inputs must be the same.",)
    found = usage(operators.calls, device, step_s=step.step_time_s, busy_s=step.device_busy_s)
    low, high = step.interval_s
    at = found.of_peak_flops * found.step_s
    return ModelUsage(
        operators=operators,
        device=device,
        usage=found,
        of_peak_flops_range=(at / high if high else 0.0, min(at / low, 1.0) if low else 1.0),
        step=step,
        notes=(*step.warnings, *(said if unheard else ())),
    )
