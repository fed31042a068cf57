"""`foretrace plan`: how to share a model out over devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from foretrace.cli import completion, options
from foretrace.cli.answers import Reply, answers, group, writable
from foretrace.cli.options import argument, flag, option
from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.report.views import Result

Devices = Annotated[int, option(..., "N", "How many there are.", least=1)]
MemoryLimit = Annotated[str, option(..., "SIZE", "Of a device, as 16GB, instead of the catalog's memory.")]
Link = Annotated[str, option(..., "RATE", "Of a device in each direction, as 200gbit; by default the catalog's.")]

plan = group("plan", "Share a model out over devices, and say how good that is.", default="transformer")


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
    memory_limit: MemoryLimit = "",
    link: Link = "",
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
            batch=batch, precision=precision, training=not inference, size=size, contiguous=not any_sets,
            seconds=seconds, progress=tell,
        )  # fmt: skip
    return report.placed(found, source)


@plan.command("pipeline")
@answers
def pipeline(
    model: str = argument(..., "MODEL", "A model as estimate reads it.", complete=completion.decoders),
    device: str = option(..., "NAME", "As foretrace devices lists them.", complete=completion.devices),
    devices: Devices = 2,
    micro_batches: int = option(8, "N", "Micro-batches of a batch; --batch is the size of one.", least=1),
    schedule: list[str] | None = option(None, "NAME", "Only this one, e.g. 2bw; several."),
    memory_limit: MemoryLimit = "",
    link: Link = "",
    batch: options.Batch = None,
    precision: options.Precision = "",
    size: options.Size = "full",
) -> Result:
    """Cut a model into a stage per device and compare the schedules of a pipeline: time, bubble and memory.

    Example: foretrace plan pipeline bert --device a100-40gb --devices 4 --batch 8
    """
    from foretrace import flow
    from foretrace.plan.result import size as size_of
    from foretrace.report import plan as report

    with options.progress(f"cutting {model}") as tell:
        found = flow.pipeline(
            model, device=device, devices=devices, micro_batches=micro_batches, schedules=schedule or (),
            memory_limit=size_of(memory_limit), link=link, batch=batch, precision=precision, size=size, progress=tell,
        )  # fmt: skip
    return report.pipelined(found, model)


@plan.command("transformer")
@answers
def transformer(
    model: str = argument(..., "MODEL", "A decoder by name: gpt3-175b, llama-3-70b.", complete=completion.decoders),
    device: str = option(..., "NAME", "As foretrace devices lists them.", complete=completion.devices),
    devices: Devices = 8,
    batch: int = option(0, "N", "Samples per step; by default one for each device.", least=0),
    length: int = option(0, "N", "Words of a sequence; by default the model's.", least=0),
    link: str = option("", "RATE", "Between machines, of a device in each direction; by default the catalog's."),
    fix: list[str] | None = option(None, "KEY=N", "A degree that is given, e.g. tensor=8; several."),
    tokens: float | None = option(None, "N", "Words to train on, for GPU-hours: 300e9."),
    explain: bool = flag("--explain", "Say of every way to lose how many configurations lost by it."),
    unequal: bool = flag("--unequal", "Also cut the layers into stages that may differ (Alpa)."),
    perfetto: Path | None = option(None, "FILE", "Write the timeline for Perfetto (.json or .json.gz), too."),
    export: str = option("", "TARGET", "Write the plan for torchrun, slurm, megatron, deepspeed, ... into --out."),
    out: Path | None = option(None, "FILE", "Where --export writes, or a folder to write into."),
    top: options.Top = 5,
) -> Reply:
    """Find the quickest way to train a large transformer on many devices, of all configurations that fit.

    Example: foretrace plan transformer gpt3-175b --devices 512 --device a100-80gb --batch 1536
    """
    from foretrace.files import write_text
    from foretrace.hardware.cluster import parse_link
    from foretrace.plan import export as launches
    from foretrace.plan.export.launch import LaunchedPlan
    from foretrace.plan.transformers.alpa import unequal_stages
    from foretrace.plan.transformers.plan import plan_decoder
    from foretrace.report import perfetto as timelines
    from foretrace.report import plan as report
    from foretrace.report.tracks import track

    if bool(export) != (out is not None):
        raise ForetraceError("`export=TARGET` and `out=FILE` go together; give both, or neither.")
    if export and unequal:
        raise ForetraceError("`export=` writes stages that are alike, the best of them; leave out `unequal=`.")
    to = launches.target(export) if export else ""
    path = launches.path_of(out, to) if out else None
    writable(path)
    found = plan_decoder(
        model, devices=devices, device=device, batch=batch or devices, length=length, fixed=options.degrees(fix),
        network_gb_s=parse_link(link).bytes_per_s / 1e9 if link else 0.0, runners_up=top,
    )  # fmt: skip
    files: dict[Path | None, Callable[[Path], object]] = {
        perfetto: lambda path: timelines.write([track(model, found.simulated)], path)
    }
    if path is not None:
        space = found.space
        launch = LaunchedPlan(model=space.model, at=found.configuration, batch=space.batch, node=space.on.node)
        text = launches.export(launch, to)
        files[path] = lambda into: write_text(into, text)
    stages = unequal_stages(found.space) if unequal else None
    view = report.planned(found, model, tokens=tokens, unequal=stages)
    return Reply(result=view, how={"explain": explain}, files=files)
