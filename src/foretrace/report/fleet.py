"""What the questions about a simulated fleet are answered with: from results to views, and the sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite

import numpy as np

from foretrace.fleet import metrics, overtime
from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.comparison import PolicyComparison
from foretrace.fleet.rates import Bill, Power
from foretrace.fleet.result import Cause, FleetResult
from foretrace.fleet.workload import SECOND, Float64
from foretrace.report.blocks import About, Block, Column, Grid, Headline, Line, notes, shown, table
from foretrace.report.fleet_views import (
    BillView,
    CauseView,
    CdfView,
    FleetCommunicationView,
    FleetRunView,
    FleetSeriesView,
    IntervalView,
    LostView,
    SlotsView,
    TenantView,
)
from foretrace.report.units import count, digits, seconds, share
from foretrace.report.views import taken

RHO_IS = "JCT / (exclusive run time x max(1, mean GPUs asked for by active jobs during its life / GPUs))"
BINS = 200
SHOWN_TENANTS = 8
WHY = {
    Cause.UNDECIDED: "the policy has not looked at them yet",
    Cause.BEHIND: "a job that is served first does not fit, and nobody may pass it",
    Cause.FULL: "fewer GPUs are free than they ask for",
    Cause.SCATTERED: "enough GPUs are free, but not together",
    Cause.TIMER: "the free GPUs are scattered, and a delay timer runs",
    Cause.QUOTA: "their tenant holds all that it may",
    Cause.TYPE: "the kind of GPU that they need is not free",
    Cause.RESERVED: "they would delay a job that holds a reservation",
    Cause.OUTRANKED: "others have a better claim to the GPUs",
    Cause.ROUND: "they fit, but the next round has to come",
}
UNEXPLAINED = "the simulator recorded no reason"
_UNITS = (("d", 86400.0, 259_200.0), ("h", 3600.0, 7200.0), ("min", 60.0, 120.0))  # name, seconds, used from


def long_time(value_s: float | None) -> str:
    """A time up to years: "58.1 s", "45.0 min", "12.4 h", "9.20 d"; "–" where it is not known."""
    if value_s is None or not isfinite(value_s):
        return "–"
    for name, size, first in _UNITS:
        if abs(value_s) >= first:
            return f"{digits(value_s / size)} {name}"
    return seconds(value_s)


def long_range(low_s: float, high_s: float) -> str:
    """As in "12.1 – 12.9 h", in the unit of the larger."""
    unit, size = next(((name, size) for name, size, first in _UNITS if abs(high_s) >= first), ("s", 1.0))
    return f"{digits(low_s / size)} – {digits(high_s / size)} {unit}"


def energy(kwh: float) -> str:
    """As in "6,459 kWh", "370 MWh"."""
    return f"{digits(kwh / 1000)} MWh" if kwh >= 99_950 else f"{kwh:,.0f} kWh"


def level_text(level: float) -> str:
    """As in "95 %"."""
    return f"{100 * level:.3g} %"


def known(value: float) -> float | None:
    """None for nan."""
    return value if isfinite(value) else None


# --- one run --------------------------------------------------------------------------------------------------------


def run(
    result: FleetResult,
    cluster: ClusterTree,
    *,
    path: str = "",
    only: overtime.Only = None,
    prices: Mapping[str, float] | None = None,
    power: Mapping[str, Power] | None = None,
    sizes: Sequence[int] | None = None,
    levels: Sequence[str] | None = None,
    repeated: PolicyComparison | None = None,
    next_: str = "",
) -> FleetRunView:
    """The answer to one simulation; `repeated` adds intervals from more runs of the same policy.

    `only` restricts what is said of jobs; free slots and curves over time are of all.
    """
    found = metrics.measure(result, cluster, only, prices=prices, power=power)
    notes = _notes(result, found)
    slots: tuple[overtime.Slots, ...] = ()
    if result.segments is None or (len(result.segments) and not len(result.segments.devices)):
        notes.append("which GPUs jobs held was not recorded, so free slots are not known; record devices for them.")
    else:
        slots = overtime.slots(result, cluster, sizes, levels, edges=overtime.bins(result, BINS))
    series = _series(result)
    intervals, repetitions, how, level = _intervals(result, repeated)
    mine = intervals.get("mean_jct_s")
    if mine and mine.low is not None and mine.high is not None and not mine.low <= found.jct_s.mean <= mine.high:
        notes.append(
            f"this run's mean completion of {long_time(found.jct_s.mean)} lies outside the interval of the repeated "
            f"runs, {long_range(mine.low, mine.high)}: judge by those, it is one draw."
        )
    jct, queue, rho = found.jct_s, found.queueing.of_finished, found.rho
    cover = found.coverage
    curve = metrics.cdf(result.jct_s[overtime.chosen(result, only)])
    return FleetRunView(
        headline=headline(found, result.gpus),
        source=path or result.workload.origin.path or result.workload.name,
        policy=result.policy,
        cluster=result.cluster,
        gpus=result.gpus,
        jobs=cover.jobs,
        finished=cover.finished,
        running=cover.running,
        waiting=cover.waiting,
        never=cover.never,
        unfinished_jobs={word: names for word, names in cover.names.items() if names},
        mean_jct_s=known(jct.mean),
        p50_jct_s=known(jct.p50),
        p90_jct_s=known(jct.p90),
        p99_jct_s=known(jct.p99),
        longest_jct_s=known(jct.longest),
        mean_jct_at_least_s=known(found.mean_jct_at_least_s),
        makespan_s=known(found.makespan_s),
        mean_queue_s=known(queue.mean),
        p50_queue_s=known(queue.p50),
        p90_queue_s=known(queue.p90),
        p99_queue_s=known(queue.p99),
        total_queue_s=found.queueing.total_s,
        utilisation=known(found.utilisation),
        useful_utilisation=known(found.useful_utilisation),
        causes=_causes(found.queueing),
        mean_rho=known(rho.mean),
        p99_rho=known(rho.p99),
        worst_rho=known(rho.longest),
        rho_is=RHO_IS,
        communication=_communication(found.communication),
        lost=taken(LostView, found.lost),
        usd_used=found.total("usd"),
        usd_all=found.total("usd_all"),
        kwh=found.total("kwh"),
        bills=tuple(_bill(each) for each in found.bills),
        tenants=tuple(_tenant(each) for each in found.tenants),
        slots=tuple(slots_view(each) for each in slots),
        over_time=series,
        jct_cdf=CdfView(jct_s=tuple(curve[0].tolist()), share=tuple(curve[1].tolist())),
        intervals=intervals,
        interval_level=level,
        repetitions=repetitions,
        repeated_how=how,
        facts={key: str(value) for key, value in result.facts.items() if isinstance(value, str | int | float | bool)},
        notes=tuple(notes),
        next=next_,
    )  # fmt: skip


def headline(found: metrics.Metrics, gpus: int) -> str:
    """As in "Jobs take 12.4 h on average, 41 % of it waiting, mostly because fewer GPUs are free than they ask for;
    78 % of 512 GPUs are in use.".
    """
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
        reasons = sorted(queue.by_cause.items(), key=lambda each: -each[1])
        if reasons and reasons[0][1] > queue.unexplained_s:
            most = reasons[0][1] / queue.total_s if queue.total_s else 0.0
            first += f", {'mostly' if most > 0.5 else 'most often'} because {WHY[reasons[0][0]]}"
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
    unpriced = [bill.kind or "GPUs of no stated kind" for bill in found.bills if bill.price is None]
    if unpriced:
        notes.append(f"no price is known for {', '.join(unpriced)}, so no cost is given; state one per GPU and hour.")
    for bill in found.bills:
        if bill.power and bill.power.source != "given":
            notes.append(f"assumed: {bill.power.source}.")
        if bill.price and bill.price.source != "given":
            notes.append(f"price of {bill.kind}: {bill.price.source}.")
    if result.stopped_ns is not None:
        notes.append(f"the simulation was stopped {long_time(result.stopped_ns / SECOND)} after its zero.")
    return notes


def _causes(queue: metrics.Queueing) -> tuple[CauseView, ...]:
    whole = queue.total_s or 1.0
    rows = [
        CauseView(cause=cause.name.lower(), wait_s=value, share=value / whole, why=WHY[cause])
        for cause, value in sorted(queue.by_cause.items(), key=lambda each: (-each[1], each[0]))
    ]
    if queue.unexplained_s > 1e-6 * whole:
        rest = queue.unexplained_s
        rows.append(CauseView(cause="unexplained", wait_s=rest, share=rest / whole, why=UNEXPLAINED))
    return tuple(rows)


def _communication(each: metrics.Communication) -> FleetCommunicationView:
    low, high = each.above_range_s or (None, None)
    return FleetCommunicationView(
        total_s=each.total_s, above_machine_s=each.above_s, above_machine_low_s=low, above_machine_high_s=high,
        share_of_running=each.share, gpu_h=each.gpu_h,
    )  # fmt: skip


def _bill(each: Bill) -> BillView:
    price, power = each.price, each.power
    return taken(
        BillView,
        each,
        gpu_type=each.kind,
        usd_per_gpu_h=price.usd_per_h if price else None,
        price_from=price.source if price else "",
        usd_used=each.usd,
        busy_w=power.busy_w if power else None,
        idle_w=power.idle_w if power else None,
        power_from=power.source if power else "",
    )


def _tenant(each: metrics.Tenant) -> TenantView:
    optional = ("mean_jct_s", "p50_jct_s", "p90_jct_s", "p99_jct_s", "mean_queue_s", "mean_rho")
    return taken(TenantView, each, tenant=each.name, **{name: known(getattr(each, name)) for name in optional})


def slots_view(each: overtime.Slots) -> SlotsView:
    width = np.diff(each.edges_ns)
    return SlotsView(
        slot_gpus=each.size, level=each.level, capacity=each.capacity, free_now=each.now,
        together_now=each.now_together, mean_free=float(np.average(each.free, weights=width)),
        mean_together=float(np.average(each.together, weights=width)), scattered=each.scattered,
        free=short(each.free), together=short(each.together),
    )  # fmt: skip


def _series(result: FleetResult) -> FleetSeriesView:
    edges = overtime.bins(result, BINS)
    used = overtime.utilisation_over_time(result, edges)
    causes = overtime.waiting_by_cause(result, edges)
    return FleetSeriesView(
        edges_s=tuple((edges * 1e-9).round(3).tolist()),
        utilisation=short(used.values),
        waiting_jobs=short(overtime.waiting_over_time(result, edges).values),
        waiting_gpus=short(overtime.waiting_over_time(result, edges, gpus=True).values),
        waiting_by_cause={cause.name.lower(): short(each.values) for cause, each in causes.items()},
        exact=used.exact,
    )


def short(values: Float64) -> tuple[float, ...]:
    return tuple(float(f"{value:.5g}") for value in values.tolist())


def _intervals(
    result: FleetResult, repeated: PolicyComparison | None
) -> tuple[dict[str, IntervalView], int, str, float]:
    if repeated is None:
        return {}, 1, "", 0.0
    mine = {
        name: figure.estimates[result.policy]
        for name, figure in repeated.figures.items()
        if result.policy in figure.estimates
    }
    views = {
        name: IntervalView(mean=each.mean, low=each.low, high=each.high)
        for name, each in mine.items()
        if isfinite(each.mean) and each.low is not None
    }
    return views, repeated.repetitions, repeated.how, repeated.level


# --- blocks ---------------------------------------------------------------------------------------------------------


def figure_text(value: float | None, kind: str) -> str:
    """A figure of a table."""
    if value is None:
        return "–"
    return share(value) if kind == "share" else long_time(value)


def facts(view: FleetRunView) -> list[str]:
    """What was simulated, in a few words each."""
    named = (view.source, f"{count(view.jobs)} jobs", f"{view.cluster}, {count(view.gpus)} GPUs", view.policy)
    return [each for each in named if each]


@shown.register
def _(view: FleetRunView, top: int) -> Iterator[Block]:
    yield About(tuple(facts(view)))
    yield ""
    yield Headline(view.headline)
    yield ""
    yield _figures(view)
    if view.repetitions > 1:
        yield f"{level_text(view.interval_level)} intervals from {count(view.repetitions)} runs: {view.repeated_how}"
    if view.causes:
        yield ""
        yield table(
            [Column("waits because", wide=True), Column("of all jobs", right=True), Column("share", "share")],
            [(cause.why, long_time(cause.wait_s), cause.share) for cause in view.causes],
        )
    yield from _remarks(view)
    if view.slots:
        yield ""
        yield slot_table(view.slots)
    if len(view.tenants) > 1:
        yield ""
        titles = ("mean JCT", "p99", "mean wait")
        yield table(
            [
                "tenant", Column("jobs", "count"), Column("GPU time", "share"),
                *(Column(title, right=True) for title in titles), Column("rho", "digits"),
            ],
            [
                (each.tenant[:20], each.jobs, each.gpu_share, long_time(each.mean_jct_s), long_time(each.p99_jct_s),
                 long_time(each.mean_queue_s), each.mean_rho)
                for each in view.tenants
            ],
            top=SHOWN_TENANTS,
        )  # fmt: skip
    yield ""
    yield from notes(view.notes)
    if view.repetitions == 1:
        unknown = "one run has no interval: moving submissions by a minute moves a makespan by some per cent"
        yield Line(view.facts.get("range", unknown), soft=True)


def _figures(view: FleetRunView) -> Grid:
    completion = (view.mean_jct_s, view.p50_jct_s, view.p90_jct_s, view.p99_jct_s)
    waiting = (view.mean_queue_s, view.p50_queue_s, view.p90_queue_s, view.p99_queue_s)
    used = figure_text(view.utilisation, "share")
    lost = view.useful_utilisation is not None and view.lost.gpu_h
    also = f"{share(view.useful_utilisation or 0.0)} without lost time" if lost else ""
    rows = [
        ("completion", *map(long_time, completion), _interval(view, "mean_jct_s")),
        ("waiting", *map(long_time, waiting), _interval(view, "mean_queue_s")),
        ("makespan", long_time(view.makespan_s), "", "", "", _interval(view, "makespan_s")),
        ("GPUs in use", used, "", "", "", _interval(view, "utilisation") or also),
    ]
    last = Column("interval of the mean" if view.intervals else "")
    return table(["", *(Column(word, right=True) for word in ("mean", "p50", "p90", "p99")), last], rows)


def _remarks(view: FleetRunView) -> Iterator[Block]:
    """What else is known: communication, fairness, lost time, money, energy."""
    comm, lost = view.communication, view.lost
    if comm.total_s:
        wide = ""
        if comm.above_machine_s is not None:
            wide = f", {long_time(comm.above_machine_s)} of it between machines"
            if comm.above_machine_low_s != comm.above_machine_high_s:
                wide += f" ({long_range(comm.above_machine_low_s or 0, comm.above_machine_high_s or 0)})"
        yield ""
        running = f"{share(comm.share_of_running)} of the running time"
        yield Line(f"{long_time(comm.total_s)} over all jobs{wide}; {running}", label="communication")
    if view.mean_rho is not None:
        worst = f"p99 {digits(view.p99_rho or 0)}, worst {digits(view.worst_rho or 0)}"
        yield Line(f"rho {digits(view.mean_rho)} on average, {worst}; 1 or less is a fair share", label="fairness")
    if lost.gpu_h:
        why = f"{count(lost.preemptions)} preemptions, {count(lost.failures)} failures"
        yield Line(f"{digits(lost.gpu_h)} GPU-hours without progress ({why})", label="lost")
    if view.usd_all is not None and view.usd_used is not None:
        held = f"${view.usd_used:,.0f} for what jobs held"
        yield Line(f"{held}, ${view.usd_all:,.0f} for all GPUs all the time", label="cost")
    if view.kwh is not None:
        yield Line(f"{energy(view.kwh)}, GPUs alone", label="energy")


def _interval(view: FleetRunView, name: str) -> str:
    found = view.intervals.get(name)
    if found is None or found.low is None or found.high is None:
        return ""
    if name == "utilisation":
        return f"{digits(100 * found.low)} – {share(found.high)}"
    return long_range(found.low, found.high)


def slot_table(slots: tuple[SlotsView, ...]) -> Grid:
    """Room for jobs by size."""
    return table(
        [
            "free slots", Column("now", "count"), Column("on average", "digits"), Column("if together", "digits"),
            Column("empty cluster", "count"),
        ],
        [
            (f"{each.slot_gpus} GPUs inside a {each.level}", each.free_now, each.mean_free, each.mean_together,
             each.capacity)
            for each in slots
        ],
    )  # fmt: skip
