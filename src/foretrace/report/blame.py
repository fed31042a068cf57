"""`foretrace blame` as an answer: suspects ranked by what the step would save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foretrace.report import headline, runs
from foretrace.report.blocks import NARROW, Block, Column, Grid
from foretrace.report.units import between, seconds, unit_for
from foretrace.report.views import Result
from foretrace.simulate.timeline import BlameRow, By, Timeline

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
    return BlameView(
        headline=headline.blame(rows, timeline.step_time_s, mean_s, every=timeline.graph.n_steps > 1),
        source=runs.source(path, timeline.graph.info.source),
        platform=timeline.graph.info.platform,
        rank_numbers=timeline.graph.ranks,
        steps=timeline.graph.n_steps,
        by=by,
        step_time_s=timeline.step_time_s,
        mean_step_s=mean_s,
        interval_s=runs.estimated(timeline),
        rows=rows,
        next=runs.advise(timeline.graph, path),
    )


def ranking(rows: Sequence[BlameRow], title: str, platform: str, *, top: int = 0) -> Grid:
    """Return a table of suspects. Host and device work may carry the same name, so where a task runs is said."""
    where = () if platform == "cpu" else (Column("on", least=NARROW),)
    columns = (
        Column(title, "name"), *where, Column("count", "count", least=NARROW), Column("time", "time"),
        Column("10 % faster", "change", least=NARROW), Column("gone", "change"),
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
