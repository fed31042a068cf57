"""An assumption as answers show it, whichever command made it, and its words."""

from __future__ import annotations

from foretrace.experiment.job import Assumed
from foretrace.report.units import between, digits, unit_for
from foretrace.report.views import taken


def assumption(each: object, at_low_s: float, at_high_s: float) -> Assumed:
    """Return an assumption as answers tell it, with the predicted step at either end of its range."""
    return taken(Assumed, each, step_at_low_s=at_low_s, step_at_high_s=at_high_s)


def said(a: Assumed, *, replaced: bool = True) -> str:
    """Return text such as "ratio 2.50× (plausible 2.00 – 3.10×: step 97.2 – 88.1 ms): from the catalog; ..."."""
    mend = f"; replace it with {flag_text(a)}" if a.flag and replaced else ""
    return f"{a.name} {value_text(a)} {range_text(a)}: {a.why.rstrip('.')}{mend}"


def value_text(a: Assumed) -> str:
    """Return the value with its unit."""
    return digits(a.value) + _suffix(a.unit)


def range_text(a: Assumed) -> str:
    """Return text such as "(plausible 2.00 – 3.10×: step 97.2 – 88.1 ms)"."""
    unit = unit_for(max(a.step_at_low_s, a.step_at_high_s))
    steps = between(a.step_at_low_s, a.step_at_high_s, unit)
    low, high = steps.split(" – ")
    effect = f"step stays {low}" if low == high else f"step {steps}"
    return f"(plausible {digits(a.low)} – {digits(a.high)}{_suffix(a.unit)}: {effect} {unit.name})"


def flag_text(a: Assumed) -> str:
    """Return what to write on the command line to replace it: "mixed-precision ratio=…"."""
    return f"{a.technique} {a.flag}=…"


def _suffix(unit: str) -> str:
    return unit if unit in ("", "×", "x") else f" {unit}"
