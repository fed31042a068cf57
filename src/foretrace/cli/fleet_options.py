"""Options that the commands of `foretrace fleet` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretrace.cli import completion

Trace = Annotated[Path, typer.Argument(metavar="TRACE", help="A log of jobs (docs/fleet-formats.md).")]
Format = Annotated[str, typer.Option("--format", metavar="NAME", help="Its format; by default told by its content.")]
Salvage = Annotated[bool, typer.Option("--salvage", help="Leave out rows that cannot be read, and say how many.")]
Cluster = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="SHAPE|FILE",
        help="2x4x8 (racks x nodes x GPUs), 4x8@v100+2x4@k80, or a file: YAML, topology.conf, nodes.",
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="NAME [KEY=VALUE ...]",
        help="See foretrace fleet policies.",
        autocompletion=completion.policies,
    ),
]
Policies = Annotated[
    list[str],
    typer.Option(
        "--policy",
        metavar="NAME [KEY=VALUE ...]",
        help="A policy; repeat it. The first is the baseline.",
        autocompletion=completion.policies,
    ),
]
Speeds = Annotated[
    str,
    typer.Option(
        "--speeds",
        metavar="MODEL",
        help="How placement makes jobs fast or slow: constant, closed-form gb-s=300,50,25, table=FILE, "
        "throughputs=FILE, goodput=FOLDER, graphs NAME=RECORDING (docs/fleet-speeds.md).",
    ),
]
Jobs = Annotated[int, typer.Option("--jobs", metavar="N", help="Only the first N jobs. 0: all.")]
Load = Annotated[float, typer.Option("--load", metavar="FACTOR", help="Let jobs come so many times as densely.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="For everything that is drawn.")]
RestartS = Annotated[
    float, typer.Option("--restart-s", metavar="S", help="Seconds that a move to other GPUs costs a job.")
]
RestartPerGpu = Annotated[
    float, typer.Option("--restart-s-per-gpu", metavar="S", help="The same per GPU of the job, in seconds.")
]
CheckpointS = Annotated[
    float,
    typer.Option("--checkpoint-s", metavar="S", help="Seconds between saves of a job. 0: a failure loses all."),
]
CheckpointGb = Annotated[
    str,
    typer.Option(
        "--checkpoint-gb",
        metavar="MODEL=GB,...",
        help="Size of a model's state: moving it costs writing and reading it, and --restart-s besides.",
    ),
]
StorageGbS = Annotated[float, typer.Option("--storage-gb-s", metavar="GB/S", help="How fast that state moves.")]
MtbfH = Annotated[float, typer.Option("--mtbf-h", metavar="H", help="Mean hours between failures of a node. 0: none.")]
MttrH = Annotated[float, typer.Option("--mttr-h", metavar="H", help="Mean hours to a node's repair.")]


def again(
    *, format: str, speeds: str, salvage: bool = False, jobs: int = 0, seed: int = 0, restart_s: float = 0.0
) -> list[str]:
    """The words that play the same jobs in the same way in another command; what is as by default is left out."""
    given = {
        "--format": (format, "auto"),
        "--speeds": (speeds, "constant"),
        "--jobs": (jobs, 0),
        "--seed": (seed, 0),
        "--restart-s": (restart_s, 0.0),
    }
    words = [word for option, (value, usual) in given.items() if value != usual for word in (option, str(value))]
    return [*words, "--salvage"] if salvage else words
