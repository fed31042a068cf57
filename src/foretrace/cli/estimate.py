"""`foretrace estimate`: time and memory of a step on a device that you do not have, from the model alone."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli import completion, options
from foretrace.cli.answers import Reply
from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.techniques.base import Technique


def estimate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A zoo model, a decoder (llama-2-70b), a script with training(), ONNX, Chakra, JSON.",
            autocompletion=completion.decoders,
        ),
    ],
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="NAME",
            help="As foretrace devices lists them; here: this processor.",
            autocompletion=completion.devices,
        ),
    ],
    batch: options.Batch = None,
    precision: options.Precision = "",
    inference: options.Inference = False,
    size: options.Size = "full",
    do: options.Do = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Every block's forward pass again before its backward pass.")
    ] = False,
    recompute_every: Annotated[
        int, typer.Option("--recompute-every", metavar="N", min=0, help="The same of every N-th block; 0: of none.")
    ] = 0,
    reentrant: Annotated[
        bool,
        typer.Option("--reentrant", help="Blocks run again to their end, as in Megatron, not only as far as read."),
    ] = False,
    accumulate: Annotated[
        int, typer.Option("--accumulate", metavar="N", min=1, help="Micro-batches of --batch samples per update.")
    ] = 1,
    zero: Annotated[
        int, typer.Option("--zero", metavar="STAGE", min=0, max=3, help="What ZeRO shares out; 3 is FSDP.")
    ] = 0,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, help="Data-parallel workers; each has --batch.")
    ] = 1,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", min=1, help="Devices in all, instead of --workers.")
    ] = None,
    tensor: Annotated[
        int, typer.Option("--tensor", metavar="N", min=1, help="Devices that share every layer of a decoder.")
    ] = 1,
    network: Annotated[
        str, typer.Option("--network", metavar="LINK", help="Between workers: 400gbit/5us, a file, nccl:DEVICE.")
    ] = "",
    optimizer: Annotated[
        str, typer.Option("--optimizer", metavar="HOW", help="Its implementation: fused, foreach or for-loop.")
    ] = "",
    attention: Annotated[
        str,
        typer.Option(
            "--attention", metavar="HOW", help="fused; flash-1, the first one; separate: products and a softmax."
        ),
    ] = "",
    loss: Annotated[
        str,
        typer.Option("--loss", metavar="HOW", help="fused: cross entropy of 16-bit scores in one kernel; separate."),
    ] = "",
    pipeline: Annotated[int, typer.Option("--pipeline", hidden=True)] = 1,
    sequence: Annotated[bool, typer.Option("--sequence-parallel", hidden=True)] = False,
    length: Annotated[
        int | None, typer.Option("--length", metavar="N", min=2, help="Words of a sequence, for a decoder.")
    ] = None,
    dim: Annotated[
        list[str] | None, typer.Option("--dim", metavar="NAME=N", help="Size of an open dimension of an ONNX model.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the task graph there, for whatif.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", min=1, help="Threads of an operator, with --device here.")
    ] = None,
    top: options.Top = 14,
) -> Reply:
    """Predict a step's time and memory from the model alone.

    Example: foretrace estimate resnet50 --device h100 --batch 32 --precision bf16
    """
    from foretrace import flow
    from foretrace.cli.operators import sizes
    from foretrace.graph.store import save
    from foretrace.report import estimate as report

    if pipeline != 1 or sequence:
        what = "--sequence-parallel" if sequence else f"--pipeline {pipeline}"
        raise ForetraceError(
            f"{what} is not modelled by estimate: layers are shared by --tensor, data by --zero; leave it out."
        )
    if gpus is not None:
        if workers > 1 or gpus % tensor:
            raise ForetraceError(f"--gpus {gpus} must be --workers times --tensor {tensor}; give one of the two.")
        workers = gpus // tensor
    techniques: tuple[Technique, ...] = ()
    if do:  # loading all techniques takes a while
        from foretrace.techniques.arguments import parse_all

        techniques = parse_all(do)
    gc.disable()  # what is captured lives as long as the program; the collector need not go through it
    with options.progress(f"capturing {source}") as tell:
        found = flow.estimate(
            source, device=device, batch=batch, precision=precision, inference=inference, size=size,
            techniques=techniques, recompute=recompute_every or int(recompute), reentrant=reentrant,
            accumulate=accumulate, zero=zero, workers=workers, tensor=tensor, network=network, optimizer=optimizer,
            attention=attention, loss=loss, length=length, dims=sizes(dim or []), threads=threads, progress=tell,
        )  # fmt: skip
    asked = {
        "--device": device, "--batch": batch, "--precision": precision, "--inference": inference,
        "--size": "" if size == "full" else size, "--do": do, "--recompute": recompute,
        "--recompute-every": recompute_every or None, "--tensor": tensor if tensor > 1 else None,
        "--network": network, "--optimizer": optimizer,
        "--attention": attention, "--loss": loss, "--reentrant": reentrant,
        "--accumulate": accumulate if accumulate > 1 else None, "--zero": zero or None,
        "--workers": workers if workers > 1 else None, "--length": length, "--dim": dim, "--threads": threads,
    }  # fmt: skip
    following = report.again(_further(source, asked, out, launches=device != "here"))
    chosen = frozenset(flag.removeprefix("--") for flag, given in asked.items() if given)
    view = report.estimate(found, model=source, again=following, chosen=chosen)
    return Reply(result=view, files={out: lambda path: save(found.step.lowered.graph, path)})


def _further(source: str, asked: Mapping[str, object], out: Path | None, *, launches: bool) -> list[str]:
    """What to ask next: this very step as a task graph, or a change of that graph."""
    if out is not None:
        return ["foretrace", *(["whatif", str(out), "--do", "cuda-graphs"] if launches else ["blame", str(out)])]
    words = ["foretrace", "estimate", source]
    for flag, given in asked.items():
        for each in given if isinstance(given, list) else [given]:
            words += [flag] if each is True else [flag, str(each)] if each else []
    return [*words, "--out", "step.graph"]
