"""`foretrace simulate`: the plain replay, beside what was recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretrace.cli import options

if TYPE_CHECKING:
    from foretrace.report.views import Result


def simulate(
    source: options.Source,
    rank: options.Rank = None,
    all_ranks: options.AllRanks = False,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
) -> Result:
    """Replay a recording unchanged, beside what was measured.

    Example: foretrace simulate run/
    """
    run = options.scenario(source, rank=rank, steps=steps, salvage=salvage, as_recorded=True, all_ranks=all_ranks)
    from foretrace.report.simulate import simulate

    return simulate(run.simulate(), path=str(source))
