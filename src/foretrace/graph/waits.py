"""Who waits for the device: blocking calls, full launch queues, and streams that wait for events of other streams.

Everything is resolved in program order (what had been launched before), never by what happened to finish last in the
recording, so that the edges stay right when kernels are removed, inserted or moved (task-graph lessons, R1-R5).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from foretrace.graph.calls import Call
from foretrace.graph.device import EVENT_LATENCY, Device
from foretrace.graph.host import Host
from foretrace.graph.taskgraph import EdgeClass, EdgeKind, TaskKind
from foretrace.trace.trace import Category

Int64 = npt.NDArray[np.int64]

BLOCKED_NS = 10_000  # a call is blocked if its target ends later than this after its start
OWN_COST_CAP_NS = 20_000
_OWN_COST_DEFAULT_NS = 10_000
_TAIL_CAP_NS = 50_000
_QUEUE_SHARE = 0.93  # launches with this share of the queue's depth outstanding wait for a slot
_QUEUE_MIN_DEPTH = 500
_REFUTED_SHARE = 0.2  # an inferred class of plain waits refuted more often than this is dropped
_TOLERANCE_NS = {"cuda": 1_500, "rocm": 20_000}


@dataclass(frozen=True, eq=False)
class Blocking:
    """Calls that may wait: own cost per call, and what each waits for."""

    call: Int64  # rows in Host, ascending, one per call that gets a RETURN
    own: Int64  # own cost, ns
    blocked: npt.NDArray[np.bool_]
    pair_call: Int64  # rows in Host
    pair_task: Int64  # rows in Device: the RETURN of pair_call waits for the end of pair_task
    pair_typical: Int64  # typical lag, ns; negative where a call returns before its copy ends
    pair_kind: npt.NDArray[np.uint8]  # EdgeKind.SYNC or QUEUE
    pair_inferred: npt.NDArray[np.bool_]
    staged: Int64  # rows in Host of calls whose own cost is the staging of a pageable copy


@dataclass(frozen=True, eq=False)
class Events:
    """Edges between streams: the end of device task `src` holds up device task `dst`."""

    src: Int64
    dst: Int64
    inferred: npt.NDArray[np.bool_]
    classes: tuple[EdgeClass, ...]


@dataclass(frozen=True, eq=False)
class Waits:
    """Resolves waits of one rank's recording."""

    host: Host
    device: Device

    @cached_property
    def _sync_rows(self) -> dict[int, int]:
        """Correlation -> trace row of the explicit synchronisation record, where the recording has them."""
        trace = self.host.trace
        rows = np.flatnonzero(trace.category == Category.SYNC)
        return dict(zip(trace.correlation[rows].tolist(), rows.tolist(), strict=True))

    @cached_property
    def _lane_of_stream(self) -> dict[int, int]:
        """Stream number -> lane of the device tasks."""
        return {self.host.trace.lanes[lane].stream: lane for lane in self.device.lanes}

    @cached_property
    def _launches(self) -> dict[tuple[int, bool], tuple[Int64, Int64]]:
        """(host lane, collective?) -> ascending call starts and the device lanes they launched to."""
        device, host = self.device, self.host
        linked = np.flatnonzero(device.call >= 0)
        host_lane = host.lane[device.call[linked]]
        collective = device.kind[linked] == TaskKind.COLLECTIVE
        table = {}
        for lane in np.unique(host_lane):
            for flag in (False, True):
                rows = linked[(host_lane == lane) & (collective == flag)]
                rows = rows[np.argsort(device.launch[rows], kind="stable")]
                table[int(lane), flag] = (device.launch[rows], device.lane[rows].astype(np.int64))
        return table

    def current_stream(self, host_lane: int, times: Int64) -> Int64:
        """Device lane to which the thread last launched other than collectives before each time.

        Before its first launch: the lane of its next launch; −1 if it never launches.
        """
        starts, lanes = self._launches.get((host_lane, False), (np.empty(0, np.int64), np.empty(0, np.int64)))
        if not len(starts):
            return np.full(len(times), -1, dtype=np.int64)
        return lanes[np.maximum(np.searchsorted(starts, times, side="left") - 1, 0)]

    # -- blocking calls ----------------------------------------------------------------------------------------

    def blocking(self) -> Blocking:
        """Split every call that may wait into own cost and targets (R1, R4, R5)."""
        host, device = self.host, self.device
        pairs: list[tuple[Int64, Int64, npt.NDArray[np.bool_]]] = []
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
        limit = np.array(
            [usual.get(int(n), _OWN_COST_DEFAULT_NS) for n in host.name[calls]], dtype=np.int64
        )
        own = np.where(blocked, np.minimum(own, limit), own)
        staged = self._staged_own(calls, own, call[staging], task[staging])

        typical = np.empty(len(call), dtype=np.int64)
        for mask in (staging, ~staging):
            sample = early[mask & blocks]
            sample = sample[sample <= 0] if mask is staging else sample[sample >= 0]
            typical[mask] = int(np.clip(np.median(sample), -10**9, _TAIL_CAP_NS)) if len(sample) else 2_000
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
        """Median duration of the unblocked calls of each name, at most 20 us."""
        host = self.host
        duration, name = (host.end - host.start)[unblocked], host.name[unblocked]
        return {
            int(n): min(int(np.median(duration[name == n])), OWN_COST_CAP_NS) for n in np.unique(name)
        }

    def _staged_own(self, calls: Int64, own: Int64, call: Int64, task: Int64) -> Int64:
        """Pageable host-to-device copies: time until the copy starts on an idle stream is staging by the host."""
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
        """Copies whose call returns only after (or shortly before) their end."""
        device, host = self.device, self.host
        linked = device.call >= 0
        call_class = np.where(linked, host.call[device.inner_call], Call.CHEAP)
        call_end = np.where(linked, host.end[device.call], 0)
        synchronous = linked & (call_class == Call.COPY_SYNC) & (device.kind == TaskKind.COPY)
        pageable = linked & device.waits_for_copy
        # A small pageable copy to the device is handed over: its call ends before the copy starts (R4).
        handed_over = device.to_device & (call_end <= device.start)
        return np.flatnonzero((synchronous | pageable) & ~handed_over)

    def _stream_syncs(self, pairs: list[tuple[Int64, Int64, npt.NDArray[np.bool_]]]) -> None:
        host, device = self.host, self.device
        calls = np.flatnonzero(host.call == Call.SYNC_STREAM)
        if not len(calls):
            return
        lane, inferred = self._sync_lane(calls)
        for target in np.unique(lane[lane >= 0]):
            mine = calls[lane == target]
            task = device.last_launched(int(target), host.start[mine])
            keep = task >= 0
            pairs.append((mine[keep], task[keep], inferred[lane == target][keep]))

    def _sync_lane(self, calls: Int64) -> tuple[Int64, npt.NDArray[np.bool_]]:
        """Device lane a stream synchronise refers to: stated by the recording, else where its thread last launched."""
        host = self.host
        lane = np.full(len(calls), -1, dtype=np.int64)
        inferred = np.ones(len(calls), dtype=np.bool_)
        for host_lane in np.unique(host.lane[calls]):
            mine = host.lane[calls] == host_lane
            lane[mine] = self._last_any(int(host_lane), host.start[calls[mine]])
        for i, correlation in enumerate(host.trace.correlation[host.event[calls]].tolist()):
            row = self._sync_rows.get(correlation)
            if row is not None:
                stream = host.trace.lanes[host.trace.lane[row]].stream
                lane[i] = self._lane_of_stream.get(stream, -1)
                inferred[i] = False
        return lane, inferred

    def _last_any(self, host_lane: int, times: Int64) -> Int64:
        """Device lane of the thread's last launch of any kind before each time, −1 if none."""
        best = np.full(len(times), -1, dtype=np.int64)
        when = np.full(len(times), np.iinfo(np.int64).min)
        for flag in (False, True):
            starts, lanes = self._launches.get((host_lane, flag), (np.empty(0, np.int64),) * 2)
            position = np.searchsorted(starts, times, side="left") - 1
            if not len(starts):
                continue
            at = np.where(position >= 0, starts[position], np.iinfo(np.int64).min)
            best = np.where(at > when, lanes[position], best)
            when = np.maximum(at, when)
        return best

    def _device_syncs(self, pairs: list[tuple[Int64, Int64, npt.NDArray[np.bool_]]]) -> None:
        host, device = self.host, self.device
        calls = np.flatnonzero(host.call == Call.SYNC_DEVICE)
        for lane in device.lanes:
            task = device.last_launched(lane, host.start[calls])
            keep = task >= 0
            pairs.append((calls[keep], task[keep], np.zeros(int(keep.sum()), np.bool_)))

    def _event_syncs(self, pairs: list[tuple[Int64, Int64, npt.NDArray[np.bool_]]]) -> None:
        """An event synchronise waits for what had been launched before the event was recorded."""
        host, device = self.host, self.device
        records = np.flatnonzero(host.call == Call.RECORD)
        records = records[np.argsort(host.start[records], kind="stable")]
        by_id = {int(c): int(r) for r, c in zip(records, host.trace.correlation[host.event[records]], strict=True)}
        for call in np.flatnonzero(host.call == Call.SYNC_EVENT).tolist():
            row = self._sync_rows.get(int(host.trace.correlation[host.event[call]]))
            stated = row is not None and int(host.trace.wait_correlation[row]) in by_id
            if stated:
                assert row is not None
                record = by_id[int(host.trace.wait_correlation[row])]
                lane = self._lane_of_stream.get(int(host.trace.wait_stream[row]), -1)
            else:
                before = records[: np.searchsorted(host.start[records], host.start[call])]
                if not len(before):
                    continue
                record = int(before[-1])
                lane = int(self._last_any(int(host.lane[record]), host.start[[record]])[0])
            if lane < 0:
                continue
            task = device.last_launched(lane, host.start[[record]])
            if task[0] >= 0:
                pairs.append((np.array([call]), task, np.array([not stated])))

    def _queue(self) -> tuple[Int64, Int64]:
        """Launches that wait for a slot of a full launch queue, and the task that frees it (R5)."""
        host, device = self.host, self.device
        calls: list[Int64] = []
        tasks: list[Int64] = []
        if device.platform != "cuda":
            return np.empty(0, np.int64), np.empty(0, np.int64)
        for lane in device.lanes:
            part = device.lane_slice(lane)
            n = part.stop - part.start
            if n < _QUEUE_MIN_DEPTH:
                continue
            ends = device.latest[part]
            mine = np.flatnonzero((device.call[part] >= 0) & device.leads[part])
            call = device.call[part][mine]
            outstanding = mine - np.searchsorted(ends, host.start[call], side="right")
            duration = host.end[call] - host.start[call]
            usual = int(np.median(duration)) if len(duration) else 0
            stuck = (outstanding >= _QUEUE_MIN_DEPTH) & (duration > usual + 200_000)
            if stuck.sum() < 3:
                continue
            left = mine - np.searchsorted(ends, host.end[call], side="right")  # in the queue when it returned
            depth = int(np.median(left[stuck]))
            if depth < _QUEUE_MIN_DEPTH:
                continue
            waits = (outstanding >= depth * _QUEUE_SHARE) & (mine - depth - 1 >= 0)
            calls.append(call[waits])
            tasks.append(part.start + mine[waits] - depth - 1)
        if not calls:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.concatenate(calls), np.concatenate(tasks)

    # -- events between streams --------------------------------------------------------------------------------

    def events(self) -> Events:
        """Edges from event record to stream wait: stated by the recording, else classified (R3)."""
        host, device = self.host, self.device
        waits = np.flatnonzero(host.call == Call.WAIT)
        if len(device.lanes) < 2 or not len(waits):
            empty = np.empty(0, np.int64)
            return Events(empty, empty, np.empty(0, np.bool_), ())
        waits = waits[np.argsort(host.start[waits], kind="stable")]
        found: list[tuple[Int64, Int64, bool]] = []
        classes: list[EdgeClass] = []
        stated, rest = self._stated_events(waits)
        if len(stated[0]):
            found.append((*stated, False))
            classes.append(self._judge("stated by the recording", stated, "stated"))
        # A recording that states its waits states all that matter: the others order nothing.
        before, work, plain = self._split(rest if not self._sync_rows else rest[:0])
        pre = self._before_collective(before)
        if len(pre[0]):
            found.append((*pre, True))
            classes.append(self._judge("collective after its stream's work", pre, "current stream"))
        for edges, policy in self._work_waits(work):
            found.append((*edges, True))
            classes.append(self._judge("consumer after its collective", edges, policy))
        for edges, policy in self._work_waits(plain, newest_elsewhere=True):
            judged = self._judge("wait for another stream", edges, policy)
            classes.append(judged)
            if judged.refuted <= _REFUTED_SHARE * judged.count:
                found.append((*edges, True))
        if not found:
            empty = np.empty(0, np.int64)
            return Events(empty, empty, np.empty(0, np.bool_), tuple(classes))
        src = np.concatenate([f[0] for f in found])
        dst = np.concatenate([f[1] for f in found])
        inferred = np.concatenate([np.full(len(f[0]), f[2]) for f in found])
        # Stated edges always win; an inferred one that the recording contradicts is dropped.
        holds = ~inferred | ~self._refuted(src, dst)
        src, dst, inferred = src[holds], dst[holds], inferred[holds]
        _, first = np.unique(src * len(device) + dst, return_index=True)
        return Events(src[first], dst[first], inferred[first], tuple(classes))

    def _refuted(self, src: Int64, dst: Int64) -> npt.NDArray[np.bool_]:
        """Edges that the recording contradicts: the waiting task began first, or well before its source ended."""
        device = self.device
        early = device.end[src] > device.start[dst] + _TOLERANCE_NS[device.platform]
        return early | (device.start[src] >= device.start[dst])

    @property
    def event_latency(self) -> int:
        """Typical time from the end of the recorded work to the start of the waiting work, ns."""
        return EVENT_LATENCY[self.device.platform]

    def _judge(self, name: str, edges: tuple[Int64, Int64], policy: str) -> EdgeClass:
        refuted = int(np.sum(self._refuted(*edges)))
        return EdgeClass(name=name, kind=EdgeKind.EVENT, count=len(edges[0]), refuted=refuted, policy=policy)

    def _stated_events(self, waits: Int64) -> tuple[tuple[Int64, Int64], Int64]:
        host, device, trace = self.host, self.device, self.host.trace
        runtime = np.flatnonzero(host.category == Category.RUNTIME)
        start_of = dict(
            zip(trace.correlation[host.event[runtime]].tolist(), host.start[runtime].tolist(), strict=True)
        )
        src, dst, rest = [], [], []
        for wait in waits.tolist():
            row = self._sync_rows.get(int(trace.correlation[host.event[wait]]))
            recorded = None if row is None else start_of.get(int(trace.wait_correlation[row]))
            if row is None:
                rest.append(wait)
                continue
            source = self._lane_of_stream.get(int(trace.wait_stream[row]), -1)
            target = self._lane_of_stream.get(trace.lanes[trace.lane[row]].stream, -1)
            if source < 0 or target < 0 or source == target:
                continue  # nothing ran on one of the two streams: the wait orders nothing
            when = np.array([host.start[wait] if recorded is None else recorded])
            a = int(device.last_launched(source, when)[0])
            b = int(device.first_launched(target, host.start[[wait]])[0])
            if a >= 0 and b >= 0:
                src.append(a)
                dst.append(b)
        return (np.array(src, dtype=np.int64), np.array(dst, dtype=np.int64)), np.array(rest, dtype=np.int64)

    def _split(self, waits: Int64) -> tuple[list[tuple[int, int]], Int64, Int64]:
        """Sort waits by the collective operator instance around them.

        Returns (wait, collective launched later in its instance), waits of an instance without a launch
        (`Work.wait`), and waits outside any instance; waits after the launch of their instance are NCCL's own.
        """
        host, device = self.host, self.device
        instance = host.communication[waits]
        collective = np.flatnonzero((device.kind == TaskKind.COLLECTIVE) & (device.call >= 0))
        collective = collective[np.argsort(device.launch[collective], kind="stable")]
        owner = host.communication[device.call[collective]]
        launched: dict[int, list[int]] = {}
        for task, own in zip(collective.tolist(), owner.tolist(), strict=True):
            launched.setdefault(own, []).append(task)
        before: list[tuple[int, int]] = []
        work: list[int] = []
        plain: list[int] = []
        for wait, inside in zip(waits.tolist(), instance.tolist(), strict=True):
            if inside < 0:
                plain.append(wait)
            elif inside not in launched:
                work.append(wait)
            else:
                later = [t for t in launched[inside] if device.launch[t] >= host.start[wait]]
                if later:
                    before.append((wait, later[0]))
        return before, np.array(work, dtype=np.int64), np.array(plain, dtype=np.int64)

    def _before_collective(self, before: list[tuple[int, int]]) -> tuple[Int64, Int64]:
        """The communication stream waits for what its caller's stream had been given so far."""
        host, device = self.host, self.device
        src, dst = [], []
        waits = np.array([w for w, _ in before], dtype=np.int64)
        tasks = np.array([t for _, t in before], dtype=np.int64)
        for lane in np.unique(host.lane[waits]) if len(waits) else ():
            mine = host.lane[waits] == lane
            times = host.start[waits[mine]]
            stream = self.current_stream(int(lane), times)
            for source in np.unique(stream[stream >= 0]):
                here = stream == source
                task = device.last_launched(int(source), times[here])
                target = tasks[mine][here]
                keep = (task >= 0) & (device.lane[target] != source)
                src.append(task[keep])
                dst.append(target[keep])
        empty = np.empty(0, np.int64)
        return (np.concatenate(src) if src else empty, np.concatenate(dst) if dst else empty)

    def _work_waits(
        self, waits: Int64, *, newest_elsewhere: bool = False
    ) -> list[tuple[tuple[Int64, Int64], str]]:
        """`Work.wait`: the current stream waits for a collective; one policy per group says which.

        A wait outside every collective operator may also mean whatever was launched last on another stream
        (`newest_elsewhere`).
        """
        host, device = self.host, self.device
        if not len(waits):
            return []
        collective = np.flatnonzero((device.kind == TaskKind.COLLECTIVE) & (device.call >= 0))
        collective = collective[np.argsort(device.launch[collective], kind="stable")]
        launch = device.launch[collective]
        # Waits of a thread with no collective launched between them form a run (the buckets of a step).
        newest = np.searchsorted(launch, host.start[waits], side="left") - 1
        run_start = np.ones(len(waits), dtype=np.bool_)
        run_start[1:] = (newest[1:] != newest[:-1]) | (host.lane[waits[1:]] != host.lane[waits[:-1]])
        run = np.cumsum(run_start) - 1
        run_length = np.bincount(run)[run]
        position = np.arange(len(waits)) - np.flatnonzero(run_start)[run]
        instance = host.communication[waits]
        around = np.where(instance >= 0, host.parent[np.maximum(instance, 0)], host.parent[waits])
        operator = np.where(around >= 0, host.name[np.maximum(around, 0)], -1)
        groups: dict[tuple[int, int], list[int]] = {}
        for i, key in enumerate(zip(operator.tolist(), run_length.tolist(), strict=True)):
            groups.setdefault(key, []).append(i)
        result = []
        for members_list in groups.values():
            members = np.array(members_list)
            result.append(
                self._best_policy(waits, members, newest, run_length, position, collective, newest_elsewhere)
            )
        return [r for r in result if len(r[0][0])]

    def _best_policy(
        self,
        waits: Int64,
        members: Int64,
        newest: Int64,
        run_length: Int64,
        position: Int64,
        collective: Int64,
        newest_elsewhere: bool,
    ) -> tuple[tuple[Int64, Int64], str]:
        """Of the policies newest, i-th of the run and k-th newest: the one that covers most, unrefuted, least slack."""
        host, device = self.host, self.device
        target = self._consumer(waits[members])
        options = {
            "newest": newest[members],
            "i-th of the run": newest[members] - run_length[members] + 1 + position[members],
        }
        options.update({f"{k}-th newest": newest[members] - k + 1 for k in range(2, 9)})
        chosen_pairs = {}
        for policy, chosen in options.items() if len(collective) else ():
            valid = (chosen >= 0) & (target >= 0)
            chosen_pairs[policy] = (collective[np.maximum(chosen, 0)][valid], target[valid])
        if newest_elsewhere:
            chosen_pairs["last launched on another stream"] = self._plain(waits[members])
        best: tuple[tuple[int, int, float], tuple[Int64, Int64], str] | None = None
        for policy, (src, dst) in chosen_pairs.items():
            cross = device.lane[src] != device.lane[dst]
            src, dst = src[cross], dst[cross]
            slack = device.start[dst] - device.end[src]
            refuted = int(np.sum(self._refuted(src, dst)))
            score = (-refuted, len(src), -float(np.sum(np.maximum(slack, 0))))
            if len(src) and (best is None or score > best[0]):
                best = (score, (src, dst), policy)
        if best is None:
            empty = np.empty(0, np.int64)
            return (empty, empty), "none"
        return best[1], best[2]

    def _consumer(self, waits: Int64) -> Int64:
        """First task given to the waiting thread's current stream after each wait, −1 if none."""
        host, device = self.host, self.device
        target = np.full(len(waits), -1, dtype=np.int64)
        for lane in np.unique(host.lane[waits]):
            mine = np.flatnonzero(host.lane[waits] == lane)
            times = host.start[waits[mine]]
            stream = self.current_stream(int(lane), times)
            for source in np.unique(stream[stream >= 0]):
                here = stream == source
                target[mine[here]] = device.first_launched(int(source), times[here])
        return target

    def _plain(self, waits: Int64) -> tuple[Int64, Int64]:
        """A wait outside collectives: the next launch of its thread waits for what was launched last elsewhere."""
        host, device = self.host, self.device
        linked = np.flatnonzero((device.call >= 0) & device.leads)
        linked = linked[np.argsort(device.launch[linked], kind="stable")]
        launch, by_lane = device.launch[linked], host.lane[device.call[linked]]
        src, dst = [], []
        for wait in waits.tolist():
            place = int(np.searchsorted(launch, host.start[wait], side="left"))
            mine = np.flatnonzero(by_lane[place : place + 64] == host.lane[wait])
            if not len(mine) or place == 0:
                continue
            target = int(linked[place + mine[0]])
            earlier = linked[max(place - 64, 0) : place][::-1]
            others = earlier[device.lane[earlier] != device.lane[target]]
            if len(others):
                src.append(int(others[0]))
                dst.append(target)
        return np.array(src, dtype=np.int64), np.array(dst, dtype=np.int64)

