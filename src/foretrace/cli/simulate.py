"""`foretrace simulate`: the plain replay, beside what was recorded."""

from __future__ import annotations

from foretrace.cli import options


def simulate(
    source: options.Source,
    rank: options.Rank = None,
    all_ranks: options.AllRanks = False,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
    as_json: options.AsJson = False,
) -> None:
    """Replay a recording unchanged, beside what was measured.

    Example: foretrace simulate run/
    """
    run = options.scenario(source, rank=rank, steps=steps, salvage=salvage, as_recorded=True, together=all_ranks)
    from foretrace.report import build

    options.answer(
        build.simulate(run.simulate(), path=str(source)), as_json=as_json, rank=rank, steps=steps, salvage=salvage
    )
