"""`foretrace show` and `blame` as answers: what is in a recording, what holds its step back, and the words for that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foretrace import techniques
from foretrace.graph.taskgraph import NotOfStep, TaskGraph
from foretrace.report import headline, ranks, runs
from foretrace.report.advise import AdviceRow, row
from foretrace.report.blocks import About, Bars, Block, Column, Grid, listing, notes
from foretrace.report.names import short_name
from foretrace.report.ranks import ClockView, CollectivesView
from foretrace.report.units import between, change, count, in_unit, seconds, share, unit_for
from foretrace.report.views import BreakdownView, Report, Result, StepTimeView, taken
from foretrace.simulate import breakdown
from foretrace.simulate.timeline import BlameRow, By, Timeline

HOLDS_BACK = 20  # rows of the ranking that `show` carries
ADVISED_UP_TO = 5_000  # tasks: trying what answers the bottleneck takes about a tenth of reading so many
MOST_MISMATCHES = 6  # sentences about calls that do not match


class ShowView(Report, frozen=True, kw_only=True):
    """`foretrace show`: what is in a recording and what holds its step back."""

    command: str = "show"
    bottleneck: str  # a part of the breakdown
    source: str
    device: str
    devices: tuple[str, ...]
    platform: str
    ranks: int  # ranks in this recording
    rank_numbers: tuple[int, ...]
    world_size: int
    steps: int
    step_numbers: tuple[int, ...]
    step_source: str
    tasks: int
    step_time_s: StepTimeView
    interval_s: tuple[float, float] | None = None  # 80 % range of an estimated or predicted step, else None
    step_times_s: tuple[float, ...]  # every step, as recorded
    breakdown_s: BreakdownView  # sums to step_time_s.median
    breakdown_mean_s: BreakdownView  # sums to step_time_s.mean
    attributed_gpu_share: float | None  # None without a GPU
    unexplained_gpu_share: float | None
    holds_back: tuple[BlameRow, ...]
    collectives: CollectivesView | None = None  # None for one rank
    clock: ClockView | None = None
    not_of_step: tuple[NotOfStep, ...]
    advice: tuple[AdviceRow, ...]  # what answers the bottleneck and gains beyond doubt

    def shown(self, top: int) -> Iterator[Block]:
        step = self.step_time_s
        unit = unit_for(step.median)
        line = f"step {in_unit(step.median, unit)} {unit.name}"
        if self.interval_s is not None:
            line += f" ({between(*self.interval_s, unit)})"
        elif self.steps > 1:
            line += f" (p10 {in_unit(step.p10, unit)} – p90 {in_unit(step.p90, unit)})"
        yield About(tuple(facts(self)))
        yield Bars((runs.step_bar(line, self.breakdown_s, self.platform),), legend=True)
        if self.collectives is not None and self.collectives.each:
            yield _ranks(self.collectives, self.clock, top)
            yield from notes(collectives(self.collectives, one_step=self.steps <= 1))
        if self.holds_back:
            title = "what holds the step back" + (" (sum of the ranks)" if self.ranks > 1 else "")
            if headline.apart(self.step_time_s.median, self.step_time_s.mean):
                title += f", per mean step of {seconds(self.step_time_s.mean)}"
            yield ranking(_named_too(self.holds_back, top, self.headline), title, self.platform)
        yield from notes(map(advice, self.advice), "try")
        yield from notes(trust(self))


def show(timeline: Timeline, *, path: str = "") -> ShowView:
    """Return what is in a recording and what holds its step back. `path` is the file as the user named it."""
    graph, info = timeline.graph, timeline.graph.info
    rows = timeline.blame("name")
    median, mean = runs.breakdowns(timeline)
    often = breakdown.recurring(ranks.breakdown(timeline).steps_ns)
    bottleneck = often.part if often else breakdown.bottleneck(median.parts())
    numbers = graph.ranks
    together = ranks.collectives(timeline)
    sentence = headline.show(
        median, rows[:HOLDS_BACK], platform=info.platform, ranks=len(numbers), every=graph.n_steps > 1, recurring=often,
        mean=mean,
    )  # fmt: skip
    suggestion = runs.advise(graph, path)
    if together is not None and together.each:
        suggestion = ranks.next_command(together, timeline.step_time_s, runs.quoted(path)) or suggestion
        first = ranks.headline(
            together,
            timeline.step_time_s,
            every=graph.n_steps > 1,
            all_there=len(numbers) >= info.world_size,
        )
        sentence = first if bottleneck == "exposed_communication" else f"{first} {sentence}"
    return taken(
        ShowView, runs.facts(timeline, path), info, headline=sentence, bottleneck=bottleneck, ranks=len(numbers),
        step_numbers=info.steps[: graph.n_steps], step_time_s=runs.step_time(timeline),
        interval_s=runs.estimated(timeline), step_times_s=tuple((timeline.step_times_ns / 1e9).tolist()),
        breakdown_s=median, breakdown_mean_s=mean,
        attributed_gpu_share=None if info.platform == "cpu" else float(info.attributed_share),
        unexplained_gpu_share=None if info.platform == "cpu" else float(info.unexplained_share),
        holds_back=rows[:HOLDS_BACK], collectives=together, clock=ranks.clock(graph), advice=_advice(graph, bottleneck),
        notes=runs.notes(graph), next=suggestion,
    )  # fmt: skip


def _advice(graph: TaskGraph, bottleneck: str) -> tuple[AdviceRow, ...]:
    """Return what answers the bottleneck and gains beyond doubt; `foretrace advise` tries everything."""
    if len(graph) > ADVISED_UP_TO or len(graph.ranks) > 1:
        return ()
    from foretrace.plan.advise import against

    names = {"data_loading": ["PrefetchData"], "launch_bound": ["CudaGraphs", "FusedOptimizer"]}
    kinds = [getattr(techniques, name) for name in names.get(bottleneck, ["MixedPrecision", "Compiled"])]
    return tuple(map(row, against(graph, kinds)))


def _ranks(view: CollectivesView, clock: ClockView | None, most: int) -> Grid:
    """Return the ranks for which others wait longest."""
    total = count(len(view.last_arriver))
    offsets = {} if clock is None else clock.offsets_s
    ahead = {rank: change(offset) for rank, offset in offsets.items() if offset is not None}
    return listing(
        sorted(view.by_rank, key=lambda each: (-each.caused_s, each.rank))[:most], ("rank", Column("rank", right=True)),
        ("wait_s", "waits", "time"), ("transfer_s", "transfers", "time"),
        (lambda row: f"{count(row.last)} of {total}", Column("last to arrive", right=True)),
        ("caused_s", Column("others wait for it", "time", extra=True)),
        (lambda row: ahead.get(str(row.rank), "not known"), Column("clock", right=True, extra=True)),
    )  # fmt: skip


def _named_too(rows: Sequence[BlameRow], most: int, headline: str) -> Sequence[BlameRow]:
    """Return the first rows, and behind them the one that the headline is about where it is further down."""
    named = [row for row in rows[most:] if short_name(row.name, 40) in headline]
    return [*rows[:most], *named[:1]]


def facts(show: ShowView) -> list[str]:
    """Return what was recorded, in a few words each: source, device, ranks, steps."""
    device = show.device or {"cpu": "CPU only", "cuda": "NVIDIA GPU", "rocm": "AMD GPU"}.get(show.platform, "")
    if show.ranks == 1:
        rank = f"rank {show.rank_numbers[0] if show.rank_numbers else 0} of {show.world_size}"
    else:
        rank = f"{show.ranks} of {show.world_size} ranks"
    if show.step_source == "whole trace":
        steps = "no steps marked"
    else:
        steps = "1 step" if show.steps == 1 else f"{count(show.steps)} steps"
    return [fact for fact in (show.source, device, rank, steps) if fact]


def step_spread(show: ShowView) -> str:
    """Return text such as "median of 6 steps, p10 164 – p90 179 ms"; one step has no spread and says so."""
    if show.interval_s is not None:
        unit = unit_for(show.step_time_s.median)
        return f"not recorded: 80 % interval {between(*show.interval_s, unit)} {unit.name}"
    if show.steps <= 1:
        return "one step recorded, so no spread is known"
    step = show.step_time_s
    unit = unit_for(step.median)
    low, high = between(step.p10, step.p90, unit).split(" – ")
    return f"median of {count(show.steps)} steps, p10 {low} – p90 {high} {unit.name}"


def reading_notes(show: ShowView) -> list[str]:
    """Return what the numbers rest on, most important first; ends with what the recording's builder noted."""
    notes = [
        "The parts of a step exclude each other and sum to the median step: a moment counts as compute while "
        "any kernel runs, and as a wait only when none does."
        if show.platform != "cpu"
        else "The parts of a step exclude each other and sum to the median step."
    ]
    if show.step_source != "whole trace":
        notes.append(f"Steps are bounded by {show.step_source} events.")
    else:
        notes.append("The recording marks no steps, so the whole recording counts as one.")
    if show.attributed_gpu_share is not None:
        notes.append(f"{share(show.attributed_gpu_share)} of the GPU time is attributed to a layer, phase or operator.")
    notes += trust(show)
    if show.ranks < show.world_size:
        notes.append(
            f"{show.ranks} of {show.world_size} ranks were recorded here: time inside collectives includes "
            "waiting for the others."
        )
    return [*notes, *show.notes]


def advice(row: AdviceRow) -> str:
    """Return text such as "prefetch-data saves 56.6 ms (35.9 – 60.7): one argument of the DataLoader"."""
    unit = unit_for(row.saved_s)
    span = f" ({between(*row.saved_range_s, unit)})" if row.saved_range_s else ""
    return f"{row.name} saves {in_unit(row.saved_s, unit)} {unit.name}{span}{f': {row.effort}' if row.effort else ''}"


def collectives(view: CollectivesView, *, one_step: bool) -> list[str]:
    """Return what waiting and transfers cost, and what the set of recordings lacks."""
    lines = [f"Transfers that take no time would save {seconds(max(view.saved_if_free_s, 0.0))} per step."]
    if view.saved_if_together_s > 0:
        step = "the step" if one_step else "the first step"
        lines.append(
            f"Ranks that enter the recording together would save {seconds(view.saved_if_together_s)} of {step}."
        )
    shown = [*view.missing, *view.unmatched]
    if len(shown) > MOST_MISMATCHES:
        shown = [*shown[:MOST_MISMATCHES], f"{count(len(shown) - MOST_MISMATCHES)} more mismatches: --json."]
    return lines + shown


def trust(show: ShowView) -> list[str]:
    """Return what makes answers about this recording less certain."""
    from foretrace.simulate.check import UNEXPLAINED_REFUSE, UNEXPLAINED_WARN  # loads compiled code

    delays = show.unexplained_gpu_share or 0.0
    if delays < UNEXPLAINED_WARN:
        return []
    sentence = f"{share(delays)} of the GPU's span are delays that no recorded dependency explains"
    if delays >= UNEXPLAINED_REFUSE:
        return [f"{sentence}: too many to say what a change of the GPU's work would do."]
    return [f"{sentence}: less certain than usual what a change of the GPU's work would do."]


# Where a kind of task runs.
WHERE = {
    "cpu": "host",
    "call": "host",
    "operator": "host",
    "python": "host",
    "data": "loader",
    "kernel": "GPU",
    "memset": "GPU",
    "copy": "copy",
    "collective": "network",
}


class BlameView(Result, frozen=True, kw_only=True):
    """`foretrace blame`: suspects ranked by what the step would save."""

    command: str = "blame"
    headline: str
    source: str
    platform: str
    rank_numbers: tuple[int, ...]  # ranks that the answer is about
    steps: int
    by: str
    step_time_s: float
    mean_step_s: float  # what the rows are about
    interval_s: tuple[float, float] | None = None  # as in `show`
    rows: tuple[BlameRow, ...]
    next: str

    def shown(self, top: int) -> Iterator[Block]:
        unit = unit_for(self.step_time_s)
        lies = "" if self.interval_s is None else f" ({between(*self.interval_s, unit)})"
        title = f"by {self.by}, per step of {seconds(self.step_time_s)}{lies}"
        if headline.apart(self.step_time_s, self.mean_step_s):
            title = f"by {self.by}, per mean step of {seconds(self.mean_step_s)} (median {seconds(self.step_time_s)})"
        title += " (sum of the ranks)" if len(self.rank_numbers) > 1 else ""
        yield ranking(self.rows, title, self.platform, top=top)


def blame(timeline: Timeline, by: By = "name", *, path: str = "") -> BlameView:
    """Return suspects ranked by what the step would save if they were 10 % faster."""
    rows, mean_s = timeline.blame(by), timeline.window_ns / timeline.graph.n_steps / 1e9
    return taken(
        BlameView, runs.facts(timeline, path),
        headline=headline.blame(rows, timeline.step_time_s, mean_s, every=timeline.graph.n_steps > 1), by=by,
        step_time_s=timeline.step_time_s, mean_step_s=mean_s, interval_s=runs.estimated(timeline), rows=rows,
        next=runs.advise(timeline.graph, path),
    )  # fmt: skip


def ranking(rows: Sequence[BlameRow], title: str, platform: str, *, top: int = 0) -> Grid:
    """Return a table of suspects. Host and device work may carry the same name, so where a task runs is said."""
    where = () if platform == "cpu" else (Column("on", extra=True),)
    columns = (
        Column(title, "name"), *where, Column("count", "count", extra=True), Column("time", "time"),
        Column("10 % faster", "change", extra=True), Column("gone", "change"),
    )  # fmt: skip
    cells = [
        (
            row.name, *([WHERE.get(row.kind, row.kind)] if where else []), row.count, row.time_s,
            -row.saved_if_10pct_faster_s, -row.saved_if_removed_s,
        )
        for row in rows
    ]  # fmt: skip
    colours = tuple(row.kind for row in rows)
    return Grid(columns, tuple(cells), top=top, noun="row", how="--top", colours=colours)
