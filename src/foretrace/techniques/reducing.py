"""`mixed-precision` on a CPU recording whose operators were timed: new times, and the casts with theirs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrace.cost.calibration import Calibration
from foretrace.cost.operator import BFLOAT16, Operator
from foretrace.graph.edit import retime
from foretrace.graph.insert import HostTask, insert
from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.techniques.casting import Overhead, cast_operator, cast_times_s, overhead_operators
from foretrace.techniques.reduced import SINGLE, Cast, Reduced

Float64 = npt.NDArray[np.float64]

HALF = {"bfloat16": BFLOAT16, "float16": "c10::Half"}


def wanted(graph: TaskGraph, reduced: Reduced, half: str) -> Iterator[Operator]:
    """Operators to be timed: changed ones beside what they become, casts, overheads."""
    yield from reduced.twins.wanted(graph)
    yield from overhead_operators(half)
    yield cast_operator((8,), SINGLE, half)
    yield from dict.fromkeys(cast_operator(each.dims, each.source, each.target) for each in reduced.casts)


@dataclass(frozen=True, kw_only=True, eq=False)
class NewTimes:
    """New durations per row of `Reduced.twins`, in ns, without what the measurements' prior adds."""

    rows: npt.NDArray[np.int64]
    ratio: Float64  # time after relative to before; NaN where no operator of that name was measured
    share: float  # of the changed tasks' time that is measured

    @classmethod
    def of(cls, graph: TaskGraph, reduced: Reduced) -> NewTimes:
        """Measured ratios; where an operator was not measured, the mean of those with its name."""
        twins = reduced.twins
        changed = np.array([each is not None for each in twins.after], dtype=np.bool_)[twins.index]
        ratio, _, _ = twins.ratios(Calibration.of(graph))
        rows, index, ratio = twins.rows[changed], twins.index[changed], ratio[changed]
        dur = graph.dur[rows].astype(np.float64)
        known = ~np.isnan(ratio)
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for i in np.flatnonzero(known).tolist():
            mine = sums[twins.before[index[i]].name]
            mine[0] += dur[i] * ratio[i]
            mine[1] += dur[i]
        for i in np.flatnonzero(~known).tolist():
            after, before = sums.get(twins.before[index[i]].name, (0.0, 0.0))
            if before:
                ratio[i] = after / before
        total = dur.sum()
        return cls(rows=rows, ratio=ratio, share=float(dur[known].sum() / total) if total else 1.0)


def apply_times(graph: TaskGraph, times: NewTimes, fallback: Float64, measured: float, technique: str) -> TaskGraph:
    """The graph with new durations; `fallback` are those of tasks of which no measurement tells (n rows, ns)."""
    dur = graph.dur.astype(np.float64)
    known = ~np.isnan(times.ratio)
    rows = times.rows
    dur[rows[known]] *= times.ratio[known] * measured
    dur[rows[~known]] = fallback[rows[~known]]
    mask = np.zeros(len(graph), dtype=np.bool_)
    mask[rows] = True
    return retime(graph, mask, dur[mask], what="ran {} on 16-bit inputs, by measured times", technique=technique)


def insert_casts(
    graph: TaskGraph, reduced: Reduced, half: str, *, casts: tuple[Cast, ...], measured: float, technique: str
) -> TaskGraph:
    """The graph with a task for all casts of an operator, and autocast's dispatch."""
    calibration = Calibration.of(graph)
    times = cast_times_s(calibration, casts, half)
    known = [(time, np.prod(cast.dims)) for time, cast in zip(times, casts, strict=True) if time is not None]
    per_element = sum(time for time, _ in known) / max(sum(size for _, size in known), 1)
    overhead = Overhead(calibration, half)
    total: dict[tuple[int, bool], float] = defaultdict(float)
    for cast, time in zip(casts, times, strict=True):
        total[cast.row, cast.backward] += float(np.prod(cast.dims)) * per_element if time is None else time
    for row in reduced.entered.tolist():
        total[row, False] += overhead.entry_s
    previous = previous_on_lane(graph)
    new = []
    for (row, backward), time_s in total.items():
        after = row if backward else int(previous[row])
        if after >= 0 and time_s > 0:
            dur_ns = round(1e9 * time_s * measured)
            new.append(HostTask(after=after, like=row, name="aten::_to_copy", dur_ns=dur_ns, kind=TaskKind.OPERATOR))
    return insert(graph, new, technique=technique)


def previous_on_lane(graph: TaskGraph) -> npt.NDArray[np.int64]:
    """The task before each on its lane, −1 for the first."""
    order = np.lexsort((np.arange(len(graph)), graph.lane))
    previous = np.full(len(graph), -1, dtype=np.int64)
    same = graph.lane[order[1:]] == graph.lane[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    return previous
