"""From timelines to views: the only place that decides which numbers an answer carries."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from foretrace import techniques
from foretrace.graph.taskgraph import TaskGraph
from foretrace.report import headline, ranks
from foretrace.report.advise_views import AdviceRow
from foretrace.report.assumptions import assumption
from foretrace.report.html import Page
from foretrace.report.tracks import Track
from foretrace.report.views import (
    PARTS,
    BlameRow,
    BlameView,
    Breakdown,
    ChangeView,
    CompareRow,
    CompareView,
    NotOfStepView,
    PathPart,
    ShowView,
    SimulateView,
    StageView,
    StepTime,
    WhatIfView,
)
from foretrace.simulate.compare import compare as compare_timelines
from foretrace.simulate.compare import on_one_clock
from foretrace.simulate.noise import Interval
from foretrace.simulate.replay import replay
from foretrace.simulate.schedule import as_run
from foretrace.simulate.timeline import By, Timeline
from foretrace.techniques import explain
from foretrace.techniques.whatif import WhatIf
from foretrace.trace.trace import LaneKind

HOLDS_BACK = 20  # rows of the ranking that `show` carries
ADVISED_UP_TO = 5_000  # tasks: trying what answers the bottleneck takes about a tenth of reading so many


def show(timeline: Timeline, *, path: str = "") -> ShowView:
    """What is in a recording and what holds its step back. `path` is the file as the user named it."""
    graph, info = timeline.graph, timeline.graph.info
    rows = _rows(timeline, "name")
    median, mean = breakdowns(timeline)
    often = headline.recurring(ranks.breakdown(timeline).steps_ns)
    bottleneck = often.part if often else headline.bottleneck(median)
    numbers = ranks.numbers(graph)
    together = ranks.collectives(timeline)
    sentence = headline.show(
        median,
        rows[:HOLDS_BACK],
        platform=info.platform,
        ranks=len(numbers),
        every=graph.n_steps > 1,
        recurring=often,
        mean=mean,
    )
    suggestion = _advise(graph, path)
    if together is not None and together.each:
        suggestion = ranks.next_command(together, timeline.step_time_s, _quoted(path)) or suggestion
        first = ranks.headline(
            together,
            timeline.step_time_s,
            every=graph.n_steps > 1,
            all_there=len(numbers) >= info.world_size,
        )
        sentence = first if bottleneck == "exposed_communication" else f"{first} {sentence}"
    return ShowView(
        headline=sentence,
        bottleneck=bottleneck,
        source=_source(path, info.source),
        device=_device(graph),
        devices=info.devices,
        platform=info.platform,
        ranks=len(numbers),
        rank_numbers=numbers,
        world_size=info.world_size,
        steps=graph.n_steps,
        step_numbers=info.steps[: graph.n_steps],
        step_source=info.step_source,
        tasks=len(graph),
        step_time_s=step_time(timeline),
        interval_s=estimated(timeline),
        step_times_s=tuple((timeline.step_times_ns / 1e9).tolist()),
        breakdown_s=median,
        breakdown_mean_s=mean,
        attributed_gpu_share=None if info.platform == "cpu" else float(info.attributed_share),
        unexplained_gpu_share=None if info.platform == "cpu" else float(info.unexplained_share),
        holds_back=rows[:HOLDS_BACK],
        collectives=together,
        clock=ranks.clock(graph),
        not_of_step=tuple(
            NotOfStepView(reason=each.reason, tasks=each.tasks, time_s=each.time_s, share=each.share)
            for each in info.not_of_step
        ),
        advice=_advice(graph, bottleneck),
        notes=_notes(graph),
        next=suggestion,
    )


def blame(timeline: Timeline, by: By = "name", *, path: str = "") -> BlameView:
    """Suspects ranked by what the step would save if they were 10 % faster."""
    rows = _rows(timeline, by)
    return BlameView(
        headline=headline.blame(rows, timeline.step_time_s, every=timeline.graph.n_steps > 1),
        source=_source(path, timeline.graph.info.source),
        platform=timeline.graph.info.platform,
        rank_numbers=ranks.numbers(timeline.graph),
        steps=timeline.graph.n_steps,
        by=by,
        step_time_s=timeline.step_time_s,
        interval_s=estimated(timeline),
        rows=rows,
        next=_advise(timeline.graph, path),
    )


def simulate(timeline: Timeline, *, path: str = "", level: float = 0.8) -> SimulateView:
    """The plain replay beside the recording, and the structural replay: typical waits instead of recorded ones."""
    graph = timeline.graph
    start, end = replay(graph, structural=True)
    structural_s = Timeline(graph=graph, start=start, end=end).step_time_s
    measured_s = float(np.median(np.diff(graph.recorded[graph.marks] + graph.dur[graph.marks]))) / 1e9
    interval = timeline.interval_s(level)
    error = _relative(timeline.step_time_s, measured_s)
    structural_error = _relative(structural_s, measured_s)
    return SimulateView(
        headline=headline.simulate(timeline.step_time_s, measured_s, structural_error),
        source=_source(path, graph.info.source),
        rank_numbers=ranks.numbers(graph),
        steps=graph.n_steps,
        tasks=len(graph),
        edges=graph.edges,
        step_time_s=timeline.step_time_s,
        measured_s=measured_s,
        error=error,
        structural_step_time_s=structural_s,
        structural_error=structural_error,
        interval_s=(interval.low_s, interval.high_s),
        interval_level=interval.level,
        interval_source=interval.source,
        notes=_notes(graph),
        next=f"foretrace check {_again(graph, path)}" if path else "",
    )


def whatif(result: WhatIf, *, path: str = "") -> WhatIfView:
    """A prediction: the step before and after, how sure, what was changed and what it rests on."""
    info = result.before.graph.info
    names = tuple(stage.technique.name for stage in result.stages)
    before_s, after_s, interval_s = result.before_s, result.after_s, result.interval_s
    low, high = result.ratio_interval
    sources = [result.noise.source] if result.noise.source else []
    if result.assumptions:
        count = len(result.assumptions)
        sources.append("the range of the assumption" if count == 1 else f"the ranges of {count} assumptions")
    written = [stage.name for stage in result.stages]
    return WhatIfView(
        headline=headline.whatif(before_s, after_s, interval_s, (low, high)),
        source=_source(path, info.source),
        platform=info.platform,
        name=" + ".join(written),
        techniques=names,
        rank_numbers=ranks.numbers(result.before.graph),
        steps=result.before.graph.n_steps,
        before_s=before_s,
        before_interval_s=result.before_interval_s,
        after_s=after_s,
        saved_s=before_s - after_s,
        speedup=before_s / after_s if after_s else 0.0,
        speedup_interval=(1 / high if high else 0.0, 1 / low if low else None),
        interval_s=interval_s,
        interval_level=result.level,
        interval_source=" and ".join(sources),
        breakdown_before_s=breakdowns(result.before)[0],
        breakdown_after_s=breakdowns(result.after)[0],
        critical_path_before=_path(result.critical_path_before),
        critical_path_after=_path(result.critical_path_after),
        critical_path_moved=result.critical_path_moved,
        stages=tuple(
            StageView(
                name=stage.name,
                before_s=stage.before_s,
                after_s=stage.after_s,
                saved_s=stage.saved_s,
                why_not_more=stage.why_not_more,
            )
            for stage in result.stages
        ),
        changes=tuple(ChangeView(technique=c.technique, what=c.what, tasks=c.tasks) for c in result.changes),
        assumptions=tuple(assumption(each.assumption, each.at_low_s, each.at_high_s) for each in result.assumptions),
        why_not_more=result.why_not_more,
        notes=_corrections(result.before.graph),
        next=f"foretrace export {_again(result.before.graph, path)} {_do(written)}" if path else "",
    )


def page(recorded: Timeline, whatifs: Sequence[WhatIf] = (), *, path: str = "") -> Page:
    """Everything that the page shows of a recording and of what-ifs about it."""
    views = [whatif(each, path=path) for each in whatifs]
    return Page(
        show=show(recorded, path=path),
        blames=[blame(recorded, by, path=path) for by in ("name", "layer", "kind", "phase")],
        whatifs=views,
        tracks=[
            track("recorded", recorded),
            *(track(view.name, each.after) for view, each in zip(views, whatifs, strict=True)),
        ],
        focus_step=median_step(recorded),
    )


def compare(before: Timeline, after: Timeline, *, before_path: str = "", after_path: str = "") -> CompareView:
    """Two recordings or predictions, and the parts and layers in which their difference lies."""
    before, after, said = on_one_clock(before, after)
    found = compare_timelines(before, after)
    (parts_before, _), (parts_after, _) = breakdowns(before), breakdowns(after)
    moved = Breakdown(**{part: parts_after.parts()[part] - parts_before.parts()[part] for part in PARTS})
    infos = before.graph.info, after.graph.info
    platform = infos[0].platform if infos[0].platform == infos[1].platform else ""
    before_s, after_s = before.step_time_s, after.step_time_s
    return CompareView(
        headline=headline.compare(before_s, after_s, moved, platform=platform),
        platform=platform,
        before_source=_source(before_path, infos[0].source),
        after_source=_source(after_path, infos[1].source),
        before_steps=before.graph.n_steps,
        after_steps=after.graph.n_steps,
        before_s=before_s,
        after_s=after_s,
        change_s=after_s - before_s,
        speedup=before_s / after_s if after_s else 0.0,
        before_time_s=step_time(before),
        after_time_s=step_time(after),
        before_interval_s=estimated(before),
        after_interval_s=estimated(after),
        breakdown_before_s=parts_before,
        breakdown_after_s=parts_after,
        breakdown_change_s=moved,
        matched_share=found.matched_share,
        rows=tuple(
            CompareRow(
                name=row.layer,
                phase=row.phase,
                before_s=row.before_ns / 1e9,
                after_s=row.after_ns / 1e9,
                change_s=(row.after_ns - row.before_ns) / 1e9,
                critical_before_s=row.critical_before_ns / 1e9,
                critical_after_s=row.critical_after_ns / 1e9,
                matched=row.matched,
                changed=row.changed,
                replaced=row.replaced,
                only_before=row.only_before,
                only_after=row.only_after,
            )
            for row in found.rows
        ),
        notes=(*((said,) if said else ()), *_compare_notes(before, after)),
        next="",
    )


def step_time(timeline: Timeline) -> StepTime:
    """Median, p10, p90 and mean of the steps."""
    steps = timeline.step_times_ns / 1e9
    low, high = np.quantile(steps, [0.1, 0.9])
    return StepTime(median=timeline.step_time_s, p10=float(low), p90=float(high), mean=float(steps.mean()))


def estimated(timeline: Timeline, level: float = 0.8) -> tuple[float, float] | None:
    """Where the step lies if it rests on estimates or assumptions, None for one that was recorded."""
    if not timeline.shifts:
        return None
    found = timeline.interval_s(level)
    return found.low_s, found.high_s


def breakdowns(timeline: Timeline) -> tuple[Breakdown, Breakdown]:
    """Where the median step goes and where the mean step goes; each sums to its step."""
    found = ranks.breakdown(timeline)
    median, mean = found.median_s(), found.mean_s()
    return Breakdown(**{part: median[part] for part in PARTS}), Breakdown(**{part: mean[part] for part in PARTS})


def track(name: str, timeline: Timeline, step: Interval | None = None) -> Track:
    """A run as the page and the export draw it, with its lanes in the order in which they ran.

    `step` is where its step lies; the page has that from its views.
    """
    path = timeline.critical_path().task.astype(np.int64)
    if timeline.order is None:
        graph, start, end = timeline.graph, timeline.start, timeline.end
    else:
        order = timeline.order
        graph, start, end = as_run(timeline.graph, order), timeline.start[order], timeline.end[order]
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        path = place[path]
    return Track(name=name, graph=graph, start=start, end=end, critical=path, step=step)


def median_step(timeline: Timeline) -> int:
    """Position of the (lower) median step."""
    order = np.argsort(timeline.step_times_ns, kind="stable")
    return int(order[(len(order) - 1) // 2])


def _rows(timeline: Timeline, by: By) -> tuple[BlameRow, ...]:
    return tuple(
        BlameRow(
            name=row.name,
            layer=row.layer,
            kind=row.kind,
            count=row.count,
            time_s=row.time_s,
            saved_if_removed_s=row.saved_if_removed_s,
            saved_if_10pct_faster_s=row.saved_if_10pct_faster_s,
        )
        for row in timeline.blame(by)
    )


def _compare_notes(before: Timeline, after: Timeline) -> tuple[str, ...]:
    """What makes the two sides less comparable than their numbers look."""
    notes = []
    first, second = before.graph, after.graph
    if _device(first) != _device(second):
        notes.append(f"The sides ran on different devices: {_device(first) or 'CPU'} and {_device(second) or 'CPU'}.")
    if first.info.world_size != second.info.world_size:
        notes.append(f"The sides ran on {first.info.world_size} and {second.info.world_size} ranks.")
    if first.info.step_source != second.info.step_source:
        notes.append(f"Their steps are bounded by {first.info.step_source} and {second.info.step_source}.")
    return tuple(notes)


def _path(parts: Sequence[explain.PathPart]) -> tuple[PathPart, ...]:
    return tuple(PathPart(name=part.name, time_s=part.time_s) for part in parts)


def _do(techniques: Sequence[str]) -> str:
    return " ".join(f"--do {_quoted(technique)}" for technique in techniques)


def _quoted(text: str) -> str:
    """One word for a shell, in double quotes where they do: they read better around single ones."""
    quoted = shlex.quote(text)
    return quoted if quoted == text or set(text) & set('"$`\\!') else f'"{text}"'


def _device(graph: TaskGraph) -> str:
    """Name of the device that most of the work ran on, "" if the recording does not say."""
    names = graph.info.devices
    used = [lane.device for lane in graph.lanes if lane.kind == LaneKind.GPU]
    at = max(set(used), key=used.count) if used else 0
    return names[at] if 0 <= at < len(names) else next(filter(None, names), "")


def _source(path: str, recorded: str) -> str:
    return Path(path or recorded).name


def _relative(value: float, reference: float) -> float:
    return (value - reference) / reference if reference else 0.0


def _notes(graph: TaskGraph) -> tuple[str, ...]:
    """What was done to the recording before any question was asked, and what its builder wants known."""
    return _corrections(graph) + graph.info.notes


def _corrections(graph: TaskGraph) -> tuple[str, ...]:
    return tuple(change.what for change in graph.changes if not change.technique)


def _advice(graph: TaskGraph, bottleneck: str) -> tuple[AdviceRow, ...]:
    """What answers the bottleneck and gains beyond doubt; `foretrace advise` tries everything."""
    if len(graph) > ADVISED_UP_TO or len(ranks.numbers(graph)) > 1:
        return ()
    from foretrace.plan.advise import against
    from foretrace.report.advise_views import row

    names = {"data_loading": ["PrefetchData"], "launch_bound": ["CudaGraphs", "FusedOptimizer"]}
    kinds = [getattr(techniques, name) for name in names.get(bottleneck, ["MixedPrecision", "Compiled"])]
    return tuple(map(row, against(graph, kinds)))


def _advise(graph: TaskGraph, path: str) -> str:
    """The command that says what to do about a run, "" without a file to name."""
    return f"foretrace advise {_again(graph, path)}" if path else ""


def _again(graph: TaskGraph, path: str) -> str:
    """The words that name the same graph in another command."""
    return _quoted(path) + (" --all-ranks" if len(ranks.numbers(graph)) > 1 else "")
