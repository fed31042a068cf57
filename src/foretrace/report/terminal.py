"""A view as text for a terminal or a pipe.

In a terminal: a bar of the step, colours by meaning. In a pipe or with TERM=dumb: the same words and tables,
plain. NO_COLOR keeps the bar (its characters differ by part) and drops the colours. Names are never read as
markup.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from foretrace.plaintext import visible
from foretrace.report import wording
from foretrace.report.names import short_name, short_names
from foretrace.report.units import (
    between,
    change,
    column,
    count,
    in_unit,
    seconds,
    share,
    unit_for,
)
from foretrace.report.views import (
    AdviseView,
    BlameRow,
    BlameView,
    Breakdown,
    CompareView,
    LedgerView,
    ProfileView,
    ShowView,
    SimulateView,
    VerifyView,
    View,
    WhatIfView,
    part_word,
)

if TYPE_CHECKING:
    from rich.console import ConsoleOptions, RenderableType
    from rich.table import Table

    from foretrace.report.ranks_views import ClockView, CollectivesView

PIPE_WIDTH = 120
NARROW = 72

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
        """What `stream` can show, given the environment (NO_COLOR, TERM, COLUMNS)."""
        capable = stream.isatty() and environ.get("TERM", "") != "dumb"
        size = shutil.get_terminal_size((80 if capable else PIPE_WIDTH, 24)).columns
        columns = environ.get("COLUMNS", "")
        width = int(columns) if re.fullmatch("0*[1-9][0-9]{0,4}", columns, re.ASCII) else size
        if not stream.isatty() and not environ.get("COLUMNS"):
            width = PIPE_WIDTH
        return cls(width=max(width, 40), bars=capable, colour=capable and not environ.get("NO_COLOR"))


def render(view: View, terminal: Terminal | None = None, *, rows: int = 12) -> str:
    """Text of a view, ending with a newline; `rows` is how many rows of a ranking to print at most."""
    terminal = terminal or Terminal()
    match view:
        case ShowView():
            parts = _show(view, terminal, rows)
        case BlameView():
            parts = _blame(view, terminal, rows)
        case WhatIfView():
            parts = _whatif(view, terminal)
        case AdviseView():
            from foretrace.report import advise

            return advise.text(view, terminal, rows)
        case CompareView():
            parts = _compare(view, terminal, rows)
        case SimulateView():
            parts = _simulate(view)
        case VerifyView():
            from foretrace.report import verification

            parts = verification.verify_text(view, terminal)
        case LedgerView():
            from foretrace.report import verification

            parts = verification.ledger_text(view, terminal, rows)
        case ProfileView():
            from foretrace.report import profile

            parts = profile.text(view, terminal, rows)
    # The next command is never wrapped, so that it can be copied.
    return _text(parts, terminal) + (f"  next: {visible(view.next)}\n" if view.next else "")


def _text(parts: Sequence[RenderableType], terminal: Terminal) -> str:
    from rich.console import Console, Group
    from rich.segment import Segment

    out = io.StringIO()

    class Plain(Console):
        """Names may hold anything; what a terminal would obey becomes an escape before it is written."""

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if text == "\n" else visible(text), style, control)

    console = Plain(
        file=out,
        width=terminal.width,
        force_terminal=terminal.colour,
        color_system="256" if terminal.colour else None,
        no_color=not terminal.colour,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=False,
        _environ={},
    )
    console.print(Group(*parts))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _show(view: ShowView, terminal: Terminal, rows: int) -> list[RenderableType]:
    step = view.step_time_s
    unit = unit_for(step.median)
    line = f"step {in_unit(step.median, unit)} {unit.name}"
    if view.interval_s is not None:
        line += f" ({between(*view.interval_s, unit)})"
    elif view.steps > 1:
        line += f" (p10 {in_unit(step.p10, unit)} – p90 {in_unit(step.p90, unit)})"
    parts: list[RenderableType] = [
        _soft(" · ".join(wording.facts(view))),
        "",
        _bold(view.headline),
        "",
        *_bar_line(line, view.breakdown_s, terminal),
        _breakdown_line(view.breakdown_s, view.platform, terminal),
    ]
    if view.collectives is not None and view.collectives.each:
        parts += ["", _ranks(view.collectives, view.clock, rows, terminal)]
        for line in wording.collectives(view.collectives, one_step=view.steps <= 1):
            parts.append(_note(line))
    if view.holds_back:
        title = "what holds the step back" + (" (sum of the ranks)" if view.ranks > 1 else "")
        parts += ["", _ranking(_named_too(view.holds_back, rows, view.headline), title, view.platform, terminal)]
    for each in view.advice:
        parts.append(_labelled("try", wording.advice(each)))
    for note in [*wording.trust(view), *view.notes]:
        parts.append(_note(note))
    return parts


def _ranks(view: CollectivesView, clock: ClockView | None, rows: int, terminal: Terminal) -> RenderableType:
    """The ranks for which others wait longest."""
    table = _table()
    narrow = terminal.width < NARROW
    titles = ["rank", "waits", "transfers", "last to arrive", "others wait for it", "clock"]
    for title in titles[:4] if narrow else titles:
        _column(table, title, right=True)
    total = count(len(view.last_arriver))
    shown = sorted(view.by_rank, key=lambda each: (-each.caused_s, each.rank))[:rows]
    waits, transfers = column([row.wait_s for row in shown]), column([row.transfer_s for row in shown])
    caused = column([row.caused_s for row in shown])
    for i, row in enumerate(shown):
        ahead = clock.offsets_s.get(str(row.rank)) if clock is not None else None
        cells = [str(row.rank), waits[i], transfers[i], f"{count(row.last)} of {total}"]
        cells += [caused[i], "not known" if ahead is None else change(ahead)]
        table.add_row(*(cells[:4] if narrow else cells))
    return _indented(table)


def _blame(view: BlameView, terminal: Terminal, rows: int) -> list[RenderableType]:
    parts: list[RenderableType] = [_bold(view.headline), ""]
    unit = unit_for(view.step_time_s)
    lies = "" if view.interval_s is None else f" ({between(*view.interval_s, unit)})"
    title = f"by {view.by}, per step of {seconds(view.step_time_s)}{lies}"
    title += " (sum of the ranks)" if len(view.rank_numbers) > 1 else ""
    parts.append(_ranking(view.rows[:rows], title, view.platform, terminal))
    if len(view.rows) > rows:
        more = len(view.rows) - rows
        parts.append(_note(f"{count(more)} more {'row' if more == 1 else 'rows'}: --top {len(view.rows)} or --json."))
    return parts


def _whatif(view: WhatIfView, terminal: Terminal) -> list[RenderableType]:
    parts: list[RenderableType] = [_bold(view.headline), ""]
    unit = unit_for(view.before_s)
    if terminal.bars:
        longest = max(view.before_s, view.after_s)
        for word, breakdown in (("before", view.breakdown_before_s), ("after", view.breakdown_after_s)):
            total = sum(breakdown.parts().values())
            parts += _bar_line(f"{word:<7}{in_unit(total, unit)} {unit.name}", breakdown, terminal, of=longest, at=22)
        parts.append("")
    table = _table()
    for title, justify in (
        ("change", "left"),
        ("step", "right"),
        ("saved", "right"),
        ("why not more", "left"),
    ):
        _column(table, title, right=justify == "right", wide=title == "why not more")
    after = column([stage.after_s for stage in view.stages])
    saved = column([-stage.saved_s for stage in view.stages], signed=True)
    for stage, *cells in zip(view.stages, after, saved, strict=True):
        table.add_row(_plain(stage.name), *cells, _plain(stage.why_not_more))
    parts.append(_indented(table))
    if view.critical_path_after:
        parts.append(_labelled("critical path", wording.path_change(view)))
    for made in view.changes:
        parts.append(_labelled("changed", wording.change_text(made, len(view.techniques) > 1)))
    matter = wording.assumptions_that_matter(view)
    for assumption in matter:
        parts.append(_labelled("assumed", wording.assumption_text(assumption)))
    if rest := view.assumptions[len(matter) :]:
        parts.append(_labelled("assumed", wording.other_assumptions(view, rest)))
    if view.why_not_more and not any(stage.why_not_more for stage in view.stages):
        parts.append(_labelled("why not more", view.why_not_more))
    for note in view.notes:
        parts.append(_note(note))
    parts.append(_note(wording.interval_source(view)))
    return parts


def _compare(view: CompareView, terminal: Terminal, rows: int) -> list[RenderableType]:
    unit = unit_for(max(view.before_s, view.after_s))
    parts: list[RenderableType] = [_bold(view.headline), ""]
    for source, steps, time, lies, breakdown in (
        (view.before_source, view.before_steps, view.before_time_s, view.before_interval_s, view.breakdown_before_s),
        (view.after_source, view.after_steps, view.after_time_s, view.after_interval_s, view.breakdown_after_s),
    ):
        spread = f"{count(steps)} steps, p10 – p90 {between(time.p10, time.p90, unit)}" if steps > 1 else "1 step"
        if lies is not None:
            spread = f"{count(steps)} step{'s' if steps > 1 else ''}, 80 % interval {between(*lies, unit)}"
        parts.append(_labelled(source, f"{in_unit(time.median, unit)} {unit.name} ({spread})"))
        if terminal.bars:
            parts += _bar_line("", breakdown, terminal, of=max(view.before_s, view.after_s), at=2)
    table = _table()
    for title in ("part of the step", "before", "after", "change"):
        _column(table, title, right=title != "part of the step")
    moved = view.breakdown_change_s.parts()
    both = [(getattr(view.breakdown_before_s, name), getattr(view.breakdown_after_s, name)) for name in moved]
    kept = [i for i, pair in enumerate(both) if any(pair)]
    names = [part_word(name, view.platform) for name in moved]
    rows_of = (
        [names[i] for i in kept],
        column([both[i][0] for i in kept]),
        column([both[i][1] for i in kept]),
        column([list(moved.values())[i] for i in kept], signed=True),
    )
    for texts in zip(*rows_of, strict=True):
        table.add_row(*texts)
    parts += ["", _indented(table), ""]
    layers = _table()
    for title in ("layer", "phase", "before", "after", "change", "on the critical path"):
        _column(layers, title, right=title not in ("layer", "phase"))
    shown = view.rows[:rows]
    for name, row, *cells in zip(
        short_names([row.name for row in shown], _room(terminal)),
        shown,
        column([row.before_s for row in shown]),
        column([row.after_s for row in shown]),
        column([row.change_s for row in shown], signed=True),
        column([row.critical_after_s - row.critical_before_s for row in shown], signed=True),
        strict=True,
    ):
        layers.add_row(_plain(name), row.phase, *cells)
    if view.rows:
        parts.append(_indented(layers))
    parts.append(_note(f"{share(view.matched_share)} of both sides' busy time is in tasks that both have."))
    for note in view.notes:
        parts.append(_note(note))
    return parts


def _simulate(view: SimulateView) -> list[RenderableType]:
    table = _table()
    for title in ("replay", "step", "error"):
        _column(table, title, right=title != "replay")
    table.add_row("measured", seconds(view.measured_s), "")
    table.add_row("recorded waits", seconds(view.step_time_s), wording.error_text(view.error))
    table.add_row("typical waits", seconds(view.structural_step_time_s), wording.error_text(view.structural_error))
    low, high = view.interval_s
    parts: list[RenderableType] = [_bold(view.headline), "", _indented(table)]
    parts.append(
        _note(
            f"{count(view.steps)} {'step' if view.steps == 1 else 'steps'}, {count(view.tasks)} tasks, "
            f"{count(view.edges)} edges; {100 * view.interval_level:.3g} % interval of a step "
            f"{between(low, high, unit_for(view.step_time_s))} {unit_for(view.step_time_s).name}."
        )
    )
    for note in view.notes:
        parts.append(_note(note))
    return parts


def _ranking(rows: Sequence[BlameRow], title: str, platform: str, terminal: Terminal) -> RenderableType:
    from rich.text import Text

    narrow = terminal.width < NARROW
    where = platform != "cpu" and not narrow  # host and device work may carry the same name
    table = _table()
    _column(table, title)
    if where:
        _column(table, "on")
    for name in ("time", "gone") if narrow else ("count", "time", "10 % faster", "gone"):
        _column(table, name, right=True)
    times = column([row.time_s for row in rows])
    gone = column([-row.saved_if_removed_s for row in rows], signed=True)
    faster = column([-row.saved_if_10pct_faster_s for row in rows], signed=True)
    for i, (row, short) in enumerate(zip(rows, short_names([row.name for row in rows], _room(terminal)), strict=True)):
        cells = [times[i], gone[i]] if narrow else [count(row.count), times[i], faster[i], gone[i]]
        if where:
            cells = [wording.WHERE.get(row.kind, row.kind), *cells]
        table.add_row(Text(short, style=KIND_STYLES.get(row.kind, "")), *cells)
    return _indented(table)


def _named_too(rows: Sequence[BlameRow], most: int, headline: str) -> Sequence[BlameRow]:
    """The first rows, and behind them the one that the headline is about where it is further down."""
    named = [row for row in rows[most:] if short_name(row.name, 40) in headline]
    return [*rows[:most], *named[:1]]


def _room(terminal: Terminal) -> int:
    """Characters left for a name beside the columns of figures."""
    return max(terminal.width - (28 if terminal.width < NARROW else 60), 16)


def _breakdown_line(breakdown: Breakdown, platform: str, terminal: Terminal) -> RenderableType:
    """Every part with its figure, largest wait first; breaks between parts, never inside one."""
    from rich.text import Text

    parts = breakdown.parts()
    unit = unit_for(sum(parts.values()))
    text, used = Text(), 0
    for name, value in sorted(parts.items(), key=lambda item: (item[0] != "compute", -item[1])):
        if platform == "cpu" and not value:  # most parts need a device
            continue
        word = f"{part_word(name, platform)} {in_unit(value, unit)}"
        if used and used + 3 + len(word) > terminal.width - 2:
            text.append("\n")
            used = 0
        elif used:
            text.append("   ")
            used += 3
        text.append(word, PART_STYLES[name][1] if value else "dim")
        used += len(word)
    return _indented(text)


def _bar_line(
    label: str, breakdown: Breakdown, terminal: Terminal, *, of: float = 0.0, at: int = 38
) -> list[RenderableType]:
    """The label and, where bars are wanted and fit beside it, the step drawn to scale."""
    from rich.text import Text

    line = Text("  " + label)
    if not terminal.bars:
        return [line]
    total = of or sum(breakdown.parts().values())
    room = terminal.width - at - 2
    if terminal.width < NARROW:
        at, room = 2, terminal.width - 4
        lines: list[RenderableType] = [line] if label else []
        line = Text("  ")
    else:
        lines = []
        line.pad_right(max(at - len(line.plain), 1 if label else 0))
    if total <= 0 or room < 8:
        return [*lines, line]
    room = min(room, 48)
    drawn = 0
    reached = 0.0
    for name, value in breakdown.parts().items():
        reached += value
        cells = round(room * reached / total) - drawn  # rounding the running sum keeps the length of the whole right
        drawn += cells
        char, style = PART_STYLES[name]
        line.append(char * cells, style)
    return [*lines, line]


def _table() -> Table:
    from rich.table import Table

    return Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim", show_edge=False)


def _column(table: Table, title: str, *, right: bool = False, wide: bool = False) -> None:
    table.add_column(
        title, justify="right" if right else "left", no_wrap=not wide, overflow="fold" if wide else "ellipsis"
    )


def _indented(what: RenderableType, by: int = 2) -> RenderableType:
    from rich.padding import Padding

    return Padding(what, (0, 0, 0, by))


def _plain(text: str) -> RenderableType:
    from rich.text import Text

    return Text(text)


def _bold(text: str) -> RenderableType:
    from rich.text import Text

    return Text(text, style="bold")


def _soft(text: str) -> RenderableType:
    from rich.text import Text

    return Text(text, style="dim")


def _labelled(label: str, text: str) -> RenderableType:
    from rich.text import Text

    return _indented(Text.assemble((label + ": ", "dim"), text))


def _note(text: str) -> RenderableType:
    return _indented(_soft(text))
