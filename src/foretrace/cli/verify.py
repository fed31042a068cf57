"""`foretrace verify`: predict a technique, then make it real and measure it, on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli import options
from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.report.views import Result

LedgerFile = Annotated[
    Path | None,
    typer.Option("--ledger", metavar="FILE", help="The ledger; by default $FORETRACE_LEDGER or your data folder."),
]


def verify(
    techniques: options.Techniques,
    model: options.Model,
    size: options.Size = "tiny",
    threads: Annotated[int, typer.Option("--threads", metavar="N", min=1, help="Intra-op threads of all arms.")] = 1,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            metavar="S",
            min=0.1,
            help="For running the arms, 8 rounds at least; recording and calibration are extra.",
        ),
    ] = 20.0,
    batches: Annotated[
        str,
        typer.Option("--batches", metavar="ready|loader", help="Where steps take batches from; by the technique."),
    ] = "",
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ...")] = "cpu",
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="FOLDER", help="Keep both recordings: FOLDER/before, FOLDER/after.")
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=0, help="Steps to record; 0 for the recorder's default.")
    ] = 0,
    ledger: LedgerFile = None,
    no_ledger: Annotated[bool, typer.Option("--no-ledger", help="Write no row.")] = False,
) -> Result:
    """Predict a change, make it, measure it, keep both figures.

    Example: foretrace verify mixed-precision fused-optimizer --model bert
    """
    from foretrace.experiment.job import Job
    from foretrace.experiment.ledger import Ledger, row_of
    from foretrace.experiment.processes import ScriptError, run
    from foretrace.techniques.arguments import parse_all
    from foretrace.zoo.registry import job as find_job

    if not isfinite(seconds):
        raise ForetraceError(f"--seconds {seconds} never ends; give a number of seconds, e.g. --seconds 20.")
    if batches not in ("", "ready", "loader"):
        raise ForetraceError(f"--batches {batches} does not exist; choose ready or loader.")
    for technique in parse_all(techniques):
        if not technique.can_apply():
            raise technique.refuse(technique.not_applied or "it can be predicted but not applied.")
    find_job(model, size)
    job = Job(
        techniques=tuple(techniques),
        model=model,
        size=size,
        threads=threads,
        seconds=seconds,
        batches=batches,
        device=device,
        keep=str(keep or ""),
        steps=steps,
    )
    kept = None if no_ledger else Ledger(ledger)
    if kept is not None:
        kept.check()
    try:
        with progress() as tell:
            outcome = run(job, tell)
    except ScriptError as error:
        print(error.trace, file=sys.stderr, end="")
        raise
    row = row_of(outcome)
    if kept is not None:
        kept.add([row])
    from foretrace.report import verification

    return verification.verify(outcome, ledger=str(kept.path) if kept else "", row=row.id if kept else "")


@contextmanager
def progress() -> Iterator[Callable[[str, float], None] | None]:
    """A bar on standard error that says what is being done; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
