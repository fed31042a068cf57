"""`foretrace fleet run` as an answer: how jobs continue a cluster under a policy, and the words for that.

Times are seconds, shares fractions, null what is not known or covers no job.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any

import msgspec

from foretrace.fleet import metrics, overtime, rates
from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.comparison import MeanInterval, PolicyComparison
from foretrace.fleet.result import FleetResult
from foretrace.fleet.workload import SECOND
from foretrace.report import shared
from foretrace.report.blocks import About, Block, Column, Grid, Line, listing, table, text
from foretrace.report.shared import J_PER_KWH, EnergyView
from foretrace.report.units import count, digits, level, long_range, long_time, share
from foretrace.report.views import Report, taken

TENANTS = 8  # rows
RHO_IS = "JCT / (exclusive run time x max(1, mean GPUs asked for by active jobs during its life / GPUs))"


class CdfView(msgspec.Struct, frozen=True, kw_only=True):
    """Share of the finished jobs that took up to so long."""

    jct_s: tuple[float, ...]
    share: tuple[float, ...]


class FleetRunView(Report, frozen=True, kw_only=True):
    """`foretrace fleet run`: how a workload continues a cluster under a policy.

    JCT, queue and rho figures cover the finished jobs; those that are not are counted and named.
    """

    command: str = "fleet run"
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
    causes: tuple[metrics.Waiting, ...]
    mean_rho: float | None
    p99_rho: float | None
    worst_rho: float | None
    rho_is: str
    communication: metrics.Communication
    lost: metrics.Lost
    usd_used: float | None
    usd_all: float | None
    kwh: float | None
    energy: EnergyView | None  # the same in joules, with its range; null where no power is known
    bills: tuple[rates.Bill, ...]
    tenants: tuple[metrics.Tenant, ...]
    slots: tuple[overtime.Slots, ...]
    over_time: overtime.OverTime
    jct_cdf: CdfView
    intervals: dict[str, MeanInterval]  # by the figure's name; empty after one run
    interval_level: float
    repetitions: int
    repeated_how: str
    facts: dict[str, str]  # what only this simulator knows

    def shown(self, top: int) -> Iterator[Block]:
        yield about(self)
        yield _figures(self)
        if self.repetitions > 1:
            runs = f"{count(self.repetitions)} runs: {self.repeated_how}"
            yield f"{level(self.interval_level)} intervals from {runs}"
        yield causes_table(self.causes)
        yield from _also(self)
        yield slots_table(self.slots)
        if len(self.tenants) > 1:
            yield _tenants(self.tenants)
        if self.repetitions == 1:
            unknown = "one run has no interval: moving submissions by a minute moves a makespan by some per cent"
            yield Line(self.facts.get("range", unknown), soft=True)


def run(
    result: FleetResult,
    cluster: ClusterTree,
    *,
    path: str = "",
    only: overtime.Only = None,
    repeated: PolicyComparison | None = None,
    next_: str = "",
    grid: float | None = None,
) -> FleetRunView:
    """Return the answer to one simulation; `repeated` adds intervals from more runs of the same policy.

    `only` restricts what is said of jobs; free slots and curves over time are of all. `grid`: grams of CO2 per kWh.
    """
    found = metrics.measure(result, cluster, only)
    notes = _notes(result, found)
    slots: tuple[overtime.Slots, ...] = ()
    if result.segments is None or (len(result.segments) and not len(result.segments.devices)):
        notes.append("which GPUs jobs held was not recorded, so free slots are not known; record devices for them.")
    else:
        slots = overtime.slots(result, cluster)
    intervals = _intervals(result.policy, repeated)
    mine = intervals.get("mean_jct_s")
    if mine and mine.low is not None and mine.high is not None and not mine.low <= found.jct_s.mean <= mine.high:
        notes.append(
            f"this run's mean completion of {long_time(found.jct_s.mean)} lies outside the interval of the repeated "
            f"runs, {long_range(mine.low, mine.high)}: judge by those, it is one draw."
        )
    curve = metrics.cdf(result.jct_s[overtime.chosen(result, only)])
    return taken(
        FleetRunView, found, found.coverage, result, headline=headline(found, result.gpus),
        source=path or result.workload.origin.path or result.workload.name,
        unfinished_jobs={word: names for word, names in found.coverage.names.items() if names},
        **_spread("jct", found.jct_s), longest_jct_s=found.jct_s.longest,
        **_spread("queue", found.queueing.of_finished), total_queue_s=found.queueing.total_s,
        causes=found.queueing.causes, mean_rho=found.rho.mean, p99_rho=found.rho.p99, worst_rho=found.rho.longest,
        rho_is=RHO_IS, usd_used=found.total("usd_used"), usd_all=found.total("usd_all"), kwh=found.total("kwh"),
        energy=_energy(found, grid), slots=slots, over_time=overtime.over_time(result),
        jct_cdf=CdfView(jct_s=tuple(curve[0].tolist()), share=tuple(curve[1].tolist())), intervals=intervals,
        interval_level=repeated.level if repeated else 0.0, repetitions=repeated.repetitions if repeated else 1,
        repeated_how=repeated.how if repeated else "",
        facts={key: str(value) for key, value in result.facts.items() if isinstance(value, str | int | float | bool)},
        notes=tuple(notes), next=next_,
    )  # fmt: skip


def _spread(word: str, found: metrics.Spread) -> dict[str, float]:
    return {f"{name}_{word}_s": getattr(found, name) for name in ("mean", "p50", "p90", "p99")}


def headline(found: metrics.Metrics, gpus: int) -> str:
    """Return text such as "Jobs take 12.4 h on average, 41 % of it waiting; 78 % of 512 GPUs are in use."."""
    cover, jct, queue = found.coverage, found.jct_s, found.queueing
    if not cover.finished:
        return f"None of the {count(cover.jobs)} jobs finishes{_unfinished(cover)}."
    waits = queue.of_finished.mean / jct.mean if jct.mean > 0 else 0.0
    used = f"{share(found.utilisation)} of {count(gpus)} GPUs are in use"
    first = f"Jobs take {long_time(jct.mean)} on average"
    if waits < 0.01:
        first += " and hardly wait"
    else:
        first += f", {share(waits)} of it waiting"
        most = queue.causes[0] if queue.causes else None
        if most and most.cause != "unexplained" and most.wait_s > queue.unexplained_s:
            first += f", {'mostly' if most.share > 0.5 else 'most often'} because {most.why}"
    return f"{first}; {used}{_unfinished(cover)}."


def _unfinished(cover: metrics.Coverage) -> str:
    parts = []
    if cover.never:
        parts.append(f"{count(cover.never)} can never run here")
    if cover.running + cover.waiting:
        parts.append(f"{count(cover.running + cover.waiting)} are not finished")
    return f"; {' and '.join(parts)}" if parts else ""


def _notes(result: FleetResult, found: metrics.Metrics) -> list[str]:
    notes = []
    cover = found.coverage
    if cover.finished < cover.jobs:
        notes.append(
            f"means of completion, waiting and fairness cover the {count(cover.finished)} of {count(cover.jobs)} jobs "
            "that finished; with the others counted up to the end, jobs take at least "
            f"{long_time(found.mean_jct_at_least_s)} on average."
        )
    for word, what in (("never", "the cluster can never hold"), ("waiting", "still wait"), ("running", "still run")):
        names = cover.names[word]
        if names:
            more = getattr(cover, word) - len(names)
            others = f" and {count(more)} more" if more else ""
            notes.append(f"{what}: {', '.join(names)}{others}.")
    if found.rho.covers < cover.finished:
        notes.append(
            f"fairness covers {count(found.rho.covers)} jobs; the exclusive run time of the others is not known."
        )
    unpriced = [bill.gpu_type or "GPUs of no stated kind" for bill in found.bills if bill.usd_per_gpu_h is None]
    if unpriced:
        notes.append(f"no price is known for {', '.join(unpriced)}, so no cost is given.")
    for bill in found.bills:
        if bill.power_from:
            notes.append(f"assumed: {bill.power_from}.")
        if bill.price_from:
            notes.append(f"price of {bill.gpu_type}: {bill.price_from}.")
    if result.stopped_ns is not None:
        notes.append(f"the simulation was stopped {long_time(result.stopped_ns / SECOND)} after its zero.")
    return notes


def _intervals(policy: str, repeated: PolicyComparison | None) -> dict[str, MeanInterval]:
    found = {name: each.estimates.get(policy) for name, each in repeated.figures.items()} if repeated else {}
    return {name: each for name, each in found.items() if each and isfinite(each.mean) and each.low is not None}


def _energy(found: metrics.Metrics, grid: float | None) -> EnergyView | None:
    kwh, low, high = (found.total(each) for each in ("kwh", "kwh_low", "kwh_high"))
    if kwh is None or low is None or high is None:
        return None
    source = "; ".join(dict.fromkeys(bill.power_from for bill in found.bills))
    return shared.joules(J_PER_KWH * kwh, (J_PER_KWH * low, J_PER_KWH * high), source, grid)


def energy(kwh: float) -> str:
    """Return text such as "0.410 kWh", "6,459 kWh", "370 MWh"."""
    return f"{digits(kwh / 1000)} MWh" if kwh >= 99_950 else f"{_amount(kwh)} kWh"


def _amount(value: float) -> str:
    """Return a large number whole, a small one in three digits."""
    return f"{value:,.0f}" if value >= 999.5 else digits(value)


def energy_text(view: FleetRunView) -> str:
    """Return text such as "GPUs alone 370 MWh (120 MWh – 380 MWh)", with CO2 where a grid was stated."""
    return f"GPUs alone {view.energy.words(lambda found: energy(found / J_PER_KWH))}" if view.energy else ""


def interval_text(low: float | None, high: float | None, kind: str = "long") -> str:
    """Return text such as "12.1 – 12.9 h" or "45.1 – 45.9 %"; "" where it is not known."""
    if low is None or high is None:
        return ""
    return f"{digits(100 * low)} – {share(high)}" if kind == "share" else long_range(low, high)


def about(view: Any) -> About:
    """Return what a result says was simulated, in a few words each."""
    jobs = getattr(view, "jobs", None)
    parts = (
        view.source, f"{count(jobs)} jobs" if jobs is not None else "", f"{view.cluster}, {count(view.gpus)} GPUs",
        getattr(view, "policy", ""),
    )  # fmt: skip
    return About(tuple(filter(None, parts)))


def _figures(view: FleetRunView) -> Grid:
    """Return completion, waiting, makespan and use; with the intervals of their means where there are some."""

    def row(word: str, name: str, kind: str = "long", *, spread: bool = False) -> tuple[str, ...]:
        names = [name, *(name.replace("mean", each) for each in ("p50", "p90", "p99") if spread)]
        texts = [text(getattr(view, each), kind) for each in names]
        found = view.intervals.get(name)
        between = [interval_text(found.low, found.high, kind) if found else ""] if view.intervals else []
        return (word, *texts, *[""] * (4 - len(texts)), *between)

    rows = [
        row("completion", "mean_jct_s", spread=True),
        row("waiting", "mean_queue_s", spread=True),
        row("makespan", "makespan_s"),
        row("GPUs in use", "utilisation", "share"),
    ]
    if view.useful_utilisation is not None and view.lost.gpu_h:
        rows.append(row("without lost time", "useful_utilisation", "share"))
    columns: list[Column | str] = ["", *(Column(title, right=True) for title in ("mean", "p50", "p90", "p99"))]
    return table([*columns, *(["interval of the mean"] if view.intervals else [])], rows)


def _also(view: FleetRunView) -> Iterator[Block]:
    """Yield communication, fairness, losses, cost and energy, a line each."""
    comm, lost = view.communication, view.lost
    if comm.total_s:
        wide = ""
        if comm.above_machine_s is not None:
            wide = f", {long_time(comm.above_machine_s)} of it between machines"
            if comm.above_machine_low_s != comm.above_machine_high_s:
                wide += f" ({interval_text(comm.above_machine_low_s, comm.above_machine_high_s)})"
        total = f"{long_time(comm.total_s)} over all jobs{wide}"
        yield Line(f"{total}; {share(comm.share_of_running)} of the running time", label="communication")
    if view.mean_rho is not None:
        worst = f"p99 {digits(view.p99_rho or 0)}, worst {digits(view.worst_rho or 0)}"
        yield Line(f"rho {digits(view.mean_rho)} on average, {worst}; 1 or less is a fair share", label="fairness")
    if lost.gpu_h:
        times = f"({count(lost.preemptions)} preemptions, {count(lost.failures)} failures)"
        yield Line(f"{digits(lost.gpu_h)} GPU-hours without progress {times}", label="lost")
    if view.usd_all is not None and view.usd_used is not None:
        yield Line(
            f"${_amount(view.usd_used)} for what jobs held, ${_amount(view.usd_all)} for all GPUs all the time",
            label="cost",
        )
    if view.kwh is not None:
        yield Line(energy_text(view), label="energy")


def causes_table(causes: Sequence[metrics.Waiting]) -> Grid:
    """Return what jobs wait for, most of it first."""
    why = Column("waits because", wide=True)
    return listing(causes, ("why", why), ("wait_s", "of all jobs", "long"), ("share", "share", "share"))


def slots_table(slots: Sequence[overtime.Slots], *, scattered: bool = False) -> Grid:
    """Return room for jobs by size and level; with `scattered`, also the share of it that scattering costs."""
    return listing(
        slots, (slot_name, "free slots"), ("free_now", "now", "count"), ("mean_free", "on average", "digits"),
        ("mean_together", "if together", "digits"),
        *([("scattered", "lost to scattering", "share")] if scattered else []),
        ("capacity", Column("empty cluster", "count", extra=True)),
    )  # fmt: skip


def slot_name(each: overtime.Slots) -> str:
    """Return text such as "8 GPUs inside a node"."""
    return f"{each.slot_gpus} GPUs inside a {each.level}"


def _tenants(tenants: Sequence[metrics.Tenant]) -> Grid:
    return listing(
        tenants, "tenant", ("jobs", "jobs", "count"), ("gpu_share", Column("GPU time", "share", extra=True)),
        ("mean_jct_s", "mean JCT", "long"), ("p99_jct_s", "p99", "long"), ("mean_queue_s", "mean wait", "long"),
        ("mean_rho", "rho", "digits"), top=TENANTS,
    )  # fmt: skip
