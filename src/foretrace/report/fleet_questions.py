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
from foretrace.report.fleet import known, long_time
from foretrace.report.fleet_question_views import (
    ChangedFigureView,
    FleetDecisionView,
    FleetPoliciesView,
    FleetSweepView,
    FleetWhatifView,
    FleetWhyView,
    HolderView,
    PolicyParameterView,
    PolicyView,
    RemedyView,
    RoomView,
)
from foretrace.report.units import count


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
    return FleetWhyView(
        headline=headline,
        source=source,
        policy=policy,
        cluster=cluster,
        job=found.job,
        tenant=found.tenant,
        gpus=found.gpus,
        at_s=found.at_s,
        status=found.status,
        reason=found.reason,
        queue_s=found.queue_s,
        start_s=found.start_s,
        end_s=found.end_s,
        causes_s=dict(found.causes),
        room=tuple(
            RoomView(level=each.level, units=each.units, free=each.free, most=each.most, fits=each.fits)
            for each in found.room
        ),
        holders=tuple(HolderView(job=job, gpus=gpus, until_s=until) for job, gpus, until in found.holders),
        decisions=tuple(FleetDecisionView(time_s=d.time_s, what=d.what, why=d.why) for d in found.decisions),
        remedies=tuple(
            RemedyView(change=each.change, queue_s=each.queue_s, mean_jct_s=known(each.mean_jct_s), helps=each.helps)
            for each in found.remedies
        ),
        next=shlex.join(["foretrace", "fleet", "whatif" if asked else "run", *run]),
    )


def why_text(view: FleetWhyView) -> str:
    """For people."""
    return "\n".join(_why_lines(view))


def _why_lines(view: FleetWhyView) -> Iterator[str]:
    yield view.headline
    if view.causes_s:
        yield ""
        yield "  waited because"
        for name, seconds in sorted(view.causes_s.items(), key=lambda each: -each[1]):
            yield f"    {name:12} {long_time(seconds):>10}"
    if view.room:
        yield ""
        yield f"  free at {long_time(view.at_s)}   GPUs   most in one   could hold it"
        for room in view.room:
            yield f"    {room.level:12} {room.free:9,} {room.most:13,} {room.fits:10,} of {room.units:,}"
    if view.holders:
        yield ""
        yield "  holds GPUs then      GPUs   for another"
        for holder in view.holders:
            yield f"    {holder.job[:16]:16} {holder.gpus:7,}   {long_time(holder.until_s):>10}"
    if view.decisions:
        yield ""
        yield "  decisions"
        shown = view.decisions if len(view.decisions) <= 24 else (*view.decisions[:12], None, *view.decisions[-12:])
        for each in shown:
            if each is None:
                yield f"    ... {len(view.decisions) - 24:,} more (--json has all)"
            else:
                yield f"    {long_time(each.time_s):>10}  {each.what:8} {each.why}"
    if view.remedies:
        yield ""
        yield "  would it help?                      it waits   mean JCT of all"
        for remedy in view.remedies:
            waits = long_time(remedy.queue_s) if remedy.queue_s is not None else "for ever"
            mean = long_time(remedy.mean_jct_s) if remedy.mean_jct_s is not None else "–"
            yield f"    {remedy.change:30} {waits:>12} {mean:>14}   {'yes' if remedy.helps else 'no'}"
    yield ""
    yield f"  next: {view.next}"


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


def whatif_text(view: FleetWhatifView) -> str:
    """For people."""
    lines = [view.headline, "", f"  {'figure':22} {'before':>12} {'after':>12}   ratio"]
    for each in view.figures:
        seconds = each.name.endswith("_s")
        pair = [_figure(value, seconds) for value in (each.before, each.after)]
        ratio = f"{each.ratio:.3f}" if each.ratio is not None else "–"
        lines.append(f"  {each.name:22} {pair[0]:>12} {pair[1]:>12}   {ratio}")
    lines += ["", f"  {count(view.sooner)} jobs end sooner, {count(view.later)} later."]
    lines += [f"  note: {each}" for each in view.notes]
    lines += ["", f"  next: {view.next}"]
    return "\n".join(lines)


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


def sweep_text(view: FleetSweepView, *, top: int = 40) -> str:
    """For people: the cells by mean JCT, shortest first."""
    shown = [
        name
        for name in view.columns
        if name not in ("jobs", "finished", "p50_jct_s", "p90_jct_s", "mean_rho", "p99_rho")
    ]
    at = [view.columns.index(name) for name in shown]
    jct = view.columns.index("mean_jct_s") if "mean_jct_s" in view.columns else 0
    rows = sorted(
        view.rows, key=lambda row: (not isinstance(row[jct], float), row[jct] if isinstance(row[jct], float) else 0)
    )
    cells = [[_cell(name, row[i]) for name, i in zip(shown, at, strict=True)] for row in rows[:top]]
    widths = [max(len(name), *(len(row[i]) for row in cells)) if cells else len(name) for i, name in enumerate(shown)]
    lines = [view.headline, ""]
    lines.append("  " + "  ".join(f"{name:>{width}}" for name, width in zip(shown, widths, strict=True)))
    lines += ["  " + "  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)) for row in cells]
    if len(rows) > top:
        lines.append(f"  ... {len(rows) - top:,} more (--json has all)")
    return "\n".join([*lines, "", f"  cells are kept in {view.folder}", f"  next: {view.next}"])


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


def policies_text(view: FleetPoliciesView) -> str:
    """For people."""
    lines = []
    for each in view.policies:
        lines.append(f"{each.name}")
        lines.append(f"    {each.about}")
        if each.parameters:
            lines.append("    " + "  ".join(f"{one.name}={one.default}" for one in each.parameters))
    return "\n".join(lines)
