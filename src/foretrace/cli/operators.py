"""`foretrace operators`: what a model computes in a step, operator by operator."""

from __future__ import annotations

from pathlib import Path

from foretrace.cli import options
from foretrace.cli.answers import Reply
from foretrace.cli.options import argument, flag, option
from foretrace.errors import ForetraceError
from foretrace.names import resolve

_BY = ("family", "operator", "phase", "layer")


def operators(
    source: str = argument(
        ..., "SOURCE", "A zoo model, a script with training(), a recording, an execution trace, ONNX or JSON."
    ),
    size: str = option("", "tiny|full", "Size of a zoo model, full by default."),
    batch: int | None = option(None, "N", "Samples per step; where a file lacks it.", least=1),
    dim: list[str] | None = option(None, "NAME=N", "Size of an open dimension of an ONNX model."),
    step: int | None = option(None, "N", "The training step; by default the last one.", least=0),
    rank: options.Rank = None,
    salvage: options.Salvage = False,
    fuse: bool = flag("--fuse", "Fuse operators into kernels, as compilers do."),
    by: str = option("family", "|".join(_BY), "What a row of the table is."),
    out: Path | None = option(None, "FILE", "Write the operators there (.json or .json.gz).", "--out", "-o"),
    top: options.Top = 14,
) -> Reply:
    """Count a step's operators, FLOPs and bytes.

    Example: foretrace operators resnet50 --batch 32, or foretrace operators model.onnx --dim batch=8
    """
    from foretrace.model.blocks import with_blocks
    from foretrace.model.fusion import fuse as fused
    from foretrace.model.readers.json_form import checked, write
    from foretrace.report import operators as report
    from foretrace.zoo.operators import operators_in

    by = resolve(by, _BY, {"families": "family", **{f"{each}s": each for each in _BY}}) or by
    if by not in _BY:
        raise ForetraceError(f"--by {by}: a row is a {', '.join(_BY[:-1])} or {_BY[-1]}.")
    if out is not None:
        checked(out)
    dims, reads = options.sizes(dim), Path(source).exists() and not source.endswith(".py")
    with options.progress(f"reading {Path(source).name}" if reads else f"capturing {source}") as tell:
        graph = operators_in(
            source, size=size, batch=batch, dims=dims, step=step, rank=rank, salvage=salvage, progress=tell
        )
    graph = with_blocks(fused(graph) if fuse else graph)
    view = report.operators(graph, path=source, fused=fuse)
    if by == "layer" and not view.layers:
        raise ForetraceError(f"--by layer: {source} does not name layers; leave it out, or take --by operator.")
    return Reply(result=view, how={"by": by}, files={out: lambda path: write(graph, path)})
