"""What answers about a run share: its steps, its device, what was done to it, and the words that name it again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from foretrace.graph.taskgraph import TaskGraph
from foretrace.report import ranks
from foretrace.report.blocks import Bar, bar
from foretrace.report.views import PARTS, BreakdownView, StepTimeView, part_word
from foretrace.simulate.timeline import Timeline


def step_time(timeline: Timeline) -> StepTimeView:
    """Return median, p10, p90 and mean of the steps."""
    steps = timeline.step_times_ns / 1e9
    low, high = np.quantile(steps, [0.1, 0.9])
    return StepTimeView(median=timeline.step_time_s, p10=float(low), p90=float(high), mean=float(steps.mean()))


def estimated(timeline: Timeline, level: float = 0.8) -> tuple[float, float] | None:
    """Return where the step lies if it rests on estimates or assumptions, None for one that was recorded."""
    if not timeline.shifts:
        return None
    found = timeline.interval_s(level)
    return found.low_s, found.high_s


def breakdowns(timeline: Timeline) -> tuple[BreakdownView, BreakdownView]:
    """Return where the median step goes and where the mean step goes; each sums to its step."""
    found = ranks.breakdown(timeline)
    both = (found.median_s(), found.mean_s())
    median, mean = (BreakdownView(**{part: each[part] for part in PARTS}) for each in both)
    return median, mean


def do(techniques: Sequence[str]) -> str:
    """Return the words that apply techniques."""
    return " ".join(f"--do {quoted(technique)}" for technique in techniques)


def quoted(text: str) -> str:
    """Return one word for a shell, in double quotes where they do: they read better around single ones."""
    quoted = shlex.quote(text)
    return quoted if quoted == text or set(text) & set('"$`\\!') else f'"{text}"'


def facts(timeline: Timeline, path: str) -> SimpleNamespace:
    """Return which run an answer is about, by the names of its fields; `path` is the file as the user named it."""
    graph, info = timeline.graph, timeline.graph.info
    return SimpleNamespace(
        source=source(path, info.source), platform=info.platform, device=graph.device_name, rank_numbers=graph.ranks,
        steps=graph.n_steps, tasks=len(graph), edges=graph.edges,
    )  # fmt: skip


def source(path: str, recorded: str) -> str:
    """Return the file as people call it."""
    return Path(path or recorded).name


def notes(graph: TaskGraph) -> tuple[str, ...]:
    """Return what was done to the recording before any question was asked, and what its builder wants known."""
    return corrections(graph) + graph.info.notes


def corrections(graph: TaskGraph) -> tuple[str, ...]:
    """Return what was done to the recording before any question was asked."""
    return tuple(change.what for change in graph.changes if not change.technique)


def advise(graph: TaskGraph, path: str) -> str:
    """Return the command that says what to do about a run, "" without a file to name."""
    return f"foretrace advise {again(graph, path)}" if path else ""


def again(graph: TaskGraph, path: str) -> str:
    """Return the words that name the same graph in another command."""
    return quoted(path) + (" --all-ranks" if len(graph.ranks) > 1 else "")


def step_bar(label: str, found: BreakdownView, platform: str) -> Bar:
    """Return a step drawn to scale; most parts need a device, and are left out without one."""
    parts = {name: value for name, value in found.parts().items() if value or platform != "cpu"}
    return bar(label, parts, {name: part_word(name, platform) for name in parts})
