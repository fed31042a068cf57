"""`foretrace graph`: the task graph of a recording, kept in a file that opens at once."""

from __future__ import annotations

from pathlib import Path

from foretrace.cli import options
from foretrace.cli.options import option


def graph(
    source: options.Source,
    out: Path = option(..., "FILE", "The file to write.", "--out", "-o"),
    do: options.Do = None,
    rank: options.Rank = None,
    all_ranks: options.AllRanks = False,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
) -> None:
    """Build and save a task graph, for faster loading.

    Every other command takes the file in place of a recording.

    Example: foretrace graph run/ --out run.graph
    """
    from foretrace.techniques.arguments import parse_all

    techniques = parse_all(do or [])
    options.scenario(source, rank=rank, steps=steps, salvage=salvage, all_ranks=all_ranks).apply(*techniques).save(out)
    options.wrote(out)
