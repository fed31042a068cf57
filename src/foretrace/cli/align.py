"""`foretrace align`: how far the clocks of a recording's ranks are apart."""

from __future__ import annotations

from foretrace.cli import options
from foretrace.errors import ForetraceError


def align(
    source: options.Source,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
    on: options.On = "here",
    as_json: options.AsJson = False,
) -> None:
    """Say how far the clocks of the ranks of a recording are apart.

    From their collectives: nobody leaves one before the last has entered it, and all leave at nearly the same time.

    Example: foretrace align run/
    """
    from foretrace import flow

    if flow.is_graph(source):
        raise ForetraceError(f"{source} is a saved graph; name the folder of the ranks' recordings.")
    graphs = options.rank_graphs(source, steps=steps, salvage=salvage, on=on)
    if len(graphs) < 2:
        raise ForetraceError(f"{source} holds one rank, whose clock has none to be compared with; name several ranks.")
    found, clock = flow.alignment(graphs)
    from foretrace.report import ranks

    view = ranks.clock_of(clock)
    if not as_json:
        print("\n".join(ranks.align_lines(found, clock)))
        return
    from foretrace.report.jsonout import dumps
    from foretrace.report.listings import AlignView

    print(
        dumps(
            AlignView(
                offsets_s=view.offsets_s,
                uncertainty_s=view.uncertainty_s,
                drift=view.drift,
                matched=found.matched,
                unmatched=found.unmatched(),
                notes=(*found.missing, *clock.notes),
            )
        )
    )
