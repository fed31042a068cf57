"""What the commands of `foretrace fleet` play: options that make a `Spec`, and the words that name it again."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from foretrace.cli import completion
from foretrace.cli.answers import parameters, taking

if TYPE_CHECKING:
    from foretrace.fleet.scene import Spec

Command = Callable[..., Any]
Policies = Annotated[
    list[str],
    typer.Option(
        "--policy",
        metavar="NAME [KEY=VALUE ...]",
        help="A policy; repeat it. The first is the baseline.",
        autocompletion=completion.policies,
    ),
]
Load = Annotated[float, typer.Option("--load", metavar="FACTOR", help="Multiply the arrival rate of jobs by this.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of all random draws.")]


class Played:
    """Options by the field of `foretrace.fleet.scene.Spec` that each is, with the same defaults."""

    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A log of jobs (docs/fleet-formats.md).")]
    format: Annotated[
        str, typer.Option("--format", metavar="NAME", help="Its format; by default recognised by content.")
    ] = "auto"
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="NAME [KEY=VALUE ...]",
            help="See foretrace fleet policies.",
            autocompletion=completion.policies,
        ),
    ] = "fifo"
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            metavar="SHAPE|FILE",
            help="2x4x8 (racks x nodes x GPUs), 4x8@v100+2x4@k80, or a file: YAML, topology.conf, nodes.",
        ),
    ] = "4x4x8"
    speeds: Annotated[
        str,
        typer.Option(
            "--speeds",
            metavar="MODEL",
            help="How placement makes jobs fast or slow: constant, closed-form gb-s=300,50,25, table=FILE, "
            "throughputs=FILE, goodput=FOLDER, graphs NAME=RECORDING (docs/fleet-speeds.md).",
        ),
    ] = "constant"
    salvage: Annotated[
        bool, typer.Option("--salvage", help="Leave out rows that cannot be read, and say how many.")
    ] = False
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", help="Only the first N jobs. 0: all.")] = 0
    load: Load = 1.0
    seed: Seed = 0
    restart_s: Annotated[
        float, typer.Option("--restart-s", metavar="S", help="Seconds that a move to other GPUs costs a job.")
    ] = 0.0
    restart_s_per_gpu: Annotated[
        float, typer.Option("--restart-s-per-gpu", metavar="S", help="The same per GPU of the job, in seconds.")
    ] = 0.0
    checkpoint_s: Annotated[
        float,
        typer.Option("--checkpoint-s", metavar="S", help="Seconds between saves of a job. 0: a failure loses all."),
    ] = 0.0
    checkpoint_gb: Annotated[
        str,
        typer.Option(
            "--checkpoint-gb",
            metavar="MODEL=GB,...",
            help="Size of a model's state: a move costs writing and reading it, plus --restart-s.",
        ),
    ] = ""
    storage_gb_s: Annotated[
        float, typer.Option("--storage-gb-s", metavar="GB/S", help="How fast that state moves.")
    ] = 2.0
    mtbf_h: Annotated[
        float, typer.Option("--mtbf-h", metavar="H", help="Mean hours between failures of a node. 0: none.")
    ] = 0.0
    mttr_h: Annotated[float, typer.Option("--mttr-h", metavar="H", help="Mean hours to a node's repair.")] = 1.0


KINDS = get_type_hints(Played, include_extras=True)
LOG = ("format", "salvage")
JOBS = (*LOG, "speeds", "jobs")
COSTS = ("restart_s", "restart_s_per_gpu", "checkpoint_s", "mtbf_h", "mttr_h")


def plays(*names: str) -> Callable[[Command], Command]:
    """A command whose first parameter is a `Spec`: in its place stand the log and the options of these names.

    Those that follow `*` in the command stand behind them.
    """

    def of(command: Command) -> Command:
        shared = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=getattr(Played, name, Parameter.empty), annotation=kind)
            for name, kind in KINDS.items()
            if name in ("trace", *names)
        ]
        own = parameters(command, "spec")
        before = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in own if each.kind is not Parameter.KEYWORD_ONLY]
        behind = [each for each in own if each.kind is Parameter.KEYWORD_ONLY]

        @wraps(command)
        def playing(**given: Any) -> Any:
            from foretrace.fleet.scene import Spec

            values = {each.name: given.pop(each.name) for each in shared}
            return command(Spec(**values | {"trace": str(values["trace"])}), **given)

        return taking(playing, [shared[0], *before, *shared[1:], *behind])

    return of


def following(asked: Sequence[str], spec: Spec, *words: str, also: Sequence[str] = (), then: Sequence[str] = ()) -> str:
    """The command that asks something else of the same jobs on the same cluster; what is as by default is left out.

    asked: its first words; words: what stands behind the cluster; also: fields of the spec beside those of all
    questions; then: the last words.
    """
    values = {name: getattr(spec, name) for name in ("format", "speeds", "jobs", *also)}
    given = spelt({name: value for name, value in values.items() if value != getattr(Played, name)})
    salvage = ["--salvage"] if spec.salvage else []
    whole = ["foretrace", "fleet", *asked, spec.trace, "--cluster", spec.cluster, *words, *given, *salvage, *then]
    return shlex.join(whole)


def spelt(given: Mapping[str, object]) -> list[str]:
    """Parameters as the words of a command."""
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def repeated(policies: Sequence[str]) -> list[str]:
    """The words that name several policies."""
    return [word for each in policies for word in ("--policy", each)]
