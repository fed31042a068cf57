"""`foretrace compare`: where the difference between two runs lies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretrace.cli import options


def compare(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="A recording or a saved graph.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="Another recording or saved graph.")],
    rank: options.Rank = None,
    all_ranks: options.AllRanks = False,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
    top: options.Top = 12,
    as_json: options.AsJson = False,
) -> None:
    """Explain by layer why one of two runs takes longer.

    Example: foretrace compare before/ after/
    """
    sides = [
        options.scenario(source, rank=rank, steps=steps, salvage=salvage, together=all_ranks).simulate()
        for source in (before, after)
    ]
    from foretrace.report import build

    view = build.compare(*sides, before_path=str(before), after_path=str(after))
    options.answer(view, as_json=as_json, top=top)
