"""`foretrace check` and `simulate` as answers: whether a graph stands up to being changed, and its plain replay."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from foretrace.report import headline, runs
from foretrace.report.blocks import Block, Column, Line, listing, table
from foretrace.report.units import between, count, level, signed, things, unit_for
from foretrace.report.views import Report, Result, taken
from foretrace.simulate.check import CheckReport, Finding
from foretrace.simulate.replay import replay
from foretrace.simulate.timeline import Timeline


class CheckView(Result, frozen=True, kw_only=True):
    """`foretrace check`: whether the graph of a recording stands up to being changed."""

    command: str = "check"
    headline: str
    ok: bool
    gpu_whatifs: bool
    findings: tuple[Finding, ...]

    def shown(self, top: int) -> Iterator[Block]:
        yield listing(self.findings, ("verdict", ""), ("name", ""), ("says", Column(wide=True)))


def check(report: CheckReport) -> CheckView:
    """Return what the checks of a graph came to."""
    failed = [finding.name for finding in report.findings if finding.verdict == "fail"]
    headline = (
        f"{len(failed)} of {len(report.findings)} checks failed: {', '.join(failed)}."
        if failed
        else f"All {len(report.findings)} checks of this graph hold."
    )
    if not report.gpu_whatifs:
        headline += " What-ifs on the device are refused."
    return taken(CheckView, report, headline=headline)


class SimulateView(Report, frozen=True, kw_only=True):
    """`foretrace simulate`: the plain replay beside the recording, and the structural one (edges alone)."""

    command: str = "simulate"
    source: str
    rank_numbers: tuple[int, ...]  # ranks that the answer is about
    steps: int
    tasks: int
    edges: int
    step_time_s: float
    measured_s: float
    error: float  # (step_time_s − measured_s) / measured_s
    structural_step_time_s: float
    structural_error: float
    interval_s: tuple[float, float]
    interval_level: float
    interval_source: str

    def shown(self, top: int) -> Iterator[Block]:
        yield table(
            ["replay", Column("step", "seconds"), Column("error", right=True)],
            [
                ("measured", self.measured_s, ""),
                ("recorded waits", self.step_time_s, signed(self.error)),
                ("typical waits", self.structural_step_time_s, signed(self.structural_error)),
            ],
        )
        unit = unit_for(self.step_time_s)
        yield Line(
            f"{things(self.steps, 'step')}, {count(self.tasks)} tasks, "
            f"{count(self.edges)} edges; {level(self.interval_level)} interval of a step "
            f"{between(*self.interval_s, unit)} {unit.name}.",
            soft=True,
        )


def simulate(timeline: Timeline, *, path: str = "", level: float = 0.8) -> SimulateView:
    """Return the plain replay beside the recording, and the structural one: typical instead of recorded waits."""
    graph = timeline.graph
    start, end = replay(graph, structural=True)
    structural_s = Timeline(graph=graph, start=start, end=end).step_time_s
    measured_s = float(np.median(np.diff(graph.recorded[graph.marks] + graph.dur[graph.marks]))) / 1e9
    interval = timeline.interval_s(level)
    error = _relative(timeline.step_time_s, measured_s)
    structural_error = _relative(structural_s, measured_s)
    return taken(
        SimulateView, runs.facts(timeline, path),
        headline=headline.simulate(timeline.step_time_s, measured_s, structural_error),
        step_time_s=timeline.step_time_s, measured_s=measured_s, error=error, structural_step_time_s=structural_s,
        structural_error=structural_error, interval_s=(interval.low_s, interval.high_s), interval_level=interval.level,
        interval_source=interval.source, notes=runs.notes(graph),
        next=f"foretrace check {runs.again(graph, path)}" if path else "",
    )  # fmt: skip


def _relative(value: float, reference: float) -> float:
    return (value - reference) / reference if reference else 0.0
