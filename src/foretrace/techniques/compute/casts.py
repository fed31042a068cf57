"""What automatic mixed precision adds to a step: casts around matrix work, and a gradient scaler for float16."""

from __future__ import annotations

import numpy as np

from foretrace.arrays import Mask
from foretrace.graph.insert import DeviceTask, HostTask, typical
from foretrace.graph.select import launching_call, previous_on_lane
from foretrace.graph.taskgraph import Phase, TaskGraph, TaskKind
from foretrace.techniques.compute.updates import find_update, runs, step_tasks, update_bandwidth

New = list[HostTask | DeviceTask]

_SHORTEST_NS = 2_000  # of a kernel
_CAST_BYTES = 6  # per element: 4 read and 2 written, or the reverse
_SCALER_BYTES = 8  # per element: every gradient read and written


def cast_tasks(graph: TaskGraph, matrix: Mask, *, casts: float, cast_us: float) -> New:
    """Return casts before every operator of `matrix` (tasks that do 16-bit work now), one task for all of an
    operator's.

    A step casts every parameter once forward and its gradient once backward. On a device a cast also is a
    kernel and its launch.
    """
    operators = matrix & (graph.flops > 0) if (graph.flops[matrix] > 0).any() else matrix
    previous, call, update = previous_on_lane(graph), launching_call(graph), find_update(graph)
    device = bool(graph.on_device.any())
    call_ns = round(casts * typical(graph).call_ns) if device else 0
    host_ns = casts * cast_us * 1e3
    forward = np.isin(graph.phase, (Phase.FORWARD, Phase.RECOMPUTE))
    new: New = []
    for mine in (operators & forward, operators & ~forward):
        rows = np.flatnonzero(mine)
        per_step = max(len(rows) / max(graph.n_steps, 1), 1.0)
        moved = update.nbytes / 4 * _CAST_BYTES / per_step if update is not None else 0.0
        streamed = moved / _bandwidth(graph)
        for row in rows.tolist():
            before, launch, op = int(previous[row]), int(call[row]), "aten::_to_copy"
            if not device:
                ns = round(host_ns + streamed)
                new.append(HostTask(after=before, like=row, name=op, dur_ns=ns, kind=TaskKind.OPERATOR))
            elif launch >= 0 and (host := int(previous[launch])) >= 0 and before >= 0:
                new.append(HostTask(after=host, like=launch, name=op, dur_ns=round(host_ns)))
                new.append(
                    DeviceTask(
                        after=before,
                        launched_after=host,
                        like=row,
                        name="cast to 16 bit",
                        op=op,
                        dur_ns=round(max(casts * _SHORTEST_NS, streamed)),
                        call_ns=call_ns,
                    )
                )
    return [task for task in new if task.after >= 0]


def scaler_tasks(graph: TaskGraph) -> New:
    """Return the gradient scaler before every optimizer step: unscale, test for infinities, and wait for the answer."""
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


def _bandwidth(graph: TaskGraph) -> float:
    """Return GB/s at which large arrays stream; infinite where nothing tells, so that only the shortest kernel
    counts.
    """
    found = update_bandwidth(graph)
    return np.inf if found is None else found.value
