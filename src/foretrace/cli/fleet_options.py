"""What the commands of `foretrace fleet` play: options that make a `Spec`, and the words that name it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import Parameter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from foretrace import report
from foretrace.cli import completion
from foretrace.cli.answers import parameters, taking
from foretrace.cli.options import argument, flag, option

if TYPE_CHECKING:
    from foretrace.fleet.scene import Spec

Command = Callable[..., Any]
_NAME = "NAME [KEY=VALUE ...]"
Policies = Annotated[
    list[str], option(..., _NAME, "A policy; repeat it. The first is the baseline.", complete=completion.policies)
]
Load = Annotated[float, option(..., "FACTOR", "Multiply the arrival rate of jobs by this.")]
Seed = Annotated[int, option(..., "N", "Seed of all random draws.", least=0)]


class Played:
    """Options by the field of `foretrace.fleet.scene.Spec` that each is, with the same defaults."""

    trace: Annotated[Path, argument(..., "TRACE", "A log of jobs (docs/fleet-formats.md).")]
    format: Annotated[str, option(..., "NAME", "Its format; by default recognised by content.")] = "auto"
    policy: Annotated[str, option(..., _NAME, "See foretrace fleet policies.", complete=completion.policies)] = "fifo"
    cluster: Annotated[
        str,
        option(
            ..., "SHAPE|FILE", "2x4x8 (racks x nodes x GPUs), 4x8@v100+2x4@k80, or a file: YAML, topology.conf, nodes."
        ),
    ] = "4x4x8"
    speeds: Annotated[
        str,
        option(
            ..., "MODEL",
            "How placement makes jobs fast or slow: constant, closed-form gb-s=300,50,25, table=FILE, "
            "throughputs=FILE, goodput=FOLDER, graphs NAME=RECORDING (docs/fleet-speeds.md).",
        ),
    ] = "constant"  # fmt: skip
    salvage: Annotated[bool, flag("--salvage", "Leave out unreadable rows, and say how many.", default=...)] = False
    jobs: Annotated[int, option(..., "N", "Only the first N jobs. 0: all.")] = 0
    load: Load = 1.0
    seed: Seed = 0
    restart_s: Annotated[float, option(..., "S", "Seconds that a move to other GPUs costs a job.")] = 0.0
    restart_s_per_gpu: Annotated[float, option(..., "S", "The same per GPU of the job, in seconds.")] = 0.0
    checkpoint_s: Annotated[float, option(..., "S", "Seconds between saves of a job. 0: a failure loses all.")] = 0.0
    checkpoint_gb: Annotated[
        str,
        option(..., "MODEL=GB,...", "Size of a model's state: a move costs writing and reading it, plus --restart-s."),
    ] = ""
    storage_gb_s: Annotated[float, option(..., "GB/S", "How fast that state moves.")] = 2.0
    mtbf_h: Annotated[float, option(..., "H", "Mean hours between failures of a node. 0: none.")] = 0.0
    mttr_h: Annotated[float, option(..., "H", "Mean hours to a node's repair.")] = 1.0


KINDS = get_type_hints(Played, include_extras=True)
LOG = ("format", "salvage")
JOBS = (*LOG, "speeds", "jobs")
COSTS = ("restart_s", "restart_s_per_gpu", "checkpoint_s", "mtbf_h", "mttr_h")


def plays(*names: str) -> Callable[[Command], Command]:
    """Return a command whose first parameter is a `Spec`: in its place stand the log and the options of these names.

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


def following(
    asked: Sequence[str], spec: Spec, options: Mapping[str, object], *, also: Sequence[str] = (),
    then: Mapping[str, object] = MappingProxyType({}),
) -> str:  # fmt: skip
    """Return the command that asks something else of the same jobs on the same cluster, without defaults.

    asked: its first words; options: those behind the cluster; also: fields of the spec beside those of all questions;
    then: the last options.
    """
    values = {name: getattr(spec, name) for name in ("format", "speeds", "jobs", *also)}
    given = {name: value for name, value in values.items() if value != getattr(Played, name)}
    whole = {"cluster": spec.cluster, **options, **given, "salvage": spec.salvage, **then}
    return report.names.command("fleet", *asked, spec.trace, **whole)
