"""Where the steps go: seven parts that exclude each other and sum to the step, to the nanosecond.

One sweep over the step window of one rank. At every moment the first of these that holds names the part:

1. `compute`: a kernel runs on the device (recordings without a device: an operator runs);
2. `exposed_communication`: a collective runs, or waits for other ranks to arrive;
3. `exposed_copy`: a copy or memset runs;
4. `data_loading`: a host thread is in the data loader;
5. `launch_bound`: a host thread works, and the device has nothing to do (without a device: host work between the
   operators, such as Python);
6. `synchronisation`: a blocking call has not returned although nothing of the above runs;
7. `data_loading` again: only the loader's own lanes work, so the host waits for a batch;
8. `idle`: nothing runs that was recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Int64
from foretrace.graph.taskgraph import EdgeKind, TaskGraph, TaskKind
from foretrace.simulate.replay import effective
from foretrace.trace.trace import LaneKind

PARTS = (
    "compute",
    "exposed_copy",
    "exposed_communication",
    "launch_bound",
    "data_loading",
    "synchronisation",
    "idle",
)
_COMPUTE, _COPY, _COMMUNICATION, _LAUNCH, _DATA, _SYNC, _IDLE = range(len(PARTS))
_SWEEP = (_COMPUTE, _COMMUNICATION, _COPY, _DATA, _LAUNCH, _SYNC, _DATA, _IDLE)  # class of the sweep -> part
_NEVER = len(_SWEEP)  # tasks that take no part in the sweep
_WASTE = 0.15  # a wait shorter than this share of the step is not what holds it back, unless nothing is longer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Breakdown:
    """Nanoseconds by step and part (steps x 7, columns as in PARTS); every row sums to its step."""

    rank: int  # −1: the mean over all ranks of the graph
    steps_ns: Int64

    def total_ns(self) -> dict[str, int]:
        """Return part -> ns over the whole window."""
        return dict(zip(PARTS, self.steps_ns.sum(axis=0).tolist(), strict=True))

    def mean_s(self) -> dict[str, float]:
        """Return part -> seconds of the mean step."""
        return self._seconds(range(len(self.steps_ns)))

    def median_s(self) -> dict[str, float]:
        """Return part -> seconds of the median step (the mean of the middle two if their number is even)."""
        by_length = np.argsort(self.steps_ns.sum(axis=1), kind="stable").tolist()
        return self._seconds(by_length[(len(by_length) - 1) // 2 : len(by_length) // 2 + 1])

    def _seconds(self, steps: Iterable[int]) -> dict[str, float]:
        mean = self.steps_ns[list(steps)].mean(axis=0) / 1e9
        return dict(zip(PARTS, mean.tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneBusy:
    """What one lane did in the window: ns by kind of task, and idle; they sum to the window.

    Time in which tasks of a lane overlap counts for the one that began first.
    """

    lane: int
    busy_ns: dict[TaskKind, int]
    idle_ns: int


def breakdown(graph: TaskGraph, start: Int64, end: Int64, *, rank: int | None = None) -> Breakdown:
    """Break the steps of a rank down (that of the first mark if not given)."""
    bounds = end[graph.marks]
    if rank is None:
        rank = graph.lanes[graph.lane[graph.marks[0]]].rank
    first, last, what = _intervals(graph, start, end, rank)
    first, last = np.clip(first, bounds[0], bounds[-1]), np.clip(last, bounds[0], bounds[-1])
    some = last > first
    first, last, what = first[some], last[some], what[some]
    times = np.concatenate([bounds, first, last])
    order = np.argsort(times, kind="stable")
    times = times[order]
    part = np.full(len(times), _IDLE, dtype=np.intp)
    for each in range(len(_SWEEP) - 2, -1, -1):  # the first class overwrites the others
        change = np.zeros(len(times), dtype=np.int32)
        change[len(bounds) : len(bounds) + len(first)] = what == each
        change[len(bounds) + len(first) :] = -(what == each).astype(np.int32)
        part[np.cumsum(change[order]) > 0] = _SWEEP[each]
    length = np.diff(times)
    step = np.clip(np.searchsorted(bounds, times[:-1], side="right") - 1, 0, max(len(bounds) - 2, 0))
    sums = np.zeros((max(len(bounds) - 1, 0), len(PARTS)), dtype=np.int64)
    np.add.at(sums, (step, part[:-1]), length)
    return Breakdown(rank=rank, steps_ns=sums)


def over_ranks(graph: TaskGraph, start: Int64, end: Int64) -> Breakdown:
    """Return the mean over the ranks of their breakdowns, that of the only rank where there is one."""
    ranks = graph.ranks
    found = [breakdown(graph, start, end, rank=rank).steps_ns for rank in ranks]
    if len(found) == 1:
        return Breakdown(rank=ranks[0], steps_ns=found[0])
    mean = np.mean(found, axis=0)
    whole = np.floor(mean).astype(np.int64)
    # Every row still sums to its step: what rounding takes goes to the part that loses most.
    left = found[0].sum(axis=1) - whole.sum(axis=1)
    whole[np.arange(len(whole)), np.argmax(mean - whole, axis=1)] += left
    return Breakdown(rank=-1, steps_ns=whole)


def bottleneck(parts: Mapping[str, float]) -> str:
    """Return the part that holds the step back: the longest wait if it matters, else compute."""
    total = sum(parts.values())
    wait = max((name for name in parts if name != "compute"), key=lambda name: parts[name])
    if parts[wait] > 0 and (parts[wait] >= _WASTE * total or parts[wait] > parts["compute"]):
        return wait
    return "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurring:
    """A wait that some steps have and the median step has not, such as a loader that stalls every fourth step."""

    part: str
    steps: int
    of: int


def recurring(steps_ns: Int64) -> Recurring | None:
    """Return the longest wait of the mean step (steps x parts, ns), if the median step hides it; None otherwise.

    Two steps at least must have it: one alone is a disturbance, not what holds a training back.
    """
    total = steps_ns.sum(axis=1)
    if not total.sum():
        return None
    middle = np.argsort(total, kind="stable")[(len(total) - 1) // 2 : len(total) // 2 + 1]
    mean_share = steps_ns.sum(axis=0) / total.sum()
    median_share = steps_ns[middle].sum(axis=0) / max(int(total[middle].sum()), 1)
    hit = (steps_ns >= _WASTE * total[:, None]).sum(axis=0)
    found = (mean_share >= _WASTE) & (median_share < _WASTE) & (hit >= 2)
    found[PARTS.index("compute")] = False
    if not found.any():
        return None
    part = int(np.argmax(np.where(found, mean_share, 0.0)))
    return Recurring(part=PARTS[part], steps=int(hit[part]), of=len(total))


def _intervals(graph: TaskGraph, start: Int64, end: Int64, rank: int) -> tuple[Int64, Int64, Int64]:
    """Return (from, to, class of the sweep) of all tasks of a rank, and of its blocked calls."""
    lane_kind = graph.lane_kinds[graph.lane]
    mine = (graph.rank == rank) & ~graph.gone
    has_device = bool(np.any(mine & (lane_kind == LaneKind.GPU)))
    class_of = np.full(len(TaskKind), _NEVER)
    class_of[TaskKind.KERNEL] = 0
    class_of[TaskKind.COLLECTIVE] = 1
    class_of[[TaskKind.COPY, TaskKind.MEMSET]] = 2
    class_of[TaskKind.DATA] = 3
    class_of[[TaskKind.CPU, TaskKind.CALL, TaskKind.PYTHON]] = 4
    class_of[TaskKind.OPERATOR] = 4 if has_device else 0
    what = class_of[graph.kind]
    what[(graph.kind == TaskKind.DATA) & (lane_kind == LaneKind.MODEL)] = 6
    rows = np.flatnonzero(mine & (what < _NEVER))
    dst = graph.dst
    blocked = (graph.edge_kind == EdgeKind.PROGRAM) & (graph.kind[dst] == TaskKind.RETURN) & mine[dst]
    # A rank that has arrived is in the collective, though the transfer waits for others.
    inside = (graph.edge_kind == EdgeKind.COLLECTIVE) & (graph.kind[graph.src] == TaskKind.ARRIVAL) & mine[dst]
    inside &= graph.lane[graph.src] == graph.lane[dst]
    return (
        np.concatenate([start[rows], end[graph.src[blocked]], start[graph.src[inside]]]),
        np.concatenate([end[rows], start[dst[blocked]], start[dst[inside]]]),
        np.concatenate([what[rows], np.full(int(blocked.sum()), 5), np.full(int(inside.sum()), 1)]),
    )


def lanes(graph: TaskGraph, start: Int64, end: Int64) -> tuple[LaneBusy, ...]:
    """Return what every lane did in the window between the first and the last mark."""
    begin, finish = int(end[graph.marks[0]]), int(end[graph.marks[-1]])
    dur = effective(graph).dur
    first, last = np.clip(start, begin, finish), np.clip(start + dur, begin, finish)
    by_lane = np.split(
        np.lexsort((start, graph.lane)), np.cumsum(np.bincount(graph.lane, minlength=len(graph.lanes)))[:-1]
    )
    result = []
    for lane, rows in enumerate(by_lane):
        covered = np.maximum.accumulate(np.append(begin, last[rows]))[:-1]
        busy = np.maximum(last[rows] - np.maximum(first[rows], covered), 0)
        by_kind = np.zeros(len(TaskKind), dtype=np.int64)
        np.add.at(by_kind, graph.kind[rows], busy)
        result.append(
            LaneBusy(
                lane=lane,
                busy_ns={kind: int(by_kind[kind]) for kind in TaskKind if by_kind[kind]},
                idle_ns=finish - begin - int(busy.sum()),
            )
        )
    return tuple(result)
