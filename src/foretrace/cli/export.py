"""`foretrace export`: the timeline for Perfetto and chrome://tracing."""

from __future__ import annotations

from pathlib import Path

from foretrace.cli import options
from foretrace.cli.options import option


def export(
    source: options.Source,
    do: options.Do = None,
    out: Path = option(Path("timeline.json.gz"), "FILE", ".json or .json.gz", "--out", "-o"),
    rank: options.Rank = None,
    all_ranks: options.AllRanks = False,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
) -> None:
    """Write the timeline for Perfetto, recorded and predicted.

    With --do, the lanes of the predicted run lie below the recorded ones.

    Example: foretrace export run/ --do prefetch-data --out timeline.json.gz, then open it in ui.perfetto.dev
    """
    from foretrace.techniques.arguments import parse_all

    techniques = parse_all(do or [])
    run = options.scenario(source, rank=rank, steps=steps, salvage=salvage, all_ranks=all_ranks)
    from foretrace.cli import pages

    found = run.apply(*techniques).whatif() if techniques else None
    pages.write_timeline(out, run.simulate() if found is None else found.before, found)
    options.wrote(out)
