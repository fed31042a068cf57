"""`foretrace show`: what is in a recording, and what holds its step back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretrace.cli import options

if TYPE_CHECKING:
    from foretrace.report.views import Result


def show(
    source: options.Source,
    rank: options.Rank = None,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
    on: options.On = "here",
    top: options.Top = 6,
) -> Result:
    """Say what is in a recording and what holds its step back.

    Of several ranks: who waits for whom, and why; --rank looks at one of them.

    Example: foretrace show run/
    """
    run = options.scenario(source, rank=rank, steps=steps, salvage=salvage, all_ranks=None, on=on)
    from foretrace.report.show import show

    return show(run.simulate(), path=str(source))
