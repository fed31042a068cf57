"""What `foretrace fleet why`, `whatif`, `sweep` and `policies` answer: views, sentences, lines for people."""

from __future__ import annotations

import inspect
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from foretrace.fleet.ask import Why
from foretrace.fleet.comparison import figures
from foretrace.fleet.policies import registry
from foretrace.fleet.result import FleetResult
from foretrace.fleet.sweep import Swept
from foretrace.report.blocks import Block, Column, Headline, Line, notes, shown, table
from foretrace.report.fleet import known, long_time
from foretrace.report.fleet_question_views import (
    ChangedFigureView,
    FleetPoliciesView,
    FleetSweepView,
    FleetWhatifView,
    FleetWhyView,
    HolderView,
    PolicyParameterView,
    PolicyView,
    RemedyView,
)
from foretrace.report.units import count
from foretrace.report.views import taken

SHOWN_DECISIONS = 12  # the first and the last
SHOWN_CELLS = 40
_FOLDED = ("jobs", "finished", "p50_jct_s", "p90_jct_s", "mean_rho", "p99_rho")  # columns that only --json has


def why(found: Why, *, source: str, policy: str, cluster: str, again: Sequence[str] = ()) -> FleetWhyView:
    """The answer to why a job waits; `again` are further options of the run, for the command to try next."""
    if found.status == "never":
        headline = f"Job {found.job} can never run here: {found.reason}."
    elif found.status == "waiting":
        headline = f"At {long_time(found.at_s)}, job {found.job} ({_gpus(found.gpus)}) waits: {found.reason}."
    else:
        headline = (
            f"At {long_time(found.at_s)}, job {found.job} ({_gpus(found.gpus)}) is {found.status}: {found.reason}."
        )
    if found.queue_s is not None:
        headline += f" In all it waits {long_time(found.queue_s)}."
    best = found.best
    if best is not None and best.queue_s is not None:
        headline += f" What helps: {best.change}; it would then wait {long_time(best.queue_s)}."
    asked = next((each.words for each in (best, *found.remedies) if each is not None and each.helps and each.words), ())
    run = [source, "--cluster", cluster, "--now" if asked else "--policy", policy, *again, *asked]
    return taken(
        FleetWhyView,
        found,
        headline=headline,
        source=source,
        policy=policy,
        cluster=cluster,
        causes_s=dict(found.causes),
        holders=tuple(HolderView(job=job, gpus=gpus, until_s=until) for job, gpus, until in found.holders),
        remedies=tuple(taken(RemedyView, each, mean_jct_s=known(each.mean_jct_s)) for each in found.remedies),
        next=shlex.join(["foretrace", "fleet", "whatif" if asked else "run", *run]),
    )


@shown.register
def _(view: FleetWhyView, top: int) -> Iterator[Block]:
    yield Headline(view.headline)
    if view.causes_s:
        yield ""
        causes = sorted(view.causes_s.items(), key=lambda each: -each[1])
        yield table(
            ["waited because", Column("in all", right=True)], [(name, long_time(value)) for name, value in causes]
        )
    if view.room:
        yield ""
        yield table(
            [
                f"free at {long_time(view.at_s)}", Column("GPUs", "count"), Column("most in one", "count"),
                Column("could hold it", right=True),
            ],
            [(room.level, room.free, room.most, f"{room.fits:,} of {room.units:,}") for room in view.room],
        )  # fmt: skip
    if view.holders:
        yield ""
        yield table(
            ["holds GPUs then", Column("GPUs", "count"), Column("for another", right=True)],
            [(holder.job, holder.gpus, long_time(holder.until_s)) for holder in view.holders],
        )
    if view.decisions:
        yield ""
        rows = [(long_time(each.time_s), each.what, each.why) for each in view.decisions]
        columns: list[Column | str] = [Column("decisions", right=True), "", Column(wide=True)]
        if len(rows) <= 2 * SHOWN_DECISIONS:
            yield table(columns, rows)
        else:
            yield table(columns, rows[:SHOWN_DECISIONS])
            yield f"... {len(rows) - 2 * SHOWN_DECISIONS:,} more (--json has all)"
            yield table([Column(right=True), "", Column(wide=True)], rows[-SHOWN_DECISIONS:])
    if view.remedies:
        yield ""
        yield table(
            [
                "would it help?", Column("it waits", right=True), Column("mean JCT of all", right=True), "",
            ],
            [
                (
                    remedy.change, "for ever" if remedy.queue_s is None else long_time(remedy.queue_s),
                    long_time(remedy.mean_jct_s), "yes" if remedy.helps else "no",
                )
                for remedy in view.remedies
            ],
        )  # fmt: skip
    yield ""


def _gpus(number: int) -> str:
    return f"{number:,} GPU{'s' if number != 1 else ''}"


def whatif(
    before: FleetResult, after: FleetResult, *, source: str, words: tuple[str, str], changes: Sequence[str], next_: str
) -> FleetWhatifView:
    """Two runs of the same jobs side by side."""
    old, new = figures(before), figures(after)
    rows = []
    for name, value in old.items():
        then = new[name]
        fine = math.isfinite(value) and math.isfinite(then) and value != 0
        rows.append(
            ChangedFigureView(name=name, before=known(value), after=known(then), ratio=then / value if fine else None)
        )
    both = before.finished & after.finished
    moved = np.where(both, after.end_ns - before.end_ns, 0)
    mean = (old["mean_jct_s"], new["mean_jct_s"])
    if min(mean) > 0 and all(map(math.isfinite, mean)):
        factor = mean[0] / mean[1] if mean[1] < mean[0] else mean[1] / mean[0]
        word = "shorter" if mean[1] < mean[0] else "longer"
        headline = (
            f"Jobs take {factor:.2f}× {word}: {long_time(mean[0])} → {long_time(mean[1])} on average, "
            f"with {' and '.join(changes)}."
        )
        if abs(mean[1] - mean[0]) < 1e-9 * mean[0]:
            headline = f"Nothing changes for the mean job ({long_time(mean[0])}) with {' and '.join(changes)}."
    else:
        headline = f"With {' and '.join(changes)}, too few jobs finish to compare means."
    return FleetWhatifView(
        headline=headline,
        source=source,
        before=words[0],
        after=words[1],
        changes=tuple(changes),
        jobs=len(before.workload),
        figures=tuple(rows),
        sooner=int((moved < 0).sum()),
        later=int((moved > 0).sum()),
        notes=(
            "one run each: differences below 10 % of the makespan on some hundred jobs are noise "
            "(foretrace fleet compare repeats runs)",
        ),
        next=next_,
    )


@shown.register
def _(view: FleetWhatifView, top: int) -> Iterator[Block]:
    yield Headline(view.headline)
    yield ""
    rows = []
    for each in view.figures:
        seconds = each.name.endswith("_s")
        ratio = f"{each.ratio:.3f}" if each.ratio is not None else None
        rows.append((each.name, _figure(each.before, seconds), _figure(each.after, seconds), ratio))
    yield table(["figure", *(Column(title, right=True) for title in ("before", "after", "ratio"))], rows)
    yield ""
    yield f"{count(view.sooner)} jobs end sooner, {count(view.later)} later."
    yield from notes(view.notes, "note")
    yield ""


def _figure(value: float | None, seconds: bool) -> str:
    if value is None:
        return "–"
    return long_time(value) if seconds else f"{value:.4g}"


def sweep(found: Swept, *, source: str, by: Mapping[str, Sequence[Any]], next_: str) -> FleetSweepView:
    """All cells of a sweep."""
    columns = list(found.rows[0]) if found.rows else []
    means = [(row.get("mean_jct_s"), row) for row in found.rows if isinstance(row.get("mean_jct_s"), float)]
    headline = f"{count(len(found.rows))} cells, {count(found.reused)} of them done before."
    if means:
        best = min(means, key=lambda each: float(each[0] or math.inf))[1]
        words = ", ".join(f"{key} {best[key]}" for key in by if len(by[key]) > 1)
        headline += f" The shortest mean JCT, {long_time(best['mean_jct_s'])}, has {words or 'the only cell'}."
    return FleetSweepView(
        headline=headline,
        source=source,
        folder=found.folder,
        cells=len(found.rows),
        reused=found.reused,
        columns=tuple(columns),
        rows=tuple(tuple(row.get(name) for name in columns) for row in found.rows),
        next=next_,
    )


@shown.register
def _(view: FleetSweepView, top: int) -> Iterator[Block]:
    shown = [name for name in view.columns if name not in _FOLDED]
    at = [view.columns.index(name) for name in shown]
    jct = view.columns.index("mean_jct_s") if "mean_jct_s" in view.columns else 0
    rows = sorted(
        view.rows, key=lambda row: (not isinstance(row[jct], float), row[jct] if isinstance(row[jct], float) else 0)
    )
    cells = [[_cell(name, row[i]) for name, i in zip(shown, at, strict=True)] for row in rows]
    yield Headline(view.headline)
    yield ""
    yield table([Column(name, right=True) for name in shown], cells, top=SHOWN_CELLS, noun="cell")
    yield ""
    yield Line(f"cells are kept in {view.folder}", whole=True)


def _cell(name: str, value: str | float | int | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return long_time(value) if name.endswith("_s") and name != "jitter_s" else f"{value:.4g}"
    return str(value)


def policies() -> FleetPoliciesView:
    """What there is."""
    found = []
    for name in registry.names():
        made = registry.factory(name)
        parameters = inspect.signature(made).parameters.values()
        found.append(
            PolicyView(
                name=name,
                about=" ".join((inspect.getdoc(made) or "").split("\n\n")[0].split()),
                parameters=tuple(
                    PolicyParameterView(
                        name=each.name.replace("_", "-"),
                        default="required" if each.default is inspect.Parameter.empty else _default(each.default),
                    )
                    for each in parameters
                ),
            )
        )
    return FleetPoliciesView(policies=tuple(found))


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@shown.register
def _(view: FleetPoliciesView, top: int) -> Iterator[Block]:
    yield Headline(f"{len(view.policies)} scheduling policies, with their parameters.")
    yield ""
    for each in view.policies:
        yield Line(each.about, label=each.name)
        if each.parameters:
            yield Line("  ".join(f"{one.name}={one.default}" for one in each.parameters), soft=True)
