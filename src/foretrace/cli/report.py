"""`foretrace report`: everything about a run on one page."""

from __future__ import annotations

from pathlib import Path

from foretrace.cli import options
from foretrace.cli.options import option


def report(
    source: options.Source,
    do: options.Do = None,
    out: Path = option(Path("report.html"), "FILE", "The page to write.", "--out", "-o"),
    rank: options.Rank = None,
    all_ranks: options.AllRanks = False,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
) -> None:
    """Write one self-contained HTML page about a run.

    Timeline, breakdown, ranking, and every --do as a what-if of its own.

    Example: foretrace report run/ --do prefetch-data --do fused-optimizer --out report.html
    """
    from foretrace.techniques.arguments import parse_all

    techniques = parse_all(do or [])
    run = options.scenario(source, rank=rank, steps=steps, salvage=salvage, all_ranks=all_ranks)
    from foretrace.report import html

    with options.progress("weighing the what-ifs"):
        found = [run.apply(technique).whatif() for technique in techniques]
        html.write(html.page_of(run.simulate(), found, path=str(source)), out)
    options.wrote(out)
