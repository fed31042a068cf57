"""`foretrace stash`: where a training step stalls, from one recording or by differential runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from foretrace.cli import options
from foretrace.cli.options import argument, option
from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.report.views import Result


def stash(
    source: str = argument(..., "TRACE|SCRIPT|MODEL", "A recording; or what to run: a script, a model of the zoo."),
    workers: int = option(1, "N", "Workers; 2 or more for stalls between them."),
    inside: str = option("", "LINK|FILE", "Between workers of a machine, for a recording."),
    between: str = option("", "LINK|FILE", "Between machines; for runs, a shaped link: 300mbit."),
    gradient_mb: float = option(0.0, "MB", "All gradients, if the recording lacks them.", least=0.0),
    data: list[str] | None = option(None, "PATH", "Files of the data set, to be taken out of the page cache."),
    size: options.Size = "tiny",
    steps: int = option(8, "N", "Steps of every run and round.", least=1),
    rank: options.Rank = None,
) -> Result:
    """Show why a step stalls: workers, network, data loading.

    A recording is answered at once; a script or model is also run for real, four ways in turns, and both are compared.
    Example: foretrace stash resnet50 --workers 2
    """
    from foretrace.report import stash as report

    if options.is_recording(source):
        from foretrace.experiment.stalls import stalls

        scenario = options.scenario(Path(source), rank=rank)
        found = stalls(scenario.graph, workers=workers, inside=inside, between=between, gradient_mb=gradient_mb)
        return report.stash(found, source=source, workers=workers)
    from foretrace.experiment.differential import DifferentialRequest, differential
    from foretrace.zoo.registry import job

    if inside or gradient_mb or rank is not None:
        raise ForetraceError("--inside, --gradient-mb and --rank are for recordings; runs measure these themselves.")
    job(source, size)
    wanted = DifferentialRequest(
        work=source, workers=workers, size=size, link=between, data=tuple(data or ()), steps=steps
    )
    with options.stages() as tell:
        compared = differential(wanted, tell or (lambda what, share: None))
    return report.stash(compared, source=source, workers=workers)
