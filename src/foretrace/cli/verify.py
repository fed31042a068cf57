"""Commands that run what was predicted: `verify` here, `rig` on shaped links, and the `ledger` of both."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from foretrace import experiment, report
from foretrace.cli import options
from foretrace.cli.answers import Reply, Result, group
from foretrace.cli.options import flag, option
from foretrace.errors import ForetraceError


def verify(
    techniques: options.Techniques,
    model: options.Model,
    size: options.Size = "tiny",
    threads: options.Threads = 1,
    seconds: float = option(
        20.0, "S", "For running the arms, 8 rounds at least; recording and calibration are extra.", least=0.1
    ),
    batches: str = option("", "ready|loader", "Where steps take batches from; by the technique."),
    device: str = option("cpu", "DEVICE", "cpu, cuda, cuda:1, ..."),
    keep: Path | None = option(None, "FOLDER", "Keep both recordings: FOLDER/before, FOLDER/after."),
    steps: int = option(0, "N", "Steps to record; 0 for the recorder's default.", least=0),
    rows: options.LedgerOptions = options.LedgerOptions(),
) -> Result:
    """Predict a change, make it, measure it, keep both figures.

    Example: foretrace verify mixed-precision fused-optimizer --model bert
    """
    job = experiment.Job(
        techniques=tuple(techniques), model=model, size=size, threads=threads, seconds=seconds, batches=batches,
        device=device, keep=str(keep or ""), steps=steps,
    )  # fmt: skip
    experiment.processes.check(job)
    kept = rows.keeper()
    try:
        with options.stages() as tell:
            outcome = experiment.processes.run(job, tell)
    except experiment.processes.ScriptError as error:
        print(error.trace, file=sys.stderr, end="")
        raise
    return report.verification.verify(outcome, *kept(outcome.row()))


def ledger(
    model: str = option("", "NAME", "Only rows of this model."),
    technique: str = option("", "NAME", "Only rows that apply this technique."),
    summary: bool = flag("--summary", "Only how well each technique was predicted."),
    export: Path | None = option(None, "FILE", "Write the rows as .csv or .jsonl."),
    import_: Path | None = option(None, "FILE", "Add the rows of an exported .jsonl first.", "--import"),
    ledger: options.LedgerFile = None,
    top: options.Top = 12,
) -> Reply:
    """Show predictions and their measurements.

    Example: foretrace ledger --technique mixed-precision --export rows.csv
    """
    if export is not None:
        experiment.ledger.checked(export)
    base = experiment.Ledger(ledger)
    if import_ is not None:
        added = base.import_jsonl(import_)
        options.say(f"{added} new {'row' if added == 1 else 'rows'} from {import_}")
    rows = base.rows(model=model, technique=technique)
    view = report.verification.ledger(rows, source=str(base.path), summary_only=summary)
    return Reply(result=view, files={export: lambda path: experiment.ledger.write(rows, path)})


LinkRate = Annotated[str, option(..., "RATE", "Rate of every worker's link, such as 300mbit.")]
Workers = Annotated[int, option(..., "N", "Processes, each in a network of its own.")]


def rig_check() -> Result:
    """Say whether this machine can have a rig, and what it lacks.

    Exit code 1 where it cannot. Example: foretrace rig check
    """
    from foretrace.executor import cores

    able = experiment.netns.probe()
    return report.verification.rig_check(
        able, cores=cores(), leftovers=() if able.missing else experiment.netns.leftovers()
    )


def rig_calibrate(
    link: LinkRate,
    workers: Workers = 2,
    out: Path | None = option(None, "FILE", "Keep the table, for network=FILE of techniques."),
) -> Result:
    """Measure what collectives take on a shaped link.

    Refuses where times vary by more than 10 %. Example: foretrace rig calibrate --link 300mbit --workers 2
    """
    return report.verification.rig_calibrate(
        experiment.calibrate_link(workers, link, out), link=link, workers=workers, stored=str(out or "")
    )


def rig_verify(
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
    rows: options.LedgerOptions = options.LedgerOptions(),
) -> Result:
    """Predict a distributed step, then run it for real.

    The prediction rests on a recording of one worker.

    Example: foretrace rig verify "data-parallel bucket_mb=4" --workers 2 --link 300mbit --emulate 12x1mb/20ms
    """
    if bool(emulate) == bool(model):
        raise ForetraceError("give one of --emulate 12x1mb/20ms and --model NAME.")
    job = experiment.LinkJob(
        work=emulate or model, link=link, workers=workers, arms=(tuple(techniques),), against=tuple(against or ()),
        size=size, seconds=seconds, keep=str(keep or ""),
    )  # fmt: skip
    experiment.link_runs.check(job)
    kept = rows.keeper()
    with options.stages() as tell:
        outcome = experiment.link_runs.verify(job, tell)
    return report.verification.rig_verify(outcome, outcome.arms[0], *kept(*experiment.rows_of_links(outcome)))


def rig_clean() -> Result:
    """Remove network namespaces and processes of killed rigs.

    Rigs that still run are left alone. Example: foretrace rig clean
    """
    experiment.netns.require()
    return report.verification.rig_clean(experiment.netns.clean())


rig = group(
    "rig", "Check predictions on real workers and shaped links.", check=rig_check, calibrate=rig_calibrate,
    verify=rig_verify, clean=rig_clean,
)  # fmt: skip
