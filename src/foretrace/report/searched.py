"""What a strategy that the user named found of a space that was enumerated, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import exp
from typing import Any

import msgspec

from foretrace.report.blocks import Block, Line
from foretrace.report.units import count, seconds
from foretrace.report.views import taken
from foretrace.search.named import NamedSearch


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
