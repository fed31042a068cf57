"""Recordings of several ranks written from a simulated job, so that the truth about waits and clocks is known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.graph.builder import build
from foretrace.graph.taskgraph import TaskGraph
from foretrace.trace.read import read
from foretrace.trace.trace import Trace
from tests.kineto_files import Recording

LATENCY_US, CALL_US, RETURN_US = 7.0, 5.0, 2.0
STREAM = 20


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of every step: all groups of it run at the same time."""

    kind: str = "AllReduce"
    groups: tuple[tuple[int, ...], ...] = ()  # () is one group of all ranks
    elements: int = 1024
    transfer_us: float = 40.0


@dataclass(kw_only=True)
class Job:
    """A job of which every rank works on its host, enters a collective, waits for its end, and so on.

    `work_us[rank][step][collective]` is the host's time before each collective.
    """

    work_us: Sequence[Sequence[Sequence[float]]]
    collectives: tuple[Collective, ...] = (Collective(),)
    offset_us: Sequence[float] = ()
    drift: Sequence[float] = ()
    entry_us: Sequence[float] = ()
    first_step: int = 5
    described: bool = True  # newer Kineto: group, members, sizes
    numbered: bool = True  # and sequence numbers
    gap_us: float = 0.0  # host time between steps
    world_size: int = 0
    ends: list[float] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return len(self.work_us)

    def groups(self, each: Collective) -> tuple[tuple[int, ...], ...]:
        return each.groups or (tuple(range(self.ranks)),)

    def run(self) -> tuple[list[Recording], list[float]]:
        """Recordings by rank, and the true end of every rank (us)."""
        files = [Recording() for _ in range(self.ranks)]
        now = [1000.0 + (self.entry_us[r] if self.entry_us else 0.0) for r in range(self.ranks)]
        number: dict[tuple[int, ...], int] = {}
        for step in range(len(self.work_us[0])):
            begin = list(now)
            for c, each in enumerate(self.collectives):
                arrival = {}
                for r in range(self.ranks):
                    files[r].op("aten::work", self.clock(r, now[r]), self.work_us[r][step][c])
                    now[r] += self.work_us[r][step][c]
                    arrival[r] = now[r] + LATENCY_US
                for g, group in enumerate(self.groups(each)):
                    last = max(arrival[r] for r in group)
                    number[group] = number.get(group, 0) + 1
                    for r in group:
                        # A broadcast needs its root alone, which is the first of the group.
                        waits = max(arrival[r], arrival[group[0]]) if each.kind == "Broadcast" else last
                        end = waits + each.transfer_us
                        self._write(files[r], r, each, group, f"{c}.{g}", number[group], now[r], arrival[r], end)
                        now[r] = end + RETURN_US
            for r in range(self.ranks):
                files[r].note(f"ProfilerStep#{self.first_step + step}", self.clock(r, begin[r]), now[r] - begin[r])
                now[r] += self.gap_us
        return files, [t - self.gap_us for t in now]

    def clock(self, rank: int, true_us: float) -> float:
        ahead = (self.offset_us[rank] if self.offset_us else 0.0) + (self.drift[rank] if self.drift else 0.0) * true_us
        return round(true_us + ahead + 1e6, 3)

    def _write(
        self, file: Recording, rank: int, each: Collective, group: tuple[int, ...], name: str, number: int, now: float,
        arrival: float, end: float,
    ) -> None:  # fmt: skip
        args: dict[str, Any] = {}
        if self.described:
            args = {
                "Collective name": each.kind.lower(), "In msg nelems": each.elements, "Out msg nelems": each.elements,
                "dtype": "Float", "Group size": len(group), "Process Group Name": name,
                "Process Group Ranks": json.dumps(list(group)),
            }  # fmt: skip
            if self.numbered:
                args["Seq"] = number
        call = file.call("cudaLaunchKernel", self.clock(rank, now), CALL_US)
        kernel = f"ncclDevKernel_{each.kind}_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        start = self.clock(rank, arrival)
        file.on_device("kernel", kernel, start, round(self.clock(rank, end) - start, 3), call, STREAM, **args)
        waiting = now + CALL_US + 1.0
        file.call("cudaDeviceSynchronize", self.clock(rank, waiting), round(end + RETURN_US - waiting, 3))

    def write(self, folder: Path, ranks: Sequence[int] | None = None) -> Path:
        """The recordings as files of a folder."""
        files, self.ends = self.run()
        for rank, file in enumerate(files):
            if ranks is None or rank in ranks:
                info = {"rank": rank, "world_size": self.world_size or self.ranks, "backend": "nccl"}
                file.extra["distributedInfo"] = info
                file.write(folder / f"rank{rank}.json")
        return folder

    def trace(self, folder: Path, ranks: Sequence[int] | None = None) -> Trace:
        return read(self.write(folder, ranks))

    def graphs(self, folder: Path, ranks: Sequence[int] | None = None) -> list[TaskGraph]:
        trace = self.trace(folder, ranks)
        return [build(trace, info.rank) for info in trace.ranks]


def work(random: np.random.Generator, ranks: int, steps: int, collectives: int = 1, most: float = 900.0) -> Any:
    """Random host times (us, whole) of at least 60."""
    return np.floor(random.uniform(60, most, size=(ranks, steps, collectives))).tolist()


def shifted(trace: Trace, rank: int, ns: int) -> Trace:
    """The recording with the clock of one rank set ahead, rows in order again."""
    from dataclasses import replace

    from foretrace.trace.read import time_order

    start = trace.start + np.where(trace.lane_rank()[trace.lane] == rank, ns, 0)
    return replace(trace, start=start).take(time_order(start, trace.dur))
