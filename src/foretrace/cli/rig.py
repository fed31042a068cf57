"""`foretrace rig`: real workers on links of a stated bandwidth, to check predictions for many workers."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli import options
from foretrace.cli.answers import answers
from foretrace.cli.verify import LedgerFile, progress
from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.report.views import Result

rig = typer.Typer(
    name="rig",
    help="Check predictions on real workers and shaped links.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

LinkRate = Annotated[str, typer.Option("--link", metavar="RATE", help="Rate of every worker's link, such as 300mbit.")]
Workers = Annotated[int, typer.Option("--workers", metavar="N", help="Processes, each in a network of its own.")]


@rig.command("check")
@answers
def check() -> Result:
    """Say whether this machine can have a rig, and what it lacks.

    Exit code 1 where it cannot. Example: foretrace rig check
    """
    from foretrace.executor import cores
    from foretrace.experiment.links import netns
    from foretrace.report import rig as report

    able = netns.probe()
    return report.check(able, cores=cores(), leftovers=() if able.missing else netns.leftovers())


@rig.command("calibrate")
@answers
def calibrate(
    link: LinkRate,
    workers: Workers = 2,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Keep the table, for network=FILE of techniques.")
    ] = None,
) -> Result:
    """Measure what collectives take on a shaped link.

    Refuses where times vary by more than 10 %. Example: foretrace rig calibrate --link 300mbit --workers 2
    """
    import tempfile

    from foretrace.experiment.links.calibrate import alone
    from foretrace.hardware.cluster import parse_link
    from foretrace.report import rig as report

    with tempfile.TemporaryDirectory(prefix="foretrace-rig-") as folder:
        found = alone(workers, link, out or Path(folder) / "network.json")
    return report.calibrate(
        found, link=link, workers=workers, stated_mbit_s=1e3 * parse_link(link).gbit_s, stored=str(out or "")
    )


@rig.command("verify")
@answers
def verify(
    techniques: options.Techniques,
    link: LinkRate,
    workers: Workers = 2,
    emulate: Annotated[
        str,
        typer.Option(
            "--emulate",
            metavar="LAYERSxGRADIENT/BACKWARD",
            help="Layers that only sleep, with real gradients: 12x1mb/20ms, or 12x1mb/20ms/5ms with a forward pass.",
        ),
    ] = "",
    model: options.Model = "",
    size: options.Size = "tiny",
    against: Annotated[
        list[str] | None,
        typer.Option("--against", metavar='"TECHNIQUE ..."', help="Techniques of the baseline; else one worker alone."),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            metavar="S",
            min=0.1,
            help="For running the arms, 6 rounds at least; recording and calibration are extra.",
        ),
    ] = 30.0,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="FOLDER", help="Keep the graph of one worker and the link's table.")
    ] = None,
    ledger: LedgerFile = None,
    no_ledger: Annotated[bool, typer.Option("--no-ledger", help="Write no row.")] = False,
) -> Result:
    """Predict a distributed step from one worker's recording, then run it for real.

    Example: foretrace rig verify "data-parallel bucket_mb=4" --workers 2 --link 300mbit --emulate 12x1mb/20ms
    """
    from foretrace.experiment.ledger import Ledger
    from foretrace.experiment.links.job import LinkJob
    from foretrace.experiment.links.judge import rows_of
    from foretrace.experiment.links.measure import check as check_job
    from foretrace.experiment.links.measure import verify as run
    from foretrace.report import rig as report

    if bool(emulate) == bool(model):
        raise ForetraceError("give one of --emulate 12x1mb/20ms and --model NAME.")
    if not isfinite(seconds):
        raise ForetraceError(f"--seconds {seconds} never ends; give a number of seconds, e.g. --seconds 30.")
    job = LinkJob(
        work=emulate or model,
        link=link,
        workers=workers,
        arms=(tuple(techniques),),
        against=tuple(against or ()),
        size=size,
        seconds=seconds,
        keep=str(keep or ""),
    )
    check_job(job)
    kept = None if no_ledger else Ledger(ledger)
    if kept is not None:
        kept.check()
    with progress() as tell:
        outcome = run(job, tell)
    (row,) = rows_of(outcome)
    if kept is not None:
        kept.add([row])
    return report.verify(outcome, outcome.arms[0], ledger=str(kept.path) if kept else "", row=row.id if kept else "")


@rig.command("clean")
@answers
def clean() -> Result:
    """Remove what killed rigs left behind: their network namespaces and the processes in them.

    Rigs that still run are left alone. Example: foretrace rig clean
    """
    from foretrace.experiment.links import netns
    from foretrace.report import rig as report

    netns.require()
    return report.clean(netns.clean())
