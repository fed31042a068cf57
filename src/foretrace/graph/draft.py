"""`Draft`: the tasks and edges of one rank while the builder collects them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from foretrace.arrays import Int32, Int64, Mask, UInt8
from foretrace.graph.assemble import Columns, assemble, edges_with_dst, task_columns
from foretrace.graph.calls import RuntimeCall
from foretrace.graph.clock import AHEAD
from foretrace.graph.device import DeviceTasks
from foretrace.graph.host import HostSpans
from foretrace.graph.kernels import at as values_at
from foretrace.graph.layers import WAYS, Layers
from foretrace.graph.links import IN_FLIGHT, Links
from foretrace.graph.settle import Settled, settle
from foretrace.graph.steps import Steps
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, GraphInfo, Lane, Phase, TaskGraph, TaskKind
from foretrace.graph.threads import HostTasks
from foretrace.graph.waits import Blocking
from foretrace.trace.trace import LaneKind, Trace

_LONG_CALL_LATENCIES = 3


@dataclass(eq=False)
class Draft:
    """Tasks and edges while they are collected; rows in any order until `finish`."""

    trace: Trace
    host: HostSpans
    device: DeviceTasks
    steps: Steps
    blocking: Blocking
    threads: HostTasks
    links: Links
    _tasks: list[Columns] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)
    n: int = 0
    _edges: list[Columns] = field(default_factory=list)
    marks: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    first_device: int = 0
    clock: str = "cpu"
    extra_names: list[str] = field(default_factory=list)  # names that the recording does not have
    way: UInt8 = field(default_factory=lambda: np.empty(0, np.uint8))  # per device task, see WAYS

    # -- tasks -------------------------------------------------------------------------------------------------

    def _append(self, **columns: Any) -> Int64:
        self._tasks.append(task_columns(columns))
        self.n += len(columns["kind"])
        return np.arange(self.n - len(columns["kind"]), self.n)

    def add_host(self) -> None:
        """Add host tasks with the layer, phase and operator of the span they ran in."""
        host, threads = self.host, self.threads
        span = threads.span
        known = span >= 0
        at = np.maximum(span, 0)
        layers = self.layers
        lane_ids = self._new_lanes(threads.lane, LaneKind.CPU)
        is_call = np.isin(threads.kind, [TaskKind.CALL, TaskKind.RETURN])
        loads = threads.kind == TaskKind.DATA  # what the loader runs belongs to no layer of the model
        operator = np.where(known & ~loads, host.named_operator[at] if len(host.event) else -1, -1)
        named = np.where(is_call, at, np.where(operator >= 0, operator, values_at(host.annotation, span, -1)))
        if len(host.event):
            named = np.where(threads.kind == TaskKind.DATA, host.data[at], named)
        name = np.where(named >= 0, host.name[np.maximum(named, 0)] if len(host.event) else -1, self._extra("python"))
        for kind, label in ((TaskKind.MARK, "step"), (TaskKind.JOIN, "thread")):
            name = np.where(threads.kind == kind, self._extra(label), name)
        nbytes = np.full(len(span), -1, dtype=np.int64)
        flops = np.zeros(len(span))
        work = np.flatnonzero((threads.kind == TaskKind.OPERATOR) & (operator >= 0))
        if len(work):
            # An operator cut into several self times does its work once: on the longest piece.
            chosen = _longest(work, operator, threads.dur)
            nbytes[chosen], flops[chosen] = layers.work_of(operator[chosen])
            passed = chosen[layers.hands_on[operator[chosen]] & (nbytes[chosen] >= 0)]
            nbytes[passed], flops[passed] = 0, 0.0
        layer, phase = np.full(len(span), -1, np.int64), np.full(len(span), Phase.NONE, np.uint8)
        if len(host.event):
            layer = np.where(known & ~loads, layers.of_span[0][at], -1)
            phase = np.where(known, host.phase[at], Phase.NONE)
        self._append(
            kind=threads.kind,
            phase=phase,
            lane=lane_ids,
            name=name,
            layer=layer,
            step=self._step_of(threads.start),
            dur=threads.dur,
            recorded=threads.start,
            nbytes=nbytes,
            flops=flops,
            op=values_at(host.name, operator, -1),
            shape=self._shape_of(operator),
            probes=self._probes(),
        )
        self.marks = threads.marks

    def _probes(self) -> Int64:
        """Return starts and ends of recorded spans inside each host task, its own first and last instant left out."""
        host, threads = self.host, self.threads
        begin, end = threads.start, threads.start + threads.dur
        count = np.zeros(len(begin), dtype=np.int64)
        for lane in np.unique(threads.lane).tolist():
            part = host.lane_slice(lane)
            mine = threads.lane == lane
            starts, ends = np.sort(host.start[part]), np.sort(host.end[part])
            inside = np.searchsorted(starts, end[mine], side="right") - np.searchsorted(
                starts, begin[mine], side="right"
            )
            inside += np.searchsorted(ends, end[mine]) - np.searchsorted(ends, begin[mine])
            count[mine] = inside
        return count

    def add_device(self) -> None:
        """Add device tasks; layer, phase and operator come from the launch call, the step from its launch time."""
        host, device, trace = self.host, self.device, self.trace
        self.first_device = self.n
        if not len(device):
            return
        linked = device.inner_call >= 0
        at = np.where(linked, device.inner_call, 0)
        layers = self.layers
        layer, way = layers.of_span if len(host.event) else (np.full(1, -1), np.full(1, len(WAYS) - 1, np.uint8))
        way = np.where(linked, way[at], WAYS.index("none"))
        collective = device.kind == TaskKind.COLLECTIVE
        way = np.where(collective & ~np.isin(way, [0, 1]), WAYS.index("collective"), way)
        self.way = way
        operator = np.where(linked, host.operator[at] if len(host.event) else -1, -1)
        nbytes = trace.nbytes[device.event].copy()
        if len(host.event):  # ROCm states the size of a copy on its call
            nbytes = np.where((nbytes < 0) & linked, trace.nbytes[host.event[at]], nbytes)
        flops = np.zeros(len(device))
        work = np.flatnonzero((operator >= 0) & (device.kind == TaskKind.KERNEL))
        if len(work):
            chosen = _longest(work, operator, device.dur)
            nbytes[chosen], flops[chosen] = layers.work_of(operator[chosen])
        phase = np.where(linked, host.phase[at] if len(host.event) else Phase.NONE, Phase.NONE)
        when = np.where(device.call >= 0, device.launch, np.minimum(device.start, self.steps.bounds[0] - 1))
        self._append(
            kind=device.kind,
            phase=phase,
            lane=self._new_lanes(device.lane, LaneKind.GPU),
            name=trace.name[device.event],
            layer=np.where(linked, layer[at], -1),
            step=self._step_of(when),
            dur=device.dur,
            recorded=device.start,
            nbytes=nbytes,
            flops=flops,
            op=values_at(host.name, operator, -1),
            shape=self._shape_of(operator),
        )

    def _shape_of(self, operator: Int64) -> Int64:
        """Return inputs of the operators in these host spans, as index into the trace's shapes; −1 where unknown."""
        return values_at(self.trace.shape[self.host.event], operator, -1).astype(np.int64)

    @cached_property
    def layers(self) -> Layers:
        """Layers of the host spans."""
        return Layers(self.host, self.steps)

    def _extra(self, name: str) -> int:
        """Return the index of a name that the recording does not have."""
        if name not in self.extra_names:
            self.extra_names.append(name)
        return len(self.trace.names) + self.extra_names.index(name)

    def _new_lanes(self, lanes: Int32, kind: LaneKind) -> Int32:
        used, inverse = np.unique(lanes, return_inverse=True)
        first = len(self.lanes)
        for lane in used.tolist():
            info = self.trace.lanes[lane]
            if kind == LaneKind.CPU:
                role = "main" if lane == self.steps.lane else "helper"
                label = info.label or f"{role} thread {info.stream}"
            else:
                label = info.label or f"gpu{info.device} stream {info.stream}"
            self.lanes.append(Lane(rank=info.rank, kind=kind, device=info.device, stream=info.stream, label=label))
        return (inverse + first).astype(np.int32)

    def _step_of(self, times: Int64) -> Int32:
        step = np.searchsorted(self.steps.bounds, times, side="right") - 1
        return np.where((step >= 0) & (step < len(self.steps.bounds) - 1), step, -1).astype(np.int32)

    # -- edges -------------------------------------------------------------------------------------------------

    def edges(
        self,
        src: Int64,
        dst: Int64,
        kind: EdgeKind,
        typical: Int64 | int = 0,
        *,
        from_start: Mask | bool = False,
        inferred: Mask | bool = False,
    ) -> None:
        """Add edges of one kind; `typical` lags in ns."""
        given = {"src": src, "dst": dst, "edge_kind": kind, "typical": typical}
        self._edges.append(edges_with_dst({**given, "from_start": from_start, "inferred": inferred}))

    def program_order(self) -> None:
        """Add edges previous -> next on every CPU thread."""
        lane = self.threads.lane
        src = np.flatnonzero(lane[1:] == lane[:-1])
        self.edges(src, src + 1, EdgeKind.PROGRAM)

    def thread_order(self) -> None:
        """Add forks and joins of helper threads."""
        threads = self.threads
        self.edges(threads.thread_src, threads.thread_dst, EdgeKind.THREAD, inferred=True)

    def launches(self) -> None:
        """Call -> device task: from the call's start, or from its end where the call prepares first (R1, R4, R11)."""
        device = self.device
        rows = np.flatnonzero(device.call >= 0)
        if not len(rows):
            return
        call_task = np.array([self.threads.task_of_call[c] for c in device.call[rows].tolist()], dtype=np.int64)
        own = self.threads.dur[call_task]
        latency = np.array([device.latency.get(lane, 0) for lane in range(len(self.trace.lanes))])[device.lane[rows]]
        leads = device.leads[rows]
        start = device.start[rows]
        staged = np.isin(device.call[rows], self.blocking.staged)
        # The kernel of a long call starts when the call is nearly over, not one latency after its start.
        long_call = (own > _LONG_CALL_LATENCIES * latency) & (start >= device.launch[rows] + own - latency) & leads
        from_end = staged | (long_call & (self.host.call[device.call[rows]] != RuntimeCall.GRAPH))
        typical = np.where(staged, latency, np.where(from_end, 1_000, latency))
        typical = np.where(leads, typical, 0)
        self.edges(call_task, self.first_device + rows, EdgeKind.LAUNCH, typical, from_start=~from_end)

    def stream_order(self) -> None:
        """Add edges previous -> next on every stream; neighbours may overlap (programmatic dependent launch, R8)."""
        device = self.device
        rows = np.flatnonzero(device.previous >= 0)
        if not len(rows):
            return
        before = device.previous[rows]
        slack = device.start[rows] - device.end[before]
        gap = np.array([device.gap.get(lane, 0) for lane in range(len(self.trace.lanes))])[device.lane[rows]]
        self.edges(
            before + self.first_device,
            rows + self.first_device,
            EdgeKind.STREAM,
            np.where(slack < 0, slack, gap),
        )
        over = slack < 0
        self.edges(before[over] + self.first_device, rows[over] + self.first_device, EdgeKind.STREAM, from_start=True)

    def returns(self) -> None:
        """Add edges device task -> RETURN of the call that waits for it."""
        blocking = self.blocking
        table = self.threads.return_of_call
        rows = [table.get(c, -1) for c in blocking.pair_call.tolist()]
        dst = np.array(rows, dtype=np.int64)
        for kind in (EdgeKind.SYNC, EdgeKind.QUEUE):
            mine = (blocking.pair_kind == kind) & (dst >= 0)
            self.edges(
                blocking.pair_task[mine] + self.first_device,
                dst[mine],
                kind,
                blocking.pair_typical[mine],
                inferred=blocking.pair_inferred[mine],
            )

    def host_collectives(self) -> None:
        """Put collectives of a host backend on a lane of their own; the main thread issues them and waits for them."""
        links, host, threads = self.links, self.host, self.threads
        k = len(links.span)
        if not k:
            return
        rank = self.trace.ranks[0].rank if self.trace.ranks else 0
        self.lanes.append(Lane(rank=rank, kind=LaneKind.LINK, label="gloo"))
        lane = len(self.lanes) - 1
        layer, _ = self.layers.of_span
        rows = self._append(
            kind=np.full(k, TaskKind.COLLECTIVE), lane=lane, name=host.name[links.span], layer=layer[links.span],
            step=self._step_of(links.start), dur=links.end - links.start, recorded=links.start,
        )  # fmt: skip
        # Two at a time, started in the order of issue.
        self.edges(rows[:-1], rows[1:], EdgeKind.STREAM, from_start=True)
        self.edges(rows[:-IN_FLIGHT], rows[IN_FLIGHT:], EdgeKind.STREAM)
        main = np.flatnonzero(threads.lane == self.steps.lane)
        begins = threads.start[main]
        known = np.flatnonzero(links.issued >= 0)
        issuer = main[np.searchsorted(begins, links.issued[known], side="right") - 1]
        latency = links.start[known] - threads.start[issuer]
        typical = int(np.median(latency)) if len(latency) else 0
        self.edges(issuer, rows[known], EdgeKind.LAUNCH, typical, from_start=True)
        joins = [threads.joins[int(t)] for t in links.end[links.held]]
        self.edges(rows[links.held], np.array(joins, dtype=np.int64), EdgeKind.COLLECTIVE)
        # One that was over before anybody waited: at the latest the optimizer needs it.
        optimizer = main[host.phase[np.maximum(threads.span[main], 0)] == Phase.OPTIMIZER]
        for i in np.flatnonzero(~links.held).tolist():
            place = int(np.searchsorted(threads.start[optimizer], links.end[i]))
            if place < len(optimizer):
                self.edges(rows[i : i + 1], optimizer[place : place + 1], EdgeKind.COLLECTIVE, inferred=True)

    def step_marks(self) -> None:
        """Add marks where steps are bounded: on the host, or on the device when the host runs ahead (R9)."""
        device, bounds = self.device, self.steps.bounds
        last = (
            np.array([device.last_launched(lane, bounds) for lane in device.lanes])
            if len(device)
            else np.empty((0, len(bounds)), np.int64)
        )
        if self.steps.source == "whole trace" and len(device):
            last[:, -1] = [device.lane_slice(lane).stop - 1 for lane in device.lanes]
            last[:, 0] = -1
        done = np.where(last >= 0, device.end[np.maximum(last, 0)], NO_RELEASE) if len(device) else last
        finished = np.maximum(bounds, done.max(axis=0)) if len(device) else bounds
        host_window, device_window = int(bounds[-1] - bounds[0]), int(finished[-1] - finished[0])
        # After the only step nothing waits for what it launched: it is over when the device has done it.
        unfinished = len(bounds) == 2 and bool(finished[-1] > bounds[-1])
        ahead = self.steps.source != "whole trace" and (unfinished or device_window > AHEAD * host_window)
        ahead &= bool(np.all(np.diff(finished) > 0))  # a step that launches nothing ends on the host
        needs_lane = self.steps.lane < 0 or ahead
        if not needs_lane and self.steps.source != "whole trace":
            return
        if needs_lane:
            self.clock = "gpu"
            rank = self.trace.ranks[0].rank if self.trace.ranks else 0
            self.lanes.append(Lane(rank=rank, kind=LaneKind.MODEL, label="steps on the device"))
            k = len(bounds)
            marks = self._append(
                kind=np.full(k, TaskKind.MARK), lane=len(self.lanes) - 1, name=self._extra("step"),
                step=np.append(np.arange(k - 1), -1), recorded=finished,
            )  # fmt: skip
            if len(self.marks):
                self.edges(self.marks, marks, EdgeKind.PROGRAM)
            self.edges(marks[:-1], marks[1:], EdgeKind.PROGRAM)
            self.marks = marks
        for row in last:
            use = np.flatnonzero(row >= 0)
            self.edges(row[use] + self.first_device, self.marks[use], EdgeKind.SYNC)

    # -- together ----------------------------------------------------------------------------------------------

    def columns(self) -> Columns:
        """Return all tasks so far, as columns."""
        self._tasks = [_joined(self._tasks)]
        return self._tasks[0]

    def settled(self) -> Settled:
        """Return recorded lags, releases and delays."""
        tasks = self.columns()
        return settle(tasks["recorded"], tasks["dur"], _joined(self._edges), self.device, self.first_device)

    def finish(self, settled: Settled, info: GraphInfo) -> TaskGraph:
        """Put everything in topological order."""
        return assemble(
            {**self.columns(), "delay": settled.delay, "release": settled.release},
            settled.edges,
            marks=self.marks,
            names=(*self.trace.names, *self.extra_names),
            layers=self.layers.names if len(self.host.event) else (),
            lanes=tuple(self.lanes),
            info=info,
            shapes=self.trace.shapes,
        )


def _joined(parts: list[Columns]) -> Columns:
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def _longest(rows: Int64, operator: Int64, dur: Int64) -> Int64:
    """Return the longest task of every operator among these rows."""
    ordered = rows[np.lexsort((-dur[rows], operator[rows]))]
    return ordered[np.unique(operator[ordered], return_index=True)[1]]
