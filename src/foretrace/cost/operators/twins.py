"""Operators of a graph beside their changed twins: which to measure, how their times relate, the graph rewritten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import Operator
from foretrace.graph.taskgraph import TaskGraph
from foretrace.graph.work import operator_work

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

MEASURED_SHARE = 0.98  # of the time of the chosen tasks; the many small calls behind it are not worth the wait


@dataclass(frozen=True, kw_only=True, eq=False)
class Ratios:
    """Time after a change relative to before (n rows), with its 80 % range; NaN where nothing tells."""

    value: Float64
    low: Float64
    high: Float64
    timed: Mask  # both calls themselves were timed; else similar ones tell

    @property
    def known(self) -> Mask:
        """Where something tells."""
        return ~np.isnan(self.value)

    def take(self, rows: Mask) -> Ratios:
        """Return those of some rows."""
        return Ratios(value=self.value[rows], low=self.low[rows], high=self.high[rows], timed=self.timed[rows])


@dataclass(frozen=True, kw_only=True, eq=False)
class Twins:
    """Distinct operator calls of the chosen tasks and what each becomes; None where it stays as it is."""

    rows: Int64  # tasks whose inputs were recorded
    index: Int64  # per row: position in `before`
    before: tuple[Operator, ...]
    after: tuple[Operator | None, ...]
    own_s: Float64  # per distinct call: its mean recorded time

    @classmethod
    def of(cls, graph: TaskGraph, mask: Mask, twin: Callable[[Operator], Operator | None]) -> Twins:
        """Return the calls of the tasks in `mask` whose operator and inputs are known, and `twin` of each."""
        rows = np.flatnonzero(mask & (graph.op >= 0) & (graph.shape >= 0) & ~graph.gone)
        pairs, index = np.unique(np.stack([graph.op[rows], graph.shape[rows]]), axis=1, return_inverse=True)
        before = tuple(Operator(graph.names[op], graph.shapes[shape]) for op, shape in pairs.T.tolist())
        after = tuple(twin(each) for each in before)
        index = index.ravel().astype(np.int64)
        return cls.paired(graph, rows, index, before, after)

    @classmethod
    def paired(
        cls,
        graph: TaskGraph,
        rows: Int64,
        index: Int64,
        before: tuple[Operator, ...],
        after: tuple[Operator | None, ...],
    ) -> Twins:
        """Return calls and twins that were worked out elsewhere; `index` says which pair each of the tasks
        `rows` is.
        """
        # Of an operator cut into pieces by what it calls, one carries the work.
        calls = np.bincount(index, weights=graph.nbytes[rows] >= 0, minlength=len(before))
        own_s = 1e-9 * np.bincount(index, weights=graph.dur[rows], minlength=len(before)) / np.maximum(calls, 1)
        return cls(rows=rows, index=index, before=before, after=after, own_s=own_s)

    def wanted(self, graph: TaskGraph, share: float = MEASURED_SHARE) -> tuple[Operator, ...]:
        """Return both sides of the changed calls, those with most time first, until `share` of their time is
        covered.
        """
        time = np.bincount(self.index, weights=graph.dur[self.rows], minlength=len(self.before))
        time[[after is None for after in self.after]] = 0.0
        order = np.argsort(-time, kind="stable")
        covered = np.cumsum(time[order]) - time[order]
        chosen = order[(covered < share * time.sum()) & (time[order] > 0)].tolist()
        pairs = ((self.before[i], self.after[i]) for i in chosen)
        return tuple(each for pair in pairs for each in pair if each is not None)

    def ratios(self, calibration: Calibration) -> Ratios:
        """Return of every task of `rows` what the calls themselves or similar ones tell."""
        table = np.full((3, max(len(self.before), 1)), np.nan)
        timed = np.zeros(max(len(self.before), 1), dtype=np.bool_)
        for i, (before, after) in enumerate(zip(self.before, self.after, strict=True)):
            found = calibration.ratio(before, after, float(self.own_s[i])) if after is not None else None
            if found is not None:
                table[:, i] = found.value, found.low, found.high
                timed[i] = found.timed
        value, low, high = table[:, self.index]
        return Ratios(value=value, low=low, high=high, timed=timed[self.index])

    def rewritten(self, graph: TaskGraph) -> TaskGraph:
        """Return the graph whose tasks say that they run the twins, with their bytes and FLOPs; durations stay."""
        shapes = list(graph.shapes)
        place = {text: i for i, text in reversed(list(enumerate(shapes)))}
        to = np.full((3, max(len(self.before), 1)), -1.0)
        for i, after in enumerate(self.after):
            if after is not None:
                if after.text not in place:
                    place[after.text] = len(shapes)
                    shapes.append(after.text)
                to[:, i] = place[after.text], *operator_work(after.name, after.text)
        shape, nbytes, flops = graph.shape.copy(), graph.nbytes.copy(), graph.flops.copy()
        mine = to[:, self.index]
        changed = mine[0] >= 0
        rows = self.rows[changed]
        shape[rows] = mine[0, changed].astype(np.int32)
        known = graph.flops[rows] > 0  # of an operator cut into pieces, one carries the work
        nbytes[rows[known]] = mine[1, changed][known].astype(np.int64)
        flops[rows[known]] = mine[2, changed][known]
        return replace(graph.with_columns(shape=shape, nbytes=nbytes, flops=flops), shapes=tuple(shapes))
