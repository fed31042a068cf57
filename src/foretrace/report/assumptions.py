"""An assumption as answers show it, whichever command made it, and its words."""

from __future__ import annotations

import msgspec

from foretrace.report.units import between, digits, unit_for
from foretrace.report.views import taken


class AssumptionView(msgspec.Struct, frozen=True, kw_only=True):
    """A number that the prediction rests on and the recording does not give, with its plausible range."""

    technique: str
    name: str
    value: float
    low: float
    high: float
    unit: str
    why: str
    flag: str  # the technique's parameter that replaces it
    step_at_low_s: float  # the predicted step with `low` instead of `value`
    step_at_high_s: float


def assumption(each: object, at_low_s: float, at_high_s: float) -> AssumptionView:
    """The view of an assumption; `at_low_s` and `at_high_s` are the predicted step at either end of its range."""
    return taken(AssumptionView, each, step_at_low_s=at_low_s, step_at_high_s=at_high_s)


def said(a: AssumptionView, *, replaced: bool = True) -> str:
    """As in "ratio 2.50× (plausible 2.00 – 3.10×: step 97.2 – 88.1 ms): from the catalog; replace it with …"."""
    mend = f"; replace it with {flag_text(a)}" if a.flag and replaced else ""
    return f"{a.name} {value_text(a)} {range_text(a)}: {a.why.rstrip('.')}{mend}"


def value_text(a: AssumptionView) -> str:
    """The value with its unit."""
    return digits(a.value) + _suffix(a.unit)


def range_text(a: AssumptionView) -> str:
    """As in "(plausible 2.00 – 3.10×: step 97.2 – 88.1 ms)"."""
    unit = unit_for(max(a.step_at_low_s, a.step_at_high_s))
    steps = between(a.step_at_low_s, a.step_at_high_s, unit)
    low, high = steps.split(" – ")
    effect = f"step stays {low}" if low == high else f"step {steps}"
    return f"(plausible {digits(a.low)} – {digits(a.high)}{_suffix(a.unit)}: {effect} {unit.name})"


def flag_text(a: AssumptionView) -> str:
    """What to write on the command line to replace it: "mixed-precision ratio=…"."""
    return f"{a.technique} {a.flag}=…"


def _suffix(unit: str) -> str:
    return unit if unit in ("", "×", "x") else f" {unit}"
