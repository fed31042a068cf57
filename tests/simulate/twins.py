"""The engines in plain Python: the readable definition of each compiled loop, equal to it bit for bit.

Nothing here is shared with the compiled side, so that a test which compares the two means something.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, TaskGraph, TaskKind

Times = tuple[list[int], list[int]]
IGNORED_WHEN_GONE = (EdgeKind.LAUNCH, EdgeKind.QUEUE, EdgeKind.SYNC, EdgeKind.CONTENTION, EdgeKind.DATA)
SHORTENED_WHEN_GONE = (EdgeKind.STREAM, EdgeKind.EVENT, EdgeKind.COLLECTIVE)
DECIDED_AS_IT_RUNS = (EdgeKind.PROGRAM, EdgeKind.STREAM)  # edges inside an unordered lane
LANE_FREE = 2**31  # stands where tasks have their priority, above all of them


def replay(graph: TaskGraph, *, structural: bool = False) -> Times:
    """Start and end of every task, by the equation of `TaskGraph`; see `foretrace.simulate.replay.replay`."""
    n = len(graph)
    dur = [0 if gone else int(d) for d, gone in zip(graph.dur, graph.gone, strict=True)]
    delay = [0 if gone or structural else int(d) for d, gone in zip(graph.delay, graph.gone, strict=True)]
    start, end = [0] * n, [0] * n
    for v in range(n):
        at = int(graph.release[v])
        for e in _edges_into(graph, v):
            u = int(graph.src[e])
            lag = _lag(graph, e, v, structural)
            at = max(at, (start[u] if graph.from_start[e] else end[u]) + lag)
        start[v] = at + delay[v]
        end[v] = start[v] + dur[v]
    return start, end


def replay_variants(
    graph: TaskGraph,
    group: npt.NDArray[np.int32],
    scale: npt.NDArray[np.float64],
    gone: npt.NDArray[np.bool_] | None = None,
) -> list[list[int]]:
    """Ends of all tasks (n lists of K): one replay per variant of the graph edited for it."""
    ends = []
    for k in range(scale.shape[1]):
        dur, removed = graph.dur.copy(), graph.gone.copy()
        for v in range(len(graph)):
            g = int(group[v])
            if g >= 0:
                dur[v] = round(int(dur[v]) * float(scale[g, k]))  # ties to even, like rint
                removed[v] |= gone is not None and gone[g, k]
        ends.append(replay(graph.with_columns(dur=dur, gone=removed))[1])
    return [list(row) for row in zip(*ends, strict=True)]


def replay_copies(
    graph: TaskGraph,
    meets: npt.NDArray[np.bool_],
    group: npt.NDArray[np.int32],
    scale: npt.NDArray[np.float64],
) -> list[list[int]]:
    """Ends of all tasks (n lists of K) in one run of K copies; see `foretrace.simulate.copies.replay_copies`."""
    n, copies = len(graph), range(scale.shape[1])
    start, end = [[0 for _ in copies] for _ in range(n)], [[0 for _ in copies] for _ in range(n)]
    for v in range(n):
        for k in copies:
            at = int(graph.release[v])
            for e in _edges_into(graph, v):
                u, lag = int(graph.src[e]), _lag(graph, e, v, structural=False)
                anchors = start[u] if graph.from_start[e] else end[u]
                at = max(at, (max(anchors) if meets[e] and not graph.gone[v] else anchors[k]) + lag)
            factor = float(scale[group[v], k]) if group[v] >= 0 else 1.0
            dur, delay = (0, 0) if graph.gone[v] else (int(graph.dur[v]), int(graph.delay[v]))
            start[v][k] = at + delay
            end[v][k] = start[v][k] + round(dur * factor)
    return end


def tails(graph: TaskGraph, target: int) -> tuple[list[int | None], list[int | None]]:
    """Longest path to the end of `target` from the start and from the end of every task, None where there is none."""
    from_a_start: list[int | None] = [None] * len(graph)
    from_an_end: list[int | None] = [None] * len(graph)
    from_an_end[target] = 0

    def longer(known: int | None, path: int) -> int:
        return path if known is None else max(known, path)

    for v in range(target, -1, -1):
        after = from_an_end[v]
        if after is not None:
            from_a_start[v] = longer(from_a_start[v], after + (0 if graph.gone[v] else int(graph.dur[v])))
        path = from_a_start[v]
        if path is None:
            continue
        arrival = path + (0 if graph.gone[v] else int(graph.delay[v]))
        for e in _edges_into(graph, v):
            u, lag = int(graph.src[e]), _lag(graph, e, v)
            if lag != NO_RELEASE:
                known = from_a_start if graph.from_start[e] else from_an_end
                known[u] = longer(known[u], arrival + lag)
    return from_a_start, from_an_end


def schedule(graph: TaskGraph) -> tuple[list[int], list[int], list[int]]:
    """Start, end and order of decision; see `foretrace.simulate.schedule.schedule`."""
    return ScheduleRun(graph).run()


def slot_givers(graph: TaskGraph, order: Iterable[int]) -> list[int]:
    """Row whose end gave each task (n) its slot on an unordered lane, −1 for none; see `as_run` in `schedule`."""
    n = len(graph)
    collective = own_collective(graph)
    arrivals = Counter(v for v in collective if v >= 0)
    start, end, giver = [0] * n, [0] * n, [-1] * n
    slots = [[(NO_RELEASE, -1)] * count for count in _slots(graph)]
    for v in order:
        lane, unordered = int(graph.lane[v]), not graph.lanes[graph.lane[v]].ordered
        at = int(graph.release[v])
        for e in _edges_into(graph, v):
            u = int(graph.src[e])
            if not (unordered and graph.lane[u] == lane and graph.edge_kind[e] in DECIDED_AS_IT_RUNS):
                at = max(at, (start[u] if graph.from_start[e] else end[u]) + _lag(graph, e, v))
        at += 0 if graph.gone[v] else int(graph.delay[v])
        if unordered and not arrivals[v]:
            free, giver[v] = heapq.heappop(slots[lane])
            at = max(at, free)
        start[v] = at
        end[v] = at + (0 if graph.gone[v] else int(graph.dur[v]))
        if unordered and collective[v] < 0:
            for _ in range(arrivals[v] or 1):
                heapq.heappush(slots[lane], (end[v], v))
    return giver


def own_collective(graph: TaskGraph) -> list[int]:
    """Row of the COLLECTIVE up to whose end each ARRIVAL holds its slot (n), −1 for all other tasks."""
    own = [-1] * len(graph)
    leads = [
        (int(graph.src[e]), v)
        for v in range(len(graph))
        for e in _edges_into(graph, v)
        if graph.edge_kind[e] == EdgeKind.COLLECTIVE
    ]
    behind: dict[int, list[int]] = {}
    for u, v in leads:
        behind.setdefault(u, []).append(v)
    for u, after in behind.items():
        if graph.kind[u] != TaskKind.ARRIVAL or graph.gone[u] or graph.lanes[graph.lane[u]].ordered:
            continue
        through = [w for v in after if graph.kind[v] == TaskKind.JOIN for w in behind.get(v, [])]
        own[u] = min(
            (
                v
                for v in after + through
                if graph.kind[v] == TaskKind.COLLECTIVE and graph.lane[v] == graph.lane[u] and not graph.gone[v]
            ),
            default=-1,
        )
    return own


class ScheduleRun:
    """State of one event-driven run."""

    def __init__(self, graph: TaskGraph) -> None:
        n = len(graph)
        self.graph = graph
        self.ready = [int(r) for r in graph.release]
        self.start, self.end, self.order = [0] * n, [0] * n, list[int]()
        self.decided = [False] * n
        self.missing = [0] * n
        self.successors: list[list[tuple[int, int, bool]]] = [[] for _ in range(n)]  # v, lag, from the start?
        self.begun: list[int] = []  # start and end known, successors not told yet
        self.events: list[tuple[int, int, int]] = []
        self.queue: list[list[tuple[int, int, int]]] = [[] for _ in graph.lanes]
        self.free = [
            [NO_RELEASE] * count for count in _slots(graph)
        ]  # heaps: when the slots that nobody holds are free
        self.collective = own_collective(graph)
        self.arrivals = Counter(v for v in self.collective if v >= 0)
        for v in range(n):
            self._read_edges(v)

    def _read_edges(self, v: int) -> None:
        graph = self.graph
        for e in _edges_into(graph, v):
            u, kind = int(graph.src[e]), int(graph.edge_kind[e])
            same_lane = graph.lane[u] == graph.lane[v]
            ordered = graph.lanes[graph.lane[v]].ordered
            if same_lane and not ordered and kind in DECIDED_AS_IT_RUNS:
                continue  # decided as it runs
            self.successors[u].append((v, _lag(graph, e, v), bool(graph.from_start[e])))
            self.missing[v] += 1

    def run(self) -> tuple[list[int], list[int], list[int]]:
        for v in [v for v, count in enumerate(self.missing) if count == 0]:
            self._arrive(v)
        while self.begun or self.events:
            if self.begun:
                self._tell_successors(self.begun.pop())
                continue
            now, rank, v = heapq.heappop(self.events)
            if rank == LANE_FREE:
                self._serve(v, now)
            else:
                self._take_lane(v, now)
        return self.start, self.end, self.order

    def _arrive(self, v: int) -> None:
        """Nothing is missing any more."""
        priority = int(self.graph.priority[v])
        self.ready[v] += 0 if self.graph.gone[v] else int(self.graph.delay[v])
        if self.graph.lanes[self.graph.lane[v]].ordered or self.arrivals[v]:
            self._begin(v, self.ready[v])
        else:
            heapq.heappush(self.events, (self.ready[v], priority, v))

    def _take_lane(self, v: int, now: int) -> None:
        """Start `v` if its lane has a free slot, queue it otherwise."""
        lane = int(self.graph.lane[v])
        if not self.queue[lane] and self.free[lane] and self.free[lane][0] <= now:
            self._take_slot(v, now)
            return
        if not self.queue[lane]:
            self._call_when_free(lane)
        heapq.heappush(self.queue[lane], (int(self.graph.priority[v]), self.ready[v], v))

    def _serve(self, lane: int, now: int) -> None:
        """Start the best task of the lane's queue, if a slot is free by now: it may have been served meanwhile."""
        if self.queue[lane] and self.free[lane] and self.free[lane][0] <= now:
            _, ready, v = heapq.heappop(self.queue[lane])
            self._take_slot(v, ready)
            if self.queue[lane]:
                self._call_when_free(lane)

    def _call_when_free(self, lane: int) -> None:
        if self.free[lane]:
            heapq.heappush(self.events, (self.free[lane][0], LANE_FREE, lane))

    def _take_slot(self, v: int, at: int) -> None:
        """Begin `v` in the slot that has been free for longest."""
        lane = self.graph.lane[v]
        self._begin(v, max(heapq.heappop(self.free[lane]), at))
        if self.collective[v] < 0:
            heapq.heappush(self.free[lane], self.end[v])

    def _begin(self, u: int, start: int) -> None:
        """Fix when `u` runs."""
        self.start[u] = start
        self.end[u] = start + (0 if self.graph.gone[u] else int(self.graph.dur[u]))
        self.begun.append(u)

    def _tell_successors(self, u: int) -> None:
        self.decided[u] = True
        self.order.append(u)
        lane = int(self.graph.lane[u])
        for _ in range(self.arrivals[u]):
            heapq.heappush(self.free[lane], self.end[u])
        if self.arrivals[u] and self.queue[lane]:
            self._call_when_free(lane)
        for v, lag, from_start in self.successors[u]:
            self._satisfy(v, (self.start[u] if from_start else self.end[u]) + lag)

    def _satisfy(self, v: int, at: int) -> None:
        self.ready[v] = max(self.ready[v], at)
        self.missing[v] -= 1
        if self.missing[v] == 0:
            self._arrive(v)


def _slots(graph: TaskGraph) -> list[int]:
    """How many slots every lane can use; 0 where edges keep the order."""
    used = Counter(graph.lane.tolist())
    return [0 if lane.ordered else min(lane.slots, used[i]) for i, lane in enumerate(graph.lanes)]


def _edges_into(graph: TaskGraph, v: int) -> range:
    return range(int(graph.in_ptr[v]), int(graph.in_ptr[v + 1]))


def _lag(graph: TaskGraph, edge: int, v: int, structural: bool = False) -> int:
    """Lag of an edge into task `v`, by the rule for removed tasks in `foretrace.simulate.replay`."""
    lag, kind = int((graph.typical if structural else graph.lag)[edge]), graph.edge_kind[edge]
    if not graph.gone[v]:
        return lag
    crossing = graph.lanes[graph.lane[graph.src[edge]]].rank != graph.lanes[graph.lane[v]].rank
    if kind in IGNORED_WHEN_GONE or (kind == EdgeKind.COLLECTIVE and crossing):
        return NO_RELEASE
    return min(lag, 0) if kind in SHORTENED_WHEN_GONE else lag
