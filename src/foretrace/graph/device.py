"""The device side of a recording: kernels, copies and memsets by stream, and the calls that launched them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from foretrace.arrays import Int32, Int64, Mask, UInt8
from foretrace.graph.calls import RuntimeCall, is_collective
from foretrace.graph.host import HostSpans
from foretrace.graph.kernels import at, farthest
from foretrace.graph.taskgraph import TaskKind
from foretrace.trace.trace import Category, LaneKind, Trace

BEFORE = np.iinfo(np.int64).min // 4  # launch time of work that was launched before the recording began

_CAPTURE = "StreamBeginCapture", "StreamEndCapture"
_MIN_SAMPLES = 10
_DEFAULT_LATENCY = {
    "cuda": 7_000,
    "rocm": 20_000,
}  # idle stream, typical of public traces
_DEFAULT_GAP = {"cuda": 1_200, "rocm": 500}


@dataclass(frozen=True, eq=False)
class DeviceTasks:
    """Device tasks ordered by (lane, start); one entry per task unless said otherwise."""

    trace: Trace
    platform: str
    event: Int64  # row in the trace
    lane: Int32
    start: Int64
    end: Int64
    kind: UInt8  # TaskKind
    call: Int64  # row of the outermost kept call in Host, −1 if the launch was not recorded
    inner_call: Int64  # row of the call with the same correlation, −1 if none
    launch: Int64  # time at which that call started, BEFORE if not recorded
    previous: Int64  # predecessor on the lane, −1 for the first
    latest: Int64  # running maximum of ends on the lane up to and including this task
    leads: Mask  # first task of its call (the others of a graph launch follow by stream order)

    def __len__(self) -> int:
        return len(self.event)

    @cached_property
    def dur(self) -> Int64:
        return self.end - self.start

    @cached_property
    def lanes(self) -> list[int]:
        """Lanes with device tasks."""
        return [int(lane) for lane in np.unique(self.lane)]

    def lane_slice(self, lane: int) -> slice:
        """Return rows of one lane."""
        low, high = np.searchsorted(self.lane, [lane, lane + 1])
        return slice(int(low), int(high))

    @cached_property
    def _suffix_launch(self) -> dict[int, Int64]:
        """Per lane the earliest launch of this or any later task: ascending, so it can be searched."""
        return {lane: np.minimum.accumulate(self.launch[self.lane_slice(lane)][::-1])[::-1] for lane in self.lanes}

    def last_launched(self, lane: int, times: Int64) -> Int64:
        """Return the row of the last task of the lane that was launched before each time, −1 if none."""
        part = self.lane_slice(lane)
        position = np.searchsorted(self._suffix_launch[lane], times, side="left") - 1
        return np.where(position >= 0, part.start + position, -1)

    def first_launched(self, lane: int, times: Int64) -> Int64:
        """Return the row of the first task of the lane that was launched at or after each time, −1 if none."""
        part = self.lane_slice(lane)
        position = np.searchsorted(self._suffix_launch[lane], times, side="left")
        return np.where(part.start + position < part.stop, part.start + position, -1)

    @cached_property
    def idle_before(self) -> Mask:
        """Launched while its stream was idle (everything before it had ended)."""
        before = np.where(self.previous >= 0, self.latest[self.previous], BEFORE)
        return (self.call >= 0) & self.leads & (before <= self.launch)

    @cached_property
    def latency(self) -> dict[int, int]:
        """Typical time from the start of a launch call to the start of its task on an idle stream, per lane, ns."""
        kernels = self.idle_before & (self.kind == TaskKind.KERNEL) & (self.previous >= 0)
        return self._typical(self.start - self.launch, kernels, _DEFAULT_LATENCY[self.platform])

    @cached_property
    def gap(self) -> dict[int, int]:
        """Typical gap between neighbours of which the second was already queued, per lane, ns."""
        has = self.previous >= 0
        before = np.where(has, self.latest[self.previous], 0)
        gap = self.start - before
        latency = np.array([self.latency.get(lane, 0) for lane in range(len(self.trace.lanes))])[self.lane]
        # Collectives start when other ranks and streams allow: their gaps say nothing about the stream.
        queued = has & (self.launch + latency < before) & (gap >= 0) & (self.kind == TaskKind.KERNEL)
        return self._typical(gap, queued, _DEFAULT_GAP[self.platform])

    def _typical(self, times: Int64, of: Mask, default: int) -> dict[int, int]:
        """Return the median of these times per lane; where they are too few that of all lanes, else the default."""

        def median(sample: Int64, otherwise: int) -> int:
            return int(np.median(sample)) if len(sample) >= _MIN_SAMPLES else otherwise

        device_wide = median(times[of], default)
        parts = {lane: self.lane_slice(lane) for lane in self.lanes}
        return {lane: median(times[part][of[part]], device_wide) for lane, part in parts.items()}

    @cached_property
    def span(self) -> int:
        """Time from the first start to the last end over all streams, ns."""
        return int(self.end.max() - self.start.min()) if len(self) else 0

    @cached_property
    def overlap_share(self) -> float:
        """Share of the time with any stream at work during which two or more are."""
        if len(self.lanes) < 2:
            return 0.0
        times = np.concatenate([self.start, self.end])
        change = np.concatenate([np.ones(len(self), np.int64), -np.ones(len(self), np.int64)])
        order = np.lexsort((change, times))
        depth, gaps = np.cumsum(change[order])[:-1], np.diff(times[order])
        busy = int(gaps[depth >= 1].sum())
        return float(gaps[depth >= 2].sum() / busy) if busy else 0.0

    @cached_property
    def waits_for_copy(self) -> Mask:
        """Pageable or synchronous copies, whose call returns only when the data has left or arrived."""
        return self._copies("pageable")

    @cached_property
    def to_device(self) -> Mask:
        """Copies from host to device."""
        return self._copies("htod", "host -> device")

    def _copies(self, *words: str) -> Mask:
        table = np.array([any(word in name.lower() for word in words) for name in self.trace.names], dtype=np.bool_)
        return np.asarray((self.kind == TaskKind.COPY) & table[self.trace.name[self.event]])


_KINDS = {
    Category.KERNEL: TaskKind.KERNEL,
    Category.MEMCPY: TaskKind.COPY,
    Category.MEMSET: TaskKind.MEMSET,
}


def device_tasks(trace: Trace, host: HostSpans, platform: str) -> DeviceTasks:
    """Collect the device tasks of one rank and link them to their launch calls through the correlation id."""
    rows = np.flatnonzero(np.isin(trace.category, list(_KINDS)))
    lane_is_gpu = trace.lane_kind()[trace.lane[rows]] == LaneKind.GPU
    rows = rows[lane_is_gpu]
    rows = rows[np.lexsort((trace.start[rows], trace.lane[rows]))]
    lane, start = trace.lane[rows], trace.start[rows]
    end = start + trace.dur[rows]
    kind = np.zeros(len(rows), dtype=np.uint8)
    for category, task_kind in _KINDS.items():
        kind[trace.category[rows] == category] = task_kind
    communicates = np.zeros(len(trace.names), dtype=np.bool_)
    for index in np.unique(trace.name[rows]):
        communicates[index] = is_collective(trace.names[index])
    kind[communicates[trace.name[rows]] & (kind == TaskKind.KERNEL)] = TaskKind.COLLECTIVE

    runtime = np.flatnonzero(host.category == Category.RUNTIME)
    correlation = trace.correlation[host.event[runtime]]
    # A runtime call and the driver call inside it may share the id: the first in (id, start) order encloses.
    order = np.lexsort((host.start[runtime], correlation))
    order = order[correlation[order] > 0]
    ids = correlation[order]
    wanted = trace.correlation[rows]
    place = np.searchsorted(ids, wanted)
    found = (place < len(ids)) & (wanted > 0)
    found[found] = ids[place[found]] == wanted[found]
    inner = np.full(len(rows), -1, dtype=np.int64)
    inner[found] = runtime[order[place[found]]]
    # Calls nested in another kept call belong to it: the outermost one is the task.
    launches = np.zeros(len(host.event), dtype=np.bool_)
    launches[inner[inner >= 0]] = True
    outer = farthest(host.parent, host.rows(launches | (host.call != RuntimeCall.CHEAP)))
    call = at(outer, inner, -1)
    launch = at(host.start, call, BEFORE)
    same = np.zeros(len(rows), dtype=np.bool_)
    same[1:] = lane[1:] == lane[:-1]
    previous = np.where(same, np.arange(len(rows)) - 1, -1)
    above = lane.astype(np.int64) * (int(end.max(initial=0)) + 1)  # lanes one above the other: one accumulation
    latest = np.maximum.accumulate(above + end) - above
    leads = call >= 0
    follows = previous >= 0
    leads[follows] &= call[follows] != call[previous[follows]]
    return DeviceTasks(
        trace=trace,
        platform=platform,
        event=rows,
        lane=lane,
        start=start,
        end=end,
        kind=kind,
        call=call,
        inner_call=inner,
        launch=launch,
        previous=previous,
        latest=latest,
        leads=leads,
    )


def without_work(host: HostSpans, device: DeviceTasks) -> tuple[Int64, Int64]:
    """Return launches (rows of the host) whose work is not recorded: captured into a graph, and cut off by its end.

    Those begin on the host after everything that did run was launched. (Memsets that leave nothing are common.)
    """
    launches = np.flatnonzero(
        np.isin(host.call, (RuntimeCall.LAUNCH, RuntimeCall.GRAPH, RuntimeCall.COPY, RuntimeCall.COPY_SYNC))
    )
    linked = np.unique(np.concatenate([device.call, device.inner_call]))
    linked = linked[linked >= 0]
    if not len(linked) or not len(launches):
        return launches[:0], launches[:0]
    missing = launches[~np.isin(launches, linked)]
    begins, ends = (np.sort(host.start[host.named(re.compile(name).search)]) for name in _CAPTURE)
    captured = np.searchsorted(begins, host.start[missing]) > np.searchsorted(ends, host.start[missing])
    late = host.start[missing] >= host.end[linked].max()
    return missing[captured], missing[late & ~captured]


def share_without_work(host: HostSpans, device: DeviceTasks) -> float:
    """Return the share of operators without work of the device, of those that have some in another call like theirs.

    1 where nothing of the device is recorded.
    """
    if not len(device):
        return 1.0
    call = device.call[device.call >= 0]
    launching = np.zeros(len(host.event), dtype=np.bool_)
    launching[host.operator[call][host.operator[call] >= 0]] = True
    like = host.name.astype(np.int64) * 2**31 + host.trace.shape[host.event]
    alike = host.is_operator & np.isin(like, like[launching])
    return 1.0 - float(launching.sum() / alike.sum()) if alike.any() else 0.0
