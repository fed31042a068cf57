"""`foretrace compare` as an answer: two runs, and the parts and layers in which their difference lies."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from foretrace.report import headline, runs
from foretrace.report.blocks import Bars, Block, Column, Line, listing, table
from foretrace.report.units import between, count, in_unit, share, unit_for
from foretrace.report.views import PARTS, BreakdownView, Report, StepTimeView, part_word, taken
from foretrace.simulate.compare import compare as compare_timelines
from foretrace.simulate.compare import on_one_clock
from foretrace.simulate.timeline import Timeline


class CompareRowView(msgspec.Struct, frozen=True, kw_only=True):
    """One layer and phase of both sides in a typical step; 0 on the side that lacks it.

    `before_s` and `after_s` are busy times; `critical_*_s` are what the layer adds to the critical path,
    waits included, so over all rows they sum to the compared step.
    """

    name: str
    phase: str
    before_s: float
    after_s: float
    change_s: float
    critical_before_s: float
    critical_after_s: float
    matched: int  # tasks that both sides have
    changed: int  # matched tasks whose duration differs
    replaced: int  # matched tasks that carry another name
    only_before: int
    only_after: int


class CompareView(Report, frozen=True, kw_only=True):
    """`foretrace compare`: two recordings or predictions, and where their difference lies.

    `breakdown_change_s` sums to `change_s`; `rows` are busy times, which may overlap and need not.
    """

    command: str = "compare"
    platform: str
    before_source: str
    after_source: str
    before_steps: int
    after_steps: int
    before_s: float
    after_s: float
    change_s: float
    speedup: float
    before_time_s: StepTimeView
    after_time_s: StepTimeView
    before_interval_s: tuple[float, float] | None = None  # as in `show`
    after_interval_s: tuple[float, float] | None = None
    breakdown_before_s: BreakdownView
    breakdown_after_s: BreakdownView
    breakdown_change_s: BreakdownView
    matched_share: float  # share of both sides' busy time in tasks that both have
    rows: tuple[CompareRowView, ...]

    def shown(self, top: int) -> Iterator[Block]:
        unit = unit_for(max(self.before_s, self.after_s))
        for source, steps, time, lies in (
            (self.before_source, self.before_steps, self.before_time_s, self.before_interval_s),
            (self.after_source, self.after_steps, self.after_time_s, self.after_interval_s),
        ):
            spread = f"{count(steps)} steps, p10 – p90 {between(time.p10, time.p90, unit)}" if steps > 1 else "1 step"
            if lies is not None:
                spread = f"{count(steps)} step{'s' if steps > 1 else ''}, 80 % interval {between(*lies, unit)}"
            yield Line(f"{in_unit(time.median, unit)} {unit.name} ({spread})", label=source)
        before, after = self.breakdown_before_s, self.breakdown_after_s
        yield Bars((runs.step_bar("before", before, self.platform), runs.step_bar("after", after, self.platform)))
        yield table(
            ["part of the step", Column("before", "time"), Column("after", "time"), Column("change", "change")],
            [
                (part_word(name, self.platform), getattr(before, name), getattr(after, name), moved)
                for name, moved in self.breakdown_change_s.parts().items()
                if getattr(before, name) or getattr(after, name)
            ],
        )
        yield listing(
            self.rows, ("name", "layer", "name"), "phase", ("before_s", "before", "time"),
            ("after_s", "after", "time"), ("change_s", "change", "change"),
            (lambda row: row.critical_after_s - row.critical_before_s, "on the critical path", "change"), top=top,
            noun="row", how="--top",
        )  # fmt: skip
        yield Line(f"{share(self.matched_share)} of both sides' busy time is in tasks that both have.", soft=True)


def compare(before: Timeline, after: Timeline, *, before_path: str = "", after_path: str = "") -> CompareView:
    """Return two recordings or predictions, and the parts and layers in which their difference lies."""
    before, after, said = on_one_clock(before, after)
    found = compare_timelines(before, after)
    (parts_before, _), (parts_after, _) = runs.breakdowns(before), runs.breakdowns(after)
    moved = BreakdownView(**{part: parts_after.parts()[part] - parts_before.parts()[part] for part in PARTS})
    infos = before.graph.info, after.graph.info
    platform = infos[0].platform if infos[0].platform == infos[1].platform else ""
    before_s, after_s = before.step_time_s, after.step_time_s
    return CompareView(
        headline=headline.compare(before_s, after_s, moved, platform=platform), platform=platform,
        before_source=runs.source(before_path, infos[0].source), after_source=runs.source(after_path, infos[1].source),
        before_steps=before.graph.n_steps, after_steps=after.graph.n_steps, before_s=before_s, after_s=after_s,
        change_s=after_s - before_s, speedup=before_s / after_s if after_s else 0.0,
        before_time_s=runs.step_time(before), after_time_s=runs.step_time(after),
        before_interval_s=runs.estimated(before), after_interval_s=runs.estimated(after),
        breakdown_before_s=parts_before, breakdown_after_s=parts_after, breakdown_change_s=moved,
        matched_share=found.matched_share,
        rows=tuple(
            taken(CompareRowView, row, name=row.layer, change_s=(row.after_ns - row.before_ns) / 1e9)
            for row in found.rows
        ),
        notes=(*((said,) if said else ()), *_notes(before, after)), next="",
    )  # fmt: skip


def _notes(before: Timeline, after: Timeline) -> tuple[str, ...]:
    """Return what makes the two sides less comparable than their numbers look."""
    notes = []
    first, second = before.graph, after.graph
    devices = [graph.device_name or "CPU" for graph in (first, second)]
    if devices[0] != devices[1]:
        notes.append(f"The sides ran on different devices: {devices[0]} and {devices[1]}.")
    if first.info.world_size != second.info.world_size:
        notes.append(f"The sides ran on {first.info.world_size} and {second.info.world_size} ranks.")
    if first.info.step_source != second.info.step_source:
        notes.append(f"Their steps are bounded by {first.info.step_source} and {second.info.step_source}.")
    return tuple(notes)
