"""What advice is made of, as plain structs: `foretrace advise`, and the first lines of it in `show`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from foretrace.report.views import taken

if TYPE_CHECKING:
    from foretrace.plan.advise import Tried


class AdviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One technique, or several applied in this order, and the step that they lead to, seconds."""

    name: str  # the techniques, joined
    do: tuple[str, ...]  # each as `--do` takes it
    after_s: float
    saved_s: float
    saved_range_s: tuple[float, float] | None  # null where only a first estimate was made
    how: str  # how the range was found: "one by one", "all at once", "noise alone", ""
    effort: str  # what it costs to do
    why_not_more: str


class LeftOutView(msgspec.Struct, frozen=True, kw_only=True):
    """A technique that was not predicted, and why."""

    name: str
    why: str


def row(tried: Tried) -> AdviceRow:
    """One line of advice."""
    return taken(
        AdviceRow,
        tried,
        do=tuple(map(str, tried.techniques)),
        effort="; ".join(each.effort for each in tried.techniques if each.effort),
    )
