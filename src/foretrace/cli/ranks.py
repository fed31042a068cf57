"""Commands about several ranks: how far their clocks are apart, and what more of them would take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from foretrace.cli import options
from foretrace.cli.options import argument, option
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


def scale(
    source: Path = argument(..., "DIR", "A folder or archive with the recordings of two or more ranks."),
    ranks: int = option(..., "N", "How many ranks to predict.", least=1),
    network: str = option(
        "", "LINK|FILE",
        "What connects them: 100gbit/5us, a cluster (FILE.yaml) or measured collectives (FILE.csv).",
    ),
    samples: int = option(32, "N", "How often noise is drawn; 0: ranks do not vary.", least=0),
    seed: int = option(0, "N", "Seed of the noise.", least=0),
    steps: options.Steps = "",
    salvage: options.Salvage = False,
    on: options.On = "here",
    top: options.Top = 8,
) -> Result:  # fmt: skip
    """Predict a run of many ranks from the recordings of a few.

    Example: foretrace scale run/ --ranks 1024 --network 100gbit/5us
    """
    from foretrace import flow
    from foretrace.report import scaling

    graphs = options.rank_graphs(source, steps=steps, salvage=salvage, on=on)
    with options.progress(f"{ranks:,} ranks") as report:
        found = flow.scale(graphs, ranks, network=network, samples=samples, seed=seed, progress=report)
    return scaling.scale(found, path=str(source), network=network)
