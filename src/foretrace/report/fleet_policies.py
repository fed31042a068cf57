"""`foretrace fleet compare`, `sweep`, `policies`, `fit`, `generate` and `export` as answers, and the words for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf, isfinite
from typing import Any

from foretrace.fleet.comparison import Best, PolicyComparison, PolicyFigure, PolicyRow
from foretrace.fleet.policies.registry import Described
from foretrace.fleet.sweep import Swept
from foretrace.fleet.synthetic import Generator
from foretrace.fleet.workload import Workload
from foretrace.report.blocks import Block, Column, Headline, Kind, Line, table
from foretrace.report.fleet import about, interval_text
from foretrace.report.fleet_questions import figure_name, figure_text
from foretrace.report.names import command, listed
from foretrace.report.units import count, digits, level, long_time, share
from foretrace.report.views import Report, Result, taken

FIGURES: tuple[tuple[str, str, Kind], ...] = (
    ("mean JCT", "mean_jct_s", "long"),
    ("p50", "p50_jct_s", "long"),
    ("p99", "p99_jct_s", "long"),
    ("mean wait", "mean_queue_s", "long"),
    ("makespan", "makespan_s", "long"),
    ("used", "utilisation", "share"),
)  # title, name and kind of what policies are compared by
VERDICT = {"within noise": "within noise", "same": "the same in every run", "unknown": "noise unknown"}
MOST_CELLS = 40  # rows
NOT_SHOWN = ("jobs", "finished", "p50_jct_s", "p90_jct_s", "mean_rho", "p99_rho")


class FleetCompareView(Report, frozen=True, kw_only=True):
    """`foretrace fleet compare`: policies on the same workload."""

    command: str = "fleet compare"
    source: str
    cluster: str
    gpus: int
    jobs: int
    baseline: str
    repetitions: int
    repeated_how: str
    interval_level: float
    policies: tuple[PolicyRow, ...]
    best: tuple[Best, ...]

    def shown(self, top: int) -> Iterator[Block]:
        yield about(self)
        yield table(
            [
                "policy",
                *(Column(title, kind, extra="mean" not in title) for title, _, kind in FIGURES),
                Column(f"mean JCT against {self.baseline}", wide=True),
            ],
            [
                (row.policy, *(row.figures[name].mean for _, name, _ in FIGURES), against(row.figures["mean_jct_s"]))
                for row in self.policies
            ],
        )  # fmt: skip
        if self.repetitions > 1:
            means = [(row.policy, row.figures["mean_jct_s"]) for row in self.policies]
            yield table(
                ["mean JCT", Column(f"{level(self.interval_level)} interval", right=True)],
                [(policy, text) for policy, each in means if (text := interval_text(each.low, each.high))],
            )
            yield f"from {count(self.repetitions)} runs of each: {self.repeated_how}"


def compare(
    found: PolicyComparison, *, path: str, cluster: str, gpus: int, jobs: int, next_: str = ""
) -> FleetCompareView:
    """Return the answer to a comparison of policies."""
    notes = []
    if found.repetitions == 1:
        notes.append("one run of each policy: nothing tells a difference from noise; repeat with --seeds 20.")
    elif len(found.policies) > 2:
        notes.append(
            f"each interval holds at {level(found.level)} for itself; of many, some miss their ratio by chance."
        )
    return taken(
        FleetCompareView, found, headline=_compare_headline(found), source=path, cluster=cluster, gpus=gpus, jobs=jobs,
        repeated_how=found.how, interval_level=found.level, policies=found.rows,
        best=tuple(Best(each.name, each.best, each.tied) for each in found.figures.values()), notes=tuple(notes),
        next=next_,
    )  # fmt: skip


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
        differ = f"differ{'s' if len(figure.tied) == 1 else ''} within noise"
        noise = f"; {listed(figure.tied)} {differ}" if figure.tied and found.repetitions > 1 else ""
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
    return f"{text}{f'; {listed(figure.tied)} within noise of it' if figure.tied else ''}."


def against(each: PolicyFigure) -> str:
    """Return text such as "0.61× (0.58 – 0.64)", "1.01× (0.98 – 1.04), within noise"."""
    if each.verdict == "baseline":
        return "baseline"
    if each.ratio is None:
        return "not known"
    text = f"{digits(each.ratio)}×"
    if each.ratio_low is not None and each.ratio_high is not None and each.verdict != "same":
        text += f" ({digits(each.ratio_low)} – {digits(each.ratio_high)})"
    return f"{text}, {VERDICT[each.verdict]}" if each.verdict in VERDICT else text


class FleetSweepView(Result, frozen=True, kw_only=True):
    """`foretrace fleet sweep`: one row per cell; `columns` names the values, cells' own first."""

    command: str = "fleet sweep"
    headline: str
    source: str
    folder: str
    cells: int
    reused: int
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | int | None, ...], ...]
    next: str

    def shown(self, top: int) -> Iterator[Block]:
        """Yield cells by mean JCT, shortest first."""
        kept = [at for at, name in enumerate(self.columns) if name not in NOT_SHOWN]
        jct = self.columns.index("mean_jct_s") if "mean_jct_s" in self.columns else 0
        rows = sorted(self.rows, key=lambda row: mean if isinstance(mean := row[jct], float) else inf)
        first = self.columns.index("jobs") if "jobs" in self.columns else 0
        yield table(
            [Column(figure_name(self.columns[at]), right=True, extra=at > max(first, jct)) for at in kept],
            [[figure_text(self.columns[at], row[at]) for at in kept] for row in rows],
            top=MOST_CELLS,
            noun="cell",
        )
        yield Line(f"cells are kept in {self.folder}", whole=True)


def sweep(found: Swept, *, source: str, by: Mapping[str, Sequence[Any]], next_: str) -> FleetSweepView:
    """Return all cells of a sweep."""
    columns = list(found.rows[0]) if found.rows else []
    means = [(row.get("mean_jct_s"), row) for row in found.rows if isinstance(row.get("mean_jct_s"), float)]
    headline = f"{count(len(found.rows))} cells, {count(found.reused)} of them done before."
    if means:
        best = min(means, key=lambda each: float(each[0] or inf))[1]
        words = ", ".join(f"{key} {best[key]}" for key in by if len(by[key]) > 1)
        headline += f" The shortest mean JCT, {long_time(best['mean_jct_s'])}, has {words or 'the only cell'}."
    return FleetSweepView(
        headline=headline, source=source, folder=found.folder, cells=len(found.rows), reused=found.reused,
        columns=tuple(columns), rows=tuple(tuple(row.get(name) for name in columns) for row in found.rows), next=next_,
    )  # fmt: skip


class FleetPoliciesView(Result, frozen=True, kw_only=True):
    """`foretrace fleet policies`: what --policy takes."""

    command: str = "fleet policies"
    policies: tuple[Described, ...]

    def shown(self, top: int) -> Iterator[Block]:
        yield Headline(f"{len(self.policies)} scheduling policies, with their parameters.")
        for each in self.policies:
            yield Line(each.about, label=each.name)
            yield Line("  ".join(f"{one.name}={one.default}" for one in each.parameters), soft=True)


class FleetFitView(Report, frozen=True, kw_only=True):
    """`foretrace fleet fit`: a generator of workloads learnt from a log."""

    command: str = "fleet fit"
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

    def shown(self, top: int) -> Iterator[Block]:
        yield f"kinds of jobs {count(self.kinds)}, by tenant {count(self.strata)}; rhythm: {self.profile_of}"
        yield Line("tenant x kind x duration, sweeps, rhythm and wandering of arrivals", label="kept")
        yield Line("users, and how they react to queues", label="not kept")
        yield Line(self.stored, label="stored", whole=True)


def fit(made: Generator, *, path: str, stored: str) -> FleetFitView:
    """Return what a generator was fitted to."""
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
    return taken(
        FleetFitView, made,
        headline=(
            f"{count(jobs)} jobs in {long_time(made.span_s)}, {digits(made.jobs_per_day)} a day from "
            f"{len(made.tenants)} tenant{'s' if len(made.tenants) > 1 else ''}, {share(swept / jobs)} of them in "
            "sweeps: jobs like these can now be generated."
        ),
        source=path, days=made.span_s / 86400, tenants=len(made.tenants), kinds=len(made.kinds), strata=len(strata),
        in_sweeps=swept / jobs, stored=stored, notes=tuple(notes),
        next=command("fleet", "generate", stored, days=30, load=1.2, out="generated.csv") if stored else "",
    )  # fmt: skip


class FleetGenerateView(Result, frozen=True, kw_only=True):
    """`foretrace fleet generate`: jobs like those of a log."""

    command: str = "fleet generate"
    headline: str
    jobs: int
    days: float
    stored: str
    next: str


def generate(made: Workload, *, stored: str) -> FleetGenerateView:
    """Return what was generated, and where it is."""
    days = float(made.submit_ns[-1]) / 86400e9 if len(made) else 0.0
    return FleetGenerateView(
        headline=f"{len(made):,} jobs over {days:.3g} days are in {stored}", jobs=len(made), days=days, stored=stored,
        next=command("fleet", "run", stored),
    )  # fmt: skip


class FleetExportView(Result, frozen=True, kw_only=True):
    """`foretrace fleet export`: decisions as a scheduler's own files."""

    command: str = "fleet export"
    headline: str
    to: str
    folder: str
    files: tuple[str, ...]


def export(files: Sequence[str], *, to: str, folder: str) -> FleetExportView:
    """Return which files were written."""
    headline = f"{len(files):,} file{'s' if len(files) != 1 else ''} for {to} in {folder}"
    return FleetExportView(headline=headline, to=to, folder=folder, files=tuple(files))
