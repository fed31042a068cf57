"""`foretrace compare`: where the difference between two runs lies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from foretrace.cli import options
from foretrace.cli.options import argument

if TYPE_CHECKING:
    from foretrace.report.views import Result


def compare(
    before: Path = argument(..., "BEFORE", "A recording or a saved graph."),
    after: Path = argument(..., "AFTER", "Another recording or saved graph."),
    rank: options.Rank = None,
    all_ranks: options.AllRanks = False,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
    top: options.Top = 12,
) -> Result:
    """Explain by layer why one of two runs takes longer.

    Example: foretrace compare before/ after/
    """
    sides = [
        options.scenario(source, rank=rank, steps=steps, salvage=salvage, all_ranks=all_ranks).simulate()
        for source in (before, after)
    ]
    from foretrace.report.compare import compare

    return compare(*sides, before_path=str(before), after_path=str(after))
