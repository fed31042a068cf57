"""What a model alone makes of a device: `foretrace.cost.devices.utilisation.usage` of its simulated step."""

from __future__ import annotations

from dataclasses import dataclass

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


def model_usage(operators: OperatorGraph, *, device: Device, costs: CostModel) -> ModelUsage:
    """Simulate one step of `operators` on `device`. Raises ForetraceError as `estimate_step` does."""
    step = estimate_step(operators, device=device, costs=costs)
    found = usage(operators.calls, device, step_s=step.step_time_s, busy_s=step.device_busy_s)
    low, high = step.interval_s
    at = found.of_peak_flops * found.step_s
    return ModelUsage(
        operators=operators,
        device=device,
        usage=found,
        of_peak_flops_range=(at / high if high else 0.0, min(at / low, 1.0) if low else 1.0),
        step=step,
    )
