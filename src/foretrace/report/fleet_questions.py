"""`foretrace fleet why`, `whatif` and `slots` as answers: a job that waits, a change, room; and their words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet import overtime
from foretrace.fleet.ask import Holder, Remedy, Room, Why
from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.comparison import ChangedFigure, changed_figures
from foretrace.fleet.result import FleetResult
from foretrace.fleet.workload import FARTHEST_S, SECOND
from foretrace.report.blocks import Block, Column, listing, table
from foretrace.report.fleet import about, slots_table
from foretrace.report.units import count, long_time
from foretrace.report.views import Report, Result, taken

MOST_DECISIONS = 24  # more of a job are left out in the middle


class FleetDecisionView(msgspec.Struct, frozen=True, kw_only=True):
    """One decision about the job."""

    time_s: float
    what: str
    why: str


class FleetWhyView(Result, frozen=True, kw_only=True):
    """`foretrace fleet why`: one job at one moment."""

    command: str = "fleet why"
    headline: str
    source: str
    policy: str
    cluster: str
    job: str
    tenant: str
    gpus: int
    at_s: float
    status: str
    reason: str
    queue_s: float | None
    start_s: float | None
    end_s: float | None
    causes_s: dict[str, float]
    room: tuple[Room, ...]
    holders: tuple[Holder, ...]
    decisions: tuple[FleetDecisionView, ...]
    remedies: tuple[Remedy, ...]
    next: str

    def shown(self, top: int) -> Iterator[Block]:
        causes = sorted(self.causes_s.items(), key=lambda each: -each[1])
        yield table(["waited because", Column(kind="long")], causes)
        yield listing(
            self.room, ("level", f"free at {long_time(self.at_s)}"), ("free", "GPUs", "count"),
            ("most", "most in one", "count"),
            (lambda each: f"{each.fits:,} of {each.units:,}", Column("could hold it", right=True)),
        )  # fmt: skip
        columns = ("job", "holds GPUs then"), ("gpus", "GPUs", "count"), ("until_s", "for another", "long")
        yield listing(self.holders, *columns)
        if self.decisions:
            rows = [(each.time_s, each.what, each.why) for each in self.decisions]
            if left := max(len(rows) - MOST_DECISIONS, 0):
                half = MOST_DECISIONS // 2
                rows = [*rows[:half], (math.nan, "...", f"{left:,} more (--json has all)"), *rows[-half:]]
            yield table([Column("decisions", "long"), "", Column(wide=True)], rows)
        yield listing(
            self.remedies, ("change", "would it help?"), ("queue_s", Column("it waits", "long", unknown="forever")),
            ("mean_jct_s", "mean JCT of all", "long"), ("helps", "", "yes"),
        )  # fmt: skip


def why(found: Why, *, source: str, policy: str, cluster: str, next_: str = "") -> FleetWhyView:
    """Return the answer to why a job waits."""
    gpus = f"{found.gpus:,} GPU{'s' if found.gpus != 1 else ''}"
    if found.status == "never":
        headline = f"Job {found.job} can never run here: {found.reason}."
    else:
        word = "waits" if found.status == "waiting" else f"is {found.status}"
        headline = f"At {long_time(found.at_s)}, job {found.job} ({gpus}) {word}: {found.reason}."
    if found.queue_s is not None:
        headline += f" In all it waits {long_time(found.queue_s)}."
    best = found.best
    if best is not None and best.queue_s is not None:
        headline += f" What helps: {best.change}; it would then wait {long_time(best.queue_s)}."
    return taken(
        FleetWhyView, found, headline=headline, source=source, policy=policy, cluster=cluster, next=next_,
    )  # fmt: skip


class FleetWhatifView(Report, frozen=True, kw_only=True):
    """`foretrace fleet whatif`: the same jobs on a changed cluster, network or policy."""

    command: str = "fleet whatif"
    source: str
    before: str
    after: str
    changes: tuple[str, ...]
    jobs: int
    figures: tuple[ChangedFigure, ...]
    sooner: int  # jobs that end sooner
    later: int

    def shown(self, top: int) -> Iterator[Block]:
        yield listing(
            self.figures, (lambda row: figure_name(row.name), "figure"),
            (lambda row: figure_text(row.name, row.before), Column("before", right=True)),
            (lambda row: figure_text(row.name, row.after), Column("after", right=True)), ("ratio", "ratio", "ratio"),
        )  # fmt: skip
        yield f"{count(self.sooner)} jobs end sooner, {count(self.later)} later."


def whatif(
    before: FleetResult, after: FleetResult, *, source: str, words: tuple[str, str], changes: Sequence[str], next_: str
) -> FleetWhatifView:
    """Return two runs of the same jobs side by side."""
    rows = changed_figures(before, after)
    both = before.finished & after.finished
    moved = np.where(both, after.end_ns - before.end_ns, 0)
    old, new = next((each.before, each.after) for each in rows if each.name == "mean_jct_s")
    those = " and ".join(changes)
    if not old or not new:
        headline = f"With {those}, too few jobs finish to compare means."
    elif abs(new - old) < 1e-9 * old:
        headline = f"Nothing changes for the mean job ({long_time(old)}) with {those}."
    else:
        factor, word = (old / new, "falls") if new < old else (new / old, "rises")
        headline = f"The mean JCT {word} {factor:.2f}×: {long_time(old)} → {long_time(new)}, with {those}."
    return FleetWhatifView(
        headline=headline, source=source, before=words[0], after=words[1], changes=tuple(changes),
        jobs=len(before.workload), figures=rows, sooner=int((moved < 0).sum()), later=int((moved > 0).sum()),
        notes=(
            "one run each: differences below 10 % of the makespan on some hundred jobs are noise "
            "(foretrace fleet compare repeats runs)",
        ),
        next=next_,
    )  # fmt: skip


def figure_name(name: str) -> str:
    """Return text such as "mean JCT" for `mean_jct_s`."""
    return name.removesuffix("_s").replace("jct", "JCT").replace("queue", "wait").replace("_", " ")


def figure_text(name: str, value: str | float | None) -> str:
    """Return a figure by what its name ends in; other values as they are."""
    if not isinstance(value, float | None):
        return str(value)
    if value is None:
        return "–"
    return long_time(value) if name.endswith("_s") and name != "jitter_s" else f"{value:.4g}"


class FleetSlotsView(Report, frozen=True, kw_only=True):
    """`foretrace fleet slots`: room for jobs of a size, at one instant and over time."""

    command: str = "fleet slots"
    source: str
    policy: str
    cluster: str
    gpus: int
    at_s: float
    free_gpus: int
    edges_s: tuple[float, ...]
    slots: tuple[overtime.Slots, ...]

    def shown(self, top: int) -> Iterator[Block]:
        yield about(self)
        yield slots_table(self.slots)


def slots(
    result: FleetResult,
    cluster: ClusterTree,
    *,
    sizes: Sequence[int] | None = None,
    at_s: float | None = None,
    path: str = "",
    next_: str = "",
) -> FleetSlotsView:
    """Return how many jobs of each size would fit, at one instant (the end where None) and over time."""
    edges = overtime.bins(result)
    if at_s is not None and not 0 <= at_s <= FARTHEST_S:
        raise ForetraceError(f"--at {at_s:g} is no time of the log; give seconds from 0 up.")
    at = None if at_s is None else round(at_s * SECOND)
    found = overtime.slots(result, cluster, sizes, edges=edges, at_ns=at)
    one = overtime.slots(result, cluster, [1], [cluster.levels[-1]], edges=edges, at_ns=at)[0]
    end = overtime.horizon_ns(result) if at is None else at
    largest = max(found, key=lambda each: each.slot_gpus, default=one)  # of equals the innermost level
    return taken(
        FleetSlotsView, result,
        headline=(
            f"At {long_time(end / SECOND)}, {count(one.free_now)} of {count(cluster.gpus)} GPUs are free, in which "
            f"{count(largest.free_now)} jobs of {largest.slot_gpus} GPUs find room inside a {largest.level}; "
            f"if the same GPUs lay together it were {count(largest.together_now)}."
        ),
        source=path, at_s=end / SECOND, free_gpus=one.free_now, edges_s=overtime.seconds(edges), slots=found, notes=(),
        next=next_,
    )  # fmt: skip
