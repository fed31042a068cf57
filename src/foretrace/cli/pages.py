"""The files that `whatif`, `report` and `export` write: the page and the timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from foretrace.report import build, html, perfetto

if TYPE_CHECKING:
    from foretrace.simulate.timeline import Timeline
    from foretrace.techniques.whatif import WhatIf


def write_report(target: Path, recorded: Timeline, found: Sequence[WhatIf], *, path: str) -> None:
    """One self-contained page: the recorded run, and every what-if beside it."""
    html.write(build.page(recorded, found, path=path), target)


def write_timeline(target: Path, timelines: Mapping[str, Timeline]) -> None:
    """Chrome trace JSON for Perfetto: the lanes of every timeline, one above the other."""
    perfetto.write([build.track(name, timeline) for name, timeline in timelines.items()], target)
