"""What the questions about a simulated fleet are answered with: the structs of the JSON contract.

Times are seconds, shares fractions, null what is not known or covers no job.
"""

from __future__ import annotations

import msgspec

from foretrace.report.views import Result


class CauseView(msgspec.Struct, frozen=True, kw_only=True):
    """Waiting of all jobs for one reason."""

    cause: str  # name of `Cause` in lower case; "unexplained" for what no cause was recorded for
    wait_s: float
    share: float  # of all waiting
    why: str


class IntervalView(msgspec.Struct, frozen=True, kw_only=True):
    """Bootstrap interval of a mean over repeated runs."""

    mean: float
    low: float | None
    high: float | None


class FleetCommunicationView(msgspec.Struct, frozen=True, kw_only=True):
    """Communication in three ways: in all, in stretches wider than a machine, as a share of the running time."""

    total_s: float
    above_machine_s: float | None  # null without segments
    above_machine_low_s: float | None  # none of the jobs that ran both inside a machine and wider
    above_machine_high_s: float | None  # all of them
    share_of_running: float
    gpu_h: float


class LostView(msgspec.Struct, frozen=True, kw_only=True):
    """GPU-hours held without progress."""

    gpu_h: float
    of_failed_gpu_h: float
    of_preempted_gpu_h: float
    preemptions: int
    failures: int
    restarts: int


class TenantView(msgspec.Struct, frozen=True, kw_only=True):
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
    gpu_share: float
    mean_rho: float | None


class BillView(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of GPU: hours, cost, energy; null where neither the user nor a catalog states a rate."""

    gpu_type: str
    gpus: int
    used_gpu_h: float
    all_gpu_h: float
    usd_per_gpu_h: float | None
    price_from: str
    usd_used: float | None
    usd_all: float | None
    busy_w: float | None
    idle_w: float | None
    power_from: str
    kwh: float | None


class SlotsView(msgspec.Struct, frozen=True, kw_only=True):
    """Room for jobs of one size inside units of one level."""

    slot_gpus: int
    level: str
    capacity: int  # on an empty cluster
    free_now: int
    together_now: int  # if the same free GPUs lay together
    mean_free: float
    mean_together: float
    scattered: float  # share of the slots over time that scattering costs
    free: tuple[float, ...]  # mean per bin of `edges_s`
    together: tuple[float, ...]


class FleetSeriesView(msgspec.Struct, frozen=True, kw_only=True):
    """Means per bin of time, between `edges_s` (one more than bins), on the clock of the workload."""

    edges_s: tuple[float, ...]
    utilisation: tuple[float, ...]
    waiting_jobs: tuple[float, ...]
    waiting_gpus: tuple[float, ...]
    waiting_by_cause: dict[str, tuple[float, ...]]  # a job's waits split by how long it waited for each cause
    exact: bool  # false where only first starts and ends are known


class CdfView(msgspec.Struct, frozen=True, kw_only=True):
    """Share of the finished jobs that took up to so long."""

    jct_s: tuple[float, ...]
    share: tuple[float, ...]


class FleetRunView(Result, frozen=True, kw_only=True):
    """`foretrace fleet run`: how a workload goes on a cluster under a policy.

    JCT, queue and rho figures cover the finished jobs; those that are not are counted and named.
    """

    command: str = "fleet run"
    headline: str
    source: str
    policy: str
    cluster: str
    gpus: int
    jobs: int
    finished: int
    running: int
    waiting: int
    never: int
    unfinished_jobs: dict[str, tuple[str, ...]]  # the first few by state: running, waiting, never
    mean_jct_s: float | None
    p50_jct_s: float | None
    p90_jct_s: float | None
    p99_jct_s: float | None
    longest_jct_s: float | None
    mean_jct_at_least_s: float | None  # unfinished jobs counted up to the end of the simulation
    makespan_s: float | None
    mean_queue_s: float | None
    p50_queue_s: float | None
    p90_queue_s: float | None
    p99_queue_s: float | None
    total_queue_s: float
    utilisation: float | None
    useful_utilisation: float | None
    causes: tuple[CauseView, ...]
    mean_rho: float | None
    p99_rho: float | None
    worst_rho: float | None
    rho_is: str
    communication: FleetCommunicationView
    lost: LostView
    usd_used: float | None
    usd_all: float | None
    kwh: float | None
    bills: tuple[BillView, ...]
    tenants: tuple[TenantView, ...]
    slots: tuple[SlotsView, ...]
    over_time: FleetSeriesView
    jct_cdf: CdfView
    intervals: dict[str, IntervalView]  # by the figure's name; empty after one run
    interval_level: float
    repetitions: int
    repeated_how: str
    facts: dict[str, str]  # what only this simulator knows
    notes: tuple[str, ...]
    next: str


class PolicyFigureView(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one policy, and how it stands to the baseline on the same repetitions."""

    mean: float | None
    low: float | None
    high: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    verdict: str  # baseline, better, worse, within noise, same, unknown


class PolicyRowView(msgspec.Struct, frozen=True, kw_only=True):
    """One policy: its figures by name."""

    policy: str
    figures: dict[str, PolicyFigureView]


class BestView(msgspec.Struct, frozen=True, kw_only=True):
    """The policy with the best mean of a figure, and those that differ from it within noise."""

    figure: str
    best: str
    tied: tuple[str, ...]


class FleetCompareView(Result, frozen=True, kw_only=True):
    """`foretrace fleet compare`: policies on the same workload."""

    command: str = "fleet compare"
    headline: str
    source: str
    cluster: str
    gpus: int
    jobs: int
    baseline: str
    repetitions: int
    repeated_how: str
    interval_level: float
    policies: tuple[PolicyRowView, ...]
    best: tuple[BestView, ...]
    notes: tuple[str, ...]
    next: str


class FleetSlotsView(Result, frozen=True, kw_only=True):
    """`foretrace fleet slots`: room for jobs of a size, at one instant and over time."""

    command: str = "fleet slots"
    headline: str
    source: str
    policy: str
    cluster: str
    gpus: int
    at_s: float
    free_gpus: int
    edges_s: tuple[float, ...]
    slots: tuple[SlotsView, ...]
    notes: tuple[str, ...]
    next: str


class FleetFitView(Result, frozen=True, kw_only=True):
    """`foretrace fleet fit`: a generator of workloads learnt from a log."""

    command: str = "fleet fit"
    headline: str
    source: str
    jobs: int
    left_out: int  # jobs without a known duration
    days: float
    jobs_per_day: float
    tenants: int
    kinds: int
    strata: int
    profile_of: str  # week, day, flat
    in_sweeps: float  # share of the jobs that came in bursts of two or more
    stored: str
    notes: tuple[str, ...]
    next: str
