"""The files that `whatif`, `report` and `export` write: the page and the timeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from foretrace.report import perfetto
from foretrace.report.tracks import track
from foretrace.report.whatif import whatif

if TYPE_CHECKING:
    from foretrace.simulate.timeline import Timeline
    from foretrace.techniques.whatif import WhatIf


def write_timeline(target: Path, recorded: Timeline, found: WhatIf | None = None) -> None:
    """Chrome trace JSON for Perfetto: the lanes of the recorded run, and below them those of a prediction."""
    tracks = [track("recorded", recorded, recorded.interval_s())]
    if found is not None:
        low_s, high_s = found.interval_s
        view = whatif(found)
        step = replace(found.noise, low_s=low_s, high_s=high_s, source=view.interval_source)
        tracks.append(track(view.name, found.after, step))
    perfetto.write(tracks, target)
