"""`foretrace whatif`: the step as it would be with one or several techniques."""

from __future__ import annotations

from pathlib import Path

from foretrace.cli import options
from foretrace.cli.answers import Reply
from foretrace.cli.options import option


def whatif(
    source: options.Source,
    do: options.Do,
    perfetto: options.Perfetto = None,
    save: Path | None = option(None, "FILE", "Keep the predicted graph, for compare."),
    calibration: options.Calibration = True,
    rank: options.Rank = None,
    all_ranks: options.AllRanks = False,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
) -> Reply:
    """Predict the step time with changes that have not been made.

    Example: foretrace whatif run/ --do fused-optimizer --do "prefetch-data workers=1" --html report.html
    """
    from foretrace.techniques.arguments import parse_all

    techniques = parse_all(do or [])
    run = options.scenario(source, rank=rank, steps=steps, salvage=salvage, all_ranks=all_ranks)
    if calibration:
        run = run.calibrated()
        if known := len(run.graph.info.calibration.get("seconds", ())):
            options.say(
                f"using {known:,} operator times measured on the recorded machine (--no-calibration ignores them)"
            )
    predicted = run.apply(*techniques)
    from foretrace.cli.pages import write_timeline
    from foretrace.report.html import page_of, write
    from foretrace.report.whatif import whatif

    with options.progress("weighing the assumptions"):
        found = predicted.whatif()
        view = whatif(found, path=str(source))
    return Reply(
        result=view,
        page=lambda path: write(page_of(found.before, [found], path=str(source)), path),
        files={perfetto: lambda path: write_timeline(path, found.before, found), save: predicted.save},
    )
