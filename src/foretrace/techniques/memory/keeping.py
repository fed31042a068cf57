"""What keeping saved tensors in another form adds to a step: storing, restoring, and hooks. Shared by compression and
offloading.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import Operator
from foretrace.graph.insert import DeviceTask, HostTask, insert
from foretrace.graph.select import launching_call, previous_on_lane
from foretrace.graph.taskgraph import Change, Phase, TaskGraph, TaskKind
from foretrace.hardware.devices import find
from foretrace.techniques.base import Prior
from foretrace.techniques.memory.saved import Saved, Savings
from foretrace.training.saved_tensors import HOOKED, hooks_operator, restore_operator, store_operator

Int64 = npt.NDArray[np.int64]

_SHORTEST_NS = 2_000  # of a kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """How the two new kinds of tasks are called."""

    store: str
    restore: str


def keeping_operators(codec: str, chosen: Iterable[Saved]) -> tuple[Operator, ...]:
    """What to time alone: both directions for every distinct size, and the hooks themselves."""
    sizes = dict.fromkeys((each.numel, each.dtype) for each in chosen)
    pairs = [make(codec, *size) for size in sizes for make in (store_operator, restore_operator)]
    return (*pairs, hooks_operator(hooked=False), hooks_operator(hooked=True)) if pairs else ()


def keeping_times(graph: TaskGraph, codec: str, chosen: Iterable[Saved]) -> dict[Saved, tuple[float, float]] | None:
    """Measured seconds for storing and restoring each; None unless all were measured."""
    known = Calibration.of(graph)
    found: dict[Saved, tuple[float, float]] = {}
    for each in chosen:
        there = known.time_s(store_operator(codec, each.numel, each.dtype))
        back = known.time_s(restore_operator(codec, each.numel, each.dtype))
        if there is None or back is None:
            return None
        found[each] = there, back
    return found or None


def hook_time_s(graph: TaskGraph) -> float | None:
    """Measured seconds that the hooks take per saved variable, both directions; None if not measured."""
    known = Calibration.of(graph)
    plain, hooked = (known.time_s(hooks_operator(hooked=each)) for each in (False, True))
    return None if plain is None or hooked is None else max(hooked - plain, 0.0) / HOOKED


def hook_tasks(savings: Savings, hook_s: float, kind: TaskKind = TaskKind.CPU) -> list[HostTask]:
    """The hooks of all saved variables, at the end of every forward pass."""
    rows = savings.last_forward[savings.last_forward >= 0].tolist()
    each_ns = round(1e9 * hook_s * savings.variables / max(len(rows), 1))
    return [HostTask(after=row, name="saved tensor hooks", dur_ns=each_ns, kind=kind) for row in rows]


def insert_keeping(
    graph: TaskGraph, savings: Savings, times: dict[Saved, tuple[float, float]], hook_s: float, names: Names
) -> TaskGraph:
    """The graph of a processor with every storing after the operator that saves, every restoring before the backward
    operator that asks, and the hooks of all saved variables at the end of the forward pass.
    """
    new, previous = list[HostTask](), previous_on_lane(graph)
    for each, (there, back) in times.items():
        dtype = _dtype(each)
        new.append(
            HostTask(after=each.row, name=names.store, dur_ns=round(1e9 * there), kind=TaskKind.OPERATOR, op=dtype)
        )
        new.append(
            HostTask(
                after=_asked(each, previous),
                name=names.restore,
                dur_ns=round(1e9 * back),
                kind=TaskKind.OPERATOR,
                like=each.use if each.use >= 0 else each.row,
                phase=Phase.BACKWARD,
                op=dtype,
            )
        )
    return insert(graph, [*new, *hook_tasks(savings, hook_s, TaskKind.PYTHON)])


def saved_note(graph: TaskGraph, savings: Savings, chosen: Iterable[Saved], kept_share: float, where: str) -> Change:
    """What the step no longer keeps, per step, in bytes."""
    tensors = list(chosen)
    steps = max(len({int(graph.step[each.row]) for each in tensors}), 1)
    nbytes = round(sum(each.nbytes for each in tensors) / steps)
    freed = round(nbytes * (1 - kept_share))
    what = (
        f"{round(len(tensors) / steps)} saved tensors of a step, {nbytes / 1e6:.4g} MB, {where}: "
        f"{freed / 1e6:.4g} MB ({freed} bytes) less between forward and backward"
    )
    if savings.unsized:
        what += f"; the recording does not tell what {savings.unsized} calls save, which stays as it is"
    return Change(what=what, tasks=len(tensors))


def _asked(each: Saved, previous: Int64) -> int:
    """The task ahead of the one that needs a saved tensor on its lane; the one that saves it, if none asks."""
    if each.use < 0:
        return each.row
    return int(previous[each.use]) if previous[each.use] >= 0 else each.use


def _dtype(each: Saved) -> str:
    return "aten::_to_copy" if each.dtype == "float" else "aten::copy_"


def insert_casts(
    graph: TaskGraph, savings: Savings, times: dict[Saved, tuple[float, float]], hook_s: float, names: Names
) -> TaskGraph:
    """The same on a device: every cast is a kernel with its launch."""
    call, previous = launching_call(graph), previous_on_lane(graph)
    new: list[HostTask | DeviceTask] = []
    for each, (there, back) in times.items():
        for row, name, seconds, phase in (
            (each.row, names.store, there, Phase.FORWARD),
            (_asked(each, previous), names.restore, back, Phase.BACKWARD),
        ):
            if call[row] >= 0:
                new.append(
                    DeviceTask(
                        after=row,
                        launched_after=int(call[row]),
                        name=name,
                        dur_ns=max(round(1e9 * seconds), _SHORTEST_NS),
                        phase=phase,
                        op="aten::_to_copy",
                        nbytes=each.nbytes * 3 // 2,
                    )
                )
    return insert(graph, [*new, *hook_tasks(savings, hook_s)])


def cast_bandwidth(graph: TaskGraph) -> Prior:
    """Rate of casts, bytes read and written."""
    device = find(graph.info.devices[0]) if graph.info.devices else None
    if graph.info.platform == "cpu" or device is None:
        low, value, high = (4.0, 10.0, 25.0) if graph.info.platform == "cpu" else (200.0, 600.0, 2500.0)
        return Prior(value, low, high, unit="GB/s", why="what casts of large tensors usually reach")
    peak = device.memory_gb_s
    why = f"60 to 90 % of the peak of {device.name}, as streaming kernels reach"
    return Prior(0.75 * peak, 0.6 * peak, 0.9 * peak, unit="GB/s", why=why)
