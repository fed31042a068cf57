"""`foretrace ledger`: what was verified so far, shown, summed up, exported and imported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretrace.cli import options
from foretrace.cli.answers import Reply
from foretrace.cli.verify import LedgerFile
from foretrace.errors import ForetraceError


def ledger(
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="Only rows of this model.")] = "",
    technique: Annotated[
        str, typer.Option("--technique", metavar="NAME", help="Only rows that apply this technique.")
    ] = "",
    summary: Annotated[bool, typer.Option("--summary", help="Only how well each technique was predicted.")] = False,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", help="Write the rows as .csv, .jsonl or .md.")
    ] = None,
    import_: Annotated[
        Path | None, typer.Option("--import", metavar="FILE", help="Add the rows of an exported .jsonl first.")
    ] = None,
    ledger: LedgerFile = None,
    top: options.Top = 12,
) -> Reply:
    """Show predictions and their measurements.

    Example: foretrace ledger --technique mixed-precision --export rows.csv
    """
    from foretrace.experiment import tables
    from foretrace.experiment.ledger import Ledger
    from foretrace.files import write_text
    from foretrace.report import verification

    if export is not None and export.suffix not in (".csv", ".jsonl", ".md"):
        raise ForetraceError(f"--export {export}: give a name that ends in .csv, .jsonl or .md.")
    base = Ledger(ledger)
    if import_ is not None:
        added = base.import_jsonl(import_)
        options.say(f"{added} new {'row' if added == 1 else 'rows'} from {import_}")
    rows = base.rows(model=model, technique=technique)
    view = verification.ledger(rows, source=str(base.path), summary_only=summary)

    def write(path: Path) -> None:
        if path.suffix == ".jsonl":
            base.export(path, rows)
        elif path.suffix == ".csv":
            write_text(path, tables.csv(rows))
        else:
            write_text(path, f"{tables.markdown(rows)}\n{tables.markdown_summary(rows)}")

    return Reply(result=view, files={export: write})
