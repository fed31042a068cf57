"""`Timeline`: when everything runs, and what the steps are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from foretrace.arrays import Int32, Int64
from foretrace.errors import ForetraceError, GraphError
from foretrace.graph.taskgraph import Phase, TaskGraph, TaskKind
from foretrace.simulate import breakdown as parts
from foretrace.simulate import critical, doubt, noise, sensitivity
from foretrace.simulate.replay import effective, replay
from foretrace.simulate.schedule import as_run, schedule_in_order

By = Literal["name", "layer", "kind", "phase"]
_TAKES_NO_TIME = (TaskKind.RETURN, TaskKind.MARK, TaskKind.JOIN, TaskKind.ARRIVAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlameRow:
    """One suspect: how long it takes and what the mean step would save, seconds.

    `time_s` and `count` are per mean step; `saved_*` come from replays of the changed graph, so work that
    something else hides saves less than it takes.
    """

    name: str  # what the group has in common
    layer: str  # "" where it has several
    kind: str  # that of most of its time
    count: float
    time_s: float
    saved_if_removed_s: float
    saved_if_10pct_faster_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """Start and end of every task (n each, ns) of a graph.

    A step lasts from one mark's end to the next one's; the window is all of them. `order` lists the rows as they
    were decided where lanes took their order as they ran, and is None after a replay. Methods that look for causes
    (critical path, slack, sensitivity, blame) keep the order in which the lanes ran.
    """

    graph: TaskGraph
    start: Int64
    end: Int64
    order: Int32 | None = None

    @cached_property
    def step_times_ns(self) -> Int64:
        """Length of every step (ns). Raises GraphError without step boundaries, or where they are out of order."""
        if self.graph.n_steps < 1:
            raise GraphError(
                f"the graph of {self.graph.info.source or 'this recording'} has no step boundaries; give it two marks."
            )
        lengths = np.diff(self.end[self.graph.marks])
        if lengths.min() < 0:
            step = int(lengths.argmin())
            raise GraphError(
                f"step {step} would end {-lengths[step]} ns before it begins: the marks of the graph do not follow "
                "each other."
            )
        return lengths

    @property
    def step_time_s(self) -> float:
        """The median step, in seconds."""
        return float(np.median(self.step_times_ns)) / 1e9

    @property
    def window_ns(self) -> int:
        """From the first mark to the last one."""
        return int(self.step_times_ns.sum())

    def interval_s(self, level: float = 0.8) -> noise.Interval:
        """Return where the median step lies: noise between steps, and what was not recorded (see `simulate.doubt`)."""
        return doubt.widened(self.noise_s(level), self.step_time_s, self.shifts)

    def noise_s(self, level: float = 0.8) -> noise.Interval:
        """Return where the median step lies as far as noise decides; see `foretrace.simulate.noise`."""
        return self.draws.interval(self.step_time_s, level)

    @cached_property
    def draws(self) -> noise.Draws:
        """The steps in variants that noise makes of the graph, the same for every graph of one recording."""
        _, graph, _, _ = self._ordered
        return noise.draw(graph, self.step_times_ns / 1e9)

    @cached_property
    def shifts(self) -> tuple[doubt.Shift, ...]:
        """How far each source of estimated durations may move the step; none where all durations were recorded."""
        step_s = self.step_time_s
        estimated = tuple(
            doubt.Shift(
                source=each.source, why=each.why, step_s=step_s, low=each.low, high=each.high,
                at_low_s=simulate(low).step_time_s, at_high_s=simulate(high).step_time_s,
            )
            for each, low, high in doubt.ends(self.graph)
        )  # fmt: skip
        return estimated + doubt.of_carried(self.graph.info.carried, step_s)

    def breakdown(self, *, rank: int | None = None) -> parts.Breakdown:
        """Return where the steps of a rank go; by default that of the first mark."""
        self._need_window()
        return parts.breakdown(self.graph, self.start, self.end, rank=rank)

    def lanes(self) -> tuple[parts.LaneBusy, ...]:
        """Return what every lane did in the window."""
        self._need_window()
        return parts.lanes(self.graph, self.start, self.end)

    def critical_path(self) -> critical.CriticalPath:
        """Return the chain of tasks and waits that decides when the last mark is reached."""
        self._need_window()
        rows, graph, start, end = self._ordered
        path = critical.critical_path(graph, start, end)
        return replace(path, graph=self.graph, task=rows[path.task])

    def slack(self) -> Int64:
        """Return nanoseconds (n) by which each task can grow alone before the last mark moves."""
        self._need_window()
        rows, graph, _, end = self._ordered
        return _at(rows, critical.slack(graph, end))

    def sensitivity(self, *, faster: float = 0.1) -> sensitivity.Sensitivity:
        """Return what the window would save if each task alone lost a share of its duration, or all of it."""
        self._need_window()
        rows, graph, start, end = self._ordered
        result = sensitivity.single_tasks(graph, start, end, faster=faster)
        return replace(
            result,
            saved_if_faster_ns=_at(rows, result.saved_if_faster_ns),
            saved_if_zero_ns=_at(rows, result.saved_if_zero_ns),
        )

    def blame(self, by: By = "name") -> tuple[BlameRow, ...]:
        """Return who holds the step back: groups of tasks by the time that a step would save, most first.

        `name` groups host work between calls by its operator, and all other tasks by their full name. Removing a
        group is what `foretrace.simulate.sensitivity.with_calls` says.
        """
        self._need_window()
        _, graph, start, end = self._ordered
        label, texts = _groups(graph, by)
        savings = sensitivity.groups(graph, start, end, label, len(texts), faster=0.1)
        own = np.flatnonzero((label >= 0) & (graph.step >= 0))
        group, dur = label[own], effective(graph).dur[own]
        count, time = np.zeros(len(texts), dtype=np.int64), np.zeros((len(texts), len(TaskKind)), dtype=np.int64)
        np.add.at(count, group, 1)
        np.add.at(time, (group, graph.kind[own]), dur)
        lowest, highest = np.full(len(texts), len(graph.layers)), np.full(len(texts), -1)
        np.minimum.at(lowest, group, graph.layer[own])
        np.maximum.at(highest, group, graph.layer[own])
        per_step = 1e-9 / graph.n_steps
        rows = [
            BlameRow(
                name=texts[g],
                layer=graph.layers[highest[g]] if lowest[g] == highest[g] >= 0 else "",
                kind=TaskKind(int(time[g].argmax())).name.lower(),
                count=float(count[g]) / graph.n_steps,
                time_s=float(time[g].sum()) * per_step,
                saved_if_removed_s=float(savings.saved_if_removed_ns[g]) * per_step,
                saved_if_10pct_faster_s=float(savings.saved_if_faster_ns[g]) * per_step,
            )
            for g in np.flatnonzero(time.any(axis=1)).tolist()
        ]
        return tuple(sorted(rows, key=lambda row: (-row.saved_if_10pct_faster_s, -row.time_s, row.name)))

    def _need_window(self) -> None:
        self.step_times_ns  # noqa: B018  (raises without marks)

    @cached_property
    def _ordered(self) -> tuple[Int32, TaskGraph, Int64, Int64]:
        """(rows of this graph, the graph with all lanes in the order of this run, its start, its end)."""
        if self.order is None:
            return np.arange(len(self.graph), dtype=np.int32), self.graph, self.start, self.end
        return self.order, as_run(self.graph, self.order), self.start[self.order], self.end[self.order]


def simulate(graph: TaskGraph) -> Timeline:
    """Return when everything runs: by replay if the order on all lanes is part of the edges, by schedule otherwise."""
    if all(lane.ordered for lane in graph.lanes):
        start, end = replay(graph)
        return Timeline(graph=graph, start=start, end=end)
    result = schedule_in_order(graph)
    return Timeline(graph=graph, start=result.start, end=result.end, order=result.order)


def _groups(graph: TaskGraph, by: By) -> tuple[Int32, list[str]]:
    """Return label of every task (n, −1 for those that take no time or are gone) and the text of every label."""
    if by == "name":
        of_operator = (graph.kind == TaskKind.CPU) & (graph.op >= 0)
        text = np.where(of_operator, graph.op, graph.name).astype(np.int64)
        key, table = text * 2 + graph.on_device, graph.names  # a kernel may be called like an operator
        texts = {value: table[value // 2] for value in np.unique(key).tolist()}
    elif by == "layer":
        key = graph.layer.astype(np.int64)
        texts = {i: graph.layers[i] if i >= 0 else "(no layer)" for i in np.unique(key).tolist()}
    elif by == "kind":
        key = graph.kind.astype(np.int64)
        texts = {kind: TaskKind(kind).name.lower() for kind in np.unique(key).tolist()}
    elif by == "phase":
        key = graph.phase.astype(np.int64)
        texts = {i: Phase(i).name.lower() if i else "(no phase)" for i in np.unique(key).tolist()}
    else:
        raise ForetraceError(f"by={by} does not exist; choose name, layer, kind or phase.")
    takes_time = ~np.isin(graph.kind, _TAKES_NO_TIME) & ~graph.gone
    label = np.searchsorted(np.array(list(texts), dtype=np.int64), key)
    return np.where(takes_time, label, -1).astype(np.int32), list(texts.values())


def _at(rows: Int32, values: Int64) -> Int64:
    """Return values of the rows of a run, back at the rows of the graph."""
    result = np.empty_like(values)
    result[rows] = values
    return result
