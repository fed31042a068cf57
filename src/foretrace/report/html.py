"""One self-contained page: the answer, the timeline, who holds the step back, what-ifs side by side.

Everything is inline (styles, script, data), so the page opens from a file without a network; a content
security policy in the page holds it to that. All names are escaped: text by the template, JSON by
`script_json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretrace.report import shared, units, whatif
from foretrace.report.names import short_names
from foretrace.report.page import PADS, drawn, filled, script_json
from foretrace.report.runs import step_bar
from foretrace.report.show import BlameView, ShowView, blame, facts, reading_notes, show, step_spread
from foretrace.report.tracks import MAX_TASKS, Track, pack, track
from foretrace.report.views import BreakdownView
from foretrace.simulate.timeline import Timeline
from foretrace.techniques.whatif import WhatIf

MOST_ROWS = 400  # of a ranking; all of them are in the JSON of `blame`
SCRIPTS = ("format.js", "data.js", "timeline.js", "axis.js", "gestures.js", "interact.js", "common.js", "page.js")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What the page shows; the first track is the recorded run, the others are predictions drawn below it."""

    show: ShowView
    blames: Sequence[BlameView] = ()
    whatifs: Sequence[whatif.WhatIfView] = ()
    tracks: Sequence[Track] = ()
    focus_step: int = 0  # position of the step that the timeline opens on


def page_of(recorded: Timeline, whatifs: Sequence[WhatIf] = (), *, path: str = "") -> Page:
    """Return everything that the page shows of a recording and of what-ifs about it."""
    views = [whatif.whatif(each, path=path) for each in whatifs]
    return Page(
        show=show(recorded, path=path),
        blames=[blame(recorded, by, path=path) for by in ("name", "layer", "kind", "phase")],
        whatifs=views,
        tracks=[
            track("recorded", recorded),
            *(track(view.name, each.after) for view, each in zip(views, whatifs, strict=True)),
        ],
        focus_step=median_step(recorded),
    )


def median_step(timeline: Timeline) -> int:
    """Return the position of the (lower) median step."""
    order = np.argsort(timeline.step_times_ns, kind="stable")
    return int(order[(len(order) - 1) // 2])


def render(page: Page, *, max_tasks: int = MAX_TASKS) -> str:
    """Return the page as one HTML text."""
    return filled("report.html.j2", ["report.css"], SCRIPTS, **_context(page, max_tasks))


def _context(page: Page, max_tasks: int) -> dict[str, Any]:
    from markupsafe import Markup

    shown = page.show
    # A step without any time is drawn all the same.
    longest = max([shown.step_time_s.median, *(max(w.after_s, w.interval_s[1]) for w in page.whatifs)]) or 1.0
    notes = reading_notes(shown)
    meta, data = {}, ""
    if page.tracks:
        packed, data = pack(page.tracks, focus_step=page.focus_step, max_tasks=max_tasks)
        first = packed["tracks"][0]
        meta = packed | {"focus": page.focus_step - first["first_step"]}
        if len(steps := first["steps"]) < first["all_steps"]:
            notes.append(
                f"The timeline draws steps {steps[0]} to {steps[-1]} ({len(steps)} of {first['all_steps']}) to keep "
                "the page small; every number is from all steps."
            )
    return {
        "show": shown,
        "facts": facts(shown),
        "unit": units.unit_for(shown.step_time_s.median),
        "spread": step_spread(shown),
        "blames": [_blame(blame) for blame in page.blames],
        "whatifs": page.whatifs,
        "scale": longest,
        "notes": notes,
        "views": script_json({"show": shown, "whatif": list(page.whatifs)}),
        "meta": script_json(meta),
        "data": Markup(data),
        # what the template writes with
        "breakdown": _breakdown,
        "columned": _columned,
        "words": shared,
        "units": units,
        "what_if": whatif,
    }


def _breakdown(breakdown: BreakdownView, platform: str) -> dict[str, Any]:
    bar = step_bar("", breakdown, platform)
    return {"total": sum(part.value for part in bar.parts), "parts": drawn(bar)}


def _columned(values_s: Iterable[float], *, saved: bool = False) -> list[str]:
    """Return times that stand below each other; `saved`: what they change of the step."""
    return units.column([-each if saved else each for each in values_s], signed=saved, pads=PADS)


def _blame(blame: BlameView) -> dict[str, Any]:
    rows = blame.rows[:MOST_ROWS]
    columns = (
        rows,
        short_names([row.name for row in rows], 64),
        _columned(row.time_s for row in rows),
        _columned((row.saved_if_10pct_faster_s for row in rows), saved=True),
        _columned((row.saved_if_removed_s for row in rows), saved=True),
    )
    return {
        "left_out": units.count(len(blame.rows) - len(rows)) if len(blame.rows) > len(rows) else "",
        "view": blame,
        "most": max((row.saved_if_removed_s for row in blame.rows), default=0.0),
        "rows": [(*each, units.count(each[0].count)) for each in zip(*columns, strict=True)],
    }
