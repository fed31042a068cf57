"""What the other questions about fleets are answered with: policies side by side, free slots, generators."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from math import isfinite

from foretrace.errors import ForetraceError
from foretrace.fleet import overtime
from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.comparison import PolicyComparison
from foretrace.fleet.result import FleetResult
from foretrace.fleet.synthetic import Generator
from foretrace.fleet.workload import FARTHEST_S, SECOND
from foretrace.report.blocks import About, Block, Column, Headline, Line, shown, table
from foretrace.report.blocks import notes as remarks
from foretrace.report.fleet import BINS, figure_text, known, level_text, long_range, long_time, slot_table, slots_view
from foretrace.report.fleet_views import (
    BestView,
    FleetCompareView,
    FleetFitView,
    FleetSlotsView,
    PolicyFigureView,
    PolicyRowView,
)
from foretrace.report.units import count, digits, share


def compare(
    found: PolicyComparison, *, path: str, cluster: str, gpus: int, jobs: int, next_: str = ""
) -> FleetCompareView:
    """The answer to a comparison of policies."""
    rows = []
    for policy in found.policies:
        figures = {}
        for name, figure in found.figures.items():
            mean, against = figure.estimates[policy], figure.against_baseline.get(policy)
            figures[name] = PolicyFigureView(
                mean=known(mean.mean),
                low=mean.low,
                high=mean.high,
                ratio=known(against.ratio) if against else 1.0,
                ratio_low=against.low if against else 1.0,
                ratio_high=against.high if against else 1.0,
                verdict=against.verdict if against else "baseline",
            )
        rows.append(PolicyRowView(policy=policy, figures=figures))
    notes = []
    if found.repetitions == 1:
        notes.append("one run of each policy: nothing tells a difference from noise; repeat with --seeds 20.")
    elif len(found.policies) > 2:
        notes.append(
            f"each interval holds at {level_text(found.level)} for itself; of many, some miss their ratio by chance."
        )
    return FleetCompareView(
        headline=_compare_headline(found),
        source=path,
        cluster=cluster,
        gpus=gpus,
        jobs=jobs,
        baseline=found.baseline,
        repetitions=found.repetitions,
        repeated_how=found.how,
        interval_level=found.level,
        policies=tuple(rows),
        best=tuple(BestView(figure=each.name, best=each.best, tied=each.tied) for each in found.figures.values()),
        notes=tuple(notes),
        next=next_,
    )


def _compare_headline(found: PolicyComparison) -> str:
    figure = found.figures["mean_jct_s"]
    best, mean = figure.best, figure.estimates[figure.best]
    if len(found.policies) == 1:
        return f"Under {best}, jobs take {long_time(mean.mean)} on average."
    base = figure.estimates[found.baseline].mean
    if not isfinite(mean.mean) or not isfinite(base):
        return "No job finishes under some policies, so their completion times cannot be compared."
    if best == found.baseline:
        rivals = [policy for policy in found.policies if policy not in (best, *figure.tied)]
        tail = f" and {len(rivals)} of {len(found.policies) - 1} others are worse" if found.repetitions > 1 else ""
        noise = f"; {_join(figure.tied)} differs within noise" if figure.tied and found.repetitions > 1 else ""
        return f"{best}, the baseline, has the shortest mean completion time, {long_time(mean.mean)}{tail}{noise}."
    each = figure.against_baseline[best]
    gain = f"{digits(1 / each.ratio)}× faster" if each.ratio < 0.98 else f"{share(1 - each.ratio)} faster"
    between = ""
    if each.low is not None and each.high is not None and each.low > 0:
        between = f" ({digits(1 / each.high)} – {digits(1 / each.low)}×)"
    text = (
        f"Under {best}, jobs complete {gain}{between} than under {found.baseline}: "
        f"{long_time(base)} → {long_time(mean.mean)} on average"
    )
    if each.verdict == "within noise":
        return f"{text}, which is within noise."
    if each.verdict == "unknown":
        return f"{text}; one run cannot tell that from noise."
    return f"{text}{f'; {_join(figure.tied)} within noise of it' if figure.tied else ''}."


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


# --- free slots, generators -----------------------------------------------------------------------------------------


def slots(
    result: FleetResult,
    cluster: ClusterTree,
    *,
    sizes: Sequence[int] | None = None,
    levels: Sequence[str] | None = None,
    at_s: float | None = None,
    path: str = "",
    next_: str = "",
) -> FleetSlotsView:
    """How many jobs of each size would fit, at one instant (the end where None) and over time."""
    edges = overtime.bins(result, BINS)
    if at_s is not None and not 0 <= at_s <= FARTHEST_S:
        raise ForetraceError(f"--at {at_s:g} is no time of the log; give seconds from 0 up.")
    at = None if at_s is None else round(at_s * SECOND)
    found = overtime.slots(result, cluster, sizes, levels, edges=edges, at_ns=at)
    one = overtime.slots(result, cluster, [1], [cluster.levels[-1]], edges=edges, at_ns=at)[0]
    end = overtime.horizon_ns(result) if at is None else at
    largest = max(found, key=lambda each: each.size, default=one)  # of equals the innermost level
    return FleetSlotsView(
        headline=(
            f"At {long_time(end / SECOND)}, {count(one.now)} of {count(cluster.gpus)} GPUs are free, in which "
            f"{count(largest.now)} jobs of {largest.size} GPUs find room inside a {largest.level}; "
            f"if the same GPUs lay together it were {count(largest.now_together)}."
        ),
        source=path,
        policy=result.policy,
        cluster=result.cluster,
        gpus=cluster.gpus,
        at_s=end / SECOND,
        free_gpus=one.now,
        edges_s=tuple((edges * 1e-9).round(3).tolist()),
        slots=tuple(slots_view(each) for each in found),
        notes=(),
        next=next_,
    )


def fit(made: Generator, *, path: str, stored: str) -> FleetFitView:
    """What a generator was fitted to."""
    strata = [each for tenant in made.tenants for each in tenant.strata]
    jobs = sum(each.jobs for each in strata)
    swept = sum(size * many for each in strata for size, many in zip(each.sizes, each.counts, strict=True) if size > 1)
    notes = []
    if made.left_out:
        notes.append(f"{count(made.left_out)} jobs without a known duration were left out.")
    if made.profile_of != "week":
        notes.append(
            "the log is shorter than two weeks, so no rhythm of the week was learnt."
            if made.profile_of == "day"
            else "the log is shorter than two days, so jobs come at any hour alike."
        )
    return FleetFitView(
        headline=(
            f"{count(jobs)} jobs in {long_time(made.span_s)}, {digits(made.jobs_per_day)} a day from "
            f"{len(made.tenants)} tenant{'s' if len(made.tenants) > 1 else ''}, {share(swept / jobs)} of them in "
            "sweeps: jobs like these can now be generated."
        ),
        source=path,
        jobs=made.jobs,
        left_out=made.left_out,
        days=made.span_s / 86400,
        jobs_per_day=made.jobs_per_day,
        tenants=len(made.tenants),
        kinds=len(made.kinds),
        strata=len(strata),
        profile_of=made.profile_of,
        in_sweeps=swept / jobs,
        stored=stored,
        notes=tuple(notes),
        next=f"foretrace fleet generate {shlex.quote(stored)} --days 30 --load 1.2 --out generated.csv"
        if stored
        else "",
    )


# --- blocks ---------------------------------------------------------------------------------------------------------

COLUMNS = (
    ("mean JCT", "mean_jct_s", "time"),
    ("p50", "p50_jct_s", "time"),
    ("p99", "p99_jct_s", "time"),
    ("mean wait", "mean_queue_s", "time"),
    ("makespan", "makespan_s", "time"),
    ("used", "utilisation", "share"),
)
VERDICT = {"within noise": "within noise", "same": "the same in every run", "unknown": "noise unknown"}


@shown.register
def _(view: FleetCompareView, top: int) -> Iterator[Block]:
    yield About((view.source, f"{count(view.jobs)} jobs", f"{view.cluster}, {count(view.gpus)} GPUs"))
    yield ""
    yield Headline(view.headline)
    yield ""
    yield table(
        ["policy", *(Column(title, right=True) for title, _, _ in COLUMNS), f"mean JCT against {view.baseline}"],
        [
            (
                row.policy, *(figure_text(row.figures[name].mean, kind) for _, name, kind in COLUMNS),
                against(row.figures["mean_jct_s"]),
            )
            for row in view.policies
        ],
    )  # fmt: skip
    if view.repetitions > 1:
        yield ""
        known = [(row.policy, row.figures["mean_jct_s"]) for row in view.policies]
        yield table(
            ["mean JCT", Column(f"{level_text(view.interval_level)} interval", right=True)],
            [
                (name, long_range(each.low, each.high))
                for name, each in known
                if each.low is not None and each.high is not None
            ],
        )
        yield f"from {count(view.repetitions)} runs of each: {view.repeated_how}"
    yield from remarks(view.notes)


def against(each: PolicyFigureView) -> str:
    """As in "0.61× (0.58 – 0.64)", "1.01× (0.98 – 1.04), within noise"."""
    if each.verdict == "baseline":
        return "baseline"
    if each.ratio is None:
        return "not known"
    text = f"{digits(each.ratio)}×"
    if each.ratio_low is not None and each.ratio_high is not None and each.verdict != "same":
        text += f" ({digits(each.ratio_low)} – {digits(each.ratio_high)})"
    return f"{text}, {VERDICT[each.verdict]}" if each.verdict in VERDICT else text


@shown.register
def _(view: FleetSlotsView, top: int) -> Iterator[Block]:
    yield About(tuple(filter(None, (view.source, f"{view.cluster}, {count(view.gpus)} GPUs", view.policy))))
    yield ""
    yield Headline(view.headline)
    yield ""
    yield slot_table(view.slots)
    yield from remarks(view.notes)


@shown.register
def _(view: FleetFitView, top: int) -> Iterator[Block]:
    yield Headline(view.headline)
    yield ""
    yield f"kinds of jobs {count(view.kinds)}, by tenant {count(view.strata)}; rhythm: {view.profile_of}"
    yield "kept: tenant x kind x duration, sweeps, rhythm and wandering of arrivals"
    yield "not kept: users, and how they react to queues"
    yield from remarks(view.notes)
    if view.stored:
        yield Line(view.stored, label="stored", whole=True)
