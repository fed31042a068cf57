"""`foretrace advise` as an answer: the view and its text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from foretrace.plan.advise import Advice, Tried
from foretrace.plan.advise import LeftOut as Left
from foretrace.report import build, ranks
from foretrace.report.advise_views import AdviceRow, LeftOutView, row
from foretrace.report.terminal import (
    NARROW,
    Terminal,
    _bold,
    _column,
    _indented,
    _labelled,
    _note,
    _plain,
    _table,
    _text,
)
from foretrace.report.units import Unit, between, change, in_unit, unit_for
from foretrace.report.views import AdviseView

if TYPE_CHECKING:
    from rich.console import RenderableType

SHOWN_REFUSALS = 8


def advise(advice: Advice, *, path: str = "") -> AdviseView:
    """What to do about a run, what was refused, and the command that predicts the best of it."""
    graph = advice.before.graph
    first = advice.together or next(iter(advice.gains), None)
    again = build._again(graph, path)
    return AdviseView(
        headline=_headline(advice),
        source=build._source(path, graph.info.source),
        platform=graph.info.platform,
        rank_numbers=ranks.numbers(graph),
        steps=graph.n_steps,
        before_s=advice.before.step_time_s,
        interval_level=advice.level,
        rows=tuple(map(row, advice.gains)),
        together=None if advice.together is None else row(advice.together),
        hidden=tuple(map(row, advice.hidden)),
        slower=tuple(map(row, advice.slower)),
        refused=_left(advice.refused),
        asks=_left(advice.asks),
        failed=_left(advice.failed),
        notes=build._notes(graph),
        next=""
        if not path
        else f"foretrace blame {again}"
        if first is None
        else f"foretrace whatif {again} {build._do(list(map(str, first.techniques)))}",
    )


def _left(found: Iterable[Left]) -> tuple[LeftOutView, ...]:
    return tuple(LeftOutView(name=each.name, why=each.why) for each in found)


def _headline(advice: Advice) -> str:
    before_s = advice.before.step_time_s
    unit = unit_for(before_s)
    if not advice.gains:
        tried = len(advice.hidden) + len(advice.slower)
        what = "no technique fits this recording" if not tried else (
            f"none of {tried} techniques can be told apart from no change" if advice.hidden else
            f"all {tried} techniques that fit would make it slower"
        )  # fmt: skip
        return f"{what[0].upper()}{what[1:]}: {in_unit(before_s, unit)} {unit.name} per step as it is."
    first = advice.gains[0]
    text = f"Do {first.name} first: {in_unit(before_s, unit)} → {_step(first, unit)} per step"
    if advice.together is not None:
        others = [str(each) for each in advice.together.techniques if each not in first.techniques]
        text += f"; with {' and '.join(others)}, {_step(advice.together, unit)}"
    return f"{text}."


def _step(tried: Tried, unit: Unit) -> str:
    assert tried.interval_s is not None
    return f"{in_unit(tried.after_s, unit)} {unit.name} ({between(*tried.interval_s, unit)})"


def text(view: AdviseView, terminal: Terminal, rows: int) -> str:
    """`AdviseView` for people."""
    unit = unit_for(view.before_s)
    parts: list[RenderableType] = [_bold(view.headline), ""]
    if view.rows:
        parts.append(_indented(_ranking(view, unit, terminal, rows)))
        if terminal.width < NARROW:
            parts += [_labelled(f"{each.name} costs", each.effort) for each in view.rows[:rows] if each.effort]
        if len(view.rows) > rows:
            parts.append(_note(f"{len(view.rows) - rows} more: --top {len(view.rows)} or --json."))
        parts.append("")
    if view.together is not None:
        parts.append(_labelled("together", _together(view.together, unit)))
        if view.together.why_not_more:
            parts.append(_labelled("why not more", view.together.why_not_more))
    if view.hidden:
        parts.append(_labelled("not told apart from nothing", ", ".join(each.name for each in view.hidden)))
    if view.slower:
        slower = ", ".join(f"{each.name} {change(-each.saved_s)}" for each in view.slower)
        parts.append(_labelled("slower, by a first estimate", slower))
    refused = list(_by_reason(view.refused).items())
    for why, names in refused[:SHOWN_REFUSALS]:
        parts.append(_labelled(f"refused {', '.join(names)}", why))
    if len(refused) > SHOWN_REFUSALS:
        parts.append(_note(f"{len(refused) - SHOWN_REFUSALS} more refusals: --json."))
    if view.asks:
        asked = ", ".join(f"{each.name} {each.why}" for each in view.asks)
        parts.append(_labelled("not tried, as they need a choice", asked))
    for each in view.failed:
        parts.append(_labelled(f"failed {each.name}", f"{each.why}; this is a bug in foretrace, see the end"))
    for note in view.notes:
        parts.append(_note(note))
    parts.append(_note(f"Ranges hold with {100 * view.interval_level:.3g} %. {_how(view)}".rstrip()))
    return _text(parts, terminal) + (f"  next: {view.next}\n" if view.next else "")


def _ranking(view: AdviseView, unit: Unit, terminal: Terminal, rows: int) -> RenderableType:
    narrow = terminal.width < NARROW
    table = _table()
    _column(table, "what to do")
    for title in (f"saves {unit.name}", "range"):
        _column(table, title, right=True)
    if not narrow:
        _column(table, "costs", wide=True)
    for each in view.rows[:rows]:
        assert each.saved_range_s is not None
        mark = "*" if each.how == "all at once" else ""
        cells = [in_unit(each.saved_s, unit), between(*each.saved_range_s, unit) + mark]
        table.add_row(_plain(each.name), *cells, *([] if narrow else [_plain(each.effort or "–")]))
    return table


def _together(row: AdviceRow, unit: Unit) -> str:
    assert row.saved_range_s is not None
    mark = "*" if row.how == "all at once" else ""
    return f"{row.name} saves {in_unit(row.saved_s, unit)} {unit.name} ({between(*row.saved_range_s, unit)}{mark})"


def _how(view: AdviseView) -> str:
    advised = [*view.rows, *([] if view.together is None else [view.together])]
    if not any(each.how == "all at once" for each in advised):
        return ""
    return (
        "* with all assumptions at their ends at once; --exact, or foretrace whatif, weighs them one by one, which is "
        "narrower and takes longer."
    )


def _by_reason(refused: Sequence[LeftOutView]) -> dict[str, list[str]]:
    """Techniques by why they do not fit."""
    found: dict[str, list[str]] = {}
    for each in refused:
        found.setdefault(each.why, []).append(each.name)
    return found
