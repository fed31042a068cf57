"""`foretrace estimate`: time and memory of a step on a device that you do not have, from the model alone."""

from __future__ import annotations

import gc
from pathlib import Path

from foretrace.cli import completion, options
from foretrace.cli.answers import Reply
from foretrace.cli.options import argument, flag, option
from foretrace.errors import ForetraceError

# What says which step is meant, in the order in which the command to try next says it.
_RECIPE = (
    "device", "batch", "precision", "inference", "size", "do", "recompute", "recompute_every", "tensor", "network",
    "optimizer", "attention", "loss", "reentrant", "accumulate", "zero", "workers", "length", "dim", "threads",
)  # fmt: skip
_USUAL = {"size": "full", "tensor": 1, "accumulate": 1, "workers": 1}


def estimate(
    source: str = argument(
        ..., "MODEL", "A zoo model, a decoder (llama-2-70b), a script with training(), ONNX, Chakra, JSON.",
        complete=completion.decoders,
    ),
    device: str = option(
        ..., "NAME", "As foretrace devices lists them; here: this processor.", complete=completion.devices
    ),
    batch: options.Batch = None,
    precision: options.Precision = "",
    inference: options.Inference = False,
    size: options.Size = "full",
    do: options.Do = None,
    recompute: bool = flag("--recompute", "Every block's forward pass again before its backward pass."),
    recompute_every: int = option(0, "N", "The same of every N-th block; 0: of none.", least=0),
    reentrant: bool = flag("--reentrant", "Blocks run again to their end, as in Megatron, not only as far as read."),
    accumulate: int = option(1, "N", "Micro-batches of --batch samples per update.", least=1),
    zero: int = option(0, "STAGE", "What ZeRO shares out; 3 is FSDP.", least=0, most=3),
    workers: int = option(1, "N", "Data-parallel workers; each has --batch.", least=1),
    gpus: int | None = option(None, "N", "Devices in all, instead of --workers.", least=1),
    tensor: int = option(1, "N", "Devices that share every layer of a decoder.", least=1),
    network: str = option("", "LINK", "Between workers: 400gbit/5us, a file, nccl:DEVICE."),
    optimizer: str = option("", "HOW", "Its implementation: fused, foreach or for-loop."),
    attention: str = option("", "HOW", "fused; flash-1, the first one; separate: products and a softmax."),
    loss: str = option("", "HOW", "fused: cross entropy of 16-bit scores in one kernel; separate."),
    pipeline: int = option(1, "", "", hidden=True),
    sequence: bool = flag("--sequence-parallel", "", hidden=True),
    length: int | None = option(None, "N", "Words of a sequence, for a decoder.", least=2),
    dim: list[str] | None = option(None, "NAME=N", "Size of an open dimension of an ONNX model."),
    out: Path | None = option(None, "FILE", "Write the task graph there, for whatif.", "--out", "-o"),
    threads: int | None = option(None, "N", "Threads of an operator, with --device here.", least=1),
    top: options.Top = 14,
) -> Reply:  # fmt: skip
    """Predict a step's time and memory from the model alone.

    Example: foretrace estimate resnet50 --device h100 --batch 32 --precision bf16
    """
    given = locals()
    from foretrace import flow
    from foretrace.graph.store import save
    from foretrace.report import estimate as report

    if pipeline != 1 or sequence:
        what = "--sequence-parallel" if sequence else f"--pipeline {pipeline}"
        raise ForetraceError(
            f"{what} is not modelled by estimate: layers are shared by --tensor, data by --zero; leave it out."
        )
    gc.disable()  # what is captured lives as long as the program; the collector need not go through it
    with options.progress(f"capturing {source}") as tell:
        found = flow.estimate(
            source, device=device, batch=batch, precision=precision, inference=inference, size=size,
            techniques=options.parsed(do), recompute=recompute_every or int(recompute), reentrant=reentrant,
            accumulate=accumulate, zero=zero, workers=workers, gpus=gpus, tensor=tensor, network=network,
            optimizer=optimizer, attention=attention, loss=loss, length=length, dims=options.sizes(dim),
            threads=threads, progress=tell,
        )  # fmt: skip
    given["workers"] = found.sharding.workers
    asked = {name: given[name] for name in _RECIPE if given[name] and given[name] != _USUAL.get(name)}
    view = report.estimate(found, model=source, asked=asked, out=out)
    return Reply(result=view, files={out: lambda path: save(found.step.lowered.graph, path)})
