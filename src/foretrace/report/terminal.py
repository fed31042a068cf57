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
LEAST_WIDE, LEAST_NAME = 16, 20  # characters of a column that may take several lines, or of names
NARROW = 72  # characters of a line; below it, a bar stands below its label

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
    lines = "\n".join(line.rstrip() for line in out.getvalue().splitlines())
    return re.sub("\n{3,}", "\n\n", lines) + "\n"  # around what is not drawn here


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
    """Yield the table, or row by row where its columns do not fit, and how much of it is folded away."""
    kept = [at for at, column in enumerate(table.columns) if terminal.bars or column.kind != "course"]
    least = [at for at in kept if not table.columns[at].extra]
    while (widths := _widths(table, kept, terminal.width - 2, 1 if kept == least else 2)) is None and kept != least:
        kept = [at for at in kept if at != max(set(kept) - set(least))]
    if widths is None:
        yield from _records(table, terminal)
    else:
        yield _columns(table, kept, *widths)
    if table.folded:
        yield _indented(_words(table.folded, "dim"))


def _widths(table: blocks.Grid, kept: Sequence[int], room: int, gap: int) -> tuple[list[int], int] | None:
    """Return the characters of columns and between two of them, at least `gap`; None where figures would be cut.

    Names may be shortened, texts of wide columns and titles may take several lines.
    """
    columns, widths, wanted = [table.columns[at] for at in kept], list[int](), list[int]()
    for at, column in zip(kept, columns, strict=True):
        cells = table.cells(at, table.shown)
        most = max(map(len, short_names(cells, room) if column.kind == "name" else cells), default=0)
        least = min(most, LEAST_NAME if column.kind == "name" else LEAST_WIDE if column.wide else most)
        widths.append(max(least, *map(len, column.title.split(" "))))
        wanted.append(max(most, len(column.title)))
    gaps = len(kept) - 1
    left = room - sum(widths) - gap * gaps
    if left < 0:
        return None
    flexible = [at for at, column in enumerate(columns) if column.wide or column.kind == "name"]
    for at in set(range(len(kept))) - set(flexible):
        more = min(wanted[at] - widths[at], left)
        widths[at], left = widths[at] + more, left - more
    more = min(left // max(gaps, 1), 3 - gap)
    gap, left = gap + more, left - more * gaps
    for place, at in enumerate(sorted(flexible, key=lambda at: wanted[at])):
        more = min(wanted[at] - widths[at], left // (len(flexible) - place))
        widths[at], left = widths[at] + more, left - more
    return widths, gap


def _columns(table: blocks.Grid, kept: Sequence[int], widths: Sequence[int], gap: int) -> RenderableType:
    from rich.table import Table as Drawn
    from rich.text import Text as Words

    grid = Drawn(
        box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim", show_edge=False,
        show_header=any(table.columns[at].title for at in kept),
    )  # fmt: skip
    for at, width in zip(kept, widths, strict=True):
        column = table.columns[at]
        grid.add_column(
            Words(column.title, no_wrap=False), justify="right" if column.flush_right else "left", width=width,
            no_wrap=not column.wide, overflow="fold",
        )  # fmt: skip
    for row in zip(*(_cells(table, at, width) for at, width in zip(kept, widths, strict=True)), strict=True):
        grid.add_row(*row)
    return _indented(grid)


def _records(table: blocks.Grid, terminal: Terminal) -> Iterator[RenderableType]:
    """Yield every row by itself: its first cell that has a title, and below it the others with theirs."""
    shown = [at for at, column in enumerate(table.columns) if column.kind != "course"]
    titles = [_words(f"{title} " if (title := table.columns[at].title) else "", "dim") for at in shown]
    first = next((at for at, title in enumerate(titles) if title), 0)
    for row in zip(*(_cells(table, at, terminal.width - 4, pads=("", "")) for at in shown), strict=True):
        yield _indented(_words(" ").join(filter(None, row[: first + 1])))
        pairs = (title + cell for title, cell in zip(titles[first + 1 :], row[first + 1 :], strict=True) if cell)
        yield _indented(_indented(_flowed(pairs, terminal.width - 4)))


def _cells(table: blocks.Grid, at: int, room: int, *, pads: tuple[str, str] = (" ", " ")) -> list[rich.Text]:
    """Return what is printed of a column; names shortened to the room for them, coloured by kind of work."""
    cells = table.cells(at, table.shown, pads=pads)
    if table.columns[at].kind != "name":
        return list(map(_words, cells))
    styles = [KIND_STYLES.get(kind, "") for kind in table.colours] or [""] * len(cells)
    return [_words(*each) for each in zip(short_names(cells, room), styles, strict=False)]


def _bars(block: blocks.Bars, terminal: Terminal) -> Iterator[RenderableType]:
    """Yield every bar to scale beside its label, below it where the terminal is narrow; the parts in figures."""
    if terminal.bars or block.legend:
        whole = max(sum(part.value for part in bar.parts) for bar in block.bars)
        at = 2 + max(len(bar.label) + 5 if bar.label else 0 for bar in block.bars)
        for bar in block.bars:
            yield from _bar(bar, terminal, whole, at)
    if block.legend:
        for bar in block.bars:
            yield _legend(bar, terminal)
    elif terminal.bars:
        words = {part.key: part.word for bar in block.bars for part in bar.parts if part.value}
        drawn = (_words(f"{PART_STYLES[key][0]} {word}", PART_STYLES[key][1]) for key, word in words.items())
        yield _indented(_flowed(drawn, terminal.width - 2))


def _bar(bar: blocks.Bar, terminal: Terminal, whole: float, at: int) -> Iterator[RenderableType]:
    line = _words("  " + bar.label)
    if not terminal.bars:
        yield line
        return
    if terminal.width < NARROW:
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
    """Return every part with its figure, largest wait first."""
    unit = unit_for(sum(part.value for part in bar.parts))
    return _indented(
        _flowed(
            [
                _words(f"{part.word} {in_unit(part.value, unit)}", PART_STYLES[part.key][1] if part.value else "dim")
                for part in sorted(bar.parts, key=lambda part: (part.key != "compute", -part.value))
            ],
            terminal.width - 2,
        )
    )


def _flowed(words: Iterable[rich.Text], width: int) -> rich.Text:
    """Return texts one after the other, in lines that break between them where they can."""
    line, used = _words(""), 0
    for each in words:
        if used and used + 3 + len(each) > width:
            line.append("\n")
            used = 0
        elif used:
            line.append("   ")
            used += 3
        line.append_text(each)
        used += len(each)
    return line


def _words(text: str, style: str = "") -> rich.Text:
    from rich.text import Text as Words

    return Words(text, style=style)


def _indented(what: RenderableType) -> RenderableType:
    from rich.padding import Padding

    return Padding(what, (0, 0, 0, 2))
