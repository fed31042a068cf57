"""`foretrace align`: how far the clocks of a recording's ranks are apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretrace.cli import options
from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.report.views import Result


def align(
    source: options.Source,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
    on: options.On = "here",
) -> Result:
    """Show how far the clocks of recorded ranks are apart.

    From their collectives: nobody leaves one before the last has entered it, and all leave at nearly the same time.

    Example: foretrace align run/
    """
    from foretrace import flow
    from foretrace.report.align import align

    if flow.is_graph(source):
        raise ForetraceError(f"{source} is a saved graph; name the folder of the ranks' recordings.")
    graphs = options.rank_graphs(source, steps=steps, salvage=salvage, on=on)
    if len(graphs) < 2:
        raise ForetraceError(f"{source} holds one rank, whose clock has none to be compared with; name several ranks.")
    return align(*flow.alignment(graphs))
