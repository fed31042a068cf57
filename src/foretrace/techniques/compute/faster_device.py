"""`faster-device`: the same run on another device: a named one, or one that is faster by given factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from foretrace.cost.devices.defaults import standard
from foretrace.cost.devices.learned.gpu_products import kept
from foretrace.cost.devices.scaled import step_range
from foretrace.cost.model import CostModel
from foretrace.errors import ForetraceError
from foretrace.graph import edit
from foretrace.graph.select import select
from foretrace.graph.taskgraph import Change, TaskGraph
from foretrace.hardware.accelerators import AcceleratorDevice
from foretrace.hardware.devices import Device, named
from foretrace.techniques.base import Prior, Technique, derived, parameter, prior
from foretrace.techniques.compute.classes import MATRIX, classify
from foretrace.techniques.compute.other_device import Elsewhere, Sort, as_recorded, elsewhere, field_of, recorded_on


@dataclass(frozen=True, kw_only=True)
class FasterDevice(Technique):
    """Kernels take the time of another device, and host work a factor that is known only roughly.

    Collectives keep their time (it is the network's, and mostly waiting), and so do copies over the bus
    unless `copy` says otherwise; launch latencies and gaps stay as recorded.
    """

    across, repeats = "each", True
    summary = "another device: by name, or kernels faster by a ratio; the host by an uncertain factor"
    source = "Habitat (ATC 2021) on compute and memory scaling; exchange of kernel times between GPUs"
    not_applied = "software does not exchange the device; run the same job there and compare."

    device: str = parameter("", doc="the device to predict, e.g. device=h100; foretrace devices lists them")
    recorded: str = parameter("", doc="the device of the recording, where it names none that the catalog has")
    ratio: float | None = parameter(None, doc="how many times faster every kernel runs", unit="×", above=0)
    compute: float | None = parameter(
        None, doc="the same for matrix products, convolutions, attention", unit="×", above=0
    )
    memory: float | None = parameter(None, doc="the same for all other kernels (memory bandwidth)", unit="×", above=0)
    copy: float = parameter(1.0, doc="the same for copies over the bus", unit="×", above=0)
    products: float | None = derived(doc="with device=, time of products relative to the predicted one")
    unsized: float | None = derived(doc="the same of products whose sizes the recording does not tell")
    kernels: float | None = derived(doc="with device=, time of all other kernels relative to the predicted one")
    attention: float | None = derived(doc="the same of fused attention, where the devices' vendors differ")
    convolutions: float | None = derived(doc="the same of convolutions, where the vendors differ")
    strided: float | None = derived(doc="the same of kernels that move number by number, where the vendors differ")
    rest: float | None = derived(doc="the same of fills, layout changes and other kernels, where the vendors differ")
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
        changed = self._on_device(graph) if self.device else self._by_ratio(graph)
        changed = _shrink_backlog(graph, changed)
        host = self.values(graph)["host"]
        if host != 1:
            mask = select(changed, kind=("cpu", "call", "data"))
            changed = edit.scale(changed, mask, host)
        return changed

    def priors(self, graph: TaskGraph) -> Mapping[str, Prior]:
        """Return, beside the host's priors, how far predicted kernel times may be off; only where a device is named."""
        found = dict(super().priors(graph))
        if not self.device:
            return found
        source, target = self._devices(graph)
        if source == target:
            return found
        apart = tuple(_APART) if source.vendor != target.vendor else ()
        for field in ("products", "kernels", *apart):
            if self._stated(field) is None:
                low, high = step_range(field, source, target)
                why = _ON_DESIGN if isinstance(target, AcceleratorDevice) else _APART.get(field, _WHY)
                found[field] = Prior(1.0, low, high, why=why)
        there = self._there(graph, source, target)
        rows = _fields(there, source, target) == "unsized"
        if rows.any() and self._stated("unsized") is None:
            low, high = step_range("products", source, target)
            recorded = graph.dur[there.rows][rows] / 1e9
            streamed = recorded * source.memory_gb_s / target.memory_gb_s / there.seconds[rows]
            ends = low * min(float(streamed.min()), 1.0), high * max(float(streamed.max()), 1.0)
            found["unsized"] = Prior(1.0, *ends, why="sizes are not recorded: peak rates bound them, or bandwidth")
        return found

    def _stated(self, field: str) -> float | None:
        """Return what the user said of the kernels of a field."""
        given = self.compute if field in ("products", "unsized", "attention", "convolutions") else self.memory
        return given if given is not None else self.ratio

    def _by_ratio(self, graph: TaskGraph) -> TaskGraph:
        compute = self.compute if self.compute is not None else self.ratio
        memory = self.memory if self.memory is not None else self.ratio
        if compute is None and memory is None and self.copy == 1:
            raise self.refuse(
                "name the device, e.g. device=h100, or give ratio=, or compute= and memory=, e.g. ratio=2 for a device "
                "twice as fast."
            )
        compute, memory = 1.0 if compute is None else compute, 1.0 if memory is None else memory
        matrix = np.isin(classify(graph).work, MATRIX)
        kernels = select(graph, kind=("kernel", "memset"))
        copies = select(graph, kind="copy")
        inside = copies & select(graph, name=("*DtoD*", "*DeviceToDevice*"))
        for mask, ratio in (
            (kernels & matrix, compute),
            ((kernels & ~matrix) | inside, memory),
            (copies & ~inside, self.copy),
        ):
            if ratio != 1 and mask.any():
                graph = edit.scale(graph, mask, 1 / ratio)
        return graph

    def _on_device(self, graph: TaskGraph) -> TaskGraph:
        source, target = self._devices(graph)
        found = self._there(graph, source, target)
        values = self.values(graph)
        recorded = graph.dur[found.rows] / 1e9
        seconds = found.seconds.copy()
        fields = _fields(found, source, target)
        for field in sorted(set(fields.tolist())):
            rows, stated = fields == field, self._stated(field)
            if stated is not None:
                seconds[rows] = recorded[rows] / stated
            else:
                seconds[rows] *= values.get(field, 1.0)
        what = f"gave {{}} the times of {target.short} instead of {source.short}"
        changed = edit.retime(graph, found.rows, seconds * 1e9, what=what)
        changed = replace(changed, info=replace(changed.info, devices=(as_recorded(target),)))
        changed = changed.noted(*(Change(what=text, tasks=0) for text in _sources(found, source, target)))
        copies = select(graph, kind="copy") & ~found.rows
        if self.copy != 1 and copies.any():
            changed = edit.scale(changed, copies, 1 / self.copy)
        return changed

    def _there(self, graph: TaskGraph, source: Device, target: Device) -> Elsewhere:
        """Return the kernels of a graph on the other device; refuses what the catalog lacks."""
        known = _FOUND.setdefault(graph, {})
        key = (source.short, target.short, kept())
        if key not in known:
            try:
                known[key] = elsewhere(graph, source, target, _models())
            except ForetraceError as error:
                raise self.refuse(str(error)) from None
        return known[key]

    def _devices(self, graph: TaskGraph) -> tuple[Device, Device]:
        """Return (recorded, asked for)."""
        target = named(self.device)
        if self.recorded:
            return named(self.recorded), target
        source = recorded_on(graph)
        if source is None:
            names = ", ".join(dict.fromkeys(name for name in graph.info.devices if name))
            said = (
                f"the recording names its device {names!r}, which the catalog lacks"
                if names
                else ("the recording does not name its device")
            )
            raise self.refuse(f"{said}; say which one it was, e.g. recorded=a100.")
        return source, target


_WHY = "median of measured over scaled times from one GPU to another, over every two GPUs of public tables"
_ON_DESIGN = "nothing was measured on a design: half the vector work, or the narrow buffer ports of PHAZE's mapper"
#: Kernels whose range is their own between two vendors, and why.
_APART = {
    "attention": "the vendors' kernels are unlike and change: two models showed less, on an H100 and an MI300X",
    "convolutions": "the vendors' libraries compute them in different ways: what one model showed on those two",
    "strided": "no rule is known: what two models showed on those two",
    "rest": "the vendors' libraries launch different ones: what three models showed on those two",
}


#: What was found of graphs that are still in use: every end of every range needs the same.
_FOUND: WeakKeyDictionary[TaskGraph, dict[Any, Elsewhere]] = WeakKeyDictionary()


def _fields(found: Elsewhere, source: Device, target: Device) -> npt.NDArray[np.object_]:
    """Return the parameter that each kernel falls into."""
    fields = np.array([field_of(sort, source, target) for sort in Sort], dtype=object)[found.kind]
    fields[found.unsized & (fields == "products")] = "unsized"
    return fields


def _models() -> tuple[CostModel, ...]:
    """Return models that are asked before `scaled`: all that commands use but the roofline, which `scaled` is
    built on.
    """
    return tuple(model for model in standard().members if model.name != "roofline")


def _sources(found: Elsewhere, source: Device, target: Device) -> list[str]:
    """Return sentences on where the times come from."""
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in found.shares.items())
    lines = [f"kernel times by share of the recorded time: {shares}"]
    if found.guessed > 0.005:
        lines.append(
            f"products with {100 * found.guessed:.0f} % of the kernel time have no recorded sizes: scaled by peak "
            "rates alone"
        )
    if found.unaligned > 0.05 and source.vendor != target.vendor:
        lines.append(
            f"products with {100 * found.unaligned:.0f} % of the kernel time have rows that are no multiple of 16 "
            "bytes: what they lose is known from two recordings of an H100 and an MI300X, and from one of "
            "other GPUs of NVIDIA"
        )
    return lines


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
    change = Change(what=what, tasks=int(waiting.sum()))
    return after.with_columns(release=np.rint(release).astype(np.int64)).noted(change)
