"""Energy beside a time in an answer, where the device has a power model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from foretrace.hardware.devices import Device
from foretrace.hardware.power import step_energy
from foretrace.report.blocks import Line
from foretrace.report.units import digits, scaled

J_PER_KWH = 3.6e6


class EnergyView(msgspec.Struct, frozen=True, kw_only=True):
    """Joules of a step on all its devices."""

    energy_j: float
    interval_j: tuple[float, float]
    source: str
    co2_g: float | None  # null where no grid was stated
    grid_g_per_kwh: float | None

    def words(self, amount: Callable[[float], str] = lambda found: scaled(found, "J")) -> str:
        """Return text such as "58.1 J (41.0 J – 66.2 J)", with CO2 where a grid was stated."""
        text = f"{amount(self.energy_j)} ({' – '.join(map(amount, self.interval_j))})"
        return text if self.co2_g is None else f"{text}, {carbon(self.co2_g, self.grid_g_per_kwh)}"


def energy(
    device: Device | None,
    step_s: float,
    interval_s: tuple[float, float],
    busy_s: float,
    devices: int,
    grid: float | None,
    **more: Any,
) -> EnergyView | None:
    """Return the energy of a step; None where there is no power model. `more` is as in `step_energy`."""
    found = device and step_energy(device, step_s, interval_s, busy_s, devices, **more)
    return joules(*found, grid) if found else None


def joules(energy_j: float, interval_j: tuple[float, float], source: str, grid: float | None) -> EnergyView:
    """Return energy that is known, with CO2 where a grid is stated."""
    return EnergyView(energy_j=energy_j, interval_j=interval_j, source=source, co2_g=co2_g(energy_j, grid),
                      grid_g_per_kwh=grid)  # fmt: skip


def shown(*views: EnergyView | None, per: str = "per step") -> Iterator[Line]:
    """Yield a line for the energy of a step, or of the step before and after."""
    known = [each for each in views if each is not None]
    if known:
        yield Line(f"{' → '.join(each.words() for each in known)} {per}: {known[-1].source}", label="energy")


def co2_g(energy_j: float, grid: float | None) -> float | None:
    """Return grams of CO2 at so many grams per kWh; None where none is stated."""
    return None if grid is None else energy_j / J_PER_KWH * grid


def carbon(grams: float, grid: float | None) -> str:
    """Return text such as "12.0 g of CO2 at 400 g/kWh"."""
    amount = f"{grams:.3g} g" if grams < 1e4 else f"{digits(grams / 1e3)} kg"
    return f"{amount} of CO2 at {digits(grid or 0.0)} g/kWh"
