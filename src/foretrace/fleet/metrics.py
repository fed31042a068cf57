"""What is said of a simulated fleet, job by job: completion, queueing, fairness, communication, cost, energy, losses.

A job that did not finish, or never can, is counted and named (`Coverage`); every mean says how many jobs it covers.
`only` restricts a figure to some jobs, as positions or as a mask. All of it is O(n log n) on columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.overtime import Only, chosen, horizon_ns, lives, span_ns
from foretrace.fleet.rates import HOUR_NS, Bill, bills
from foretrace.fleet.result import Cause, FleetResult
from foretrace.fleet.workload import SECOND, Float64, codes

NAMED = 5  # jobs of a kind that are called by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How the jobs ended. `names`: the first few of those that no mean of completed jobs covers, by state."""

    jobs: int
    finished: int
    running: int  # at the end of the simulation
    waiting: int
    never: int  # the cluster can never hold them
    names: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A figure over jobs; nan where `covers` is 0. Percentiles interpolate linearly between jobs."""

    mean: float
    p50: float
    p90: float
    p99: float
    longest: float
    covers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Waiting of all jobs for one reason."""

    cause: str  # name of `Cause` in lower case; "unexplained" for what no cause was recorded for
    wait_s: float
    share: float  # of all waiting
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Queueing:
    """Time without GPUs between submission and completion, or the end of the simulation.

    of_finished: seconds per finished job. total_s: of all jobs but those that can never run. by_cause: the same by
    `Cause`, empty where the simulator does not say; unexplained_s: what remains of the total.
    """

    of_finished: Spread
    total_s: float
    by_cause: Mapping[Cause, float]
    unexplained_s: float

    @property
    def causes(self) -> tuple[Waiting, ...]:
        """The causes, most waiting first; last what none was recorded for, where that is more than rounding."""
        found = sorted(self.by_cause.items(), key=lambda each: (-each[1], each[0]))
        rows = [(cause.name.lower(), value, cause.why) for cause, value in found]
        if self.unexplained_s > 1e-6 * (self.total_s or 1.0):
            rows.append(("unexplained", self.unexplained_s, "the simulator recorded no reason"))
        return tuple(
            Waiting(cause=cause, wait_s=value, share=value / (self.total_s or 1.0), why=why)
            for cause, value, why in rows
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Communication in three ways: in all, in stretches wider than a machine, as a share of the running time."""

    # Time beyond what the same progress takes without communication, summed over jobs. A job that ran both inside a
    # machine and wider is split by running time, which understates the wide part: `low` has none, `high` all of such.
    total_s: float
    above_machine_s: float | None  # None without segments
    above_machine_low_s: float | None
    above_machine_high_s: float | None
    share_of_running: float  # held without dead time
    gpu_h: float  # total_s times the GPUs held


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """GPU-hours held without progress (`dead_ns`): all; of jobs that a failure stopped; of those only preempted."""

    gpu_h: float
    of_failed_gpu_h: float
    of_preempted_gpu_h: float
    preemptions: int
    failures: int
    restarts: int  # starts beyond the first of each job


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant; times over its finished jobs."""

    tenant: str
    jobs: int
    finished: int
    never: int
    mean_jct_s: float | None
    p50_jct_s: float | None
    p90_jct_s: float | None
    p99_jct_s: float | None
    mean_queue_s: float | None
    gpu_h: float
    gpu_share: float  # of the GPU time of all tenants
    mean_rho: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Everything `measure` says. rho: finish-time fairness over finished jobs, see `fairness`."""

    coverage: Coverage
    jct_s: Spread
    mean_jct_at_least_s: float  # over all jobs that can run, those unfinished counted up to the end of the simulation
    makespan_s: float
    queueing: Queueing
    utilisation: float
    useful_utilisation: float  # without time that made no progress
    rho: Spread
    communication: Communication
    lost: Lost
    tenants: tuple[Tenant, ...]
    bills: tuple[Bill, ...]

    def total(self, what: str) -> float | None:
        """Return sum over kinds of GPUs of `usd_used`, `usd_all`, `kwh` ...; None where one of them is not stated."""
        parts = [getattr(bill, what) for bill in self.bills]
        return None if not parts or any(part is None for part in parts) else float(sum(parts))


def known(value: float) -> float | None:
    """Return none for nan and infinity."""
    return float(value) if np.isfinite(value) else None


def spread(values: Float64) -> Spread:
    """Return the spread of the values that are not nan."""
    those = values[~np.isnan(values)]
    if not len(those):
        return Spread(mean=np.nan, p50=np.nan, p90=np.nan, p99=np.nan, longest=np.nan, covers=0)
    p50, p90, p99 = np.percentile(those, (50, 90, 99)).tolist()
    return Spread(mean=float(those.mean()), p50=p50, p90=p90, p99=p99, longest=float(those.max()), covers=len(those))


def coverage(result: FleetResult, only: Only = None) -> Coverage:
    """Return how many jobs finished, and which did not."""
    at = chosen(result, only)
    finished, never = result.finished[at], result.never[at]
    waiting = ~finished & ~never & (result.start_ns[at] < 0)
    states = {"running": ~finished & ~never & ~waiting, "waiting": waiting, "never": never}
    return Coverage(
        jobs=len(at),
        finished=int(finished.sum()),
        names={word: tuple(map(str, result.workload.job[at[mask][:NAMED]])) for word, mask in states.items()},
        **{word: int(mask.sum()) for word, mask in states.items()},
    )


def cdf(values: Float64, points: int = 200) -> tuple[Float64, Float64]:
    """Return (value, share of the known values up to it): every value where they are few, else `points` of them.

    The largest percent keeps a quarter of the points, so that a heavy tail stays visible.
    """
    those = np.sort(values[~np.isnan(values)])
    n = len(those)
    if n <= points:
        return those, np.arange(1, n + 1) / max(n, 1)
    body = np.linspace(0, 0.99, points - points // 4, endpoint=False)
    rank = np.unique(np.ceil(np.concatenate([body, np.linspace(0.99, 1, points // 4)]) * n).astype(np.int64).clip(1))
    return those[rank - 1], rank / n


def queueing(result: FleetResult, only: Only = None) -> Queueing:
    """Return how long jobs wait, and for what."""
    at = chosen(result, only)
    at = at[~result.never[at]]
    until = np.where(result.finished[at], result.end_ns[at], max(horizon_ns(result), 0))
    total_ns = float((until - result.workload.submit_ns[at] - result.held_ns[at]).clip(0).sum(dtype=np.float64))
    sums = result.waited_ns[at].sum(axis=0, dtype=np.float64)
    return Queueing(
        of_finished=spread(result.queue_s[at]),
        total_s=total_ns * 1e-9,
        by_cause={Cause(cause): value * 1e-9 for cause, value in enumerate(sums.tolist()) if value},
        unexplained_s=max(total_ns - float(sums.sum()), 0.0) * 1e-9,
    )


def fairness(result: FleetResult, *, demand: str = "gpus") -> Float64:
    """Return (n,) finish-time fairness ρ = JCT / (exclusive × max(1, mean active demand / GPUs)), nan where unknown.

    exclusive is `work_s`; active demand, averaged over the job's own life, is the number of GPUs ("gpus") or of jobs
    ("jobs") that submitted, unfinished jobs ask for, itself included. ρ ≤ 1: at least as fast as with an equal share.
    After Themis (NSDI'20) as evaluated for Shockwave (NSDI'23), where demand is in jobs.
    """
    load = result.workload
    begin, end = lives(result)
    can = ~result.never
    weight = load.gpus * load.share if demand == "gpus" else np.ones(len(load))
    # The integral of the active demand at every submission and end: one pass over sorted events.
    time = np.concatenate([begin[can], end[can]])
    order = np.argsort(time, kind="stable")
    delta = np.concatenate([weight[can], -weight[can]])[order]
    time = time[order].astype(np.float64)
    integral = np.concatenate([[0.0], np.cumsum(np.cumsum(delta)[:-1] * np.diff(time))]) if len(time) else np.zeros(0)
    rho = np.full(len(load), np.nan)
    at = np.flatnonzero(result.finished & (end > begin) & np.isfinite(load.work_s))
    if len(at):
        life = (end[at] - begin[at]).astype(np.float64)
        mean = (np.interp(end[at], time, integral) - np.interp(begin[at], time, integral)) / life
        rho[at] = life * 1e-9 / (load.work_s[at] * np.maximum(1.0, mean / result.gpus))
    return rho


def communication(result: FleetResult, only: Only = None, *, machine_level: int = 1) -> Communication:
    """Return communication in three ways; `machine_level`: the level of segments that lie within one machine."""
    at = chosen(result, only)
    comm = result.comm_ns[at]
    running = (result.held_ns[at] - result.dead_ns[at]).clip(0).sum(dtype=np.float64)
    per_job = np.divide(result.gpu_ns, result.held_ns, out=np.zeros(len(result.gpu_ns)), where=result.held_ns > 0)
    above: dict[str, float | None] = {f"above_machine{end}_s": None for end in ("", "_low", "_high")}
    if result.segments is not None:
        each = result.segments
        length = (each.end_ns - each.start_ns - each.dead_ns).clip(0).astype(np.float64)
        n = len(result.workload)
        wide = np.bincount(each.job, length * (each.level > machine_level), minlength=n)[at]
        near = np.bincount(each.job, length * ((each.level > 0) & (each.level <= machine_level)), minlength=n)[at]
        part = np.divide(wide, wide + near, out=np.zeros(len(at)), where=wide + near > 0)
        wide_ns = {"": (comm * part).sum(), "_low": comm[part == 1].sum(), "_high": comm[part > 0].sum()}
        above = {f"above_machine{end}_s": float(value) * 1e-9 for end, value in wide_ns.items()}
    total = float(comm.sum())
    return Communication(
        total_s=total * 1e-9,
        share_of_running=total / float(running) if running > 0 else 0.0,
        gpu_h=float((comm * per_job[at]).sum()) / HOUR_NS,
        **above,
    )


def time_of_finished(result: FleetResult) -> dict[str, float]:
    """Return nanoseconds that the finished jobs wait, compute, communicate and make no progress ("dead")."""
    done = result.finished
    held, dead = float(result.held_ns[done].sum()), float(result.dead_ns[done].sum())
    comm = min(float(result.comm_ns[done].sum()), held - dead)
    waits = max(float((result.end_ns - result.workload.submit_ns)[done].sum()) - held, 0.0)
    return {"waits": waits, "compute": held - dead - comm, "comm": comm, "dead": dead}


def lost(result: FleetResult, only: Only = None) -> Lost:
    """Return what restarts, repeated work and failures cost."""
    at = chosen(result, only)
    held = result.held_ns[at].astype(np.float64)
    wide = np.divide(result.gpu_ns[at], held, out=result.workload.gpus[at].astype(np.float64), where=held > 0)
    dead = result.dead_ns[at] * wide / HOUR_NS
    failed, preempted = result.failed[at] > 0, result.preempted[at] > 0
    return Lost(
        gpu_h=float(dead.sum()),
        of_failed_gpu_h=float(dead[failed].sum()),
        of_preempted_gpu_h=float(dead[preempted & ~failed].sum()),
        preemptions=int(result.preempted[at].sum()),
        failures=int(result.failed[at].sum()),
        restarts=int((result.starts[at] - 1).clip(0).sum()),
    )


def tenants(result: FleetResult, only: Only = None, *, rho: Float64 | None = None) -> tuple[Tenant, ...]:
    """Return figures by tenant, those with most GPU time first."""
    at = chosen(result, only)
    who, names = codes(result.workload.tenant[at].tolist())
    rho = (fairness(result) if rho is None else rho)[at]
    jct, queue, used = result.jct_s[at], result.queue_s[at], result.gpu_ns[at]
    order = np.lexsort((jct, who))  # nan, unfinished, come last within a tenant
    bounds = np.searchsorted(who[order], np.arange(len(names) + 1))
    everything = float(used.sum()) or 1.0
    found = []
    for i, name in enumerate(names):
        rows = order[bounds[i] : bounds[i + 1]]
        took, waits, fair = spread(jct[rows]), spread(queue[rows]), spread(rho[rows])
        mine = float(used[rows].sum())
        found.append(
            Tenant(
                tenant=name, jobs=len(rows), finished=took.covers, never=int(result.never[at[rows]].sum()),
                mean_jct_s=known(took.mean), p50_jct_s=known(took.p50), p90_jct_s=known(took.p90),
                p99_jct_s=known(took.p99), mean_queue_s=known(waits.mean), gpu_h=mine / HOUR_NS,
                gpu_share=mine / everything, mean_rho=known(fair.mean),
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda each: (-each.gpu_h, each.tenant)))


def utilisation(result: FleetResult, only: Only = None, *, useful: bool = False) -> float:
    """Return GPU time held (by these jobs) over GPU time there was; nan where no time passed.

    A job that shares a GPU counts with its part. useful: without time that made no progress.
    """
    at = chosen(result, only)
    span = span_ns(result)
    if span <= 0:
        return float("nan")
    held = result.gpu_ns[at]
    if useful:
        dead = np.divide(result.dead_ns[at], result.held_ns[at], out=np.zeros(len(at)), where=result.held_ns[at] > 0)
        held = held * (1 - dead)
    return float(held.sum() / (span * result.gpus))


def makespan_s(result: FleetResult, only: Only = None) -> float:
    """Return the last completion minus first submission of these jobs, seconds; nan where none finished."""
    at = chosen(result, only)
    if not result.finished[at].any():
        return float("nan")
    return int(result.end_ns[at].max() - result.workload.submit_ns[at].min()) / SECOND


def measure(
    result: FleetResult,
    cluster: ClusterTree | None = None,
    only: Only = None,
) -> Metrics:
    """Return all figures over jobs; utilisation is of the whole cluster and span, by these jobs."""
    at = chosen(result, only)
    can = at[~result.never[at]]
    until = np.where(result.finished[can], result.end_ns[can], horizon_ns(result))
    so_far = (until - result.workload.submit_ns[can]) * 1e-9
    machine = 1 + (0 if cluster is None else cluster.machine_level)
    rho = fairness(result)
    return Metrics(
        coverage=coverage(result, at),
        jct_s=spread(result.jct_s[at]),
        mean_jct_at_least_s=float(so_far.mean()) if len(can) else float("nan"),
        makespan_s=makespan_s(result, at),
        queueing=queueing(result, at),
        utilisation=utilisation(result, at),
        useful_utilisation=utilisation(result, at, useful=True),
        rho=spread(rho[at]),
        communication=communication(result, at, machine_level=machine),
        lost=lost(result, at),
        tenants=tenants(result, at, rho=rho),
        bills=bills(result, cluster, at),
    )
