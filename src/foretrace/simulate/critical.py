"""Paths through a replay: how far every task is from the last mark, the critical path, slack.

Every function here takes a graph whose lanes are all ordered, with the times of its replay.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Int32, Int64, UInt8
from foretrace.graph.sound import fixed
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, TaskGraph
from foretrace.simulate.replay import effective, structure
from foretrace.trace.trace import LaneKind

UNREACHED = NO_RELEASE // 2  # a tail below this leads nowhere
UNBOUNDED = np.iinfo(np.int64).max  # slack of a task that the last mark does not wait for
RELEASE = 254  # reasons beside the kinds of edges: the task waited for its release time,
WINDOW = 255  # or the path reached the beginning of the window


def tails(graph: TaskGraph, target: int) -> tuple[Int64, Int64]:
    """Return the longest paths (n each, ns) to the end of task `target`; below UNREACHED where there is none.

    The first leaves the start of each task (its delay comes before that), the second its end.
    """
    from foretrace.simulate import engine

    columns = effective(graph)
    from_start, from_end = np.full((2, len(graph)), NO_RELEASE)
    from_end[target] = 0
    times = (columns.lag, columns.dur, columns.delay)
    engine.tails(*structure(graph), *map(fixed, times), from_start, from_end)  # type: ignore[call-arg]
    return from_start, from_end


def slack(graph: TaskGraph, end: Int64) -> Int64:
    """Return nanoseconds (n) by which a duration can grow before the last mark moves; UNBOUNDED where it never does."""
    last = int(graph.marks[-1])
    _, from_end = tails(graph, last)
    reached = from_end > UNREACHED
    return np.where(reached, end[last] - end - np.where(reached, from_end, 0), UNBOUNDED)


@dataclass(frozen=True, slots=True)
class PathRow:
    """Time of the window that is spent on the critical path in one kind of thing.

    `reason` is "work" for the tasks themselves (with `lane` the kind of their lane and `name` their name), the kind
    of edge for its lags ("launch", "sync", ...), "delay" for waiting without a reason, and "release" for waiting
    for work from before the recording.
    """

    reason: str
    lane: str
    name: str
    count: int
    time_ns: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CriticalPath:
    """The chain of tasks that decides when the last mark is reached, in the order in which they run (k segments).

    Segment i waits `lag_ns` after what it depends on (`reason`: EdgeKind, RELEASE or WINDOW), then `delay_ns` without
    a reason, then task `task[i]` works for `work_ns` (0 where the path leaves from its start). The three sum to
    the window exactly; lags may be negative where tasks overlap. The first segment is cut at the window's beginning.
    """

    graph: TaskGraph
    task: Int32
    reason: UInt8
    lag_ns: Int64
    delay_ns: Int64
    work_ns: Int64

    def __len__(self) -> int:
        return len(self.task)

    @property
    def total_ns(self) -> int:
        """Length of the window."""
        return int(self.lag_ns.sum() + self.delay_ns.sum() + self.work_ns.sum())

    def summary(self) -> tuple[PathRow, ...]:
        """Return the time by name of task and by kind of wait, longest first; the rows sum to the window."""
        graph, rows = self.graph, list[PathRow]()
        kinds = graph.lane_kinds[graph.lane[self.task]].astype(np.int64)
        key = kinds * max(len(graph.names), 1) + graph.name[self.task]
        for value in np.unique(key):
            here = key == value
            kind, name = divmod(int(value), max(len(graph.names), 1))
            worked = here & (self.work_ns != 0)
            if worked.any():
                time = int(self.work_ns[here].sum())
                lane = LaneKind(kind).name.lower()
                rows.append(PathRow("work", lane, graph.names[name], int(worked.sum()), time))
        for reason in np.unique(self.reason):
            here = (self.reason == reason) & (self.lag_ns != 0)
            if here.any():
                rows.append(PathRow(reason_name(int(reason)), "", "", int(here.sum()), int(self.lag_ns[here].sum())))
        delayed = self.delay_ns != 0
        if delayed.any():
            rows.append(PathRow("delay", "", "", int(delayed.sum()), int(self.delay_ns.sum())))
        return tuple(sorted(rows, key=lambda row: (-row.time_ns, row.reason, row.lane, row.name)))


def reason_name(reason: int) -> str:
    """Return word for a reason of the critical path."""
    return {RELEASE: "release", WINDOW: "window"}.get(reason) or EdgeKind(reason).name.lower()


def binding(graph: TaskGraph, start: Int64, end: Int64) -> Int64:
    """Return the edge (n) that each task waited for last, −1 where a release time decided.

    Among edges that bind alike: program order first, and so on in the order of EdgeKind; then the latest source.
    """
    columns, dst = effective(graph), graph.dst
    anchor = np.where(graph.from_start, start[graph.src], end[graph.src])
    tight = np.flatnonzero(anchor + columns.lag + columns.delay[dst] == start[dst])
    order = np.lexsort((-graph.src[tight], graph.edge_kind[tight], dst[tight]))
    rows, first = np.unique(dst[tight][order], return_index=True)
    edge = np.full(len(graph), -1, dtype=np.int64)
    edge[rows] = tight[order][first]
    return edge


def critical_path(graph: TaskGraph, start: Int64, end: Int64) -> CriticalPath:
    """Walk back from the last mark to the beginning of the window."""
    columns, edge = effective(graph), binding(graph, start, end)
    before = np.where(edge >= 0, graph.src[edge], -1) if graph.edges else np.full(len(graph), -1)
    chain, previous = list[int](), before.tolist()
    v = int(graph.marks[-1])
    while v >= 0:
        chain.append(v)
        v = previous[v]
    task = np.array(chain, dtype=np.int32)
    by = edge[task]
    released = by < 0  # the root of the chain
    from_start = np.append(False, graph.from_start[by[:-1]])
    piece = np.empty((len(task), 3), dtype=np.int64)  # walking back: work, delay, lag
    piece[:, 0] = np.where(from_start, 0, columns.dur[task])
    piece[:, 1] = columns.delay[task]
    piece[:, 2] = np.where(released, 0, columns.lag[by]) if graph.edges else 0
    reason = np.where(released, RELEASE, graph.edge_kind[by] if graph.edges else 0).astype(np.uint8)

    # Cut where the walk reaches the beginning of the window; what is left at the root is its release time.
    window = int(end[graph.marks[-1]] - end[graph.marks[0]])
    piece[-1, 2] = max(window - int(piece.sum()), 0)
    walked = np.cumsum(piece)
    stop = int(np.argmax(walked >= window)) if window > 0 else 0
    flat = piece.ravel()
    flat[stop] -= walked[stop] - window
    flat[stop + 1 :] = 0
    length = stop // 3 + 1 if window > 0 else 0
    if length and stop % 3 < 2:
        reason[length - 1] = WINDOW
    work, delay, lag = piece[:length][::-1].T
    return CriticalPath(
        graph=graph,
        task=task[:length][::-1],
        reason=reason[:length][::-1],
        lag_ns=lag,
        delay_ns=delay,
        work_ns=work,
    )
