"""Who waits for the device: blocking calls and full launch queues.

Everything is resolved in program order (what had been launched before), never by what happened to finish last in the
recording, so that the edges stay right when kernels are removed, inserted or moved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Int64, Mask, UInt8
from foretrace.graph.calls import RuntimeCall
from foretrace.graph.device import DeviceTasks
from foretrace.graph.host import HostSpans
from foretrace.graph.kernels import at
from foretrace.graph.streams import Streams
from foretrace.graph.taskgraph import EdgeKind, TaskKind

BLOCKED_NS = 10_000  # a call is blocked if its target ends later than this after its start
OWN_COST_CAP_NS = 20_000
_OWN_COST_DEFAULT_NS = 10_000
_TAIL_CAP_NS = 50_000
_QUEUE_SHARE = 0.93  # launches with this share of the queue's depth outstanding wait for a slot
_QUEUE_MIN_DEPTH = 700  # about 1,022 tasks of one stream; less with events, graphs and several streams
_QUEUE_SCATTER = 0.02


@dataclass(frozen=True, eq=False)
class Blocking:
    """Calls that may wait: own cost per call, and what each waits for."""

    call: Int64  # rows in Host, ascending, one per call that gets a RETURN
    own: Int64  # own cost, ns
    blocked: Mask
    pair_call: Int64  # rows in Host
    pair_task: Int64  # rows in Device: the RETURN of pair_call waits for the end of pair_task
    pair_typical: Int64  # typical lag, ns; negative where a call returns before its copy ends
    pair_kind: UInt8  # EdgeKind.SYNC or QUEUE
    pair_inferred: Mask
    staged: Int64  # rows in Host of calls whose own cost is the staging of a pageable copy


def blocking_calls(host: HostSpans, device: DeviceTasks, streams: Streams) -> Blocking:
    """Split every call that may wait into own cost and targets (R1, R4, R5)."""
    return _Waits(host, device, streams).resolve()


@dataclass(frozen=True, eq=False)
class _Waits:
    """Resolves the blocking calls of one rank's recording."""

    host: HostSpans
    device: DeviceTasks
    streams: Streams

    def resolve(self) -> Blocking:
        """Split every call that may wait into own cost and targets (R1, R4, R5)."""
        host, device = self.host, self.device
        pairs: list[tuple[Int64, Int64, Mask]] = []
        self._stream_syncs(pairs)
        self._device_syncs(pairs)
        self._event_syncs(pairs)
        copies = self._copies_waited_for()
        pairs.append((device.call[copies], copies, np.zeros(len(copies), np.bool_)))
        call = np.concatenate([p[0] for p in pairs])
        task = np.concatenate([p[1] for p in pairs])
        inferred = np.concatenate([p[2] for p in pairs])

        call_start, call_end = host.start[call], host.end[call]
        staging = device.to_device[task] & device.waits_for_copy[task]
        early = call_end - device.end[task]  # negative: the call returns before its target ends
        blocks = device.end[task] > call_start + BLOCKED_NS
        queue_call, queue_task = self._queue()
        everything = np.concatenate([call, queue_call])
        calls = np.unique(everything)
        place = np.searchsorted(calls, call)
        blocked = np.zeros(len(calls), dtype=np.bool_)
        np.logical_or.at(blocked, place, blocks)
        blocked[np.searchsorted(calls, queue_call)] = True

        own = (host.end - host.start)[calls]
        usual = self._usual_own_cost(calls[~blocked])
        limit = np.array([usual.get(int(n), _OWN_COST_DEFAULT_NS) for n in host.name[calls]], dtype=np.int64)
        own = np.where(blocked, np.minimum(own, limit), own)
        staged = self._staged_own(calls, own, call[staging], task[staging])

        typical = np.empty(len(call), dtype=np.int64)
        for mask in (staging, ~staging):
            sample = early[mask & blocks]
            sample = sample[sample <= 0] if mask is staging else sample[sample >= 0]
            typical[mask] = int(np.clip(np.median(sample), -(10**9), _TAIL_CAP_NS)) if len(sample) else 2_000
        return Blocking(
            call=calls,
            own=own,
            blocked=blocked,
            pair_call=everything,
            pair_task=np.concatenate([task, queue_task]),
            pair_typical=np.concatenate([typical, np.full(len(queue_call), 1_000, np.int64)]),
            pair_kind=np.concatenate(
                [np.full(len(call), EdgeKind.SYNC), np.full(len(queue_call), EdgeKind.QUEUE)]
            ).astype(np.uint8),
            pair_inferred=np.concatenate([inferred, np.ones(len(queue_call), np.bool_)]),
            staged=staged,
        )

    def _usual_own_cost(self, unblocked: Int64) -> dict[int, int]:
        """Return median duration of the unblocked calls of each name, at most 20 us."""
        host = self.host
        duration, name = (host.end - host.start)[unblocked], host.name[unblocked]
        return {int(n): min(int(np.median(duration[name == n])), OWN_COST_CAP_NS) for n in np.unique(name)}

    def _staged_own(self, calls: Int64, own: Int64, call: Int64, task: Int64) -> Int64:
        """Return pageable host-to-device copies: time until the copy starts on an idle stream is the host's staging."""
        if not len(call):
            return call
        host, device = self.host, self.device
        latency = np.array([device.latency[int(lane)] for lane in device.lane[task]], dtype=np.int64)
        until_copy = np.maximum(device.start[task] - host.start[call] - latency, 0)
        idle = device.idle_before[task] | (device.previous[task] < 0)
        usual = int(np.median(until_copy[idle])) if idle.any() else OWN_COST_CAP_NS
        duration = host.end[call] - host.start[call]
        own[np.searchsorted(calls, call)] = np.minimum(np.where(idle, until_copy, usual), duration)
        return np.unique(call)

    def _copies_waited_for(self) -> Int64:
        """Return copies whose call returns only after (or shortly before) their end."""
        device, host = self.device, self.host
        linked = device.call >= 0
        call_class = at(host.call, np.where(linked, device.inner_call, -1), RuntimeCall.CHEAP)
        call_end = at(host.end, device.call, 0)
        synchronous = linked & (call_class == RuntimeCall.COPY_SYNC) & (device.kind == TaskKind.COPY)
        pageable = linked & device.waits_for_copy
        # A small pageable copy to the device is handed over: its call ends before the copy starts (R4).
        handed_over = device.to_device & (call_end <= device.start)
        return np.flatnonzero((synchronous | pageable) & ~handed_over)

    def _stream_syncs(self, pairs: list[tuple[Int64, Int64, Mask]]) -> None:
        host, device = self.host, self.device
        calls = np.flatnonzero(host.call == RuntimeCall.SYNC_STREAM)
        if not len(calls):
            return
        lane, inferred = self._sync_lane(calls)
        for target in np.unique(lane[lane >= 0]):
            mine = calls[lane == target]
            task = device.last_launched(int(target), host.start[mine])
            keep = task >= 0
            pairs.append((mine[keep], task[keep], inferred[lane == target][keep]))

    def _sync_lane(self, calls: Int64) -> tuple[Int64, Mask]:
        """Return the device lane of a stream synchronise: as recorded, else where its thread last launched."""
        host = self.host
        lane = np.full(len(calls), -1, dtype=np.int64)
        inferred = np.ones(len(calls), dtype=np.bool_)
        for host_lane in np.unique(host.lane[calls]):
            mine = host.lane[calls] == host_lane
            lane[mine] = self.streams.last_stream(int(host_lane), host.start[calls[mine]])
        for i, correlation in enumerate(host.trace.correlation[host.event[calls]].tolist()):
            row = self.streams.sync_rows.get(correlation)
            if row is not None:
                stream = host.trace.lanes[host.trace.lane[row]].stream
                lane[i] = self.streams.lane_of_stream.get(stream, -1)
                inferred[i] = False
        return lane, inferred

    def _device_syncs(self, pairs: list[tuple[Int64, Int64, Mask]]) -> None:
        host, device = self.host, self.device
        calls = np.flatnonzero(host.call == RuntimeCall.SYNC_DEVICE)
        for lane in device.lanes:
            task = device.last_launched(lane, host.start[calls])
            keep = task >= 0
            pairs.append((calls[keep], task[keep], np.zeros(int(keep.sum()), np.bool_)))

    def _event_syncs(self, pairs: list[tuple[Int64, Int64, Mask]]) -> None:
        """Let an event synchronise wait for what had been launched before the event was recorded."""
        host, device = self.host, self.device
        records = np.flatnonzero(host.call == RuntimeCall.RECORD)
        records = records[np.argsort(host.start[records], kind="stable")]
        by_id = {int(c): int(r) for r, c in zip(records, host.trace.correlation[host.event[records]], strict=True)}
        for call in np.flatnonzero(host.call == RuntimeCall.SYNC_EVENT).tolist():
            row = self.streams.sync_rows.get(int(host.trace.correlation[host.event[call]]))
            stated = row is not None and int(host.trace.wait_correlation[row]) in by_id
            if stated:
                assert row is not None
                record = by_id[int(host.trace.wait_correlation[row])]
                lane = self.streams.lane_of_stream.get(int(host.trace.wait_stream[row]), -1)
            else:
                before = records[: np.searchsorted(host.start[records], host.start[call])]
                if not len(before):
                    continue
                record = int(before[-1])
                lane = int(self.streams.last_stream(int(host.lane[record]), host.start[[record]])[0])
            if lane < 0:
                continue
            task = device.last_launched(lane, host.start[[record]])
            if task[0] >= 0:
                pairs.append((np.array([call]), task, np.array([not stated])))

    def _queue(self) -> tuple[Int64, Int64]:
        """Return launches that wait for a slot of a full launch queue, and the task that frees it (R5).

        A launch takes one slot however many tasks it begins, and frees it when the last of them has ended. A launch
        that returned while that task still ran did not wait for it: the queue was deeper there.
        """
        host, device = self.host, self.device
        calls: list[Int64] = []
        tasks: list[Int64] = []
        if device.platform != "cuda":
            return np.empty(0, np.int64), np.empty(0, np.int64)
        for lane in device.lanes:
            part = device.lane_slice(lane)
            first = np.flatnonzero((device.call[part] < 0) | device.leads[part])  # task with which each slot begins
            if len(first) < _QUEUE_MIN_DEPTH:
                continue
            last = np.append(first[1:], part.stop - part.start) - 1
            ends = device.latest[part][last]
            mine = np.flatnonzero(device.call[part][first] >= 0)
            call = device.call[part][first[mine]]
            outstanding = mine - np.searchsorted(ends, host.start[call], side="right")
            duration = host.end[call] - host.start[call]
            room = duration[outstanding < _QUEUE_MIN_DEPTH]
            usual = int(np.median(room)) if len(room) else OWN_COST_CAP_NS
            left = mine - np.searchsorted(ends, host.end[call], side="right")  # in the queue when it returned
            stuck = (outstanding >= _QUEUE_MIN_DEPTH) & (duration > 3 * usual + BLOCKED_NS) & (left < outstanding)
            if stuck.sum() < 3:
                continue
            depth = int(np.median(left[stuck]))
            # A full queue has one depth; launches that are slow for another reason scatter.
            scatter = np.quantile(left[stuck], 0.75) - np.quantile(left[stuck], 0.25)
            if depth < _QUEUE_MIN_DEPTH or scatter > _QUEUE_SCATTER * depth:
                continue
            waits = np.flatnonzero((outstanding >= depth * _QUEUE_SHARE) & (mine - depth - 1 >= 0))
            freed = mine[waits] - depth - 1
            able = ends[freed] <= host.end[call[waits]]
            calls.append(call[waits[able]])
            tasks.append(part.start + last[freed[able]])
        if not calls:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.concatenate(calls), np.concatenate(tasks)
