"""What `foretrace utilisation` answers: its view, its sentences and its text for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from foretrace.report.blocks import Block, table
from foretrace.report.units import digits, seconds, share, within
from foretrace.report.views import Report, taken

if TYPE_CHECKING:
    from foretrace.model.estimate import ModelUsage

_LEVEL = 0.8


class ModelUsageView(msgspec.Struct, frozen=True, kw_only=True):
    """What one model makes of a device, without having run. Shares are of the device's peaks over the whole step."""

    model: str
    device: str
    precision: str  # in which most FLOPs run
    training: bool
    batch: int  # samples per step; 0 if unknown
    flops: float  # of products, per step
    nbytes: float = msgspec.field(name="bytes")  # read and written by all operators, per step
    step_time_s: float
    interval_s: tuple[float, float]
    interval_level: float
    of_peak_flops: float
    of_peak_flops_range: tuple[float, float]
    of_peak_bandwidth: float
    busy: float  # share of the step in which the device runs any kernel
    intensity: float  # aggregate: FLOPs over bytes of products
    ridge: float  # FLOPs per byte of the device
    bound: str  # "bandwidth" or "compute", by intensity against ridge
    cost_sources: dict[str, float]


class UtilisationView(Report, frozen=True, kw_only=True):
    """`foretrace utilisation`."""

    command: str = "utilisation"
    usage: ModelUsageView

    def shown(self, top: int) -> Iterator[Block]:
        found = self.usage
        yield table(
            ["", ""],
            [
                ("step", within(found.step_time_s, found.interval_s)),
                (f"peak FLOP/s ({found.precision})", share(found.of_peak_flops)),
                ("peak bandwidth", share(found.of_peak_bandwidth)),
                ("device busy", share(found.busy)),
                (
                    "FLOPs per byte",
                    f"{digits(found.intensity)}, ridge {digits(found.ridge)}: {found.bound}-bound as a whole",
                ),
                ("costs from", ", ".join(f"{name} {share(part)}" for name, part in found.cost_sources.items())),
            ],
        )


def of_model(found: ModelUsage, *, model: str, training: bool, next: str) -> UtilisationView:
    """Return the view of one model."""
    used, step = found.usage, found.step
    low, high = found.of_peak_flops_range
    side = "below" if used.bound == "bandwidth" else "above"
    sentence = (
        f"{model} is predicted to reach {share(used.of_peak_flops)} ({share(low)} – {share(high)}) of the peak of "
        f"{found.device.short}: a step takes {seconds(step.step_time_s)}, the device works in "
        f"{share(used.busy)} of it, and {digits(used.intensity)} FLOPs per byte are {side} its ridge of "
        f"{digits(used.peaks.ridge)}."
    )
    return UtilisationView(
        headline=sentence,
        usage=taken(
            ModelUsageView,
            used,
            step,
            found.operators,
            model=model,
            device=found.device.name,
            precision=used.precision.name.lower(),
            training=training,
            interval_level=_LEVEL,
            of_peak_flops_range=found.of_peak_flops_range,
            ridge=used.peaks.ridge,
            cost_sources=dict(step.cost_sources),
        ),
        notes=found.notes,
        next=next,
    )
