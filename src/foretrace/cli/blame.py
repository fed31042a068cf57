"""`foretrace blame`: who holds the step back, ranked by what the step would save."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from foretrace.cli import options
from foretrace.cli.options import option

if TYPE_CHECKING:
    from foretrace.report.views import Result


class By(StrEnum):
    """What tasks are summed up by."""

    name = "name"
    layer = "layer"
    kind = "kind"
    phase = "phase"


def blame(
    source: options.Source,
    by: By = option(By.name, "", "What to group rows by."),
    rank: options.Rank = None,
    all_ranks: options.AllRanks = False,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
    top: options.Top = 12,
) -> Result:
    """Rank operators by what the step would save.

    Kernels, operators, layers or phases: the step time saved if they were 10 % faster, or gone.

    Example: foretrace blame run/ --by layer
    """
    run = options.scenario(source, rank=rank, steps=steps, salvage=salvage, all_ranks=all_ranks)
    from foretrace.report.blame import blame

    return blame(run.simulate(), by.value, path=str(source))
