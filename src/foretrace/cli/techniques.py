"""`foretrace techniques`: the what-ifs there are, with their parameters and where they were verified."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from foretrace.cli import completion
from foretrace.cli.options import argument, option

if TYPE_CHECKING:
    from foretrace.report.views import Result


def techniques(
    name: str = argument("", "[NAME]", "One technique, with all its parameters.", complete=completion.techniques),
    ledger: Path | None = option(None, "FILE", "Where verified rows are; by default the user's own."),
) -> Result:
    """List all techniques, or explain one.

    Example: foretrace techniques prefetch-data
    """
    from foretrace.experiment.ledger import shipped_on, verified_on
    from foretrace.report.techniques import techniques
    from foretrace.techniques import registry

    known = [registry.technique(name)] if name else registry.techniques().values()
    return techniques(known, verified=verified_on(ledger), shipped=shipped_on())
