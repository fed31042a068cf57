"""How much of a device a training step uses: TBD's metrics and the roofline, from one recording.

Zhu et al., Benchmarking and Analyzing Deep Neural Network Training (TBD), IISWC 2018: throughput, device busy share,
FLOP utilisation (operations over peak x busy time), CPU utilisation. Williams et al., Roofline, CACM 2009: arithmetic
intensity against the ridge of the device, and the time that the roofline allows over the time taken.

FLOPs and bytes are estimates from operator shapes (`foretrace.graph.work`); bytes are a lower bound that ignores
caches, so a rate above the peak of the memory means that the arrays were found in a cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretrace.arrays import Float64, Int64, Mask
from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.graph.work import is_product
from foretrace.simulate.replay import effective
from foretrace.simulate.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Limits:
    """Peak of the device for every task (n rows): FLOP/s of its precision (NaN unknown), and bytes/s (NaN unknown)."""

    flops_per_s: Float64
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRates:
    """What a class of work, an operator or a kernel computes and moves, per step.

    Rates are over the part of its time whose FLOPs and bytes are known (`known_share`).
    """

    name: str
    count: float
    time_s: float  # summed over the tasks
    share: float  # of the time of all work
    known_share: float
    flops: float
    bytes: float
    flops_per_s: float
    bytes_per_s: float
    intensity: float  # FLOP/B
    of_peak_flops: float | None  # of the peak of each task's precision; None where it is not known
    of_peak_bandwidth: float | None
    of_roofline: float | None  # shortest time that both peaks allow, over the time taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """What the step makes of the device."""

    busy_s: float  # any device work running (without a device: any operator), per step
    busy_share: float  # of the elapsed time
    total: GroupRates
    step_flops_per_s: float  # over the elapsed time instead of the time of the work
    classes: tuple[GroupRates, ...]  # longest first
    operators: tuple[GroupRates, ...]
    compute_bound_share: float | None  # of the time of known work: intensity above the ridge
    bandwidth_bound_share: float | None
    lane_busy: dict[str, float]  # CPU thread -> share of the elapsed time with recorded work


def utilisation(timeline: Timeline, limits: Limits, *, classes: Int64, class_names: tuple[str, ...]) -> Utilisation:
    """Measure a recorded run. `classes` (n rows) is the class of every task, −1 for what is not the device's work.

    Without a device, operators and the host work between them are the work. Raises GraphError without step boundaries.
    """
    graph = timeline.graph
    window_s = timeline.window_ns / 1e9
    steps = graph.n_steps
    kinds = effective(graph)
    work = (classes >= 0) & (graph.step >= 0) & ~graph.gone
    rows = np.flatnonzero(work)
    time = kinds.dur[rows] / 1e9
    known = known_work(graph)[rows]
    flops, nbytes = np.where(known, graph.flops[rows], 0.0), np.where(known, np.maximum(graph.nbytes[rows], 0), 0)
    peak = limits.flops_per_s[rows]
    ideal_compute, ideal_memory = flops / peak, nbytes / limits.bytes_per_s
    parts = timeline.breakdown().total_ns()
    busy_s = sum(parts[name] for name in ("compute", "exposed_copy", "exposed_communication")) / 1e9

    def rates(name: str, mine: Mask) -> GroupRates:
        known_time = float(time[mine & known].sum())
        compute = _share(ideal_compute[mine], known_time)
        memory = _share(ideal_memory[mine], known_time)
        best = np.fmax(ideal_compute[mine], ideal_memory[mine]) if compute is not None and memory is not None else None
        taken, computed, moved = float(time[mine].sum()), float(flops[mine].sum()), float(nbytes[mine].sum())
        return GroupRates(
            name=name,
            count=int(mine.sum()) / steps,
            time_s=taken / steps,
            share=_ratio(taken, float(time.sum())),
            known_share=_ratio(known_time, taken),
            flops=computed / steps,
            bytes=moved / steps,
            flops_per_s=_ratio(computed, known_time),
            bytes_per_s=_ratio(moved, known_time),
            intensity=_ratio(computed, moved),
            of_peak_flops=compute,
            of_peak_bandwidth=memory,
            of_roofline=None if best is None else _share(best, known_time),
        )

    total = rates("all", np.ones(len(rows), dtype=np.bool_))
    by_class = [rates(class_names[c], classes[rows] == c) for c in np.unique(classes[rows]).tolist()]
    label = np.where((graph.kind[rows] == TaskKind.OPERATOR) & (graph.op[rows] >= 0), graph.op[rows], graph.name[rows])
    seconds = np.bincount(label, weights=time, minlength=len(graph.names))
    longest = [i for i in np.argsort(-seconds, kind="stable").tolist() if seconds[i] > 0]
    by_name = [rates(graph.names[i], label == i) for i in longest[:100]]
    bound = (flops > 0) & np.isfinite(ideal_compute) & np.isfinite(ideal_memory)
    bound_time = float(time[bound].sum())
    compute_bound = float(time[bound & (ideal_compute > ideal_memory)].sum()) / bound_time if bound_time else None
    busy_lanes = {
        graph.lanes[lane.lane].label: 1.0 - lane.idle_ns / max(timeline.window_ns, 1)
        for lane in timeline.lanes()
        if not graph.lanes[lane.lane].kind and lane.busy_ns
    }
    return Utilisation(
        busy_s=busy_s / steps,
        busy_share=busy_s / window_s if window_s else 0.0,
        total=total,
        step_flops_per_s=total.flops * steps / window_s if window_s else 0.0,
        classes=tuple(sorted(by_class, key=lambda each: -each.time_s)),
        operators=tuple(by_name),
        compute_bound_share=compute_bound,
        bandwidth_bound_share=None if compute_bound is None else 1.0 - compute_bound,
        lane_busy=busy_lanes,
    )


def known_work(graph: TaskGraph) -> Mask:
    """Return tasks (n) whose work is known; of several tasks of an operator one carries it for all.

    Unknown where the inputs were not recorded, and for products whose FLOPs their inputs do not tell.
    """
    copies = (graph.nbytes >= 0) & (graph.kind == TaskKind.COPY)
    rows = np.flatnonzero((graph.shape >= 0) & (graph.op >= 0))
    _, call = np.unique(graph.op[rows].astype(np.int64) * 2**31 + graph.shape[rows], return_inverse=True)
    flops, nbytes = np.zeros(int(call.max(initial=-1)) + 1), np.full(int(call.max(initial=-1)) + 1, -1)
    np.maximum.at(flops, call, graph.flops[rows])
    np.maximum.at(nbytes, call, graph.nbytes[rows])
    product = np.array([is_product(name) for name in graph.names], dtype=np.bool_)[graph.op[rows]]
    known = np.zeros(len(graph), dtype=np.bool_)
    known[rows] = (nbytes[call] >= 0) & ~(product & (flops[call] == 0) & (nbytes[call] > 0))
    result: Mask = known | copies
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUse:
    """CPU time of the process over cores x elapsed time, in unprofiled steps."""

    share: float
    cores: int
    busy_cores: float
    steps: int


def cpu_use(facts: Mapping[str, Any]) -> CpuUse | None:
    """Return CPU utilisation by the recorder's facts: unprofiled steps, recorded ones where there are no others."""
    steps = facts.get("steps") or []
    machine = facts.get("machine") or {}
    affinity = machine.get("affinity")
    cores = len(affinity) if affinity else machine.get("cores")
    chosen = [each for each in steps if each["phase"] in ("before", "after")]
    chosen = chosen or [each for each in steps if each["phase"] == "active"]
    elapsed = sum(each["wall_ns"] for each in chosen)
    if not cores or not elapsed:
        return None
    busy = sum(each["cpu_ns"] for each in chosen) / elapsed
    return CpuUse(share=busy / cores, cores=cores, busy_cores=busy, steps=len(chosen))


def samples_per_step(facts: Mapping[str, Any]) -> float | None:
    """Return samples of one step by the recorder's facts: what was told, else batches per step times their size."""
    if told := (facts.get("options") or {}).get("samples"):
        return float(told)
    loaders = [
        each for each in facts.get("loaders") or [] if each.get("read_by_step_thread") and each.get("batch_size")
    ]
    if len(loaders) != 1:
        return None
    counts = [each["batches"] for each in facts.get("steps") or [] if each.get("batches")]
    return float(loaders[0]["batch_size"]) * (float(np.median(counts)) if counts else 1.0)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _share(ideal: Float64, taken: float) -> float | None:
    """Return ideal time over time taken; None where a peak is not known or nothing took time."""
    some = ideal[np.isfinite(ideal)]
    return float(some.sum()) / taken if len(some) == len(ideal) and taken > 0 else None
