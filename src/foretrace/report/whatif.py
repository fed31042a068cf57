"""`foretrace whatif` as an answer: the predicted step, what was changed, what it rests on, and the words for that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from foretrace.experiment.job import Assumed
from foretrace.graph.taskgraph import Change
from foretrace.report import headline, runs, shared
from foretrace.report.blocks import Bars, Block, Column, Line, notes, table
from foretrace.report.shared import EnergyView, assumption
from foretrace.report.units import between, in_unit, level, unit_for
from foretrace.report.views import BreakdownView, Report, taken
from foretrace.simulate.timeline import Timeline
from foretrace.techniques.compute.other_device import recorded_on
from foretrace.techniques.explain import PathPart
from foretrace.techniques.whatif import WhatIf

MATTERS = 0.01  # an assumption whose range moves the predicted step by less is named, not explained
LEAST_SHARE = 0.03  # parts of a critical path below this share of the step are left out of the words


class StageView(msgspec.Struct, frozen=True, kw_only=True):
    """The step after one more technique of a what-if."""

    name: str
    before_s: float
    after_s: float
    saved_s: float
    why_not_more: str


class WhatIfView(Report, frozen=True, kw_only=True):
    """`foretrace whatif`: the predicted step, what was changed and what was assumed."""

    command: str = "whatif"
    source: str
    platform: str
    name: str  # the techniques, joined: "prefetch-data + mixed-precision"
    techniques: tuple[str, ...]
    rank_numbers: tuple[int, ...]  # ranks that the answer is about
    steps: int
    before_s: float
    before_interval_s: tuple[float, float]
    after_s: float
    saved_s: float
    speedup: float
    speedup_interval: tuple[float, float | None]  # what moves both steps alike does not count; None: without limit
    interval_s: tuple[float, float]
    interval_level: float
    interval_source: str
    energy_before: EnergyView | None  # null where the device is not known or has no power model
    energy_after: EnergyView | None
    breakdown_before_s: BreakdownView
    breakdown_after_s: BreakdownView
    critical_path_before: tuple[PathPart, ...]
    critical_path_after: tuple[PathPart, ...]
    critical_path_moved: bool
    stages: tuple[StageView, ...]
    changes: tuple[Change, ...]
    assumptions: tuple[Assumed, ...]
    why_not_more: str

    def shown(self, top: int) -> Iterator[Block]:
        unit = unit_for(self.before_s)
        sides = (("before", self.breakdown_before_s), ("after", self.breakdown_after_s))
        yield Bars(
            tuple(
                runs.step_bar(f"{word:<7}{in_unit(sum(each.parts().values()), unit)} {unit.name}", each, self.platform)
                for word, each in sides
            )
        )
        yield table(
            ["change", Column("step", "time"), Column("saved", "change"), Column("why not more", wide=True)],
            [(stage.name, stage.after_s, -stage.saved_s, stage.why_not_more) for stage in self.stages],
        )
        if self.critical_path_after:
            yield Line(path_change(self), label="critical path")
        if self.energy_before and self.energy_after:
            yield from shared.energy_lines(self.energy_before, self.energy_after)
        yield from notes((change_text(made, len(self.techniques) > 1) for made in self.changes), "changed")
        matter = assumptions_that_matter(self)
        yield from notes(map(shared.assumption_text, matter), "assumed")
        if rest := self.assumptions[len(matter) :]:
            yield Line(other_assumptions(self, rest), label="assumed")
        if self.why_not_more and not any(stage.why_not_more for stage in self.stages):
            yield Line(self.why_not_more, label="why not more")
        yield Line(f"{interval_text(self)}: {self.interval_source}.", soft=True)


def whatif(result: WhatIf, *, path: str = "", grid: float | None = None) -> WhatIfView:
    """Return a prediction: the step before and after, how sure, what was changed and what it rests on."""
    names = tuple(stage.technique.name for stage in result.stages)
    before_s, after_s, interval_s = result.before_s, result.after_s, result.interval_s
    low, high = result.ratio_interval
    sources = [result.noise.source] if result.noise.source else []
    if result.assumptions:
        count = len(result.assumptions)
        sources.append("the range of the assumption" if count == 1 else f"the ranges of {count} assumptions")
    written = [stage.name for stage in result.stages]
    return taken(
        WhatIfView, runs.facts(result.before, path), result,
        headline=headline.whatif(before_s, after_s, interval_s, (low, high)), name=" + ".join(written),
        techniques=names, saved_s=before_s - after_s, speedup=before_s / after_s if after_s else 0.0,
        speedup_interval=(1 / high if high else 0.0, 1 / low if low else None), interval_level=result.level,
        interval_source=" and ".join(sources), energy_before=_energy(result.before, result.before_interval_s, grid),
        energy_after=_energy(result.after, interval_s, grid), breakdown_before_s=runs.breakdowns(result.before)[0],
        breakdown_after_s=runs.breakdowns(result.after)[0],
        assumptions=tuple(assumption(each.assumption, each.at_low_s, each.at_high_s) for each in result.assumptions),
        notes=runs.corrections(result.before.graph),
        next=f"foretrace export {runs.again(result.before.graph, path)} {runs.do(written)}" if path else "",
    )  # fmt: skip


def _energy(timeline: Timeline, interval_s: tuple[float, float], grid: float | None) -> EnergyView | None:
    """Return the energy of a step of all ranks; kernels run on a device also while messages keep them waiting."""
    graph, found = timeline.graph, runs.breakdowns(timeline)[0]
    busy_s = found.compute + found.exposed_communication
    step_s = sum(found.parts().values())
    return shared.energy(recorded_on(graph), step_s, interval_s, busy_s, max(len(graph.ranks), 1), grid)


def interval_text(view: WhatIfView) -> str:
    """Return text such as "80 % interval 84.0 – 101 ms"."""
    unit = unit_for(view.before_s)
    return f"{level(view.interval_level)} interval {between(*view.interval_s, unit)} {unit.name}"


def change_text(made: Change, several: bool) -> str:
    """Return what one edit did, with the technique's name where several were applied."""
    return f"{made.technique}: {made.what}" if several and made.technique else made.what


def assumptions_that_matter(view: WhatIfView) -> tuple[Assumed, ...]:
    """Return the first assumptions: those that move the step by a hundredth or more, and always the first one."""
    moved = [max(abs(a.step_at_low_s - view.after_s), abs(a.step_at_high_s - view.after_s)) for a in view.assumptions]
    return tuple(a for i, a in enumerate(view.assumptions) if i == 0 or moved[i] >= MATTERS * view.after_s)


def other_assumptions(view: WhatIfView, rest: Sequence[Assumed]) -> str:
    """Return text such as "conv 3.47×, norm 0.600×: each moves the step by less than 1 %"."""
    several = len({a.technique for a in view.assumptions}) > 1
    named = ", ".join(
        f"{a.technique + ' ' if several and a.technique else ''}{shared.name_text(a)} {shared.value_text(a)}"
        for a in rest
    )
    return f"{named}: {'each moves' if len(rest) > 1 else 'moves'} the step by less than {100 * MATTERS:g} %"


def path_text(parts: Sequence[PathPart]) -> str:
    """Return text such as "data loading 58.0 → backward kernels 61.2 ms", the parts that matter only."""
    total = sum(part.time_s for part in parts)
    kept = [part for part in parts if part.time_s >= LEAST_SHARE * total and part.time_s > 0]
    unit = unit_for(total)
    return " → ".join(f"{part.name} {in_unit(part.time_s, unit)}" for part in kept) + (f" {unit.name}" if kept else "")


def path_change(view: WhatIfView) -> str:
    """Return the critical path after the change, and before it if it moved."""
    after = path_text(view.critical_path_after)
    if not view.critical_path_moved:
        return f"{after} (where it was)"
    return f"{after} (before: {path_text(view.critical_path_before)})"
