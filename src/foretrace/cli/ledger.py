"""`foretrace ledger`: what was verified so far, shown, summed up, exported and imported."""

from __future__ import annotations

from pathlib import Path

from foretrace.cli import options
from foretrace.cli.answers import Reply
from foretrace.cli.options import flag, option
from foretrace.cli.verify import LedgerFile


def ledger(
    model: str = option("", "NAME", "Only rows of this model."),
    technique: str = option("", "NAME", "Only rows that apply this technique."),
    summary: bool = flag("--summary", "Only how well each technique was predicted."),
    export: Path | None = option(None, "FILE", "Write the rows as .csv, .jsonl or .md."),
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
