"""`foretrace verify` and `ledger`: predict a technique, make it real, measure it; and what was verified so far."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from foretrace.cli import options
from foretrace.cli.answers import Reply
from foretrace.cli.options import flag, option

if TYPE_CHECKING:
    from foretrace.report.views import Result

LedgerFile = Annotated[
    Path | None, option(..., "FILE", "The ledger; by default $FORETRACE_LEDGER or your data folder.")
]
NoLedger = Annotated[bool, flag("--no-ledger", "Write no row.", default=...)]


def verify(
    techniques: options.Techniques,
    model: options.Model,
    size: options.Size = "tiny",
    threads: int = option(1, "N", "Intra-op threads of all arms.", least=1),
    seconds: float = option(
        20.0, "S", "For running the arms, 8 rounds at least; recording and calibration are extra.", least=0.1
    ),
    batches: str = option("", "ready|loader", "Where steps take batches from; by the technique."),
    device: str = option("cpu", "DEVICE", "cpu, cuda, cuda:1, ..."),
    keep: Path | None = option(None, "FOLDER", "Keep both recordings: FOLDER/before, FOLDER/after."),
    steps: int = option(0, "N", "Steps to record; 0 for the recorder's default.", least=0),
    ledger: LedgerFile = None,
    no_ledger: NoLedger = False,
) -> Result:
    """Predict a change, make it, measure it, keep both figures.

    Example: foretrace verify mixed-precision fused-optimizer --model bert
    """
    from foretrace.experiment import processes
    from foretrace.experiment.job import Job
    from foretrace.experiment.ledger import Ledger
    from foretrace.report import verification

    job = Job(
        techniques=tuple(techniques), model=model, size=size, threads=threads, seconds=seconds, batches=batches,
        device=device, keep=str(keep or ""), steps=steps,
    )  # fmt: skip
    processes.check(job)
    kept = None if no_ledger else Ledger(ledger).checked()
    try:
        with options.stages() as tell:
            outcome = processes.run(job, tell)
    except processes.ScriptError as error:
        print(error.trace, file=sys.stderr, end="")
        raise
    return verification.verify(outcome, *(() if kept is None else kept.keep(outcome.row())))


def ledger(
    model: str = option("", "NAME", "Only rows of this model."),
    technique: str = option("", "NAME", "Only rows that apply this technique."),
    summary: bool = flag("--summary", "Only how well each technique was predicted."),
    export: Path | None = option(None, "FILE", "Write the rows as .csv or .jsonl."),
    import_: Path | None = option(None, "FILE", "Add the rows of an exported .jsonl first.", "--import"),
    ledger: LedgerFile = None,
    top: options.Top = 12,
) -> Reply:
    """Show predictions and their measurements.

    Example: foretrace ledger --technique mixed-precision --export rows.csv
    """
    from foretrace.experiment import tables
    from foretrace.experiment.ledger import Ledger
    from foretrace.report import verification

    if export is not None:
        tables.checked(export)
    base = Ledger(ledger)
    if import_ is not None:
        added = base.import_jsonl(import_)
        options.say(f"{added} new {'row' if added == 1 else 'rows'} from {import_}")
    rows = base.rows(model=model, technique=technique)
    view = verification.ledger(rows, source=str(base.path), summary_only=summary)
    return Reply(result=view, files={export: lambda path: tables.write(rows, path)})
