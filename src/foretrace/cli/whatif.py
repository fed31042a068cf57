"""`foretrace whatif`: the step as it would be with one or several techniques."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretrace.cli import options


def whatif(
    source: options.Source,
    do: Annotated[
        list[str],
        typer.Option(
            "--do",
            metavar='"NAME KEY=VALUE ..."',
            help="A technique; may be given several times, applied in this order. See foretrace techniques.",
        ),
    ],
    html: options.Html = None,
    perfetto: options.Perfetto = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Keep the predicted graph, for compare.")
    ] = None,
    calibration: options.Calibration = True,
    rank: options.Rank = None,
    all_ranks: options.AllRanks = False,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
    as_json: options.AsJson = False,
) -> None:
    """Predict the step time with changes that nobody has made yet.

    Example: foretrace whatif run/ --do mixed-precision --do "prefetch-data workers=4" --html report.html
    """
    from foretrace.techniques.arguments import parse_all

    techniques = parse_all(do)
    run = options.scenario(source, rank=rank, steps=steps, salvage=salvage, together=all_ranks)
    if calibration:
        run = run.calibrated()
        if known := len(run.graph.info.calibration.get("seconds", ())):
            options.say(
                f"using {known:,} operator times measured on the recorded machine (--no-calibration ignores them)"
            )
    predicted = run.apply(*techniques)
    from foretrace.cli import pages
    from foretrace.report import build

    with options.progress("weighing the assumptions"):
        found = predicted.whatif()
        view = build.whatif(found, path=str(source))
    options.answer(view, as_json=as_json, rank=rank, steps=steps, salvage=salvage)
    if html is not None:
        pages.write_report(html, found.before, [found], path=str(source))
    if perfetto is not None:
        pages.write_timeline(perfetto, found.before, found)
    if save is not None:
        predicted.save(save)
    options.wrote(html, perfetto, save, quiet=as_json)
