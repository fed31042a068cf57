"""The terminal face: the shape that people learn, in every width, with and without colours."""

from __future__ import annotations

import io
import re

import pytest

from foretrace.report import terminal
from foretrace.report.blocks import Column, Grid, blocks, table
from foretrace.report.terminal import PIPE_WIDTH, Terminal, render
from foretrace.report.views import Result
from tests.report.report_views import make_blame, make_compare, make_show, make_simulate, make_whatif

VIEWS = [make_show(), make_blame(), make_whatif(), make_compare(), make_simulate()]
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def test_show_reads_as_documented() -> None:
    lines = render(make_show(), Terminal(width=100, bars=True)).splitlines()
    assert lines[0] == "run.json.gz · Tesla V100 · rank 0 of 1 · 6 steps"
    assert lines[2] == "The GPU waits for data: 58.0 of every 174 ms are DataLoader work that nothing overlaps."
    assert lines[4].startswith("  step 174 ms (p10 164 – p90 179)     ███")
    assert lines[5] == (
        "  compute 112   data loading 58.0   exposed copy 2.00   launch-bound 2.00   exposed communication 0"
    )
    assert re.search(r"what holds the step back +on +count +time +10 % faster +gone", "\n".join(lines))
    assert re.search(r"DataLoader.__next__ +loader +1 +58.0 +ms +−5.80 +ms +−57.0 +ms", "\n".join(lines))
    assert lines[-1] == "  next: foretrace whatif run.json.gz --do prefetch-data"


def test_whatif_says_what_why_and_what_was_assumed() -> None:
    text = render(make_whatif(), Terminal(width=100))
    assert text.startswith("1.89× faster: 174 → 92.0 ms per step (84.0 – 101).\n")
    assert re.search(r"prefetch-data +119 +ms +−55.0 +ms +copies slow down", text)
    assert "critical path: kernels 90.0 ms (before: data loading 58.0 → kernels 116 ms)" in text
    assert "assumed: tensor-core ratio 2.50× (plausible 2.00 – 3.10×: step 97.0 – 88.0 ms): from the catalog" in text
    assert "80 % interval 84.0 – 101 ms: noise between 6 steps." in text


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.command)
@pytest.mark.parametrize("width", [40, 60, 79, 80, 120, 200])
def test_every_line_fits(view: Result, width: int) -> None:
    for line in render(view, Terminal(width=width, bars=True)).splitlines():
        if not line.startswith("  next: "):  # a command stays whole so that it can be copied
            assert len(line) <= width


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.command)
@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_figure_is_cut(view: Result, width: int) -> None:
    text = " ".join(render(view, Terminal(width=width)).split())
    for grid in (block for block in blocks(view) if isinstance(block, Grid)):
        for at, column in enumerate(grid.columns):
            if column.kind not in ("name", "course") and not column.extra and not column.wide:
                for cell in grid.cells(at, grid.shown, pads=("", "")):
                    assert " ".join(cell.split()) in text


def test_a_table_that_does_not_fit_is_told_row_by_row() -> None:
    columns = [Column("layer", "name"), *(Column(f"time of part {i}", "time") for i in range(8))]
    text = terminal.text([table(columns, [["linear[0]", *[0.0123] * 8]])], Terminal(width=60))
    assert text.startswith("  linear[0]\n    time of part 0 12.3 ms   time of part 1 12.3 ms\n")


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.command)
def test_colour_changes_nothing_but_colour(view: Result) -> None:
    plain = render(view, Terminal(width=100, bars=True))
    coloured = render(view, Terminal(width=100, bars=True, colour=True))
    assert "\x1b[" in coloured and "\x1b[" not in plain
    assert [line.rstrip() for line in ESCAPE.sub("", coloured).splitlines()] == plain.splitlines()


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.command)
def test_a_pipe_gets_no_bars(view: Result) -> None:
    text = render(view, Terminal(width=PIPE_WIDTH))
    assert not set("█▓▒░") & set(text)
    assert "\x1b" not in text


def test_names_are_not_markup() -> None:
    assert "[bold]" in render(make_blame(), Terminal(width=120))


def test_long_rankings_say_that_there_is_more() -> None:
    text = render(make_blame(), Terminal(width=100), rows=1)
    assert "2 more rows: --top 3 or --json." in text


def test_the_bar_is_to_scale() -> None:
    text = render(make_show(), Terminal(width=100, bars=True))
    bar = next(line for line in text.splitlines() if "█" in line)
    assert (bar.count("█"), bar.count("▒")) == (31, 17)  # of 48: 112, and 58 + 2 of 174


class Stream(io.StringIO):
    def __init__(self, tty: bool) -> None:
        super().__init__()
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty


def test_what_a_stream_can_show() -> None:
    assert Terminal.of(Stream(False), {}) == Terminal(width=PIPE_WIDTH, bars=False, colour=False)
    assert Terminal.of(Stream(False), {"COLUMNS": "60"}).width == 60
    assert Terminal.of(Stream(True), {"COLUMNS": "90"}) == Terminal(width=90, bars=True, colour=True)
    assert Terminal.of(Stream(True), {"COLUMNS": "90", "NO_COLOR": "1"}) == Terminal(width=90, bars=True)
    assert Terminal.of(Stream(True), {"COLUMNS": "90", "TERM": "dumb"}) == Terminal(width=90)
    assert Terminal.of(Stream(True), {"COLUMNS": "9"}).width == 40
    assert Terminal.of(Stream(True), {"COLUMNS": "wide"}).width >= 40
