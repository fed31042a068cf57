"""Parts that several answers show: assumptions, energy beside a time, and what a search by name found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import exp
from typing import Any

import msgspec

from foretrace.experiment.job import Assumed
from foretrace.hardware.devices import Device
from foretrace.hardware.power import step_energy
from foretrace.report.blocks import Block, Line
from foretrace.report.units import between, count, digits, scaled, seconds, unit_for
from foretrace.report.views import taken
from foretrace.search.named import NamedSearch


def assumption(each: object, at_low_s: float, at_high_s: float) -> Assumed:
    """Return an assumption as answers tell it, with the predicted step at either end of its range."""
    return taken(Assumed, each, step_at_low_s=at_low_s, step_at_high_s=at_high_s)


def assumption_text(a: Assumed, *, replaced: bool = True) -> str:
    """Return text such as "ratio 2.50× (plausible 2.00 – 3.10×: step 97.2 – 88.1 ms): from the catalog; ..."."""
    mend = f"; replace it with {flag_text(a)}" if a.flag and replaced else ""
    lies = f" {within}" if (within := range_text(a)) else ""
    return f"{name_text(a)} {value_text(a)}{lies}: {a.why.rstrip('.')}{mend}"


def name_text(a: Assumed) -> str:
    """Return the name without the unit at its end, which its value has: "launch" for "launch us", 40 µs."""
    return a.name.removesuffix(f" {a.unit.lower().replace('µ', 'u').replace('/', ' ')}")


def value_text(a: Assumed) -> str:
    """Return the value with its unit."""
    return (count(a.value) if a.unit in _THINGS else digits(a.value)) + _suffix(a.unit)


def range_text(a: Assumed) -> str:
    """Return text such as "(plausible 2.00 – 3.10×: step 97.2 – 88.1 ms)"; "" for what has no range."""
    if a.low == a.high:
        return ""
    unit = unit_for(max(a.step_at_low_s, a.step_at_high_s))
    steps = between(a.step_at_low_s, a.step_at_high_s, unit)
    low, high = steps.split(" – ")
    effect = f"step stays {low}" if low == high else f"step {steps}"
    return f"(plausible {digits(a.low)} – {digits(a.high)}{_suffix(a.unit)}: {effect} {unit.name})"


def flag_text(a: Assumed) -> str:
    """Return what to write on the command line to replace it: "mixed-precision ratio=…", or an option."""
    return a.flag if a.flag.startswith("--") else f"{a.technique} {a.flag}=…"


_THINGS = ("ranks", "collectives", "kernels", "samples", "tokens")  # units that are counted


def _suffix(unit: str) -> str:
    return "×" if unit == "x" else unit if unit in ("", "×") else f" {unit}"


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


def energy_lines(*views: EnergyView | None, per: str = "per step") -> Iterator[Line]:
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


class NamedSearchView(msgspec.Struct, frozen=True, kw_only=True):
    """Its best, beside the proven one. Seconds are null where nothing fits; of starts, where none is learned."""

    strategy: str
    calls: int  # of the cost model, those that it learned from included
    lessons: int  # of those, what it learned from
    best_s: float | None
    best: dict[str, int] | None  # by name
    over_best: float | None  # its time over the least of all
    found_after: int  # calls
    learned_s: float | None  # of the learned start
    nearest_s: float | None  # of the best that it learned from


def search_view(search: NamedSearch[Any], best: Mapping[str, int] | None, least_s: float) -> NamedSearchView:
    """Return the answer; costs are logarithms of seconds, `least_s` is the least time of all."""
    found, start, best_s = search.found, search.found.learned, exp(search.found.cost)
    return taken(
        NamedSearchView, search, found, lessons=start.lessons if start else 0, best_s=best_s,
        best=None if best is None else dict(best), over_best=best_s / least_s,
        found_after=found.curve[-1][0] if found.curve else 0,
        learned_s=exp(start.cost) if start else None, nearest_s=exp(start.nearest) if start else None,
    )  # fmt: skip


def searched(view: NamedSearchView) -> Iterator[Block]:
    """Yield it as a person reads it."""
    learned = f", {count(view.lessons)} of them to learn from" if view.lessons else ""
    calls = f"{view.strategy} made {count(view.calls)} calls{learned}"
    if view.best_s is None or view.over_best is None or view.best is None:
        yield Line(f"{calls}: nothing fits")
        return
    words = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in view.best.items())
    where = f"{seconds(view.best_s)} after {count(view.found_after)}, {view.over_best:.3f} times the least"
    yield Line(f"{calls}: {where}, with {words}")
    if view.lessons:
        started, nearest = ("does not fit" if s is None else seconds(s) for s in (view.learned_s, view.nearest_s))
        yield Line(f"learned start: {started}; best of what it learned from: {nearest}")
