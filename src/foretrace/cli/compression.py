"""`foretrace compression`: whether compressing gradients pays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrace.cli import completion, options
from foretrace.cli.answers import answers, group
from foretrace.cli.options import argument, flag, option
from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.graph.taskgraph import TaskGraph
    from foretrace.report.views import Result

compression = group("compression", "Whether compressing gradients pays off.")


@compression.command("advise")
@answers
def advise(
    source: str = argument(..., "TRACE|MODEL", "A recording of one worker or a saved graph; or what estimate takes."),
    network: str = option(..., "LINK|FILE", "Link between workers (10gbit/50us), or a file."),
    workers: int = option(..., "N", "Data-parallel processes.", least=2),
    method: list[str] | None = option(None, '"NAME KEY=VALUE ..."', "Try this one, e.g. powersgd rank=8; several."),
    device: str = option("", "NAME", "Of a MODEL: its device; here: this processor.", complete=completion.devices),
    batch: options.Batch = None,
    precision: options.Precision = "",
    size: options.Size = "full",
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
) -> Result:  # fmt: skip
    """Say which gradient compression pays.

    Which ratio near-linear scaling needs, and from which bandwidth down each method gains.

    Of a model that never ran, with --device, the step is estimated. Hooks are timed on processors; what they take on a
    GPU follows from their passes over its memory.
    Example: foretrace compression advise run/ --network 10gbit/50us --workers 8
    """
    from foretrace.experiment.calibrate import with_hooks
    from foretrace.plan import compression_advice as plan
    from foretrace.report import compression as report

    plan.positive(tolerance=tolerance, seconds=seconds)
    chosen = plan.methods_named(method or ()) or plan.DEFAULT
    parallel = plan.data_parallel(workers, network, bucket_mb=bucket_mb, gradient_mb=gradient_mb, backend=backend)
    if not device and not options.is_recording(source):
        raise ForetraceError(f"{source} does not exist; give a recording, or a model with its --device.")
    if not device and (batch or precision):
        raise ForetraceError(
            f"--batch and --precision are of a model, not of {source}; say its --device, or leave them out."
        )
    if device and (rank is not None or steps or salvage):
        raise ForetraceError(f"--rank, --steps and --salvage are of a recording, not of {source}; leave them out.")
    if device:
        asked: dict[str, Any] = {"device": device, "batch": batch, "precision": precision, "size": size}
        graph, note = _estimated(source, **asked), ""
    else:
        run = options.scenario(Path(source), rank=rank, steps=steps, salvage=salvage)
        asked, graph, note = {}, run.calibrated().graph, ""
    if measure and not (device and graph.info.devices):
        with options.progress("timing hooks") as told:
            graph, note = with_hooks(graph, [(parallel, each) for each in chosen], seconds, told)
    with options.progress("predicting methods") as told:
        advice = plan.advise(graph, parallel, chosen, tolerance=tolerance, progress=told)
    return report.advise(advice, source=source, note=note, asked=asked)


def _estimated(source: str, *, device: str, **how: Any) -> TaskGraph:
    """Return the graph of a step of a model that never ran."""
    from foretrace import flow
    from foretrace.cost.operators.calibration import Calibration
    from foretrace.model.target import HERE

    with options.progress(f"capturing {source}") as tell:
        graph = flow.estimate(source, device=device, progress=tell, **how).step.lowered.graph
    if device != HERE:
        return graph
    from foretrace.experiment.calibrate import as_here

    graph = as_here(graph)
    return Calibration.load_for(graph).on(graph)
