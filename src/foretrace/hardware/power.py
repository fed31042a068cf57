"""What an accelerator's board draws: a share of its board power while kernels run, another one between them.

The shares are read off Zeus' recordings of six trainings on a V100 and an A40 without a lowered limit, and off whole
servers with H100s in MLPerf Training; `benchmarks/energy_tune.py --power` holds them against recordings that were left
out. Host, network and cooling are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretrace.hardware.devices import Device

IDLE_SHARE = 0.15  # of the board power; a V100 has 25-45 W of 300, an A100 50-60 W of 400
IDLE_RANGE = (0.08, 0.32)  # up to an A40 that a training keeps awake
BUSY_SHARE = 0.82
BUSY_RANGE = (0.55, 1.0)  # from a recurrent network to a transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnergy:
    """Joules of a step on all its devices, and where they lie."""

    energy_j: float
    interval_j: tuple[float, float]
    source: str


def step_energy(
    device: Device, step_s: float, interval_s: tuple[float, float], busy_s: float, devices: int = 1
) -> StepEnergy | None:
    """What the boards of `devices` take in a step; None where the catalog does not state the board power.

    Args:
        device: of the catalog.
        step_s: length of the step.
        interval_s: where that lies.
        busy_s: of it, kernels run on each device.
        devices: boards that take part alike.

    """
    if not device.tdp_w or step_s <= 0:
        return None
    busy = min(busy_s / step_s, 1.0)
    boards_w = device.tdp_w * devices
    low, value, high = (
        boards_w * time_s * (at_work * busy + between * (1 - busy))
        for time_s, at_work, between in zip(
            (interval_s[0], step_s, interval_s[1]),
            (BUSY_RANGE[0], BUSY_SHARE, BUSY_RANGE[1]),
            (IDLE_RANGE[0], IDLE_SHARE, IDLE_RANGE[1]),
            strict=True,
        )
    )
    source = (
        f"board power {device.tdp_w:g} W, of it {100 * BUSY_RANGE[0]:g} – {100 * BUSY_RANGE[1]:g} % while kernels run "
        f"and {100 * IDLE_RANGE[0]:g} – {100 * IDLE_RANGE[1]:g} % else; without host, network and cooling"
    )
    return StepEnergy(energy_j=value, interval_j=(low, high), source=source)
