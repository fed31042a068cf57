"""`foretrace compression`: whether compressing gradients pays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretrace.cli import options
from foretrace.cli.answers import answers, group
from foretrace.cli.options import flag, option

if TYPE_CHECKING:
    from foretrace.report.views import Result

compression = group("compression", "Whether compressing gradients pays off.")


@compression.command("advise")
@answers
def advise(
    source: options.Source,
    network: str = option(..., "LINK|FILE", "Link between workers (10gbit/50us), or a file."),
    workers: int = option(..., "N", "Data-parallel processes.", least=2),
    method: list[str] | None = option(None, '"NAME KEY=VALUE ..."', "Try this one, e.g. powersgd rank=8; several."),
    bucket_mb: float | None = option(None, "MIB", "Size at which a bucket is sent."),
    gradient_mb: float = option(0.0, "MB", "Size of all gradients, where TRACE does not show them."),
    backend: str = option("", "gloo|nccl", "By the recorded device."),
    tolerance: float = option(0.05, "SHARE", "What still counts as near-linear scaling."),
    measure: bool = flag(
        "--measure/--no-measure", "Time the hooks here, if this is the machine of the recording.", default=True
    ),
    seconds: float = option(60.0, "S", "At most this many seconds for timing hooks.", least=1.0),
    rank: options.Rank = None,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
) -> Result:
    """Say which gradient compression pays.

    Which ratio near-linear scaling needs, and from which bandwidth down each method gains.

    TRACE is a recording of one worker. Example: foretrace compression advise run/ --network 10gbit/50us --workers 8
    """
    from foretrace.experiment.calibrate import with_hooks
    from foretrace.plan import compression_advice as plan
    from foretrace.report import compression as report

    plan.positive(tolerance=tolerance, seconds=seconds)
    chosen = plan.methods_named(method or ()) or plan.DEFAULT
    parallel = plan.data_parallel(workers, network, bucket_mb=bucket_mb, gradient_mb=gradient_mb, backend=backend)
    graph, note = options.scenario(source, rank=rank, steps=steps, salvage=salvage).calibrated().graph, ""
    if measure:
        with options.progress("timing hooks") as told:
            graph, note = with_hooks(graph, [(parallel, each) for each in chosen], seconds, told)
    with options.progress("predicting methods") as told:
        advice = plan.advise(graph, parallel, chosen, tolerance=tolerance, progress=told)
    return report.advise(advice, source=str(source), note=note)
