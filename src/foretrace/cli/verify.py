"""`foretrace verify`: predict a technique, then make it real and measure it, on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from foretrace.cli import options
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
    from foretrace.experiment import runner
    from foretrace.experiment.job import Job
    from foretrace.experiment.ledger import Ledger, row_of
    from foretrace.report import verification

    job = Job(
        techniques=tuple(techniques), model=model, size=size, threads=threads, seconds=seconds, batches=batches,
        device=device, keep=str(keep or ""), steps=steps,
    )  # fmt: skip
    runner.check(job)
    kept = None if no_ledger else Ledger(ledger).checked()
    try:
        with options.stages() as tell:
            outcome = runner.run(job, tell)
    except runner.ScriptError as error:
        print(error.trace, file=sys.stderr, end="")
        raise
    return verification.verify(outcome, *(() if kept is None else kept.keep(row_of(outcome))))
