"""Blocks as HTML: a self-contained page, or the fragment of it that a notebook shows.

Everything is inline, as on the page of a run (`html`), so nothing is loaded from a network; all names are escaped.
"""

from __future__ import annotations

from typing import Any

from foretrace.report.blocks import Bars, Block, Grid, Headline, blocks
from foretrace.report.html import PADS, drawn, filled, unparted
from foretrace.report.names import short_names

NAME = 64  # characters of a name


def render(result: Any, *, top: int = 12, **how: Any) -> str:
    """The page as one HTML text. Deterministic: the same result gives the same bytes."""
    return _rendered("blocks.html.j2", "report.css", result, blocks(result, top, **how))


def fragment(result: Any, *, top: int = 12) -> str:
    """What a notebook shows of a result: the blocks with their styles, and no script."""
    return _rendered("fragment.html.j2", "fragment.css", result, blocks(result, top))


def _rendered(template: str, style: str, result: Any, found: list[Block]) -> str:
    title = next((block.text for block in found if isinstance(block, Headline)), result.command)
    return filled(template, [style], title=title, blocks=[context(block) for block in found if block != ""])


def context(block: Block) -> dict[str, Any]:
    """A block as the template takes it: its kind and its fields, figures as text."""
    if isinstance(block, str):
        return {"kind": "plain", "text": unparted(block)}
    kind = {"kind": type(block).__name__.lower()}
    if isinstance(block, Grid):
        return kind | _grid(block)
    if isinstance(block, Bars):
        return kind | {"bars": _bars(block), "legend": block.legend}
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


def _bars(block: Bars) -> list[dict[str, Any]]:
    totals = [sum(part.value for part in bar.parts) for bar in block.bars]
    longest = max(totals) or 1.0
    return [
        {"label": bar.label, "parts": drawn(bar), "length": total / longest}
        for bar, total in zip(block.bars, totals, strict=True)
    ]
