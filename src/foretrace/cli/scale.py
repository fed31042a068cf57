"""`foretrace scale`: a run of many ranks, predicted from the recordings of a few."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli import options

if TYPE_CHECKING:
    from foretrace.report.views import Result


def scale(
    source: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder or archive with the recordings of two or more ranks.")
    ],
    ranks: Annotated[int, typer.Option("--ranks", metavar="N", min=1, help="How many ranks to predict.")],
    network: Annotated[
        str,
        typer.Option(
            "--network",
            metavar="LINK|FILE",
            help="What connects them: 100gbit/5us, a cluster (FILE.yaml) or measured collectives (FILE.csv).",
        ),
    ] = "",
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", min=0, help="How often noise is drawn; 0: ranks do not vary.")
    ] = 32,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the noise.")] = 0,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
    on: options.On = "here",
    top: options.Top = 8,
) -> Result:
    """Predict a run of many ranks from the recordings of a few.

    Example: foretrace scale run/ --ranks 1024 --network 100gbit/5us
    """
    from foretrace import flow

    graphs = options.rank_graphs(source, steps=steps, salvage=salvage, on=on)
    with options.progress(f"{ranks:,} ranks") as report:
        found = flow.scale(graphs, ranks, network=network, samples=samples, seed=seed, progress=report)
    from foretrace.report import scaling

    return scaling.scale(found, path=str(source), network=network)
