"""Which kernels shared the device with another stream, and which do so no longer after a change.

Streams that compete for a device slow each other down by an amount that a recording shows but does not explain. A
kernel whose company changes keeps its recorded duration in a prediction; that is an assumption, and this module says
how much time it concerns (Proteus models the same effect as a factor on overlapped tasks).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Int64, Mask
from foretrace.graph.taskgraph import Assumption, TaskGraph
from foretrace.simulate.timeline import Timeline
from foretrace.trace.trace import LaneKind

CHANGED = 0.5  # share of its duration by which a kernel's company must change to be marked
SLOWDOWN = (1.0, 1.3)  # a prior: where streams compete, single kernels vary by 4-9 % from step to step


@dataclass(frozen=True, eq=False)
class OverlapChange:
    """Device tasks whose company changed: row masks of the graph after the change, and the time concerned."""

    alone_now: Mask
    shared_now: Mask
    alone_ns: int
    shared_ns: int

    @property
    def tasks(self) -> int:
        """Number of tasks marked."""
        return int(self.alone_now.sum() + self.shared_now.sum())


def shared_time(graph: TaskGraph, start: Int64, end: Int64) -> Int64:
    """Return time (ns) that each device task (n) runs while another stream of its device does; 0 for others."""
    shared = np.zeros(len(graph), dtype=np.int64)
    on_device = graph.on_device & ~graph.gone
    by_device: dict[tuple[int, int], list[int]] = {}  # ranks number their devices for themselves
    for i, each in enumerate(graph.lanes):
        if each.kind == LaneKind.GPU:
            by_device.setdefault((each.rank, each.device), []).append(i)
    for lanes in by_device.values():
        if len(lanes) < 2:
            continue
        for lane in lanes:
            mine = np.flatnonzero(on_device & (graph.lane == lane))
            others = np.flatnonzero(on_device & np.isin(graph.lane, lanes) & (graph.lane != lane))
            if len(mine) and len(others):
                shared[mine] = covered(start[others], end[others], start[mine], end[mine])
    return shared


def covered(begin: Int64, finish: Int64, start: Int64, end: Int64) -> Int64:
    """Return how much of each interval [start, end) the union of the intervals [begin, finish) covers."""
    order = np.argsort(begin, kind="stable")
    begin, finish = begin[order], np.maximum.accumulate(finish[order])
    new = np.ones(len(begin), dtype=np.bool_)
    new[1:] = begin[1:] > finish[:-1]
    first = np.flatnonzero(new)
    opens, closes = begin[first], finish[np.append(first[1:], len(begin)) - 1]
    before = np.concatenate([[0], np.cumsum(closes - opens)])

    def until(times: Int64) -> Int64:
        block = np.searchsorted(opens, times, side="right") - 1
        at = np.maximum(block, 0)
        inside = before[at] + np.minimum(times, closes[at]) - opens[at]
        covered: Int64 = np.where(block >= 0, inside, 0)
        return covered

    return until(end) - until(start)


def overlap_change(before: Timeline, after: Timeline) -> OverlapChange | None:
    """Compare a run before and after a change; None where rows cannot be compared.

    Rows correspond when the change neither inserted nor moved tasks.
    """
    old, new = before.graph, after.graph
    if len(old) != len(new) or not np.array_equal(old.name, new.name):
        return None
    was, now = (shared_time(t.graph, t.start, t.end) / np.maximum(t.end - t.start, 1) for t in (before, after))
    change = now - was
    runs = new.on_device & ~new.gone
    alone, shared = runs & (change < -CHANGED), runs & (change > CHANGED)
    return OverlapChange(
        alone_now=alone,
        shared_now=shared,
        alone_ns=int((after.end - after.start)[alone].sum()),
        shared_ns=int((after.end - after.start)[shared].sum()),
    )


def overlap_assumption(change: OverlapChange | None) -> Assumption | None:
    """Return what a prediction assumes of kernels whose company changed; None if none did."""
    if change is None or not change.tasks:
        return None
    why = (
        f"{int(change.alone_now.sum())} kernels ({change.alone_ns / 1e6:.3g} ms) no longer share the device and "
        f"{int(change.shared_now.sum())} ({change.shared_ns / 1e6:.3g} ms) newly do; all keep their recorded time"
    )
    return Assumption(
        technique="", name="slow-down by other streams", value=1.0, low=SLOWDOWN[0], high=SLOWDOWN[1], unit="x", why=why
    )
