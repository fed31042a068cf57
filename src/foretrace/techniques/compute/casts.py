"""What automatic mixed precision adds to a step: casts around matrix work, and a gradient scaler for float16."""

from __future__ import annotations

import numpy as np

from foretrace.arrays import Int64, Mask
from foretrace.graph.insert import DeviceTask, HostTask, Typical, typical
from foretrace.graph.select import launching_call, previous_on_lane
from foretrace.graph.taskgraph import Phase, TaskGraph, TaskKind
from foretrace.techniques.compute.updates import find_update, runs, step_tasks, update_bandwidth

New = list[HostTask | DeviceTask]

_SHORTEST_NS = 2_000  # of a kernel
_CAST_BYTES = 6  # per element: 4 read and 2 written, or the reverse
_SCALER_BYTES = 8  # per element: every gradient read and written


def cast_tasks(graph: TaskGraph, matrix: Mask, *, casts: float, cast_us: float) -> New:
    """Casts before every operator of `matrix` (tasks that do 16-bit work now), one task for all of an
    operator's.

    A step casts every parameter once forward and its gradient once backward. On a device a cast also is a
    kernel and its launch.
    """
    operators = matrix & (graph.flops > 0) if (graph.flops[matrix] > 0).any() else matrix
    previous = previous_on_lane(graph)
    update = find_update(graph)
    device = bool(graph.on_device.any())
    usual = typical(graph) if device else None
    call = launching_call(graph)
    new: New = []
    for ahead in (True, False):
        forward = np.isin(graph.phase, (Phase.FORWARD, Phase.RECOMPUTE))
        rows = np.flatnonzero(operators & (forward if ahead else ~forward))
        per_step = max(len(rows) / max(graph.n_steps, 1), 1.0)
        moved = update.nbytes / 4 * _CAST_BYTES / per_step if update is not None else 0.0
        streamed = moved / _bandwidth(graph)
        for row in rows.tolist():
            if not device:
                new.append(_on_host(graph, int(previous[row]), row, casts * cast_us * 1e3 + streamed))
            elif usual is not None and call[row] >= 0:
                new += _on_device(graph, previous, row, int(call[row]), casts, cast_us, streamed, usual)
    return [task for task in new if task.after >= 0]


def scaler_tasks(graph: TaskGraph) -> New:
    """The gradient scaler before every optimizer step: unscale, test for infinities, and wait for the answer."""
    update = find_update(graph)
    previous = previous_on_lane(graph)
    copy_call = "hipMemcpyWithStream" if graph.info.platform == "rocm" else "cudaMemcpyAsync"
    new: New = []
    for run in runs(graph, step_tasks(graph)):
        host = int(previous[run.host[0]])
        before = int(previous[run.device[0]]) if len(run.device) else -1
        if host >= 0 and before >= 0:
            moved = update.nbytes / 4 * _SCALER_BYTES if update is not None else 0
            unscale_ns = max(round(moved / _bandwidth(graph)), _SHORTEST_NS)
            for name, op, kind, dur_ns in (
                ("unscale gradients", "aten::_amp_foreach_non_finite_check_and_unscale_", TaskKind.KERNEL, unscale_ns),
                ("Memcpy DtoH (found_inf)", "aten::item", TaskKind.COPY, _SHORTEST_NS),
            ):
                copies = kind == TaskKind.COPY
                new.append(
                    DeviceTask(
                        after=before,
                        launched_after=host,
                        name=name,
                        op=op,
                        kind=kind,
                        dur_ns=dur_ns,
                        phase=Phase.OPTIMIZER,
                        blocking=copies,
                        call_name=copy_call if copies else None,
                    )
                )
    return new


def _on_host(graph: TaskGraph, before: int, row: int, dur_ns: float) -> HostTask:
    return HostTask(after=before, like=row, name="aten::_to_copy", dur_ns=round(dur_ns), kind=TaskKind.OPERATOR)


def _on_device(
    graph: TaskGraph,
    previous: Int64,
    row: int,
    call: int,
    casts: float,
    cast_us: float,
    streamed: float,
    usual: Typical,
) -> New:
    host, before = int(previous[call]), int(previous[row])
    if host < 0 or before < 0:
        return []
    kernel = DeviceTask(
        after=before,
        launched_after=host,
        like=row,
        name="cast to 16 bit",
        op="aten::_to_copy",
        dur_ns=round(max(casts * _SHORTEST_NS, streamed)),
        call_ns=round(casts * usual.call_ns),
    )
    return [HostTask(after=host, like=call, name="aten::_to_copy", dur_ns=round(casts * cast_us * 1e3)), kernel]


def _bandwidth(graph: TaskGraph) -> float:
    """GB/s at which large arrays stream; infinite where nothing tells, so that only the shortest kernel counts."""
    found = update_bandwidth(graph)
    return np.inf if found is None else found.value
