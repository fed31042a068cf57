"""`foretrace advise`: what to do first."""

from __future__ import annotations

from typing import Annotated

import typer

from foretrace.cli import options


def advise(
    source: options.Source,
    exact: Annotated[bool, typer.Option("--exact", help="Weigh every assumption by itself, however long.")] = False,
    calibration: options.Calibration = True,
    rank: options.Rank = None,
    all_ranks: options.AllRanks = False,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
    top: options.Top = 6,
    as_json: options.AsJson = False,
) -> None:
    """Try every technique that applies and say what to do first.

    Ranked by what the step would save, the best three predicted together, refusals with their reason.

    Example: foretrace advise run/
    """
    run = options.scenario(source, rank=rank, steps=steps, salvage=salvage, together=all_ranks)
    if calibration:
        run = run.calibrated()
    from foretrace.report import advise as report

    with options.progress("trying techniques"):
        advice = run.advise(exact=exact)
    view = report.advise(advice, path=str(source))
    options.answer(view, as_json=as_json, top=top, rank=rank, steps=steps, salvage=salvage)
    if advice.failed:  # our bug; it costs no other technique its advice, but it is reported like any other
        names = ", ".join(each.name for each in advice.failed)
        raise ExceptionGroup(f"these techniques failed: {names}", [each.error for each in advice.failed])
