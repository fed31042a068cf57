"""An assumption as answers show it, whichever command made it."""

from __future__ import annotations

from typing import Protocol

from foretrace.report.views import AssumptionView


class Assumed(Protocol):
    """What every assumption says of itself."""

    @property
    def technique(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    @property
    def unit(self) -> str: ...
    @property
    def why(self) -> str: ...
    @property
    def flag(self) -> str: ...


def assumption(each: Assumed, at_low_s: float, at_high_s: float) -> AssumptionView:
    """The view of an assumption; `at_low_s` and `at_high_s` are the predicted step at either end of its range."""
    return AssumptionView(
        technique=each.technique,
        name=each.name,
        value=each.value,
        low=each.low,
        high=each.high,
        unit=each.unit,
        why=each.why,
        flag=each.flag,
        step_at_low_s=at_low_s,
        step_at_high_s=at_high_s,
    )
