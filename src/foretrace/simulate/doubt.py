"""Ranges that a graph carries: how far its step may be off because durations were estimated or assumed, not recorded.

Such a task points to a `Doubt`: how many times its duration it takes at either end, and who said so. What one source
says is off in one direction for all its tasks, sources are independent. So a source moves the step by what a simulation
with all its tasks at one end says, and a change that removes or shortens those tasks takes their part of the range with
it. What no task stands for (an assumption that decides how many tasks there are) is carried as a movement of the step:
in proportion where the step grows, as it was where it shrinks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import hypot, isclose

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.graph.taskgraph import Carried, Doubt, TaskGraph
from foretrace.simulate.noise import Interval

_STRUCTURE = ("kind", "lane", "name", "in_ptr", "src", "edge_kind", "from_start", "gone")
_TIMES = ("delay", "release", "lag")
_DIGITS = 6  # of a factor: tasks that share one share their entry in the table


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """The step with one source at its low and at its high end, seconds; `low` and `high` are its widest factors."""

    source: str
    why: str
    step_s: float
    at_low_s: float
    at_high_s: float
    low: float
    high: float

    @property
    def faster_s(self) -> float:
        """How much shorter the step may be on its account."""
        return max(self.step_s - min(self.at_low_s, self.at_high_s), 0.0)

    @property
    def slower_s(self) -> float:
        """How much longer the step may be on its account."""
        return max(max(self.at_low_s, self.at_high_s) - self.step_s, 0.0)


def doubted(
    graph: TaskGraph,
    rows: Int64,
    source: str,
    low: Float64,
    high: Float64,
    why: str = "",
    *,
    recorded: bool = False,
) -> TaskGraph:
    """Return the graph with these tasks at `low` to `high` times their duration (one factor per row), as `source` says.

    What is said of them already stays beside it. `recorded`: what `source` says is a factor on recorded durations.
    """
    table = graph.info.doubts
    factors = np.round(np.stack([low, high], axis=1), _DIGITS)
    if not np.all(np.isfinite(factors)) or np.any(factors < 0):
        raise ValueError(f"{source}: want finite factors, 0 or more")
    keys, of = np.unique(np.column_stack([factors, graph.doubt[rows]]), axis=0, return_inverse=True)
    more = tuple(
        Doubt(source=source, low=a, high=b, why=why, beside=c, recorded=recorded and (c < 0 or table[c].recorded))
        for a, b, c in ((a, b, int(c)) for a, b, c in keys.tolist())
    )
    column = graph.doubt.copy()
    column[rows] = len(table) + of.reshape(-1)
    info = replace(graph.info, doubts=table + more)
    return replace(graph.with_columns(doubt=column.astype(np.int32)), info=info)


def assumed(graph: TaskGraph, low: TaskGraph, high: TaskGraph, source: str, why: str = "") -> TaskGraph | None:
    """Return the graph with the durations of `low` and `high`, the same prediction with one assumption at either end.

    None where those have other tasks or edges, or where a task that takes no time here takes some there.
    """
    for other in (low, high):
        if len(other) != len(graph) or not all(
            np.array_equal(getattr(graph, key), getattr(other, key)) for key in (*_STRUCTURE, *_TIMES)
        ):
            return None
    moved = np.flatnonzero((low.dur != graph.dur) | (high.dur != graph.dur))
    own = graph.dur[moved]
    if not len(moved) or np.any(own == 0):
        return None
    return doubted(graph, moved, source, low.dur[moved] / own, high.dur[moved] / own, why, recorded=True)


def ends(graph: TaskGraph) -> Iterable[tuple[Doubt, TaskGraph, TaskGraph]]:
    """Yield, per source (its widest `Doubt`), the graph with all its tasks at their low and at their high end."""
    table = graph.info.doubts
    if not table:
        return
    heads = np.unique(graph.doubt[(graph.doubt >= 0) & ~graph.gone & (graph.dur > 0)]).tolist()
    found: dict[str, tuple[Doubt, Float64, Float64]] = {}
    for head in heads:
        for doubt in _beside(table, head):
            widest, low, high = found.get(doubt.source) or (doubt, *np.ones((2, len(table) + 1)))
            low[head] *= doubt.low
            high[head] *= doubt.high
            widest = replace(widest, low=min(widest.low, doubt.low), high=max(widest.high, doubt.high))
            found[doubt.source] = widest, low, high
    for widest, low, high in found.values():
        sides = [np.rint(graph.dur * factor[graph.doubt]).astype(np.int64) for factor in (low, high)]
        yield widest, graph.with_columns(dur=sides[0]), graph.with_columns(dur=sides[1])


def _beside(table: Sequence[Doubt], head: int) -> Iterable[Doubt]:
    """Yield a doubt and those beside it; a table that was read from a file may not lead in a circle."""
    while head >= 0:
        yield table[head]
        head = table[head].beside if table[head].beside < head else -1


def of_carried(carried: Sequence[Carried], step_s: float) -> tuple[Shift, ...]:
    """Return what assumptions made before this graph was saved may move a step that takes `step_s` now."""
    found = []
    for each in carried:
        grown = max(step_s / each.of_s, 1.0) if each.of_s else 1.0
        faster_s, slower_s = each.faster_s * grown, each.slower_s * grown
        if not isclose(step_s, each.of_s, rel_tol=1e-9):  # a later change may have uncovered what was hidden
            faster_s, slower_s = max(faster_s, each.work_s[0]), max(slower_s, each.work_s[1])
        low, high = max(step_s - faster_s, 0.0), step_s + slower_s
        found.append(
            Shift(
                source=each.source, why=each.why, step_s=step_s, at_low_s=low, at_high_s=high,
                low=low / step_s if step_s else 1.0, high=high / step_s if step_s else 1.0,
            )
        )  # fmt: skip
    return tuple(found)


def work_between(graph: TaskGraph, ends: Sequence[TaskGraph]) -> tuple[float, float]:
    """Return how much less and more work these predictions hold in a step than `graph`, s, over all lanes."""

    def lanes_s(of: TaskGraph) -> dict[tuple[int, str], float]:
        busy = np.where(of.gone | (of.step < 0), 0, of.dur + of.delay)
        total = np.bincount(of.lane, weights=busy, minlength=len(of.lanes)) / 1e9 / max(of.n_steps, 1)
        found: dict[tuple[int, str], float] = {}
        for lane, time_s in zip(of.lanes, total.tolist(), strict=True):
            found[lane.rank, lane.label] = found.get((lane.rank, lane.label), 0.0) + time_s
        return found

    here, less, more = lanes_s(graph), 0.0, 0.0
    for there in map(lanes_s, ends):
        differ = [there.get(lane, 0.0) - here.get(lane, 0.0) for lane in here.keys() | there.keys()]
        less, more = (
            max(less, -sum(min(each, 0.0) for each in differ)),
            max(more, sum(max(each, 0.0) for each in differ)),
        )
    return less, more


def widened(noise: Interval, step_s: float, shifts: Sequence[Shift]) -> Interval:
    """Return the interval of noise with these sources beside it, all independent of each other."""
    if not shifts:
        return noise
    faster = hypot(step_s - noise.low_s, *(each.faster_s for each in shifts))
    slower = hypot(noise.high_s - step_s, *(each.slower_s for each in shifts))
    named = ", ".join(dict.fromkeys(each.source for each in shifts))
    said = f"the ranges of {named}"
    return replace(
        noise,
        low_s=max(step_s - faster, 0.0),
        high_s=step_s + slower,
        source=f"{noise.source} and {said}" if noise.source else said,
    )
