"""Blocks as HTML: a self-contained page, or the fragment of it that a notebook shows.

Everything is inline, so nothing is loaded from a network; all names are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

from foretrace.plaintext import encoded, visible
from foretrace.report.blocks import Bar, Bars, Block, Chart, Grid, Headline, LaneChart, blocks, text
from foretrace.report.names import short_names
from foretrace.report.units import in_unit, seconds, share, unit_for

PADS = ("\N{FIGURE SPACE}", "\N{PUNCTUATION SPACE}")  # as wide as a digit and as a point
NAME = 64  # characters of a name
CHART, POINTS = (640, 150), 129  # box of a chart, and points of a line in it
LANE = 18  # height of a lane
COLOURS = ("compute", "comm", "copy", "data", "launch")


def render(result: Any, *, top: int = 12, **how: Any) -> str:
    """Return the page as one HTML text. Deterministic: the same result gives the same bytes."""
    return _rendered("blocks.html.j2", "report.css", result, blocks(result, top, **how))


def fragment(result: Any, *, top: int = 12) -> str:
    """Return what a notebook shows of a result: the blocks with their styles, and no script."""
    return _rendered("fragment.html.j2", "fragment.css", result, blocks(result, top))


def _rendered(template: str, style: str, result: Any, found: list[Block]) -> str:
    title = next((block.text for block in found if isinstance(block, Headline)), result.command)
    return filled(template, [style], title=title, blocks=[context(block) for block in found if block != ""])


def context(block: Block) -> dict[str, Any]:
    """Return a block as the template takes it: its kind and its fields, figures as text."""
    if isinstance(block, str):
        return {"kind": "plain", "text": unparted(block)}
    kind = {"kind": type(block).__name__.lower()}
    if isinstance(block, Grid):
        return kind | _grid(block)
    if isinstance(block, Bars):
        return kind | {"bars": _bars(block)}
    if isinstance(block, Chart):
        return kind | _chart(block)
    if isinstance(block, LaneChart):
        return kind | _lanes(block)
    return kind | {name: getattr(block, name) for name in block.__struct_fields__}


def _grid(grid: Grid) -> dict[str, Any]:
    columns = []
    for at, column in enumerate(grid.columns):
        cells = grid.cells(at, len(grid.rows), pads=PADS)
        full = cells
        if column.kind == "name":
            cells = short_names(cells, NAME)
        columns.append([(short, name if name != short else "") for short, name in zip(cells, full, strict=True)])
    return {
        "columns": [{"title": column.title, "right": column.flush_right} for column in grid.columns],
        "titled": any(column.title for column in grid.columns),
        "rows": list(zip(*columns, strict=True)),
        "shown": grid.shown,
        "colours": grid.colours,
    }


def _chart(chart: Chart) -> dict[str, Any]:
    """Return lines in a box of CHART, and what stands at its corners."""
    width, height = CHART
    places, most = chart.places(POINTS), chart.most or 1.0
    lines = [
        {
            "name": curve.name,
            "colour": colour,
            "points": " ".join(
                f"{width * i / (POINTS - 1):.1f},{height * (1 - each / most):.1f}"
                for i, each in enumerate(curve.at(places))
            ),
        }
        for curve, colour in zip(chart.curves, COLOURS, strict=False)
    ]
    low, high = (chart.words(each, of_x=True) for each in chart.x_range)
    middle = chart.words(places[POINTS // 2], of_x=True)
    return {
        "title": chart.title, "lines": lines, "width": width, "height": height, "most": chart.words(most),
        "ends": (low, middle, high),
    }  # fmt: skip


def _lanes(block: LaneChart) -> dict[str, Any]:
    """Return boxes on lanes in a box as wide as a chart's."""
    lanes, last = list(dict.fromkeys(each.lane for each in block.spans)), max(each.end_s for each in block.spans)
    scale = CHART[0] / (last or 1.0)
    boxes = [
        {
            "x": f"{scale * each.begin_s:.1f}", "y": LANE * lanes.index(each.lane), "colour": each.key,
            "width": f"{max(scale * (each.end_s - each.begin_s) - 0.5, 0.5):.1f}",
            "text": f"{each.name}: {seconds(each.end_s - each.begin_s)}",
        }
        for each in block.spans
    ]  # fmt: skip
    return {"title": block.title, "boxes": boxes, "lanes": lanes, "width": CHART[0], "height": LANE * len(lanes),
            "tall": LANE, "end": seconds(last)}  # fmt: skip


def _bars(block: Bars) -> list[dict[str, Any]]:
    totals = [sum(part.value for part in bar.parts) for bar in block.bars]
    longest = max(totals) or 1.0
    return [
        {"label": bar.label, "parts": drawn(bar), "length": total / longest}
        for bar, total in zip(block.bars, totals, strict=True)
    ]


def filled(template: str, styles: Sequence[str], scripts: Sequence[str] = (), **context: Any) -> str:
    """Return a template of this room with styles and scripts in it; all that is not marked as markup is escaped.

    Deterministic: the same context gives the same bytes.
    """
    import jinja2
    from markupsafe import Markup

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("foretrace.report"), autoescape=True, undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )  # fmt: skip
    made.filters |= {"whole": unparted, "text": text}
    assets = files("foretrace.report") / "assets"
    css, js = ("\n".join((assets / name).read_text("utf-8") for name in names) for names in (styles, scripts))
    whole = Markup(f"(() => {{\n'use strict';\n{js}\n}})();")
    return visible(made.get_template(template).render(version=_version(), css=Markup(css), js=whole, **context))


def unparted(text: str) -> str:
    """Return the text with figures that are not parted from their units at the end of a line."""
    return re.sub(r"(?<=\d) (?=(?:ns|µs|ms|s|%)\b|%)", "\N{NO-BREAK SPACE}", text)


def drawn(bar: Bar) -> list[dict[str, Any]]:
    """Return the parts of a bar as the templates take them."""
    total = sum(part.value for part in bar.parts)
    unit = unit_for(total)
    return [
        {
            "key": part.key,
            "word": part.word,
            "share": part.value / total if total else 0.0,
            "text": f"{in_unit(part.value, unit)} {unit.name}" if part.value else "0",
            "short": in_unit(part.value, unit),
            "percent": share(part.value / total) if total and part.value else "",
        }
        for part in bar.parts
    ]


def script_json(value: Any) -> Any:
    """Return JSON that may stand inside a script element: no markup character survives, whatever the names hold."""
    import markupsafe

    text = encoded(value).decode()
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return markupsafe.Markup(text)


def _version() -> str:
    try:
        return version("foretrace")
    except PackageNotFoundError:
        return "(source tree)"
