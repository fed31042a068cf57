"""`foretrace rig`: real workers on links of a stated bandwidth, to check predictions for many workers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from foretrace.cli import options
from foretrace.cli.answers import answers, group
from foretrace.cli.options import option
from foretrace.cli.verify import LedgerFile, NoLedger
from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.report.views import Result

rig = group("rig", "Check predictions on real workers and shaped links.")

LinkRate = Annotated[str, option(..., "RATE", "Rate of every worker's link, such as 300mbit.")]
Workers = Annotated[int, option(..., "N", "Processes, each in a network of its own.")]


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
    out: Path | None = option(None, "FILE", "Keep the table, for network=FILE of techniques."),
) -> Result:
    """Measure what collectives take on a shaped link.

    Refuses where times vary by more than 10 %. Example: foretrace rig calibrate --link 300mbit --workers 2
    """
    from foretrace.experiment.links.calibrate import alone
    from foretrace.report import rig as report

    return report.calibrate(alone(workers, link, out), link=link, workers=workers, stored=str(out or ""))


@rig.command("verify")
@answers
def verify(
    techniques: options.Techniques,
    link: LinkRate,
    workers: Workers = 2,
    emulate: str = option(
        "",
        "LAYERSxGRADIENT/BACKWARD",
        "Layers that only sleep, with real gradients: 12x1mb/20ms, or 12x1mb/20ms/5ms with a forward pass.",
    ),
    model: options.Model = "",
    size: options.Size = "tiny",
    against: list[str] | None = option(None, '"TECHNIQUE ..."', "Techniques of the baseline; else one worker alone."),
    seconds: float = option(
        30.0, "S", "For running the arms, 6 rounds at least; recording and calibration are extra.", least=0.1
    ),
    keep: Path | None = option(None, "FOLDER", "Keep the graph of one worker and the link's table."),
    ledger: LedgerFile = None,
    no_ledger: NoLedger = False,
) -> Result:
    """Predict a distributed step, then run it for real.

    The prediction rests on a recording of one worker.

    Example: foretrace rig verify "data-parallel bucket_mb=4" --workers 2 --link 300mbit --emulate 12x1mb/20ms
    """
    from foretrace.experiment.ledger import Ledger
    from foretrace.experiment.links import measure
    from foretrace.experiment.links.job import LinkJob
    from foretrace.experiment.links.judge import rows_of
    from foretrace.report import rig as report

    if bool(emulate) == bool(model):
        raise ForetraceError("give one of --emulate 12x1mb/20ms and --model NAME.")
    job = LinkJob(
        work=emulate or model, link=link, workers=workers, arms=(tuple(techniques),), against=tuple(against or ()),
        size=size, seconds=seconds, keep=str(keep or ""),
    )  # fmt: skip
    measure.check(job)
    kept = None if no_ledger else Ledger(ledger).checked()
    with options.stages() as tell:
        outcome = measure.verify(job, tell)
    (row,) = rows_of(outcome)
    return report.verify(outcome, outcome.arms[0], *(() if kept is None else kept.keep(row)))


@rig.command("clean")
@answers
def clean() -> Result:
    """Remove network namespaces and processes of killed rigs.

    Rigs that still run are left alone. Example: foretrace rig clean
    """
    from foretrace.experiment.links import netns
    from foretrace.report import rig as report

    netns.require()
    return report.clean(netns.clean())
