"""What a graph shows of its optimizer: which one, how many parameters, which tasks, and at what bandwidth."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretrace.arrays import Int64, Mask
from foretrace.graph.select import select
from foretrace.graph.taskgraph import EdgeKind, Phase, TaskGraph, TaskKind, per_graph
from foretrace.graph.work import element_bytes
from foretrace.hardware.devices import Device, find
from foretrace.techniques.base import Prior

_STEP = re.compile(r"Optimizer\.step#(\w+)\.step")
# Operators that an update runs once per parameter, and the bytes per element that their shapes show.
_ONCE = {"aten::addcdiv_": 16, "aten::_foreach_addcdiv_": 12, "aten::mul_": 8, "aten::add_": 12}
# A step's first operator on an array finds it in memory, the ones after it in a cache; a fused update meets all arrays
# for the first time.
_FIRST = ("aten::mul_", "aten::lerp_")
_IN_PLACE = ("aten::mul_", "aten::add_", "aten::addcmul_", "aten::addcdiv_", "aten::lerp_")
_LARGE_BYTES = 256 * 1024  # on a processor: larger arrays show a bandwidth, not an overhead
_MOST_GB_S = 60.0  # of a processor's update, whose arrays are met for the first time; caches give its loops more
_LARGE_NS = 20_000  # on a device


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one optimizer step works on."""

    optimizer: str  # class name
    fused: bool
    tensors: int  # 0 if unknown
    nbytes: int  # of all parameters together, 0 if unknown
    accesses: int  # arrays of this size that a fused update reads or writes
    settings: dict[str, Any]
    sizes: tuple[tuple[int, ...], ...] = ()  # of the parameters with a gradient, empty if unknown


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptimizerRun:
    """The tasks of one optimizer step: those of its thread, and what they launch on their busiest stream."""

    host: Int64
    device: Int64


def step_tasks(graph: TaskGraph) -> Mask:
    """Return everything inside `Optimizer.step`, on host and device, without `zero_grad` and without step marks."""
    inside = select(graph, layer="Optimizer.step#*", ignore_case=False)
    return np.asarray(inside & ~np.isin(graph.kind, (TaskKind.MARK, TaskKind.JOIN)))


def ends_by_step(graph: TaskGraph, mask: Mask) -> tuple[Int64, Int64]:
    """Return the first and the last row of a mask in every step; -1 where it has none."""
    rows = np.flatnonzero(mask & (graph.step >= 0) & (graph.step < graph.n_steps))
    first, last = np.full((2, graph.n_steps), -1, dtype=np.int64)
    first[graph.step[rows[::-1]]], last[graph.step[rows]] = rows[::-1], rows
    return first, last


@per_graph
def find_update(graph: TaskGraph) -> Update | None:
    """Return the optimizer that marks the steps, else the one seen most; None if the recording shows none."""
    mask = step_tasks(graph)
    if not mask.any():
        return None
    layers, count = np.unique(graph.layer[mask], return_counts=True)
    found = _STEP.match(graph.layers[layers[count.argmax()]])
    optimizer = found.group(1) if found else ""
    recorded = [each for each in graph.info.recording.get("optimizers", []) if each.get("class") == optimizer]
    settings: dict[str, Any] = recorded[0].get("settings", {}) if recorded else {}
    named = ("*_fused_*", "*Fused*", "*multi_tensor_apply*AdamFunctor*")
    fused = bool(settings.get("fused")) or bool((select(graph, name=named, ignore_case=False) & mask).any())
    tensors, nbytes = _parameters(graph, mask, recorded)
    sizes = _sizes(graph, optimizer)
    momentum = settings.get("momentum", (select(graph, op=("aten::mul_", "aten::_foreach_mul_")) & mask).any())
    states = {"Adam": 2, "AdamW": 2, "SGD": int(bool(momentum)), "Adagrad": 1}.get(optimizer, 0)
    return Update(
        optimizer=optimizer,
        fused=fused,
        tensors=tensors,
        nbytes=nbytes,
        accesses=3 + 2 * states,  # parameter and gradient read, parameter written; states read and written
        settings=settings,
        sizes=sizes,
    )


def runs(graph: TaskGraph, mask: Mask) -> list[OptimizerRun]:
    """Return the optimizer steps in `mask`: runs of its tasks on a thread, whatever step marks lie in them."""
    launch = np.flatnonzero((graph.edge_kind == EdgeKind.LAUNCH) & mask[graph.src])
    launched = graph.dst[launch]
    found = []
    for lane in np.unique(graph.lane[mask & ~graph.on_device]).tolist():
        rows = np.flatnonzero((graph.lane == lane) & ~graph.gone)
        rows = rows[~np.isin(graph.kind[rows], (TaskKind.MARK, TaskKind.JOIN))]
        inside = mask[rows]
        number = np.cumsum(np.diff(inside.astype(np.int8), prepend=0) == 1)
        for i in range(1, int(number.max(initial=0)) + 1):
            host = rows[inside & (number == i)]
            device = np.unique(launched[np.isin(graph.src[launch], host)]).astype(np.int64)
            if len(device):
                device = device[graph.lane[device] == np.bincount(graph.lane[device]).argmax()]
            found.append(OptimizerRun(host=host, device=device))
    return found


@per_graph
def update_bandwidth(graph: TaskGraph) -> Prior | None:
    """Return the bandwidth that one pass over large arrays reaches, GB/s; None where nothing tells."""
    if graph.info.platform == "cpu":
        large = (graph.nbytes >= _LARGE_BYTES) & (graph.phase == Phase.OPTIMIZER)
        shown = select(graph, kind="operator", name=_FIRST, ignore_case=False) & large
        if not shown.any():
            shown = select(graph, kind="operator", name=_IN_PLACE, ignore_case=False) & large
        if not shown.any():
            return Prior(20.0, 8.0, 60.0, unit="GB/s", why="one core streams so much from memory or cache")
        time, moved = (np.bincount(graph.step[shown] + 1, column[shown]) for column in (graph.dur, graph.nbytes))
        value = min(float(np.median(moved[time > 0] / time[time > 0])), _MOST_GB_S)
        why = f"{int(shown.sum())} large in-place operators of the recording reach it on average"
        return Prior(value, 0.6 * value, 1.6 * value, unit="GB/s", why=why)
    device = find(graph.info.devices[0]) if graph.info.devices else None
    peak = device.memory_gb_s if device else np.inf
    shown = select(graph, kind="kernel", name=("*elementwise*", "*multi_tensor_apply*"))
    shown &= (graph.nbytes > 0) & (graph.dur >= _LARGE_NS)
    if shown.sum() >= 3:
        value = min(float(np.percentile(graph.nbytes[shown] / graph.dur[shown], 75)), 0.95 * peak)
        why = f"{int(shown.sum())} large elementwise kernels of the recording reach it"
        return Prior(value, 0.8 * value, min(1.2 * value, peak), unit="GB/s", why=why)
    if device is None:
        return None
    return streaming(device)


def streaming(device: Device) -> Prior:
    """Return the bandwidth that kernels which only move data reach on a device, GB/s."""
    low, value, high = (share * device.memory_gb_s for share in (0.6, 0.75, 0.9))
    why = f"60 to 90 % of the peak of {device.name}, as streaming kernels reach"
    return Prior(value, low, high, unit="GB/s", why=why)


def _sizes(graph: TaskGraph, optimizer: str) -> tuple[tuple[int, ...], ...]:
    """Return sizes of the float32 parameters that optimizers of this class update; empty where others are
    among them.
    """
    recording = graph.info.recording
    mine = {i for i, each in enumerate(recording.get("optimizers", [])) if each.get("class") == optimizer}
    found = [each for each in recording.get("parameters", []) if each.get("optimizer") in mine and each.get("trained")]
    if any(each.get("dtype") != "float32" for each in found):
        return ()
    return tuple(tuple(int(n) for n in each["shape"]) for each in found)


def _parameters(graph: TaskGraph, mask: Mask, recorded: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the number of parameter tensors and their bytes; 0 bytes if unknown."""
    if recorded:
        sizes = recorded[0].get("tensors", {})
        elements = {dtype: each["elements"] for dtype, each in sizes.items()}
        count = sum(each["count"] for each in sizes.values())
        return count, sum((element_bytes(dtype) or 4) * each for dtype, each in elements.items())
    steps = max(len(runs(graph, mask)), 1)
    work = mask & np.isin(graph.kind, (TaskKind.OPERATOR, TaskKind.KERNEL))
    for name, per_element in _ONCE.items():
        shown = select(graph, op=name, ignore_case=False) & work
        if shown.any():
            tensors = 0 if "foreach" in name else round(shown.sum() / steps)
            known = shown & (graph.nbytes > 0)
            return tensors, int(graph.nbytes[known].sum() / per_element * 4 / steps)
    return 0, 0
