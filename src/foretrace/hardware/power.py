"""What an accelerator's board draws: a share of its board power while kernels run, another one between them.

The shares are read off Zeus' recordings of six trainings on a V100 and an A40 without a lowered limit, and off whole
servers with H100s in MLPerf Training; `benchmarks/energy_tune.py --power` holds them against recordings that were left
out. Host, network and cooling are not in it.
"""

from __future__ import annotations

from foretrace.hardware.devices import Device

IDLE_SHARE = 0.15  # of the board power; a V100 has 25-45 W of 300, an A100 50-60 W of 400
IDLE_RANGE = (0.08, 0.32)  # up to an A40 that a training keeps awake
BUSY_SHARE = 0.82
BUSY_RANGE = (0.55, 1.0)  # from a recurrent network to a transformer
# Of engines that serve: reading weights for few tokens draws much less than prompts, which draw all there is. No server
# was metered for it; the range goes from an idle board's upper end to the whole power.
SERVING_SHARES = (0.32, 0.65, 1.0)


def step_energy(
    device: Device, step_s: float, interval_s: tuple[float, float], busy_s: float, devices: int = 1, *,
    busy_range: tuple[float, float] | None = None,
    working: tuple[float, float, float] = (BUSY_RANGE[0], BUSY_SHARE, BUSY_RANGE[1]),
) -> tuple[float, tuple[float, float], str] | None:  # fmt: skip
    """Return joules of the boards of `devices` in a step, their range and source; None without a known power.

    Args:
        device: of the catalog.
        step_s: length of the step.
        interval_s: where that lies.
        busy_s: of it, kernels run on each device.
        devices: boards that take part alike.
        busy_range: where the share of the step lies in which kernels run; by default it is known.
        working: share of the board power that they draw then: low, middle, high.

    """
    if not device.tdp_w or step_s <= 0:
        return None
    busy = min(busy_s / step_s, 1.0)
    boards_w = device.tdp_w * devices
    least, most = busy_range or (busy, busy)
    low, value, high = (
        boards_w * time_s * (at_work * share + between * (1 - share))
        for time_s, share, at_work, between in zip(
            (interval_s[0], step_s, interval_s[1]), (min(least, busy), busy, min(max(most, busy), 1.0)), working,
            (IDLE_RANGE[0], IDLE_SHARE, IDLE_RANGE[1]), strict=True,
        )
    )  # fmt: skip
    source = (
        f"board power {device.tdp_w:g} W, of it {100 * working[0]:g} – {100 * working[2]:g} % while kernels run "
        f"and {100 * IDLE_RANGE[0]:g} – {100 * IDLE_RANGE[1]:g} % else; without host, network and cooling"
    )
    return value, (low, high), source
