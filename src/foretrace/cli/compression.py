"""`foretrace compression`: whether compressing gradients pays."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli import options
from foretrace.cli.answers import answers
from foretrace.errors import ForetraceError
from foretrace.names import resolve

if TYPE_CHECKING:
    from foretrace.graph.taskgraph import TaskGraph
    from foretrace.report.views import Result
    from foretrace.techniques.base import Technique

compression = typer.Typer(
    name="compression",
    help="Whether compressing gradients pays off.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@compression.callback()
def group() -> None:
    """Whether compressing gradients pays off."""


@compression.command("advise")
@answers
def advise(
    source: options.Source,
    network: Annotated[
        str, typer.Option("--network", metavar="LINK|FILE", help="Link between workers (10gbit/50us), or a file.")
    ],
    workers: Annotated[int, typer.Option("--workers", metavar="N", min=2, help="Data-parallel processes.")],
    method: Annotated[
        list[str] | None,
        typer.Option("--method", metavar='"NAME KEY=VALUE ..."', help="Try this one, e.g. powersgd rank=8; several."),
    ] = None,
    bucket_mb: Annotated[
        float | None, typer.Option("--bucket-mb", metavar="MIB", help="Size at which a bucket is sent.")
    ] = None,
    gradient_mb: Annotated[
        float,
        typer.Option("--gradient-mb", metavar="MB", help="Size of all gradients, where TRACE does not show them."),
    ] = 0.0,
    backend: Annotated[str, typer.Option("--backend", metavar="gloo|nccl", help="By the recorded device.")] = "",
    tolerance: Annotated[
        float, typer.Option("--tolerance", metavar="SHARE", help="What still counts as near-linear scaling.")
    ] = 0.05,
    measure: Annotated[
        bool,
        typer.Option("--measure/--no-measure", help="Time the hooks here, if this is the machine of the recording."),
    ] = True,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", min=1.0, help="At most this many seconds for timing hooks.")
    ] = 60.0,
    rank: options.Rank = None,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
) -> Result:
    """Which ratio near-linear scaling needs, which methods pay, and from which bandwidth down.

    TRACE is a recording of one worker. Example: foretrace compression advise run/ --network 10gbit/50us --workers 8
    """
    from foretrace.plan.compression_advice import DEFAULT
    from foretrace.plan.compression_advice import advise as ask
    from foretrace.report import compression as report
    from foretrace.techniques.arguments import parse
    from foretrace.techniques.distributed.data_parallel import DataParallel
    from foretrace.techniques.distributed.gradient_compression import GradientCompression

    for name, value in (("--tolerance", tolerance), ("--seconds", seconds)):
        if not (isfinite(value) and value > 0):
            raise ForetraceError(f"{name} {value} makes no sense; give a number above 0.")
    methods: list[GradientCompression] = []
    for each in method or ():
        found = parse(f"gradient-compression method={each}")
        assert isinstance(found, GradientCompression)
        methods.append(found)
    backend = resolve(backend, ("gloo", "nccl")) or backend
    if backend not in ("", "gloo", "nccl"):
        raise ForetraceError(f"--backend {backend} does not exist; choose gloo or nccl.")
    parallel = DataParallel(
        workers=workers, network=network, bucket_mb=bucket_mb, gradient_mb=gradient_mb, backend=backend
    )
    run = options.scenario(source, rank=rank, steps=steps, salvage=salvage).calibrated()
    graph, notes = run.graph, list[str]()
    chosen = tuple(methods) or DEFAULT
    if measure:
        graph, note = _timed(graph, [(parallel, each) for each in chosen], seconds)
        notes += [note] if note else []
    with options.progress("predicting methods") as told:
        advice = ask(graph, parallel, chosen, tolerance=tolerance, progress=told)
    return report.advise(advice, source=str(source), notes=notes)


def _timed(graph: TaskGraph, chains: list[tuple[Technique, Technique]], seconds: float) -> tuple[TaskGraph, str]:
    """The graph with the times of all hooks, kept for later; or the graph as it is and why nothing was timed."""
    from foretrace.cost.operators.machine import differences, fingerprint, fingerprint_of
    from foretrace.errors import NotApplicableError

    recorded = fingerprint_of(graph.info.recording)
    if not recorded or recorded["device"] != "cpu":
        return graph, "hooks are timed on processors only, for a recording that says on which machine it was made"
    from foretrace.cli.calibrate import _threads
    from foretrace.cost.operators import bench, store
    from foretrace.cost.operators.calibration import Calibration
    from foretrace.deadline import Deadline
    from foretrace.techniques.measuring import calibrated

    with _threads(recorded["threads"]):
        machine = fingerprint()
        if other := differences(recorded, machine):
            return graph, f"hooks were not timed: the recording was made elsewhere ({', '.join(other)})"
        failed: dict[str, str] = {}
        until = Deadline(seconds)
        with options.progress("timing hooks") as report:
            for i, chain in enumerate(chains):
                share = Deadline(until.budget_s / (len(chains) - i), until.clock)
                try:
                    found = calibrated(graph, chain, bench.measure, share)
                except NotApplicableError:
                    continue
                if found.seconds:
                    store.save(machine, found.seconds)
                    graph = Calibration.load_for(graph).on(graph)
                failed |= found.failed
                if report is not None:
                    report((i + 1) / len(chains))
    reasons = sorted(set(failed.values()))
    return graph, f"{len(failed)} hooks could not be timed: {'; '.join(reasons)}" if failed else ""
