"""`scale` and `remove`: the plainest what-ifs, on tasks chosen by name, kind, layer, phase or operator."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretrace.arrays import Mask
from foretrace.graph import edit
from foretrace.graph.select import select
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.replay import replay
from foretrace.techniques.base import Technique, parameter


@dataclass(frozen=True, kw_only=True)
class _Selection(Technique):
    """Parameters that choose tasks; every one given must hold."""

    across, repeats = "all", True

    named: str | None = parameter(
        None, key="name", doc="pattern over the task's name: * and ? are wildcards, | separates alternatives"
    )
    op: str | None = parameter(None, doc="pattern over the operator that a task belongs to")
    layer: str | None = parameter(None, doc="pattern over the layer")
    lane: str | None = parameter(None, doc="pattern over the label of the thread or stream")
    kind: str | None = parameter(None, doc="kernel, copy, collective, call, operator, ..., device or host")
    phase: str | None = parameter(None, doc="data, forward, backward, optimizer or recompute")
    step: int | None = parameter(None, doc="recorded step, counted from 0")
    on_rank: int | None = parameter(None, key="rank", doc="rank, where the graph holds several")

    def chosen(self, graph: TaskGraph) -> Mask:
        """Return the tasks that the parameters choose; refuses where there are none."""
        known = {each.name: each.field for each in _Selection.parameters()}
        asked = {name: value for name, field in known.items() if (value := getattr(self, field)) is not None}
        if not asked:
            raise self.refuse(f"choose tasks by {', '.join(f'{name}=' for name in known)}.")
        if self.on_rank is not None and self.on_rank not in (there := graph.ranks):
            raise self.refuse(f"rank={self.on_rank} is not in this graph, which holds {_numbers(there)}.")
        each_of: dict[str, Any] = {
            name: value.split("|") if isinstance(value, str) else value for name, value in asked.items()
        }
        mask = select(graph, **each_of)
        if not mask.any():
            words = shlex.join(f"{name}={value}" for name, value in asked.items())
            raise self.refuse(f"no task fits {words}; {_common(graph)}.")
        return mask


@dataclass(frozen=True, kw_only=True)
class Scale(_Selection):
    """Chosen tasks take `by` times as long."""

    summary = "chosen tasks take a given factor of their time"
    source = "Daydream (ATC 2020), section 4.3: primitives select and scale"
    not_applied = "it supposes a speed and does not say how to reach it."

    by: float = parameter(
        doc="factor on the duration: 0.5 is twice as fast", unit="×", least=0, most=1e6,
        hint="give by=0.5 for half the time",
    )  # fmt: skip

    def change(self, graph: TaskGraph) -> TaskGraph:
        return edit.scale(graph, self.chosen(graph), self.by)


@dataclass(frozen=True, kw_only=True)
class Remove(_Selection):
    """Chosen tasks are gone, kernels together with their launches."""

    summary = "chosen tasks are gone, device tasks together with their launches"
    source = "Daydream (ATC 2020), section 4.3: primitives select and remove"
    not_applied = "it supposes that work is gone and does not say what does it instead."

    def change(self, graph: TaskGraph) -> TaskGraph:
        changed = edit.remove(graph, self.chosen(graph))
        _, end = replay(changed)
        nothing = changed.n_steps and not np.diff(end[changed.marks]).any()  # or what is left runs beside the steps
        if nothing or not (changed.dur[~changed.gone & (changed.step >= 0)] > 0).any():
            raise self.refuse(f"no work of a step would be left by {str(self).partition(' ')[2]}; choose fewer tasks.")
        return changed


def _numbers(ranks: tuple[int, ...]) -> str:
    """Return ranks in words."""
    return f"rank {ranks[0]} alone" if len(ranks) == 1 else f"{len(ranks)} ranks, {ranks[0]} to {ranks[-1]}"


def _common(graph: TaskGraph) -> str:
    """Return what there is to choose, for a selection that found nothing."""
    time: Counter[int] = Counter()
    for name, dur in zip(graph.name.tolist(), graph.dur.tolist(), strict=True):
        time[name] += dur
    names = [graph.names[index] for index, _ in time.most_common(4)]
    return "the names with most time are " + ", ".join(name if len(name) < 60 else name[:57] + "..." for name in names)


@dataclass(frozen=True, kw_only=True)
class ReplaceKernel(_Selection):
    """Every chosen task takes `time_us`; with `count`, only so many of each rank's step are left."""

    summary = "your own time for chosen kernels or operators"
    source = "Daydream (ATC 2020), section 4.3: primitives select, scale and insert"
    not_applied = "the kernel is yours: put it into the model, record again, and compare the recordings."

    time_us: float = parameter(
        doc="time of one task, measured or promised", unit="µs", least=0, hint="give microseconds per task"
    )
    count: int | None = parameter(None, doc="tasks per step that do the work of all that were chosen")

    def change(self, graph: TaskGraph) -> TaskGraph:
        if self.count is not None and self.count < 1:
            raise self.refuse(f"count={self.count} leaves no task; use remove for that, or give 1 or more.")
        mask = self.chosen(graph) & (graph.dur > 0)
        if not mask.any():
            raise self.refuse("the chosen tasks take no time as it is.")
        if self.count is not None:
            rows = np.flatnonzero(mask)
            step = graph.rank[rows].astype(np.int64) * (graph.n_steps + 1) + graph.step[rows]
            place = np.arange(len(rows)) - np.searchsorted(np.sort(step), np.sort(step))
            rank = np.empty(len(rows), dtype=np.int64)
            rank[np.argsort(step, kind="stable")] = place
            surplus = graph.mask(rows[rank >= self.count])
            if surplus.any():
                graph = edit.remove(graph, surplus)
                mask &= ~surplus
        what = f"gave {{}} {self.time_us:g} µs each"
        return edit.retime(graph, mask, np.full(int(mask.sum()), 1e3 * self.time_us), what=what)
