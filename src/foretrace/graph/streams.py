"""Which stream a host thread means: explicit synchronisation records, else where the thread last launched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from foretrace.arrays import Int64
from foretrace.graph.device import DeviceTasks
from foretrace.graph.host import HostSpans
from foretrace.graph.taskgraph import TaskKind
from foretrace.trace.trace import Category


@dataclass(frozen=True, eq=False)
class Streams:
    """Streams of one rank's recording as its host threads use them."""

    host: HostSpans
    device: DeviceTasks

    @cached_property
    def sync_rows(self) -> dict[int, int]:
        """Correlation -> trace row of the explicit synchronisation record, where the recording has them."""
        trace = self.host.trace
        rows = np.flatnonzero(trace.category == Category.SYNC)
        return dict(zip(trace.correlation[rows].tolist(), rows.tolist(), strict=True))

    @cached_property
    def lane_of_stream(self) -> dict[int, int]:
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
        """Return device lane to which the thread last launched other than collectives before each time.

        Before its first launch: the lane of its next launch; −1 if it never launches.
        """
        starts, lanes = self._launches.get((host_lane, False), (np.empty(0, np.int64), np.empty(0, np.int64)))
        if not len(starts):
            return np.full(len(times), -1, dtype=np.int64)
        return lanes[np.maximum(np.searchsorted(starts, times, side="left") - 1, 0)]

    def last_stream(self, host_lane: int, times: Int64) -> Int64:
        """Return device lane of the thread's last launch of any kind before each time, −1 if none."""
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
