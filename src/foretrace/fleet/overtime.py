"""What is said of a simulated fleet over time: GPUs held, jobs waiting, and slots for jobs of a size that are free.

Everything is a step function of time, given as its exact mean in each of a number of bins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.errors import ForetraceError
from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.result import Cause, FleetResult
from foretrace.fleet.workload import Float64, Int64

Only = npt.NDArray[Any] | None  # positions of jobs or a mask; None for all
SIZES = (8, 16, 32, 64)  # GPUs of the slots that are looked for where nobody requests others


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """Means of a quantity per bin. edges_ns: (m + 1,) float64 on the clock of the workload; values: (m,).

    exact: False where a simulator gives no segments, so that holding is spread evenly from first start to end.
    """

    edges_ns: Float64
    values: Float64
    exact: bool = True

    @property
    def mean(self) -> float:
        """Over the whole time."""
        width = np.diff(self.edges_ns)
        return float((self.values * width).sum() / width.sum()) if width.sum() > 0 else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Room for jobs of one size inside units of one level."""

    slot_gpus: int
    level: str
    capacity: int  # on an empty cluster
    free_now: int  # at the instant asked for
    together_now: int  # if the same free GPUs lay together as far as the units allow
    mean_free: float
    mean_together: float
    scattered: float  # share of the slots over time that scattering costs; 0 where there were none anyway
    free: tuple[float, ...]  # mean per bin, five significant digits
    together: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverTime:
    """Means per bin of time, between `edges_s` (one more than bins), on the clock of the workload."""

    edges_s: tuple[float, ...]
    utilisation: tuple[float, ...]
    waiting_jobs: tuple[float, ...]
    waiting_gpus: tuple[float, ...]
    waiting_by_cause: dict[str, tuple[float, ...]]  # a job's waits split by how long it waited for each cause
    exact: bool  # false where only first starts and ends are known


def horizon_ns(result: FleetResult) -> int:
    """Return the end of what was simulated: where it was stopped, else the last completion, stretch or submission.

    A job that can never run tells no end.
    """
    if result.stopped_ns is not None:
        return result.stopped_ns
    last = int(result.end_ns.max(initial=0))
    if result.segments is not None:
        last = max(last, int(result.segments.end_ns.max(initial=0)))
    return max(last, int(result.workload.submit_ns[~(result.finished | result.never)].max(initial=0)))


def chosen(result: FleetResult, only: Only) -> Int64:
    """Return positions that `only` names, all of them for None."""
    n = len(result.workload)
    if only is None:
        return np.arange(n)
    if only.dtype == bool:
        return np.flatnonzero(only)
    return np.unique(only.astype(np.int64))


def span_ns(result: FleetResult) -> int:
    """Return the time from the first submission to the last completion, or to where the simulation was stopped."""
    if not len(result.workload):
        return 0
    return max(horizon_ns(result) - int(result.workload.submit_ns.min()), 0)


def lives(result: FleetResult) -> tuple[Int64, Int64]:
    """Return (n,) submission and completion, the end of the simulation for jobs that did not finish."""
    begin = result.workload.submit_ns
    end = np.where(result.finished, result.end_ns, np.maximum(horizon_ns(result), begin))
    return begin, end


def bins(result: FleetResult, count: int = 200) -> Float64:
    """Return edges of so many bins from the first submission to the end of the simulation."""
    first = float(result.workload.submit_ns.min()) if len(result.workload) else 0.0
    return np.linspace(first, max(float(horizon_ns(result)), first + 1.0), count + 1)


def mean_of_steps(time: npt.NDArray[np.int64], delta: Float64, edges: Float64, *, base: float = 0.0) -> Float64:
    """Return (m,) exact mean per bin of a step function: `base`, changed by `delta` at every `time` (any order)."""
    origin = int(edges[0])  # taken off as a whole number: doubles count nanoseconds exactly up to 104 days only
    moment = np.concatenate([[0.0], (time - origin).astype(np.float64)])
    change = np.concatenate([[0.0], delta])
    order = np.argsort(moment, kind="stable")
    moment, level = moment[order], base + np.cumsum(change[order])
    upto = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(moment))])
    where = edges - origin
    # Beyond the last change the function stays as it is; before the first one it is `base`.
    after = np.interp(where, moment, upto) + np.maximum(where - moment[-1], 0) * level[-1]
    before = np.minimum(where - moment[0], 0) * base
    mean: Float64 = np.diff(after + before) / np.diff(where)
    return mean


def own_part(result: FleetResult) -> Float64:
    """Return (n,) mean part of the GPUs of its stretches that counts as a job's own: 1 where it shares none."""
    each, n = result.segments, len(result.workload)
    if each is None:
        return np.ones(n)
    held = np.bincount(each.job, each.gpus * (each.end_ns - each.start_ns), minlength=n)
    return np.divide(result.gpu_ns, held, out=np.ones(n), where=held > 0)


def holding(result: FleetResult) -> tuple[Int64, Int64, Int64, Float64, bool]:
    """Return (job, start_ns, end_ns, GPUs held, exact) of every stretch, of shared GPUs the job's part."""
    each = result.segments
    if each is not None:
        return each.job, each.start_ns, each.end_ns, each.gpus * own_part(result)[each.job], True
    job = np.flatnonzero((result.start_ns >= 0) & (result.held_ns > 0))
    start = result.start_ns[job]
    end = np.maximum(lives(result)[1][job], start + 1)
    weight = result.gpu_ns[job] / (end - start)
    return job, start, end, weight, bool((result.held_ns[job] == end - start).all())


def mean_held(begin: Int64, end: Int64, weight: Float64, edges: Float64) -> Float64:
    """Return (m,) mean per bin of the sum of these weights, each from its begin to its end."""
    return mean_of_steps(np.concatenate([begin, end]), np.concatenate([weight, -weight]), edges)


def utilisation_over_time(result: FleetResult, edges: Float64 | None = None, only: Only = None) -> Series:
    """Return share of the GPUs that are held (by these jobs)."""
    edges = bins(result) if edges is None else edges
    job, start, end, weight, exact = holding(result)
    if only is not None:
        keep = np.isin(job, chosen(result, only))
        start, end, weight = start[keep], end[keep], weight[keep]
    return Series(edges_ns=edges, values=mean_held(start, end, weight, edges) / result.gpus, exact=exact)


def waiting_over_time(result: FleetResult, edges: Float64 | None = None, *, gpus: bool = False) -> Series:
    """Return jobs that wait, or the GPUs that they ask for; those that can never run are left out."""
    edges = bins(result) if edges is None else edges
    _, begin, end, weight, exact = _waits(result, gpus)
    return Series(edges_ns=edges, values=mean_held(begin, end, weight, edges).clip(0), exact=exact)


def waiting_by_cause(result: FleetResult, edges: Float64 | None = None) -> Mapping[Cause, Series]:
    """Return jobs waiting, split by cause: a job's waits count for its causes in proportion to what it waited for each.

    When which cause held is not recorded, only how long; the sum over causes is exact. Empty where no simulator said.
    """
    edges = bins(result) if edges is None else edges
    waited = result.waited_ns
    if not waited.shape[1]:
        return {}
    job, begin, end, weight, exact = _waits(result, False)
    total = waited.sum(axis=1)
    found = {}
    for cause in np.flatnonzero(waited.sum(axis=0)).tolist():
        part = np.divide(waited[:, cause], total, out=np.zeros(len(total)), where=total > 0)[job] * weight
        some = part != 0
        values = mean_held(begin[some], end[some], part[some], edges)
        found[Cause(cause)] = Series(edges_ns=edges, values=values.clip(0), exact=exact)
    return found


def over_time(result: FleetResult) -> OverTime:
    """Use and waiting from the first submission to the end of the simulation."""
    edges = bins(result)
    used = utilisation_over_time(result, edges)
    causes = waiting_by_cause(result, edges)
    return OverTime(
        edges_s=seconds(edges),
        utilisation=short(used.values),
        waiting_jobs=short(waiting_over_time(result, edges).values),
        waiting_gpus=short(waiting_over_time(result, edges, gpus=True).values),
        waiting_by_cause={cause.name.lower(): short(each.values) for cause, each in causes.items()},
        exact=used.exact,
    )


def seconds(edges_ns: Float64) -> tuple[float, ...]:
    """Return edges of bins to the millisecond."""
    return tuple((edges_ns * 1e-9).round(3).tolist())


def short(values: Float64) -> tuple[float, ...]:
    """Return five significant digits each."""
    return tuple(float(f"{value:.5g}") for value in values.tolist())


def _waits(result: FleetResult, gpus: bool) -> tuple[Int64, Int64, Int64, Float64, bool]:
    """Return (job, begin, end, weight, exact): lives as +1 and stretches of holding as −1; their sum is who waits."""
    can = np.flatnonzero(~result.never)
    begin, end = lives(result)
    job, start, stop, _, exact = holding(result)
    one = result.workload.gpus * result.workload.share if gpus else np.ones(len(result.workload))
    inside = np.ones(len(job)) if result.segments is not None else result.held_ns[job] / (stop - start)
    return (
        np.concatenate([can, job]),
        np.concatenate([begin[can], start]),
        np.concatenate([end[can], stop]),
        np.concatenate([one[can], -one[job] * inside]),
        exact,
    )


def slots(
    result: FleetResult,
    cluster: ClusterTree,
    sizes: Sequence[int] | None = None,
    levels: Sequence[str] | None = None,
    *,
    edges: Float64 | None = None,
    at_ns: int | None = None,
) -> tuple[Slots, ...]:
    """Return how many jobs of each size would find room inside one unit of each level, over time and at one instant.

    sizes: GPUs; SIZES up to the cluster where None. levels: names, all below the whole cluster where None; a level
    none of whose units is as large as the size is left out. at_ns: the instant, the end of the simulation where None.
    Raises ForetraceError where the simulator did not say which GPUs a job held, or where a size or level is not of
    this cluster.
    """
    edges = bins(result) if edges is None else edges
    if at_ns is None:  # where a simulation was stopped, the state before everything is let go
        at_ns = horizon_ns(result) if result.stopped_ns is None else result.stopped_ns - 1
    asked = [size for size in SIZES if size <= cluster.gpus] or [cluster.gpus] if sizes is None else list(sizes)
    for size in asked:
        if not 1 <= size <= cluster.gpus:
            raise ForetraceError(f"a slot of {size} GPUs does not exist on {cluster.gpus:,} GPUs; ask for fewer.")
    which = list(range(max(len(cluster.levels) - 1, 1))) if levels is None else [cluster.level(name) for name in levels]
    gpu, time, delta = _transitions(result, cluster)
    running = np.concatenate([[0.0], np.cumsum(delta)])
    free_all = cluster.gpus + running  # after each change of any GPU, those at one instant in a row
    bin_width = np.diff(edges)
    found = []
    for level in which:
        width = np.diff(cluster.starts[level])
        unit = np.searchsorted(cluster.starts[level], gpu, side="right") - 1
        moment, place, change = _merged(time, unit, delta)
        order = np.lexsort((moment, place))
        moment, place, change = moment[order], place[order], change[order]
        upto = np.cumsum(change)
        first = np.flatnonzero(np.diff(place, prepend=-1))
        before = np.repeat(upto[first] - change[first], np.diff(np.append(first, len(upto))))
        free = width[place] + upto - before
        for size in asked:
            capacity = int((width // size).sum())
            if not capacity:
                continue
            fit = free // size
            was = np.roll(fit, 1)
            was[first] = width[place[first]] // size
            step = (fit - was).astype(np.float64)
            could = np.minimum(free_all // size, capacity)
            free_by_bin = mean_of_steps(moment, step, edges, base=capacity)
            together = mean_of_steps(time, np.diff(could), edges, base=float(could[0]))
            room = float((together * bin_width).sum())
            found.append(
                Slots(
                    slot_gpus=size,
                    level=cluster.levels[level],
                    capacity=capacity,
                    free_now=capacity + int(step[moment <= at_ns].sum()),
                    together_now=int(could[np.searchsorted(time, at_ns, side="right")]),
                    mean_free=float(np.average(free_by_bin, weights=bin_width)),
                    mean_together=float(np.average(together, weights=bin_width)),
                    scattered=1 - float((free_by_bin * bin_width).sum()) / room if room > 0 else 0.0,
                    free=short(free_by_bin),
                    together=short(together),
                )
            )
    return tuple(found)


def _transitions(result: FleetResult, cluster: ClusterTree) -> tuple[Int64, Int64, Int64]:
    """Return (GPU, time, +1 freed or −1 taken) in order of time; several jobs on one GPU take it once."""
    each = result.segments
    if each is None or (len(each) and not len(each.devices)):
        raise ForetraceError(
            f"{result.policy} on {result.cluster} was simulated by counts of GPUs, so which of them are free is not "
            "known; simulate with placement."
        )
    counts = np.diff(each.offset)
    gpu = np.concatenate([each.devices, each.devices])
    if len(gpu) and not 0 <= int(gpu.min()) <= int(gpu.max()) < cluster.gpus:
        raise ForetraceError(f"the result names GPU {int(gpu.max())}, but cluster {cluster.name!r} has {cluster.gpus}.")
    time = np.concatenate([np.repeat(each.start_ns, counts), np.repeat(each.end_ns, counts)])
    delta = np.repeat(np.array([-1, 1], np.int64), len(each.devices))
    order = np.lexsort((-delta, time, gpu))
    gpu, time, delta = gpu[order], time[order], delta[order]
    held = np.cumsum(delta) < 0  # −k: k jobs on this GPU; every GPU ends at 0, so the sum needs no reset
    keep = held != np.concatenate([[False], held[:-1]])
    gpu, time, delta = gpu[keep], time[keep], np.where(held[keep], -1, 1)
    order = np.argsort(time, kind="stable")
    return gpu[order], time[order], delta[order]


def _merged(time: Int64, unit: Int64, delta: Int64) -> tuple[Int64, Int64, Int64]:
    """Return changes of one unit at one time added up."""
    if not len(time):
        return time, unit, delta
    order = np.lexsort((unit, time))
    time, unit, delta = time[order], unit[order], delta[order]
    first = np.flatnonzero((np.diff(time, prepend=time[0] - 1) != 0) | (np.diff(unit, prepend=unit[0] - 1) != 0))
    return time[first], unit[first], np.add.reduceat(delta, first)
