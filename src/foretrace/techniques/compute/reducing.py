"""`mixed-precision` on a CPU recording whose operators were timed: new times, and the casts with theirs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import BFLOAT16, Operator
from foretrace.graph.edit import retime
from foretrace.graph.insert import HostTask, insert
from foretrace.graph.select import previous_on_lane
from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.techniques.base import Prior
from foretrace.techniques.compute.casting import Overhead, cast_operator, cast_times_s, overhead_operators
from foretrace.techniques.compute.reduced import SINGLE, Reduced
from foretrace.techniques.untimed import by_name, untimed

Float64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_CAST_BYTES, _CAST_GB_S = 6.0, 10.0  # per element: read and written; one core
_CASTS_STRAY = 2.5  # a cast that was not timed may take so many times as long or as short
HALF = {"bfloat16": BFLOAT16, "float16": "c10::Half"}


def wanted(graph: TaskGraph, reduced: Reduced, half: str) -> Iterator[Operator]:
    """Operators to be timed: overheads, which are few; changed ones beside what they become, casts."""
    yield from overhead_operators(half)
    yield cast_operator((8,), SINGLE, half)
    yield from reduced.twins.wanted(graph)
    yield from dict.fromkeys(cast_operator(each.dims, each.source, each.target) for each in reduced.casts)


@dataclass(frozen=True, kw_only=True, eq=False)
class NewTimes:
    """New durations per row of `Reduced.twins`, in ns, without what the measurements' prior adds."""

    rows: npt.NDArray[np.int64]
    ratio: Float64  # time after relative to before; NaN where no operator of that name was measured
    timed: Mask  # these very calls were timed
    share: float  # of the changed tasks' time that is measured
    untimed: dict[str, Prior]  # "untimed", where something was not timed itself

    @classmethod
    def of(cls, graph: TaskGraph, reduced: Reduced, half: str) -> NewTimes:
        """Measured ratios; where an operator was not measured, the mean of those with its name."""
        twins = reduced.twins
        changed = np.array([each is not None for each in twins.after], dtype=np.bool_)[twins.index]
        found = twins.ratios(Calibration.of(graph)).take(changed)
        rows, index = twins.rows[changed], twins.index[changed]
        dur = graph.dur[rows].astype(np.float64)
        known = found.known
        names = [twins.before[i].name for i in index.tolist()]
        found = by_name(found, names, dur)
        casts = Casts.of(graph, reduced, half)
        guessed = dur * ~found.timed
        parts: list[tuple[Float64 | float, Float64 | float, Float64 | float]] = [
            (guessed * found.value, guessed * found.low, guessed * found.high),
            (casts.guessed_ns, casts.guessed_ns / _CASTS_STRAY, casts.guessed_ns * _CASTS_STRAY),
        ]
        total = dur.sum()
        return cls(
            rows=rows,
            ratio=found.value,
            timed=found.timed,
            share=float(dur[known].sum() / total) if total else 1.0,
            untimed=untimed(parts, float(guessed[~np.isnan(found.value)].sum()), float(graph.dur.sum())),
        )


def apply_times(
    graph: TaskGraph, times: NewTimes, fallback: Float64, values: Mapping[str, float], technique: str
) -> TaskGraph:
    """The graph with new durations; `fallback` are those of tasks of which no measurement tells (n rows, ns)."""
    dur = graph.dur.astype(np.float64)
    known = ~np.isnan(times.ratio)
    rows = times.rows
    dur[rows[known]] *= (
        times.ratio[known] * np.where(times.timed, values["measured"], values.get("untimed", 1.0))[known]
    )
    dur[rows[~known]] = fallback[rows[~known]]
    mask = graph.mask(rows)
    return retime(graph, mask, dur[mask], what="ran {} on 16-bit inputs, by measured times", technique=technique)


@dataclass(frozen=True, kw_only=True, eq=False)
class Casts:
    """Times of the casts that autocast adds, ns per cast of `Reduced.casts`, and of entering its operators, ns each."""

    ns: Float64
    timed: Mask
    entry_ns: float
    entries: int
    entry_timed: bool

    @classmethod
    def of(cls, graph: TaskGraph, reduced: Reduced, half: str) -> Casts:
        """Casts of sizes that were not timed take the time per element of the others, else bytes at _CAST_GB_S."""
        calibration = Calibration.of(graph)
        overhead = Overhead(calibration, half)
        times = cast_times_s(calibration, reduced.casts, half)
        timed = np.array([time is not None for time in times], dtype=np.bool_)
        ns = np.array([1e9 * (time or 0.0) for time in times])
        size = np.array([float(np.prod(cast.dims)) for cast in reduced.casts])
        per_element = ns[timed].sum() / max(size[timed].sum(), 1.0) if timed.any() else _CAST_BYTES / _CAST_GB_S
        return cls(
            ns=np.where(timed, ns, size * per_element),
            timed=timed & overhead.timed,
            entry_ns=1e9 * overhead.entry_s,
            entries=len(reduced.entered),
            entry_timed=overhead.timed,
        )

    @property
    def guessed_ns(self) -> float:
        """Of what was not timed, in all."""
        return float(self.ns[~self.timed].sum()) + (0.0 if self.entry_timed else self.entry_ns * self.entries)


def insert_casts(
    graph: TaskGraph, reduced: Reduced, half: str, *, values: Mapping[str, float], technique: str
) -> TaskGraph:
    """The graph with a task for all casts of an operator, and autocast's dispatch."""
    casts = Casts.of(graph, reduced, half)
    guess = values.get("untimed", 1.0)
    factor = np.where(casts.timed, values["measured"], guess)
    total: dict[tuple[int, bool], float] = defaultdict(float)
    for cast, ns in zip(reduced.casts, (casts.ns * factor).tolist(), strict=True):
        total[cast.row, cast.backward] += ns
    for row in reduced.entered.tolist():
        total[row, False] += casts.entry_ns * (values["measured"] if casts.entry_timed else guess)
    previous = previous_on_lane(graph)
    new = []
    for (row, backward), ns in total.items():
        after = row if backward else int(previous[row])
        if after >= 0 and ns > 0:
            new.append(HostTask(after=after, like=row, name="aten::_to_copy", dur_ns=round(ns), kind=TaskKind.OPERATOR))
    return insert(graph, new, technique=technique)
