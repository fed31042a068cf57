"""`faster-device`: the same run on a device that computes and moves data by given factors faster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foretrace.graph import edit
from foretrace.graph.select import select
from foretrace.graph.taskgraph import Change, TaskGraph
from foretrace.techniques.base import Across, Technique, parameter, prior
from foretrace.techniques.classes import MATRIX, classify


@dataclass(frozen=True, kw_only=True)
class FasterDevice(Technique):
    """Scale device work by ratios, and host work by a factor that is known only roughly.

    Collectives keep their time (it is the network's, and mostly waiting), and so do copies over the bus
    unless `copy` says otherwise; launch latencies and gaps stay as recorded.
    """

    name: ClassVar[str] = "faster-device"
    across: ClassVar[Across] = "each"
    summary: ClassVar[str] = "another device: kernels faster by a ratio, the host by an uncertain factor"
    source: ClassVar[str] = "Habitat (ATC 2021) on compute and memory scaling; exchange of kernel times between GPUs"
    not_applied: ClassVar[str] = "software does not exchange the device; run the same job there and compare."

    ratio: float | None = parameter(None, doc="how many times faster every kernel runs", unit="×")
    compute: float | None = parameter(None, doc="the same for matrix products, convolutions, attention", unit="×")
    memory: float | None = parameter(None, doc="the same for all other kernels (memory bandwidth)", unit="×")
    copy: float = parameter(1.0, doc="the same for copies over the bus", unit="×")
    host: float | None = prior(
        1.0,
        0.85,
        1.15,
        doc="host time relative to the recorded machine; host=1 if only the device changes",
        why="machines with other devices have other processors: their host times differed by up to 15 % (exchanging "
        "recorded kernel times between an H100 and an MI300X machine)",
    )

    def change(self, graph: TaskGraph) -> TaskGraph:
        if not graph.on_device.any():
            raise self.refuse("the recording has no device work; use scale on its operators.")
        compute = self.compute if self.compute is not None else self.ratio
        memory = self.memory if self.memory is not None else self.ratio
        if compute is None and memory is None and self.copy == 1:
            raise self.refuse("give ratio=, or compute= and memory=, e.g. ratio=2 for a device twice as fast.")
        compute, memory = 1.0 if compute is None else compute, 1.0 if memory is None else memory
        if min(compute, memory, self.copy) <= 0:
            raise self.refuse("ratios must be above 0.")
        matrix = np.isin(classify(graph).work, MATRIX)
        kernels = select(graph, kind=("kernel", "memset"))
        copies = select(graph, kind="copy")
        inside = copies & select(graph, name=("*DtoD*", "*DeviceToDevice*"))
        before = graph
        for mask, ratio in (
            (kernels & matrix, compute),
            ((kernels & ~matrix) | inside, memory),
            (copies & ~inside, self.copy),
        ):
            if ratio != 1 and mask.any():
                graph = edit.scale(graph, mask, 1 / ratio, technique=self.name)
        graph = _shrink_backlog(before, graph)
        host = self.values(graph)["host"]
        if host != 1:
            mask = select(graph, kind=("cpu", "call", "data"))
            graph = edit.scale(graph, mask, host, technique=self.name)
        return graph


def _shrink_backlog(before: TaskGraph, after: TaskGraph) -> TaskGraph:
    """Let device tasks that waited for earlier work wait less, as kernels take less time in `after`."""
    kernels = select(before, kind="kernel")
    waiting = before.on_device & (before.release > before.recorded[before.marks[0]])
    if not waiting.any() or not before.dur[kernels].sum():
        return after
    factor = after.dur[kernels].sum() / before.dur[kernels].sum()
    begin = int(before.recorded[before.marks[0]])
    release = np.where(waiting, begin + (before.release - begin) * factor, before.release)
    what = f"shrank work from before the recording, which {int(waiting.sum())} device tasks wait for, by {factor:.3g}"
    change = Change(technique=FasterDevice.name, what=what, tasks=int(waiting.sum()))
    return after.with_columns(release=np.rint(release).astype(np.int64)).noted(change)
