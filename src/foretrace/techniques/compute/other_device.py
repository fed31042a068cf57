"""What the kernels of a recording would take on another device: the ratio of predicted times on the recorded ones.

Each kernel is judged by what it is, read from its name and from the call that launched it: products, convolutions and
attention by FLOPs in the precision that they run in, everything else by bytes. The models are asked in a fixed order,
the learned one first, then `foretrace.cost.devices.scaled`; what each of them said is kept by share of the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from foretrace.arrays import Float64, Int64, Mask
from foretrace.cost.calls import Call, Calls, Family, Precision, describe
from foretrace.cost.devices.designed import Designed
from foretrace.cost.devices.reached import REACHED, Reached
from foretrace.cost.devices.roofline import MATRIX
from foretrace.cost.devices.scaled import carried, rescale, unaligned
from foretrace.cost.model import CostModel
from foretrace.errors import ForetraceError
from foretrace.graph.select import select
from foretrace.graph.taskgraph import TaskGraph
from foretrace.hardware.accelerators import AcceleratorDevice
from foretrace.hardware.devices import Device, find
from foretrace.techniques.compute import classes
from foretrace.techniques.compute.classes import WorkClass, classify

_FAMILY = {WorkClass.GEMM: Family.GEMM, WorkClass.CONV: Family.CONV, WorkClass.ATTENTION: Family.ATTENTION}
_PRECISION = {classes.TaskPrecision.SINGLE: Precision.FP32, classes.TaskPrecision.TF32: Precision.TF32}
_SHORT = (Precision.FP16, Precision.BF16, Precision.FP8, Precision.INT8)


class Sort(IntEnum):
    """Kinds of kernels whose times on another device are off for reasons of their own."""

    PRODUCTS = 0
    ODD_PRODUCTS = 1  # rows that tensor cores of NVIDIA cannot load at once
    UNSIZED = 2  # products whose sizes the recording does not tell
    CONVOLUTIONS = 3
    ATTENTION = 4
    SOFTMAX = 5
    NORM = 6
    WIDE = 7  # elementwise, 16 bytes at once
    STRIDED = 8  # elementwise and copies, number by number
    MEMORY = 9  # all that is left


#: Kinds whose ranges between two vendors are their own (`scaled.STEP_RANGES`).
APART = {
    Sort.ATTENTION: "attention", Sort.CONVOLUTIONS: "convolutions", Sort.STRIDED: "strided", Sort.MEMORY: "rest",
}  # fmt: skip
PRODUCTS = (Sort.PRODUCTS, Sort.ODD_PRODUCTS, Sort.UNSIZED, Sort.CONVOLUTIONS, Sort.ATTENTION)
_SORT = {
    Family.CONV: Sort.CONVOLUTIONS, Family.ATTENTION: Sort.ATTENTION, Family.SOFTMAX: Sort.SOFTMAX,
    Family.NORM: Sort.NORM,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Elsewhere:
    """Kernels of a graph on another device."""

    rows: Mask  # kernels, fills, and copies inside the device (n rows of the graph)
    seconds: Float64  # one per chosen row, in row order
    kind: npt.NDArray[np.uint8]  # `Sort`, one per chosen row
    calls: Calls  # what each chosen row does
    shares: dict[str, float]  # which model said so, by share of the recorded time
    guessed: float  # share of the recorded time of products whose sizes the recording does not tell
    unsized: Mask  # these products: one per chosen row
    unaligned: float  # share of products whose rows tensor cores of NVIDIA cannot load at once

    @property
    def product(self) -> Mask:
        """Products, convolutions, attention: one per chosen row."""
        return np.isin(self.kind, PRODUCTS)


def field_of(sort: Sort, source: Device, target: Device) -> str:
    """Return the field of `scaled.STEP_RANGES` that kernels of a kind fall into."""
    apart = APART.get(sort) if source.vendor != target.vendor else None
    return apart or ("products" if sort in PRODUCTS else "kernels")


def recorded_on(graph: TaskGraph) -> Device | None:
    """Return the device that a recording was made on; None where the catalog does not know its name, or has several."""
    found = [find(name) for name in dict.fromkeys(graph.info.devices) if name]
    return found[0] if found and all(each is found[0] for each in found) else None


def as_recorded(device: Device) -> str:
    """Return a name under which a recording made on this device would be found again."""
    return device.patterns[0].replace("*", "") if device.patterns else device.name


def elsewhere(
    graph: TaskGraph,
    source: Device,
    target: Device,
    models: Iterable[CostModel] = (),
    table: Sequence[Reached] = REACHED,
) -> Elsewhere:
    """Return seconds of every kernel of `graph` on `target`, recorded on `source`.

    `models` are asked in their order before `scaled` is: a model counts where it can answer for a call on both devices,
    and between devices of one vendor only, as the learned ones have seen no other. `table` is what `scaled` takes
    kernels of some kinds to reach.
    Raises ForetraceError where the catalog lacks the rate that a kernel needs.
    """
    inside = select(graph, kind="copy") & select(graph, name=("*DtoD*", "*DeviceToDevice*"))
    mask = select(graph, kind=("kernel", "memset")) | inside
    rows = np.flatnonzero(mask)
    seconds = graph.dur[rows] / 1e9
    calls, which = _calls(graph, rows)
    # Kernels that load 16 bytes at once, as PyTorch names them.
    wide = np.array(["vectorized_elementwise" in name for name in graph.names], np.bool_)[graph.name[rows]]
    found = rescale(seconds, calls, source, target, wide=wide, table=table)
    product = np.isin(calls.family, MATRIX)
    known = product & (calls.flops > 0)
    if isinstance(target, AcceleratorDevice):  # no ratio to what was recorded
        told = known | (~product & (calls.nbytes > 0))
        found = np.where(told, Designed().predict(calls, target).seconds, found)
    left = np.flatnonzero(known)
    shares: dict[str, float] = {}
    total = float(seconds.sum()) or 1.0
    for model in models:
        if not len(left) or source is target or source.vendor != target.vendor:
            break
        # The same call is launched many times: each is asked once.
        _, first, back = np.unique(which[left], return_index=True, return_inverse=True)
        asked = calls.take(left[first])
        here, there = (model.predict(asked, device).seconds[back] for device in (source, target))
        good = np.isfinite(here) & np.isfinite(there) & (here > 0) & (there > 0)
        at = left[good]
        found[at] = there[good] * np.exp(carried(np.log(seconds[at] / here[good])))
        shares[model.name] = shares.get(model.name, 0.0) + float(seconds[at].sum()) / total
        left = left[~good]
    lost = np.flatnonzero(~np.isfinite(found))
    if len(lost):
        what = f"{Precision(int(calls.precision[lost[0]])).name} products" if product[lost[0]] else "memory"
        raise ForetraceError(
            f"the catalog has no rate of {target.short} or {source.short} for {what}, which "
            f"{graph.names[graph.name[rows[lost[0]]]][:60]} needs; give compute= and memory= instead of device=."
        )
    if isinstance(target, AcceleratorDevice):
        shares["designed"] = float(seconds[told].sum()) / total
    shares["scaled"] = 1.0 - sum(shares.values())
    unsized = product & ~known
    return Elsewhere(
        rows=mask,
        seconds=found,
        shares={name: share for name, share in shares.items() if share > 1e-9},
        kind=_kinds(graph, rows, calls, wide),
        calls=calls,
        guessed=float(seconds[unsized].sum()) / total,
        unsized=unsized,
        unaligned=float(seconds[known & unaligned(calls)].sum()) / total,
    )


def _kinds(graph: TaskGraph, rows: Int64, calls: Calls, wide: Mask) -> npt.NDArray[np.uint8]:
    """Return `Sort` of each of these rows."""
    found = np.full(len(rows), Sort.MEMORY, np.uint8)
    found[np.isin(calls.family, (Family.GEMM, Family.RECURRENT))] = Sort.PRODUCTS
    found[np.isin(calls.family, MATRIX) & (calls.flops <= 0)] = Sort.UNSIZED
    found[unaligned(calls)] = Sort.ODD_PRODUCTS
    for family, sort in _SORT.items():
        found[calls.family == family] = sort
    loose = np.array(["elementwise" in name for name in graph.names], np.bool_)[graph.name[rows]] & ~wide
    simple = np.isin(calls.family, (Family.ELEMENTWISE, Family.MOVE))
    found[simple & wide] = Sort.WIDE
    found[simple & loose] = Sort.STRIDED
    return found


def _calls(graph: TaskGraph, rows: Int64) -> tuple[Calls, Int64]:
    """Return what each of these device tasks does (k rows), and the number of the kind of call that it belongs to (k
    rows).
    """
    kinds = classify(graph)
    keys = np.stack([kinds.work[rows], kinds.precision[rows], graph.op[rows], graph.shape[rows]])
    table, which = np.unique(keys, axis=1, return_inverse=True)
    which = which.ravel()
    known: dict[tuple[int, int], Call] = {}
    described = []
    for work, precision, op, shape in table.T.tolist():
        if (op, shape) not in known:
            name = graph.names[op] if op >= 0 else ""
            known[op, shape] = describe(name, graph.shapes[shape] if shape >= 0 else "")
        described.append(_as_kernel(known[op, shape], WorkClass(work), classes.TaskPrecision(precision)))
    calls = Calls.from_rows([described[i] for i in which.tolist()])
    flops, share = _own_flops(graph, rows, np.isin(calls.family, MATRIX))
    return replace(
        calls, flops=flops, read_bytes=calls.read_bytes * share, written_bytes=calls.written_bytes * share
    ), (which)


def _as_kernel(call: Call, work: WorkClass, precision: classes.TaskPrecision) -> Call:
    """Return a kernel of this work within a call: a product may bring kernels along that only move data."""
    if work not in _FAMILY:
        moves = call.family not in (*MATRIX, Family.NONE, Family.OTHER)
        return call if moves else replace(call, family=Family.ELEMENTWISE)
    runs_in = _PRECISION.get(precision)
    if precision == classes.TaskPrecision.HALF:
        runs_in = call.precision if call.precision in _SHORT else Precision.BF16
    family = call.family if call.family in MATRIX else _FAMILY[work]
    return replace(call, family=family, precision=call.precision if runs_in is None else runs_in)


def _own_flops(graph: TaskGraph, rows: Int64, product: Mask) -> tuple[Float64, Float64]:
    """Return FLOPs of each task, and its share of its call (k rows each).

    The graph gives the FLOPs of a call to its longest kernel. Here they are dealt out, by time, to all kernels of a
    run that compute: neighbours on a stream which calls of one operator with the same inputs launched.
    """
    order = np.lexsort((rows, graph.lane[rows]))
    same = np.ones(len(rows), dtype=np.bool_)
    columns = [column[rows][order] for column in (graph.lane, graph.op, graph.shape)]
    same[1:] = np.logical_and.reduce([column[1:] == column[:-1] for column in columns])
    run = np.empty(len(rows), dtype=np.int64)
    run[order] = np.cumsum(~same)
    weight = np.where(product, graph.dur[rows].astype(np.float64), 0.0)
    total = np.bincount(run, weights=weight, minlength=1)
    flops: Float64 = np.bincount(run, weights=graph.flops[rows], minlength=1).astype(np.float64)
    calls = np.bincount(run, weights=(graph.flops[rows] > 0).astype(np.float64), minlength=1)
    part: Float64 = np.divide(weight, total[run], out=np.zeros(len(rows)), where=total[run] > 0)
    return flops[run] * part, np.minimum(np.where(product, part * calls[run], 1.0), 1.0)
