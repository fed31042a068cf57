"""`foretrace stash`: where a training step stalls, from one recording or by differential runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli import options
from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.report.views import Result


def stash(
    source: Annotated[
        str,
        typer.Argument(metavar="TRACE|SCRIPT|MODEL", help="A recording; or what to run: a script, a model of the zoo."),
    ],
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", help="Workers; 2 or more for stalls between them.")
    ] = 1,
    inside: Annotated[
        str, typer.Option("--inside", metavar="LINK|FILE", help="Between workers of a machine, for a recording.")
    ] = "",
    between: Annotated[
        str, typer.Option("--between", metavar="LINK|FILE", help="Between machines; for runs, a shaped link: 300mbit.")
    ] = "",
    gradient_mb: Annotated[
        float, typer.Option("--gradient-mb", metavar="MB", min=0.0, help="All gradients, if the recording lacks them.")
    ] = 0.0,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="PATH", help="Files of the data set, to be taken out of the page cache."),
    ] = None,
    size: options.Size = "tiny",
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Steps of every run and round.")] = 8,
    rank: options.Rank = None,
) -> Result:
    """Show why a step stalls: workers, network, data loading.

    A recording is answered at once; a script or model is also run for real, four ways in turns, and both are compared.
    Example: foretrace stash resnet50 --workers 2
    """
    from foretrace.report import stash as report

    if options.is_recording(source):
        from foretrace.experiment.stalls import stalls

        if workers < 1:
            raise ForetraceError(f"--workers {workers} cannot be; one is the least.")
        scenario = options.scenario(Path(source), rank=rank)
        found = stalls(scenario.graph, workers=workers, inside=inside, between=between, gradient_mb=gradient_mb)
        return report.stash(found, source=source, workers=workers)
    from foretrace.cli.verify import progress
    from foretrace.experiment.differential import DifferentialRequest, differential
    from foretrace.zoo.registry import job

    if inside or gradient_mb or rank is not None:
        raise ForetraceError("--inside, --gradient-mb and --rank are for recordings; runs measure these themselves.")
    job(source, size)
    wanted = DifferentialRequest(
        work=source, workers=workers, size=size, link=between, data=tuple(data or ()), steps=steps
    )
    with progress() as tell:
        compared = differential(wanted, tell or (lambda what, share: None))
    return report.stash(compared, source=source, workers=workers)
