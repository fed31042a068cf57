"""`foretrace plan`: how to share a model out over devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretrace.cli import completion, options
from foretrace.cli.answers import answers, group
from foretrace.cli.options import argument, flag, option

if TYPE_CHECKING:
    from foretrace.report.views import Result

plan = group("plan", "Share a model out over devices, and prove how good that is.")


@plan.command("place")
@answers
def place(
    source: str = argument(
        ...,
        "SOURCE",
        "A model as estimate reads it, a recording, or a placement problem (JSON).",
        complete=completion.decoders,
    ),
    device: str = option("", "NAME", "As foretrace devices lists them.", complete=completion.devices),
    devices: int | None = option(None, "N", "How many there are.", least=1),
    objective: str = option("throughput", "throughput|latency", "Of a full pipeline, or of one batch alone."),
    memory_limit: str = option("", "SIZE", "Of a device, as 16GB, instead of the catalog's memory."),
    link: str = option("", "RATE", "Of a device in each direction, as 200gbit; by default the catalog's."),
    batch: options.Batch = None,
    precision: options.Precision = "",
    inference: options.Inference = False,
    size: options.Size = "full",
    any_sets: bool = flag("--any-sets", "A device may run several pieces of the graph."),
    seconds: float = option(30.0, "S", "At most this for an integer program, if one is needed.", least=0),
) -> Result:
    """Share operators out over devices: the best throughput of a full pipeline, or the best latency of one batch.

    Example: foretrace plan place bert --device a100-40gb --devices 4 --inference
    """
    from foretrace import flow
    from foretrace.plan.result import size as size_of
    from foretrace.report import plan as report

    with options.progress(f"placing {source}") as tell:
        found = flow.place(
            source, device=device, devices=devices, objective=objective, memory_limit=size_of(memory_limit), link=link,
            batch=batch, precision=precision, inference=inference, size=size, contiguous=not any_sets,
            seconds=seconds, progress=tell,
        )  # fmt: skip
    return report.placed(found, source)
