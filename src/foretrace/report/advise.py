"""`foretrace advise` as an answer: the view and its text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from foretrace.graph.taskgraph import TaskGraph
from foretrace.plan.advise import Advice, LeftOut, Tried
from foretrace.plan.sync import SyncQuestion, fitted, plan_sync, recorded_step_times
from foretrace.report import runs
from foretrace.report.blocks import Block, Column, Line, table
from foretrace.report.names import command
from foretrace.report.units import TimeUnit, between, change, digits, in_unit, level, seconds, unit_for
from foretrace.report.views import Report, taken
from foretrace.training.workers.policies import POLICIES

SHOWN_REFUSALS = 8
_UNLIKE = 1.1  # of the quickest rank's own step
_LISTED, _GAINS = 64, 1.02  # ranks for which policies are listed; times the steps per second that are worth a word


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


class AdviseView(Report, frozen=True, kw_only=True):
    """`foretrace advise`: what to do first, what together, and what was left out."""

    command: str = "advise"
    source: str
    platform: str
    rank_numbers: tuple[int, ...]  # ranks that the answer is about
    steps: int
    before_s: float
    interval_level: float
    rows: tuple[AdviceRow, ...]  # distinguished from no change, most saved first
    together: AdviceRow | None  # the best of them applied together; null where there are no two
    hidden: tuple[AdviceRow, ...]  # cannot be distinguished from no change
    slower: tuple[AdviceRow, ...]  # by a first estimate
    refused: tuple[LeftOut, ...]
    asks: tuple[LeftOut, ...]  # not tried: `why` lists the parameters that have no default
    failed: tuple[LeftOut, ...]  # mistakes of foretrace

    def shown(self, top: int) -> Iterator[Block]:
        unit = unit_for(self.before_s)
        yield table(
            [
                Column("what to do"), Column(f"saves {unit.name}", right=True), Column("range", right=True),
                Column("costs", wide=True),
            ],
            [(row.name, in_unit(row.saved_s, unit), _range(row, unit), row.effort or "–") for row in self.rows],
            top=top, how="--top",
        )  # fmt: skip
        if self.together is not None:
            saved = f"{in_unit(self.together.saved_s, unit)} {unit.name}"
            yield Line(f"{self.together.name} saves {saved} ({_range(self.together, unit)})", label="together")
            yield Line(self.together.why_not_more, label="why not more")
        yield Line(", ".join(each.name for each in self.hidden), label="not distinguishable from no change")
        if self.slower:
            slower = ", ".join(f"{each.name} {change(-each.saved_s)}" for each in self.slower)
            yield Line(slower, label="slower, by a first estimate")
        refused = list(_by_reason(self.refused).items())
        for why, names in refused[:SHOWN_REFUSALS]:
            yield Line(why, label=f"refused {', '.join(names)}")
        if len(refused) > SHOWN_REFUSALS:
            yield Line(f"{len(refused) - SHOWN_REFUSALS} more refusals: --json.", soft=True)
        if self.asks:
            asked = ", ".join(f"{each.name} {each.why}" for each in self.asks)
            yield Line(asked, label="not tried, as they need a choice")
        for each in self.failed:
            yield Line(f"{each.why}; this is a bug in foretrace, see the end", label=f"failed {each.name}")
        yield Line(f"Ranges hold with {level(self.interval_level)}. {_how(self)}".rstrip(), soft=True)


def advise(advice: Advice, *, path: str = "") -> AdviseView:
    """Return what to do about a run, what was refused, and the command that predicts the best of it."""
    graph = advice.before.graph
    first = advice.together or next(iter(advice.gains), None)
    again = runs.again(graph, path)
    return taken(
        AdviseView, runs.facts(advice.before, path), advice, headline=_headline(advice),
        before_s=advice.before.step_time_s, interval_level=advice.level, rows=tuple(map(row, advice.gains)),
        together=None if advice.together is None else row(advice.together), hidden=tuple(map(row, advice.hidden)),
        slower=tuple(map(row, advice.slower)),
        failed=tuple(LeftOut(name=each.name, why=each.why) for each in advice.failed),
        notes=(*runs.notes(graph), *_unlike(graph, path)),
        next=""
        if not path
        else f"foretrace blame {again}"
        if first is None
        else f"foretrace whatif {again} {runs.do(list(map(str, first.techniques)))}",
    )  # fmt: skip


def _unlike(graph: TaskGraph, path: str) -> tuple[str, ...]:
    """Return where ranks are not equally quick: the ways to agree that wait less, and what compares them."""
    own = recorded_step_times(graph) if len(graph.ranks) > 1 else (1.0,)
    if max(own) < _UNLIKE * min(own):
        return ()
    asked = tuple(fitted(each, own) for each in POLICIES) if len(own) <= _LISTED else ()
    found = plan_sync(SyncQuestion(source=path, step_s=own, policies=asked)).ranked
    fit = [f"{each.policy} {digits(each.over_synchronous)}×" for each in found if each.over_synchronous > _GAINS]
    words = command("plan", "sync", path)
    gains = f": {', '.join(fit)} the steps per second of synchronous training, with commits for nothing" if fit else ""
    return (f"the slowest rank's own step takes {digits(max(own) / min(own))} times the quickest's: {words} compares "
            f"policies that wait less{gains}.",)  # fmt: skip


def row(tried: Tried) -> AdviceRow:
    """Return one line of advice."""
    return taken(
        AdviceRow,
        tried,
        do=tuple(map(str, tried.techniques)),
        effort="; ".join(each.effort for each in tried.techniques if each.effort),
    )


def _headline(advice: Advice) -> str:
    before_s = advice.before.step_time_s
    if not advice.gains:
        tried = len(advice.hidden) + len(advice.slower)
        what = "no technique fits this recording" if not tried else (
            f"none of {tried} techniques can be distinguished from no change" if advice.hidden else
            f"all {tried} techniques that fit would make it slower"
        )  # fmt: skip
        return f"{what[0].upper()}{what[1:]}: {seconds(before_s)} per step as it is."
    first = advice.gains[0]
    unit = unit_for(before_s)
    text = f"Do {first.name} first: {in_unit(before_s, unit)} → {_step(first, unit)} per step"
    if advice.together is not None:
        others = [str(each) for each in advice.together.techniques if each not in first.techniques]
        text += f"; with {' and '.join(others)}, {_step(advice.together, unit)}"
    return f"{text}."


def _step(tried: Tried, unit: TimeUnit) -> str:
    assert tried.interval_s is not None
    return f"{in_unit(tried.after_s, unit)} {unit.name} ({between(*tried.interval_s, unit)})"


def _range(row: AdviceRow, unit: TimeUnit) -> str:
    assert row.saved_range_s is not None
    return between(*row.saved_range_s, unit) + ("*" if row.how == "all at once" else "")


def _how(view: AdviseView) -> str:
    advised = [*view.rows, *([] if view.together is None else [view.together])]
    if not any(each.how == "all at once" for each in advised):
        return ""
    return (
        "* with all assumptions at their ends at once; --exact, or foretrace whatif, weighs them one by one, which is "
        "narrower and takes longer."
    )


def _by_reason(refused: Sequence[LeftOut]) -> dict[str, list[str]]:
    """Return techniques by why they do not fit."""
    found: dict[str, list[str]] = {}
    for each in refused:
        found.setdefault(each.why, []).append(each.name)
    return found
