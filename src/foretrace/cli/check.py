"""`foretrace check`: whether the graph of a recording stands up to being changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretrace.cli import options

if TYPE_CHECKING:
    from foretrace.report.views import Result


def check(
    source: options.Source,
    rank: options.Rank = None,
    all_ranks: options.AllRanks = False,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
) -> Result:
    """Test a graph with questions whose answers are known.

    Checks its invariants, and what it predicts where the answer is known.

    Exit code 1 where a check fails. Example: foretrace check run/
    """
    run = options.scenario(source, rank=rank, steps=steps, salvage=salvage, as_recorded=True, all_ranks=all_ranks)
    from foretrace.report.check import check

    return check(run.check())
