"""`foretrace advise`: what to do first."""

from __future__ import annotations

from foretrace.cli import options
from foretrace.cli.answers import Reply
from foretrace.cli.options import flag


def advise(
    source: options.Source,
    exact: bool = flag("--exact", "Vary every assumption separately, however long."),
    calibration: options.Calibration = True,
    rank: options.Rank = None,
    all_ranks: options.AllRanks = False,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
    top: options.Top = 6,
) -> Reply:
    """Try every technique that applies and say what to do first.

    Ranked by what the step would save, the best three predicted together, refusals with their reason.

    Example: foretrace advise run/
    """
    run = options.scenario(source, rank=rank, steps=steps, salvage=salvage, all_ranks=all_ranks)
    if calibration:
        run = run.calibrated()
    from foretrace.report.advise import advise

    with options.progress("trying techniques"):
        advice = run.advise(exact=exact)
    # A failure is our bug; it costs no other technique its advice, but it is reported like any other.
    names = ", ".join(each.name for each in advice.failed)
    failed = (
        ExceptionGroup(f"these techniques failed: {names}", [each.error for each in advice.failed]) if names else None
    )
    return Reply(result=advise(advice, path=str(source)), error=failed)
