"""Edges between streams: work that waits for an event recorded on another stream.

New recordings state them (`cuda_sync`); older ones show a wait without saying for what. Then the collective operator
around the wait says which kind of wait it is, and a policy is chosen per class of waits, never per occurrence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Int64, Mask
from foretrace.graph.calls import RuntimeCall
from foretrace.graph.device import DeviceTasks
from foretrace.graph.host import HostSpans
from foretrace.graph.streams import Streams
from foretrace.graph.taskgraph import EdgeClass, EdgeKind, TaskKind
from foretrace.trace.trace import Category

LATENCY_NS = {"cuda": 1_500, "rocm": 15_000}  # end of the recorded work to start of the waiting work
_REFUTED_SHARE = 0.2  # an inferred class of plain waits refuted more often than this is dropped
_TOLERANCE_NS = {"cuda": 1_500, "rocm": 20_000}


@dataclass(frozen=True, eq=False)
class Events:
    """Edges between streams: the end of device task `src` holds up device task `dst`."""

    src: Int64
    dst: Int64
    inferred: Mask
    classes: tuple[EdgeClass, ...]


def stream_events(host: HostSpans, device: DeviceTasks, streams: Streams) -> Events:
    """Return edges from event record to stream wait: stated by the recording, else classified (R3)."""
    return _Events(host, device, streams).resolve()


@dataclass(frozen=True, eq=False)
class _Events:
    host: HostSpans
    device: DeviceTasks
    streams: Streams

    def resolve(self) -> Events:
        """Return edges from event record to stream wait: stated by the recording, else classified (R3)."""
        host, device = self.host, self.device
        waits = np.flatnonzero(host.call == RuntimeCall.WAIT)
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
        before, work, plain = self._split(rest if not self.streams.sync_rows else rest[:0])
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

    def _refuted(self, src: Int64, dst: Int64) -> Mask:
        """Return edges that the recording contradicts: a waiting task began first, or long before its source ended."""
        device = self.device
        early = device.end[src] > device.start[dst] + _TOLERANCE_NS[device.platform]
        return early | (device.start[src] >= device.start[dst])

    def _judge(self, name: str, edges: tuple[Int64, Int64], policy: str) -> EdgeClass:
        refuted = int(np.sum(self._refuted(*edges)))
        return EdgeClass(name=name, kind=EdgeKind.EVENT, count=len(edges[0]), refuted=refuted, policy=policy)

    def _stated_events(self, waits: Int64) -> tuple[tuple[Int64, Int64], Int64]:
        host, device, trace = self.host, self.device, self.host.trace
        runtime = np.flatnonzero(host.category == Category.RUNTIME)
        start_of = dict(zip(trace.correlation[host.event[runtime]].tolist(), host.start[runtime].tolist(), strict=True))
        src, dst, rest = [], [], []
        for wait in waits.tolist():
            row = self.streams.sync_rows.get(int(trace.correlation[host.event[wait]]))
            recorded = None if row is None else start_of.get(int(trace.wait_correlation[row]))
            if row is None:
                rest.append(wait)
                continue
            source = self.streams.lane_of_stream.get(int(trace.wait_stream[row]), -1)
            target = self.streams.lane_of_stream.get(trace.lanes[trace.lane[row]].stream, -1)
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
        """Return edges by which the communication stream waits for what its caller's stream had been given so far."""
        host, device = self.host, self.device
        src, dst = [], []
        waits = np.array([w for w, _ in before], dtype=np.int64)
        tasks = np.array([t for _, t in before], dtype=np.int64)
        for lane in np.unique(host.lane[waits]) if len(waits) else ():
            mine = host.lane[waits] == lane
            times = host.start[waits[mine]]
            stream = self.streams.current_stream(int(lane), times)
            for source in np.unique(stream[stream >= 0]):
                here = stream == source
                task = device.last_launched(int(source), times[here])
                target = tasks[mine][here]
                keep = (task >= 0) & (device.lane[target] != source)
                src.append(task[keep])
                dst.append(target[keep])
        empty = np.empty(0, np.int64)
        return np.concatenate([empty, *src]), np.concatenate([empty, *dst])

    def _work_waits(self, waits: Int64, *, newest_elsewhere: bool = False) -> list[tuple[tuple[Int64, Int64], str]]:
        """Return `Work.wait`: the current stream waits for a collective; one policy per group says which.

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
        found = (
            self._best_policy(waits, np.array(members), newest, run_length, position, collective, newest_elsewhere)
            for members in groups.values()
        )
        return [each for each in found if len(each[0][0])]

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
        """Return, of the policies newest, i-th of the run and k-th newest, the one that covers most, then fits best."""
        device = self.device
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
        for policy, (sources, targets) in chosen_pairs.items():
            cross = device.lane[sources] != device.lane[targets]
            src, dst = sources[cross], targets[cross]
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
        """Return the first task given to the waiting thread's current stream after each wait, −1 if none."""
        host, device = self.host, self.device
        target = np.full(len(waits), -1, dtype=np.int64)
        for lane in np.unique(host.lane[waits]):
            mine = np.flatnonzero(host.lane[waits] == lane)
            times = host.start[waits[mine]]
            stream = self.streams.current_stream(int(lane), times)
            for source in np.unique(stream[stream >= 0]):
                here = stream == source
                target[mine[here]] = device.first_launched(int(source), times[here])
        return target

    def _plain(self, waits: Int64) -> tuple[Int64, Int64]:
        """Return a wait outside collectives: a thread's next launch waits for what was launched last elsewhere."""
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
