"""Blocks as text for a terminal or a pipe.

In a terminal: a bar of the step, colours by meaning. In a pipe or with TERM=dumb: the same words and tables,
plain. NO_COLOR keeps the bar (its characters differ by part) and drops the colours. Names are never read as
markup.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from foretrace.plaintext import visible
from foretrace.report import blocks
from foretrace.report.names import short_names
from foretrace.report.units import in_unit, unit_for

if TYPE_CHECKING:
    from rich import text as rich
    from rich.console import ConsoleOptions, RenderableType

PIPE_WIDTH = 120
BAR = 48  # characters of the longest bar
LEAST_WIDE = 16  # characters of a column that may take several lines

# Blue, orange, violet and greys stay apart for colour-blind readers; the characters differ as well.
PART_STYLES = {
    "compute": ("█", "blue"),
    "exposed_copy": ("▓", "magenta"),
    "exposed_communication": ("▓", "dark_orange"),
    "launch_bound": ("▒", "bright_black"),
    "data_loading": ("▒", "cyan"),
    "synchronisation": ("░", "bright_black"),
    "idle": ("·", "bright_black"),
}
KIND_STYLES = {
    "kernel": "blue",
    "operator": "blue",
    "memset": "blue",
    "collective": "dark_orange",
    "copy": "magenta",
    "data": "cyan",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """How much the place that we write to can show."""

    width: int = 80
    bars: bool = False
    colour: bool = False

    @classmethod
    def of(cls, stream: TextIO, environ: Mapping[str, str]) -> Terminal:
        """Return what `stream` can show, given the environment (NO_COLOR, TERM, COLUMNS)."""
        capable = stream.isatty() and environ.get("TERM", "") != "dumb"
        size = shutil.get_terminal_size((80 if capable else PIPE_WIDTH, 24)).columns
        columns = environ.get("COLUMNS", "")
        width = int(columns) if re.fullmatch("0*[1-9][0-9]{0,4}", columns, re.ASCII) else size
        if not stream.isatty() and not environ.get("COLUMNS"):
            width = PIPE_WIDTH
        return cls(width=max(width, 40), bars=capable, colour=capable and not environ.get("NO_COLOR"))


def render(result: Any, terminal: Terminal | None = None, *, rows: int = 12, **how: Any) -> str:
    """Return text of a result, ending with a newline; `rows` is how many rows of a ranking to print at most."""
    return text(blocks.blocks(result, rows, **how), terminal or Terminal())


def text(found: Sequence[blocks.Block], terminal: Terminal) -> str:
    """Return blocks as text, ending with a newline. The next command is never wrapped, so that it can be copied."""
    from rich.console import Console
    from rich.segment import Segment

    out = io.StringIO()

    class Plain(Console):
        """Names may hold anything; what a terminal would obey becomes an escape before it is written."""

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if text == "\n" else visible(text), style, control)

    console = Plain(
        file=out, force_jupyter=False, width=terminal.width, force_terminal=terminal.colour,
        color_system="256" if terminal.colour else None, no_color=not terminal.colour, highlight=False, markup=False,
        emoji=False, soft_wrap=False, _environ={},
    )  # fmt: skip
    for block in found:
        if isinstance(block, blocks.Next):
            out.write(f"  next: {visible(block.command)}\n")
        elif isinstance(block, blocks.Line) and block.whole:
            out.write(f"  {visible(f'{block.label}: ' if block.label else '')}{visible(block.text)}\n")
        else:
            for each in _block(block, terminal):
                console.print(each)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _block(block: blocks.Block, terminal: Terminal) -> Iterator[RenderableType]:
    match block:
        case str():
            yield _indented(_words(block)) if block else ""
        case blocks.About(parts=parts):
            yield _words(" · ".join(parts), "dim")
        case blocks.Headline(text=text):
            yield _words(text, "bold")
        case blocks.Line(text=text, label=label, soft=soft):
            line = _words(f"{label}: ", "dim") if label else _words("")
            yield _indented(line.append(text, "dim" if soft else None))
        case blocks.Bars():
            yield from _bars(block, terminal)
        case blocks.Chart():
            yield from _chart(block, terminal)
        case blocks.Grid():
            yield from _table(block, terminal)


def _table(table: blocks.Grid, terminal: Terminal) -> Iterator[RenderableType]:
    """Yield the table, and how much of it is folded away."""
    from rich.table import Table as Drawn

    kept = [
        at for at, column in enumerate(table.columns)
        if terminal.width >= column.least and (terminal.bars or column.kind != "course")
    ]  # fmt: skip
    columns = [_cells(table, at, terminal) for at in kept]
    widths = [
        min(
            max([len(table.columns[at].title), *map(len, cells)]),
            LEAST_WIDE if table.columns[at].wide else terminal.width,
        )
        for at, cells in zip(kept, columns, strict=True)
    ]
    room = terminal.width - 2 - sum(widths)
    grid = Drawn(
        box=None, pad_edge=False, padding=(0, min(max(room // max(len(kept) - 1, 1), 1), 3), 0, 0), header_style="dim",
        show_edge=False, show_header=any(table.columns[at].title for at in kept),
    )  # fmt: skip
    for at in kept:
        column = table.columns[at]
        grid.add_column(
            column.title, justify="right" if column.flush_right else "left", no_wrap=not column.wide,
            overflow="fold" if column.wide else "ellipsis",
        )  # fmt: skip
    for row in zip(*columns, strict=True):
        grid.add_row(*row)
    yield _indented(grid)
    for at, column in enumerate(table.columns):
        if at not in kept and column.under:
            for name, cell in zip(table.cells(0, table.shown), table.cells(at, table.shown), strict=True):
                if cell != "–":
                    yield _indented(_words(f"{name} {column.title}: ", "dim").append(cell, None))
    if table.folded:
        yield _indented(_words(table.folded, "dim"))


def _cells(table: blocks.Grid, at: int, terminal: Terminal) -> list[rich.Text]:
    """Return what is printed of a column; names shortened to the room for them, coloured by kind of work."""
    column, cells = table.columns[at], table.cells(at, table.shown)
    if column.kind != "name":
        return list(map(_words, cells))
    room = max(terminal.width - (28 if terminal.width < blocks.NARROW else column.beside), 16)
    styles = [KIND_STYLES.get(kind, "") for kind in table.colours] or [""] * len(cells)
    return [_words(*each) for each in zip(short_names(cells, room), styles, strict=False)]


def _bars(block: blocks.Bars, terminal: Terminal) -> Iterator[RenderableType]:
    """Yield every bar to scale beside its label, below it where the terminal is narrow; the parts in figures."""
    if terminal.bars or block.legend:
        whole = max(sum(part.value for part in bar.parts) for bar in block.bars)
        at = 2 + max(len(bar.label) + 5 if bar.label else 0 for bar in block.bars)
        for bar in block.bars:
            yield from _bar(bar, terminal, whole, at)
        if block.apart:
            yield ""
    if block.legend:
        for bar in block.bars:
            yield _legend(bar, terminal)


def _bar(bar: blocks.Bar, terminal: Terminal, whole: float, at: int) -> Iterator[RenderableType]:
    line = _words("  " + bar.label)
    if not terminal.bars:
        yield line
        return
    if terminal.width < blocks.NARROW:
        if bar.label:
            yield line
        line, at = _words("  "), 2
    line.pad_right(max(at - len(line.plain), 0))
    room = min(terminal.width - at - 2, BAR)
    if whole > 0 and room >= 8:
        drawn, reached = 0, 0.0
        for part in bar.parts:
            reached += part.value
            cells = round(room * reached / whole) - drawn  # rounding the running sum keeps the length of all right
            drawn += cells
            char, style = PART_STYLES[part.key]
            line.append(char * cells, style)
    yield line


def _chart(chart: blocks.Chart, terminal: Terminal) -> Iterator[RenderableType]:
    """Yield a row of heights for each curve, all on one scale, with the ends of the axis."""
    if not terminal.bars or not chart.most:
        return
    low, high = (chart.words(each, of_x=True) for each in chart.x_range)
    yield _indented(_words(f"{chart.title}, up to {chart.words(chart.most)}, {low} to {high}", "dim"))
    names = max(len(curve.name) for curve in chart.curves)
    places = chart.places(min(max(terminal.width - names - 6, 8), BAR))
    for curve in chart.curves:
        drawn = blocks.heights([each / chart.most for each in curve.at(places)])
        yield _words(f"  {curve.name:{names}}  {drawn}")


def _legend(bar: blocks.Bar, terminal: Terminal) -> RenderableType:
    """Return every part with its figure, largest wait first; breaks between parts, never inside one."""
    unit = unit_for(sum(part.value for part in bar.parts))
    line, used = _words(""), 0
    for part in sorted(bar.parts, key=lambda part: (part.key != "compute", -part.value)):
        word = f"{part.word} {in_unit(part.value, unit)}"
        if used and used + 3 + len(word) > terminal.width - 2:
            line.append("\n")
            used = 0
        elif used:
            line.append("   ")
            used += 3
        line.append(word, PART_STYLES[part.key][1] if part.value else "dim")
        used += len(word)
    return _indented(line)


def _words(text: str, style: str = "") -> rich.Text:
    from rich.text import Text as Words

    return Words(text, style=style)


def _indented(what: RenderableType) -> RenderableType:
    from rich.padding import Padding

    return Padding(what, (0, 0, 0, 2))
