"""The run of flows in plain Python: the readable definition of `simulate.flows.engine`, equal to it bit for bit.

As in `twins`, nothing here is shared with the compiled side.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrace.graph.taskgraph import NO_RELEASE, TaskGraph
from foretrace.simulate.flows.flows import Flows
from tests.simulate.twins import LANE_FREE, ScheduleRun

Route = Mapping[int, int]  # link -> connections of the flow that cross it
AT_ONCE, WORK_ENDS, FLOW_JOINS = -(2**31) - 3, -(2**31) - 2, -(2**31) - 1  # below every priority


def fixed_point(capacity: Sequence[float]) -> tuple[list[int], float]:
    """Capacities as whole multiples of a power of 2, which is returned beside them; the largest one has 60 bits."""
    unit = 2.0 ** (math.frexp(max(capacity))[1] - 60)
    return [round(each / unit) for each in capacity], unit


def fair_rates(routes: Mapping[int, Route], capacity: Sequence[int]) -> dict[int, int]:
    """Rate of each flow, max-min fair, by progressive filling; see `foretrace.simulate.flows.flows`."""
    left = list(capacity)
    rate: dict[int, int] = {}
    while len(rate) < len(routes):
        load: dict[int, int] = {}
        for f in routes.keys() - rate.keys():
            for link, times in routes[f].items():
                load[link] = load.get(link, 0) + times
        level = min(left[link] // load[link] for link in load)
        full = {link for link in load if left[link] // load[link] == level}
        stopped = [f for f in routes if f not in rate and full & routes[f].keys()]
        given = {link: sum(routes[f].get(link, 0) for f in stopped) for link in load}
        for link, times in given.items():
            left[link] -= level * times
        rate |= dict.fromkeys(stopped, level)
    return rate


@dataclass(kw_only=True)
class Flow:
    """One flow: its tasks and what it moves, then how far it is."""

    members: list[int]
    nbytes: float
    latency: int
    route: Route
    absent: int = 0  # members that have not begun
    began: int = NO_RELEASE
    remaining: float = 0.0  # bytes, when the rate was last changed
    rate: int = 0  # in units
    settled: int = 0  # when that was
    finish: int = 0


@dataclass(kw_only=True)
class SlowedTask:
    """A task that communication slows, while it runs."""

    left: float  # ns at full speed, when its speed was last changed
    since: int
    until: int


class FlowRun(ScheduleRun):
    """State of one run: that of a schedule, the flows under way, and the work under way that they slow."""

    def __init__(
        self,
        graph: TaskGraph,
        flows: Sequence[Flow],
        capacity: Sequence[float],
        *,
        slowed: Sequence[bool],
        slows: Sequence[bool],
        factor: float,
    ) -> None:
        super().__init__(graph)
        self.flows, self.slowed, self.slows, self.factor = flows, slowed, slows, factor
        self.capacity, self.unit = fixed_point(capacity)
        self.flow_of = {v: f for f, flow in enumerate(flows) for v in flow.members}
        self.active: list[int] = []
        self.changed = False
        self.clock = NO_RELEASE
        self.transfers = dict.fromkeys((lane.rank for lane in graph.lanes), 0)
        self.working: dict[int, SlowedTask] = {}
        self.until: dict[int, int] = {}  # end of the fixed transfers under way
        for flow in flows:
            flow.absent, flow.remaining = len(flow.members), flow.nbytes

    def run(self) -> tuple[list[int], list[int], list[int]]:
        for v in [v for v, count in enumerate(self.missing) if count == 0]:
            self._arrive(v)
        while self.begun or self.events or self.active:
            if self.begun:
                code = self.begun.pop()
                self._tell(code >> 1, at_end=bool(code & 1))
                continue
            top = self.events[0][0] if self.events else None
            if self.changed and (top is None or top > self.clock):
                self._share()
            due = min((self.flows[f].finish for f in self.active), default=None)
            if due is not None and not self.changed and (top is None or due <= top):
                self._finish(due)
            else:
                self._handle(*heapq.heappop(self.events))
        return self.start, self.end, self.order

    def _share(self) -> None:
        """Give all flows their fair rates; those whose rate changes have moved their bytes so far."""
        rates = fair_rates({f: self.flows[f].route for f in self.active}, self.capacity)
        for f in self.active:
            flow = self.flows[f]
            if rates[f] != flow.rate:
                flow.remaining = max(0.0, flow.remaining - flow.rate * self.unit * (self.clock - flow.settled))
                flow.rate, flow.settled = rates[f], self.clock
                flow.finish = self.clock + round(flow.remaining / (flow.rate * self.unit))
        self.changed = False

    def _finish(self, now: int) -> None:
        """End all flows that are through by now."""
        self.clock = now
        over = [f for f in self.active if self.flows[f].finish <= now]
        self.active = [f for f in self.active if self.flows[f].finish > now]
        self.changed = True
        for f in over:
            self._end_flow(f, now)

    def _end_flow(self, f: int, now: int) -> None:
        for u in self.flows[f].members:
            self._end(u, now)
        for u in self.flows[f].members:
            self._communicate(u, -1)

    def _end(self, u: int, now: int) -> None:
        self.end[u] = now
        self.begun.append(2 * u + 1)

    def _handle(self, now: int, what: int, v: int) -> None:
        self.clock = max(self.clock, now)
        if what == WORK_ENDS:
            if v in self.working and self.working[v].until == now:
                del self.working[v]
                self._end(v, now)
            elif self.until.get(v) == now:
                del self.until[v]
                self._end(v, now)
                self._communicate(v, -1)
        elif what == FLOW_JOINS:
            flow = self.flows[v]
            if flow.nbytes > 0 and flow.route:
                flow.settled = self.clock
                self.active.append(v)
                self.changed = True
            else:
                self._end_flow(v, now)
        elif what == LANE_FREE:
            self._serve(v, now)
        elif self.graph.lanes[self.graph.lane[v]].ordered or self.arrivals[v]:
            self._begin(v, now)
        else:
            self._take_lane(v, now)

    def _timed(self, v: int) -> bool:
        """Whether the end of `v` is known only when its time has come."""
        return v in self.flow_of or self.slowed[v] or self.slows[v]

    def _arrive(self, v: int) -> None:
        if self._timed(v):
            self.ready[v] += 0 if self.graph.gone[v] else int(self.graph.delay[v])
            at_once = self.graph.lanes[self.graph.lane[v]].ordered or self.arrivals[v]  # no slot to wait for
            heapq.heappush(self.events, (self.ready[v], AT_ONCE if at_once else int(self.graph.priority[v]), v))
        else:
            super()._arrive(v)

    def _take_slot(self, v: int, at: int) -> None:
        if self._timed(v):
            self._begin(v, max(heapq.heappop(self.free[self.graph.lane[v]]), at))
        else:
            super()._take_slot(v, at)

    def _begin(self, u: int, start: int) -> None:
        self.start[u] = start
        self.begun.append(2 * u)
        rank = self.graph.lanes[self.graph.lane[u]].rank
        if u in self.flow_of:
            flow = self.flows[self.flow_of[u]]
            flow.began = max(flow.began, start)
            flow.absent -= 1
            if not flow.absent:
                heapq.heappush(self.events, (flow.began + flow.latency, FLOW_JOINS, self.flow_of[u]))
                for v in flow.members:
                    self._communicate(v, 1)
        elif self.slowed[u]:
            dur = float(self.graph.dur[u])
            until = start + round(dur * (self.factor if self.transfers[rank] else 1.0))
            self.working[u] = SlowedTask(left=dur, since=start, until=until)
            heapq.heappush(self.events, (until, WORK_ENDS, u))
        elif self.slows[u]:
            self.until[u] = start + int(self.graph.dur[u])
            heapq.heappush(self.events, (self.until[u], WORK_ENDS, u))
            self._communicate(u, 1)
        else:
            self._end(u, start + (0 if self.graph.gone[u] else int(self.graph.dur[u])))

    def _communicate(self, v: int, more: int) -> None:
        """One transfer more or less on the rank of `v`: its work slows with the first, recovers with the last."""
        rank = self.graph.lanes[self.graph.lane[v]].rank
        before = self.transfers[rank]
        self.transfers[rank] += more
        if bool(before) == bool(self.transfers[rank]):
            return
        was, now_is = (self.factor, 1.0) if before else (1.0, self.factor)
        for u, work in self.working.items():
            if self.graph.lanes[self.graph.lane[u]].rank == rank:
                work.left = max(0.0, work.left - (self.clock - work.since) / was)
                work.since = self.clock
                work.until = self.clock + round(work.left * now_is)
                heapq.heappush(self.events, (work.until, WORK_ENDS, u))

    def _tell(self, u: int, *, at_end: bool) -> None:
        """Tell the successors of `u` its start or its end; at its end it gives back the slots that it holds."""
        if at_end:
            self.decided[u] = True
            self.order.append(u)
            lane = int(self.graph.lane[u])
            in_slot = not self.graph.lanes[lane].ordered and self._timed(u)
            gives = self.arrivals[u] or int(in_slot)
            for _ in range(gives):
                heapq.heappush(self.free[lane], self.end[u])
            if gives and self.queue[lane]:
                self._call_when_free(lane)
        for v, lag, from_start in self.successors[u]:
            if from_start != at_end:
                self._satisfy(v, (self.end[u] if at_end else self.start[u]) + lag)


def run(
    graph: TaskGraph, flows: Flows, flow: npt.NDArray[np.int32], per_ns: npt.NDArray[np.float64],
    slowed: npt.NDArray[np.bool_], slows: npt.NDArray[np.bool_], factor: float,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:  # fmt: skip
    """What `simulate_flows` asks of the compiled run: start and end of every task, and which could be decided."""
    described = [
        Flow(
            members=np.flatnonzero(flow == f).tolist(),
            nbytes=float(flows.nbytes[f]),
            latency=int(flows.latency_ns[f]),
            route=route(flows, f),
        )
        for f in range(len(flows))
    ]
    made = FlowRun(graph, described, per_ns.tolist(), slowed=slowed.tolist(), slows=slows.tolist(), factor=factor)
    start, end, _ = made.run()
    return np.array(start, dtype=np.int64), np.array(end, dtype=np.int64), np.array(made.decided, dtype=np.bool_)


def route(flows: Flows, f: int) -> dict[int, int]:
    """Link -> connections of flow f that cross it."""
    part = slice(int(flows.route_ptr[f]), int(flows.route_ptr[f + 1]))
    return dict(zip(flows.route_link[part].tolist(), flows.route_times[part].tolist(), strict=True))
