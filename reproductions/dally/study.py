"""Are the published claims of Dally reached, against whom, and by which of its parts? (arXiv 2401.16492)

Up to 69 % less makespan, 83 % less mean completion time and 98 % less communication are held against policies that
differ from Dally in one part at a time, over loads, clusters, networks and compute scales, and on repetitions.
Negative gains are in Dally's favour. Everything is played by the engine of `simulate`; jobs are those of
`dally_workload`, speeds the closed form, which overlaps nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from foretrace.fleet.sweep import sweep
from reproductions.dally import cells

Progress = Callable[[float], None] | None


class GainRow(msgspec.Struct, frozen=True, kw_only=True):
    """Dally with tuned timers against one baseline in one figure, over the cells of the grid."""

    figure: str
    baseline: str
    published: float  # −0.69, −0.83 or −0.98
    cells: int
    left_out: int  # one of the two was capped, or the baseline's figure is 0
    ties: int  # of the cells: less than half a per cent apart
    median: float
    best: float
    worst: float
    reached: int  # cells
    best_cell: str


class ClaimRow(msgspec.Struct, frozen=True, kw_only=True):
    """One published claim: against whom it is reached in some cell (with the best gain), what the cells that reach it
    have in common (one entry per baseline, "" nothing), and the rest.
    """

    claim: str
    figure: str
    published: float
    reached_against: tuple[str, ...]
    reached_only_where: tuple[str, ...]
    not_reached: tuple[str, ...]  # with the best gain
    verdict: str


class DriverRow(msgspec.Struct, frozen=True, kw_only=True):
    """Median gains of Dally among the cells with one value of one dimension; None where no cell is left."""

    dimension: str
    value: str
    cells: int
    makespan_hol: float | None
    jct_hol: float | None
    jct_skip: float | None
    jct_las: float | None
    comm_gandiva: float | None
    comm_gandiva_best: float | None


class FactorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One order with one placement, against submission order with strict placement and without leases (medians)."""

    leases: bool
    order: str
    place: str
    cells: int
    jct: float
    makespan: float
    comm: float
    above: float | None


class BestRow(msgspec.Struct, frozen=True, kw_only=True):
    """In how many cells a policy is the best or within 0.1 % of it, of those where policies are over 1 % apart."""

    policy: str
    jct: int
    makespan: int
    comm: int


class Mean(msgspec.Struct, frozen=True, kw_only=True):
    """Mean over repetitions with its 95 % bootstrap interval; None from one repetition."""

    mean: float
    low: float | None
    high: float | None


class RepeatRow(msgspec.Struct, frozen=True, kw_only=True):
    """A policy in a named cell, repeated: `jitter` moves submissions by up to 60 s, `redraw` draws other jobs.

    ratio_*: Dally with tuned timers over this policy, in pairs, by figure; verdicts are Dally's.
    """

    cell: str
    kind: str
    policy: str
    repetitions: int
    jct_h: Mean
    makespan_h: Mean
    comm_h: Mean
    above_h: Mean
    makespan_scatter: float  # standard deviation over mean
    ratio_jct: Mean
    ratio_makespan: Mean
    ratio_comm: Mean
    verdicts: tuple[str, str, str]  # of those three ratios


class TimerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A tuned timer in leases by quarter of the time in which timers were asked; at_*: share of that time."""

    cluster: str
    lease_s: float
    history: int
    gpus: int
    level: str  # rack, or between racks
    changes: int
    mean: tuple[float | None, ...]
    sd: tuple[float | None, ...]
    at_floor: float
    at_cap: float


class WaitRow(msgspec.Struct, frozen=True, kw_only=True):
    """Dally with stated timers, in leases of 600 s."""

    waits: str
    repetitions: int
    jct_h: Mean
    makespan_h: Mean
    comm_h: Mean


class LeaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """One length of lease; None: capped."""

    scale: str
    lease_s: float
    restart: str
    policy: str
    jct_h: float | None
    makespan_h: float | None
    lost_gpu_h: float | None
    starts: float | None  # per job


class SpreadRow(msgspec.Struct, frozen=True, kw_only=True):
    """Gains of Dally by spread of work, over draws of jobs: median, least, most; None where all are capped."""

    spread: float
    baseline: str
    draws: int
    jct: tuple[float, float, float] | None
    makespan: tuple[float, float, float] | None
    comm: tuple[float, float, float] | None


class LoggedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A policy on consecutive jobs of a log; None: capped."""

    cluster: str
    congestion: int
    jobs: int
    gpus_from: int
    lease_s: float
    policy: str
    jct_h: float | None
    makespan_h: float | None
    comm_h: float | None


class FindingRow(msgspec.Struct, frozen=True, kw_only=True):
    """What was found before with another simulator, what is found here, and whether they agree."""

    finding: str
    earlier: str
    here: str
    verdict: str


class DallyStudy(msgspec.Struct, frozen=True, kw_only=True):
    """`make reproduce NAME=dally`. Gains are shares: −0.83 is 83 % less than the baseline."""

    schema_version: int = 1
    command: str = "reproduce dally"
    headline: str
    date: str
    machine: str
    took_s: float
    quick: bool
    seeds: int
    trace: str | None
    cells: int
    reused: int  # cells that the folder had already
    runs: int
    capped: int  # runs that needed more events than allowed, or were not begun behind one
    assumptions: tuple[str, ...]
    claims: tuple[ClaimRow, ...]
    gains: tuple[GainRow, ...]
    drivers: tuple[DriverRow, ...]
    factors: tuple[FactorRow, ...]
    best: tuple[BestRow, ...]
    repeated: tuple[RepeatRow, ...]
    timers: tuple[TimerRow, ...]
    timer_steps: tuple[tuple[str, float, int, int, float, float], ...]  # cluster, lease s, GPUs, level, hours, leases
    waits: tuple[WaitRow, ...]
    leases: tuple[LeaseRow, ...]
    spreads: tuple[SpreadRow, ...]
    logged: tuple[LoggedRow, ...]  # empty without a trace
    findings: tuple[FindingRow, ...]


def run_study(
    *,
    folder: Path,
    seeds: int = 20,
    quick: bool = False,
    trace: Path | None = None,
    on: str = "here",
    progress: Progress = None,
) -> DallyStudy:
    """Play every cell that `folder` has not yet, and sum up.

    seeds: repetitions of the named cells. quick: a few dozens of cells. trace: a log in any format that `formats` reads
    (Philly), whose middle is played, too. on: "here" or "ray". A folder belongs to one version of the study.
    Raises ForetraceError, before anything is played, where the log cannot be read or has too few jobs.
    """
    began = time.perf_counter()
    wanted = all_cells(seeds=seeds, quick=quick, trace=trace)
    for each in wanted:
        if each["part"] == "philly":
            cells.jobs_of(each)
    said = {"study": "dally", "version": cells.VERSION}
    swept = sweep(cells.play_cell, wanted, folder=folder, of=said, on=on, progress=progress)
    return study_of(
        swept.rows, seeds=seeds, quick=quick, trace=trace, reused=swept.reused, took_s=time.perf_counter() - began
    )


def all_cells(*, seeds: int, quick: bool, trace: Path | None) -> list[dict[str, Any]]:
    """The cells of a study."""
    return [
        *cells.grid(quick=quick),
        *cells.slow_cells(quick=quick),
        *cells.repeated(min(seeds, 3) if quick else seeds, quick=quick),
        *cells.timer_cells(quick=quick),
        *cells.lease_cells(quick=quick),
        *cells.spread_cells(quick=quick),
        *(cells.philly_cells(str(trace), quick=quick) if trace is not None else ()),
    ]


def study_of(
    rows: tuple[dict[str, Any], ...],
    *,
    seeds: int,
    quick: bool = False,
    trace: Path | None = None,
    reused: int = 0,
    took_s: float = 0.0,
) -> DallyStudy:
    """All tables from what the cells found."""
    from foretrace.trace.observe.machine import machine
    from reproductions.dally import findings as dally_findings
    from reproductions.dally import sums as dally_sums

    parts: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        parts.setdefault(row["part"], []).append(row)
    grid, slow = parts.get("grid", []), parts.get("slow", [])
    runs = [run for row in rows for run in row["runs"].values()]
    study = DallyStudy(
        headline="",
        date=time.strftime("%Y-%m-%d"),
        machine=str(machine()["cpu"]),
        took_s=took_s,
        quick=quick,
        seeds=seeds,
        trace=None if trace is None else trace.name,
        cells=len(rows),
        reused=reused,
        runs=len(runs),
        capped=sum(run is None for run in runs),
        assumptions=ASSUMPTIONS,
        claims=dally_sums.claims_of(grid),
        gains=dally_sums.gains_of(grid),
        drivers=dally_sums.drivers_of(grid, slow),
        factors=dally_sums.factors_of(grid),
        best=dally_sums.best_of(grid),
        repeated=dally_sums.repeated_of([*parts.get("jitter", []), *parts.get("redraw", [])]),
        timers=dally_sums.timers_of(parts.get("tuned", [])),
        timer_steps=dally_sums.steps_of(parts.get("tuned", [])),
        waits=dally_sums.waits_of(parts.get("manual", [])),
        leases=dally_sums.leases_of(parts.get("lease", [])),
        spreads=dally_sums.spreads_of(parts.get("spread", [])),
        logged=dally_sums.logged_of(parts.get("philly", [])),
        findings=(),
    )
    found = dally_findings.findings_of(study, grid)
    return msgspec.structs.replace(study, findings=found, headline=dally_findings.headline_of(study))


ASSUMPTIONS = (
    "500 jobs made by seed from published marginals; which model, how many GPUs and how much work go together is drawn "
    "independently, and work is log-normal (the job list itself has no licence).",
    "Communication is the closed form (ring per level, all bytes at every level), not overlapped with compute, and "
    "jobs do not slow each other: congestion divides the bandwidth above the machine.",
    "A lease that ends is bid for again if somebody waits; winning the same GPUs is free, other GPUs cost 1 s per GPU. "
    "A job that is spread wider than its timer allows gives its GPUs back at the end of the lease.",
    "Only waiting jobs bid, and a timer that runs out wakes the scheduler; neither can be switched off.",
    "Inside a level the unit with the fewest free GPUs that are enough is taken (best fit).",
)
