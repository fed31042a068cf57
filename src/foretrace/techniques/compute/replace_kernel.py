"""`replace-kernel`: chosen tasks take a time of your own, measured or promised."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.graph import edit
from foretrace.graph.taskgraph import TaskGraph
from foretrace.techniques.base import parameter
from foretrace.techniques.selection import _Selection


@dataclass(frozen=True, kw_only=True)
class ReplaceKernel(_Selection):
    """Every chosen task takes `time_us`; with `count`, only so many of each rank's step are left."""

    summary = "your own time for chosen kernels or operators"
    source = "Daydream (ATC 2020), section 4.3: primitives select, scale and insert"
    not_applied = "the kernel is yours: put it into the model, record again, and compare the recordings."

    time_us: float = parameter(doc="time of one task, measured or promised", unit="µs")
    count: int | None = parameter(None, doc="tasks per step that do the work of all that were chosen")

    def change(self, graph: TaskGraph) -> TaskGraph:
        if not 0 <= self.time_us < np.inf:
            raise self.refuse(f"time_us={self.time_us:g} is no time; give microseconds per task, e.g. time_us=25.")
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
                graph = edit.remove(graph, surplus, technique=self.name)
                mask &= ~surplus
        what = f"gave {{}} {self.time_us:g} µs each"
        return edit.retime(graph, mask, np.full(int(mask.sum()), 1e3 * self.time_us), what=what, technique=self.name)
