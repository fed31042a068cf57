"""`whatif`: techniques applied one after the other, and how sure the prediction is.

The interval of the predicted step has five sources, taken as independent. *Noise* between the recorded steps moves the
step around its prediction (`Timeline.noise_s`); of what is gained, only as far as it does not move both steps alike
(`noise.between`). *Estimates*: durations that the graph carries with a range of their
own (`Timeline.shifts`); they are as far off before as after a change, so they cancel in the ratio of the two steps as
far as both rest on them. *Assumptions*: the whole chain is predicted again with one
assumption after the other at its low and its high end; how far the step moves down or up is that assumption's
deviation. *Changes on a GPU*: none that was predicted was held against a measurement yet, so the change itself may be
off by as much as on processors (`UNVERIFIED`). *Waits that nothing explains* may go with what caused them. On either
side, the interval reaches as far as the root of the sum of squares of all deviations there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import hypot

import numpy as np

from foretrace.arrays import Mask
from foretrace.graph.taskgraph import Assumption, Carried, Change, TaskGraph
from foretrace.simulate.doubt import assumed, work_between
from foretrace.simulate.noise import Figure, Interval, between
from foretrace.simulate.overlap import overlap_assumption, overlap_change
from foretrace.simulate.replay import replay
from foretrace.simulate.timeline import Timeline, simulate
from foretrace.techniques.base import Technique
from foretrace.techniques.explain import PathPart, main_parts, path_parts, why_not_more

# Of the newest conclusive verification of every setting in benchmarks/data/ledger.jsonl, where it predicts a change of
# 3 % of the step or more, 80 % are off by at most this share of the change. All ran on processors: rows that get better
# because a change is timed on the processor itself tell nothing of a GPU, so it follows them up, not down
# (tests/techniques/test_whatif.py computes it again).
UNVERIFIED = 0.19
_FEW_WAITS = 0.01  # waits that no edge explains up to this share of the steps move none of them noticeably


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """The step after one more technique."""

    technique: Technique
    before_s: float
    timeline: Timeline
    changes: tuple[Change, ...]

    @property
    def name(self) -> str:
        """The technique as it is written."""
        return str(self.technique)

    @property
    def after_s(self) -> float:
        """Predicted step."""
        return self.timeline.step_time_s

    @property
    def saved_s(self) -> float:
        """What this technique takes off the step."""
        return self.before_s - self.after_s

    @cached_property
    def why_not_more(self) -> str:
        """What holds the step now."""
        return why_not_more(self.timeline)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """An assumption and the predicted step with it at its low and at its high end."""

    assumption: Assumption
    at_low_s: float
    at_high_s: float
    after_s: float
    before_s: tuple[float, float] | None = None  # the step before at the same ends, where it rests on this, too
    stage: int | None = None  # of the technique whose parameter it is

    @property
    def faster_s(self) -> float:
        """How much shorter the step may be on its account."""
        return max(self.after_s - min(self.at_low_s, self.at_high_s), 0.0)

    @property
    def slower_s(self) -> float:
        """How much longer the step may be on its account."""
        return max(max(self.at_low_s, self.at_high_s) - self.after_s, 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class WhatIf:
    """A prediction: the step before and after, how sure, and what it rests on."""

    before: Timeline
    after: Timeline
    stages: tuple[Stage, ...]
    level: float
    noise: Interval  # of the predicted step, from the recorded steps alone
    assumptions: tuple[Weighed, ...]  # those that matter most first

    @property
    def before_s(self) -> float:
        """Median step of the recording."""
        return self.before.step_time_s

    @property
    def after_s(self) -> float:
        """Median step predicted."""
        return self.after.step_time_s

    @property
    def interval_s(self) -> tuple[float, float]:
        """Where the predicted step lies with probability `level`."""
        faster = hypot(self.after_s - self.noise.low_s, *(each.faster_s for each in self.assumptions))
        slower = hypot(self.noise.high_s - self.after_s, *(each.slower_s for each in self.assumptions))
        return max(self.after_s - faster, 0.0), self.after_s + slower

    @property
    def before_interval_s(self) -> tuple[float, float]:
        """Where the step before lies with probability `level`."""
        found = self.before.interval_s(self.level)
        return found.low_s, found.high_s

    @property
    def ratio_interval(self) -> tuple[float, float]:
        """Where the predicted step lies as a share of the step before; what moves both alike does not count."""
        if not self.before_s:
            return 1.0, 1.0
        low, high = self._interval(lambda before, after: after / np.where(before > 0, before, self.before_s))
        return max(low, 0.0), high

    @property
    def saved_interval_s(self) -> tuple[float, float]:
        """Where lies what is taken off the step; what moves both alike does not count."""
        return self._interval(np.subtract)

    def _interval(self, figure: Figure) -> tuple[float, float]:
        """Return where a figure of the step before and after lies with probability `level`."""

        def of(before_s: float, after_s: float) -> float:
            return float(figure(np.array([before_s]), np.array([after_s]))[0])

        value = of(self.before_s, self.after_s)
        below, above = between(self.before.draws, self.after.draws, figure, self.level)
        low, high = [below], [above]
        for each in self.assumptions:
            before = each.before_s or (self.before_s, self.before_s)
            ends = list(map(of, before, (each.at_low_s, each.at_high_s)))
            low.append(max(value - min(ends), 0.0))
            high.append(max(max(ends) - value, 0.0))
        return value - hypot(*low), value + hypot(*high)

    def saved(self) -> TaskGraph:
        """Return the predicted graph with the range of every assumption: on the tasks that rest on it, else on the
        step.

        What the graph carries itself (its estimates, and what it was saved with before) stays.
        """
        graph, techniques, carried = self.after.graph, [stage.technique for stage in self.stages], list[Carried]()
        for each in self.assumptions:
            if each.before_s is not None:
                continue
            source, work_s = f"{each.assumption.technique} {each.assumption.name}", (0.0, 0.0)
            if each.stage is not None:
                base = self.stages[each.stage - 1].timeline.graph if each.stage else self.before.graph
                low, high = _ends(base, techniques[each.stage :], each.assumption)
                known = assumed(graph, low, high, source, each.assumption.why)
                if known is not None:
                    graph = known
                    continue
                work_s = work_between(graph, (low, high))  # hidden now, a later change may uncover it
            if not max(each.faster_s, each.slower_s, *work_s) > 0:
                continue
            shift = {"faster_s": each.faster_s, "slower_s": each.slower_s, "of_s": self.after_s}
            carried.append(Carried(source=source, why=each.assumption.why, work_s=work_s, **shift))
        return replace(graph, info=replace(graph.info, carried=(*graph.info.carried, *carried)))

    @property
    def changes(self) -> tuple[Change, ...]:
        """What all techniques did."""
        return tuple(change for stage in self.stages for change in stage.changes)

    @cached_property
    def critical_path_before(self) -> tuple[PathPart, ...]:
        """What decides the recorded step."""
        return path_parts(self.before)

    @cached_property
    def critical_path_after(self) -> tuple[PathPart, ...]:
        """What decides the predicted step."""
        return path_parts(self.after)

    @property
    def critical_path_moved(self) -> bool:
        """Whether other kinds of work decide the step than before."""
        return set(main_parts(self.critical_path_before)) != set(main_parts(self.critical_path_after))

    @property
    def why_not_more(self) -> str:
        """What holds the step in the end."""
        return why_not_more(self.after)


def whatif(graph: TaskGraph, techniques: Sequence[Technique], *, level: float = 0.8) -> WhatIf:
    """Predict the step after these techniques, each applied to the graph that the former produced.

    Raises NotApplicableError, with a reason, where one of them does not fit.
    """
    before = simulate(graph)
    graphs, stages, latest = [graph], list[Stage](), before
    for technique in techniques:
        changed = technique.predict(graphs[-1])
        timeline = simulate(changed)
        made = changed.changes[len(graphs[-1].changes) :]
        stages.append(Stage(technique=technique, before_s=latest.step_time_s, timeline=timeline, changes=made))
        graphs.append(changed)
        latest = timeline
    after_s = latest.step_time_s
    weighed = [
        _weigh(graphs[i], techniques[i:], assumption, after_s, i)
        for i, technique in enumerate(techniques)
        for assumption in technique.uncertain(graphs[i])
    ]
    weighed += [
        Weighed(assumption=each, at_low_s=after_s, at_high_s=after_s, after_s=after_s)
        for each in graphs[-1].assumptions[len(graph.assumptions) :]
        if not each.flag
    ]
    weighed += company(before, latest)
    weighed += unexplained(latest) if techniques else []
    weighed += unverified(graph, techniques, [before, *(stage.timeline for stage in stages)])
    weighed += estimates(before, latest)
    return WhatIf(
        before=before,
        after=latest,
        stages=tuple(stages),
        level=level,
        noise=latest.noise_s(level),
        assumptions=tuple(sorted(weighed, key=lambda each: -max(each.faster_s, each.slower_s))),
    )


def _weigh(
    graph: TaskGraph, techniques: Sequence[Technique], assumption: Assumption, after_s: float, stage: int
) -> Weighed:
    """Return the end of the chain with one assumption of its first technique at either end."""
    low_s, high_s = (simulate(each).step_time_s for each in _ends(graph, techniques, assumption))
    return Weighed(assumption=assumption, at_low_s=low_s, at_high_s=high_s, after_s=after_s, stage=stage)


def _ends(graph: TaskGraph, techniques: Sequence[Technique], assumption: Assumption) -> tuple[TaskGraph, TaskGraph]:
    """Return what these techniques make of the graph with one assumption of the first at its low and at its
    high end.
    """

    def changed(value: float) -> TaskGraph:
        made = replace(techniques[0], **{assumption.flag: value}).predict(graph)
        for technique in techniques[1:]:
            made = technique.predict(made)
        return made

    return changed(assumption.low), changed(assumption.high)


def _around_1(
    name: str,
    ends: tuple[float, float],
    why: str,
    step_s: tuple[float, float],
    after: Timeline,
    before_s: tuple[float, float] | None = None,
) -> Weighed:
    """Return a factor around 1 that no technique assumes, from one of `ends` to the other, and the step there."""
    low, high = ends
    assumption = Assumption(technique="", name=name, value=1.0, low=low, high=high, unit="×", why=why)
    (low_s, high_s), after_s = step_s, after.step_time_s
    return Weighed(assumption=assumption, at_low_s=low_s, at_high_s=high_s, after_s=after_s, before_s=before_s)


def estimates(before: Timeline, after: Timeline) -> list[Weighed]:
    """Return what was not recorded but estimated, before the change and after it."""
    was, now = ({each.source: each for each in timeline.shifts} for timeline in (before, after))
    found = []
    for source, said in {**was, **now}.items():
        before_s, step_s = (
            (held.at_low_s, held.at_high_s) if (held := shifts.get(source)) else (timeline.step_time_s,) * 2
            for shifts, timeline in ((was, before), (now, after))
        )
        found.append(_around_1(f"estimates by {source}", (said.low, said.high), said.why, step_s, after, before_s))
    return found


def unverified(graph: TaskGraph, techniques: Sequence[Technique], timelines: Sequence[Timeline]) -> list[Weighed]:
    """Return how far real changes of a job on a GPU may be off beside all that is assumed, as none was verified there.

    `timelines`: before the first technique and after each. What only supposes (`scale`) claims nothing.
    """
    if not graph.on_device.any():
        return []
    steps = [timeline.step_time_s for timeline in timelines]
    claimed_s = sum(
        abs(after - before)
        for technique, (before, after) in zip(techniques, pairwise(steps), strict=True)
        if technique.can_apply()
    )
    if not claimed_s:
        return []
    why = "verified on processors alone, where 80 % of the predictions are off by less than that share of the change"
    off_s = UNVERIFIED * claimed_s
    step_s = max(steps[-1] - off_s, 0.0), steps[-1] + off_s
    return [_around_1("change on a GPU", (1 - UNVERIFIED, 1 + UNVERIFIED), why, step_s, timelines[-1])]


def unexplained(after: Timeline) -> list[Weighed]:
    """Return waits that the recording shows and no edge explains: what caused them may go with a change, or stay."""
    graph, step_s = after.graph, after.step_time_s
    if int(graph.delay[~graph.gone].sum()) < _FEW_WAITS * step_s * 1e9 * max(graph.n_steps, 1):
        return []
    _, end = replay(graph.with_columns(delay=np.zeros_like(graph.delay)))
    without_s = float(np.median(np.diff(end[graph.marks]))) / 1e9 if graph.n_steps else step_s
    why = "nothing in the recording explains them; what caused them may go with the change, or stay"
    return [_around_1("unexplained waits", (0.0, 1.0), why, (min(without_s, step_s), step_s), after)]


def company(before: Timeline, after: Timeline) -> list[Weighed]:
    """Return kernels that shared the device and no longer do, or the reverse: what their recorded time may be
    off by.
    """
    change = overlap_change(before, after)
    assumption = overlap_assumption(change)
    if change is None or assumption is None:
        return []

    def step_s(mask: Mask, by: float) -> float:
        dur = np.where(mask, np.rint(after.graph.dur * by).astype(np.int64), after.graph.dur)
        return simulate(after.graph.with_columns(dur=dur)).step_time_s

    return [
        Weighed(
            assumption=assumption,
            at_low_s=step_s(change.alone_now, 1 / assumption.high),
            at_high_s=step_s(change.shared_now, assumption.high),
            after_s=after.step_time_s,
        )
    ]
