"""`foretrace operators`: what a model computes in a step, operator by operator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli import options
from foretrace.cli.answers import Reply
from foretrace.errors import ForetraceError
from foretrace.names import resolve

if TYPE_CHECKING:
    from foretrace.model.operator_graph import OperatorGraph

_BY = ("family", "operator", "phase", "layer")


def operators(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A zoo model, a script with training(), a recording, an execution trace, ONNX or JSON.",
        ),
    ],
    size: Annotated[
        str, typer.Option("--size", metavar="tiny|full", help="Size of a zoo model, full by default.")
    ] = "",
    batch: Annotated[
        int | None, typer.Option("--batch", metavar="N", min=1, help="Samples per step; where a file lacks it.")
    ] = None,
    dim: Annotated[
        list[str] | None, typer.Option("--dim", metavar="NAME=N", help="Size of an open dimension of an ONNX model.")
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", min=0, help="The training step; by default the last one.")
    ] = None,
    rank: options.Rank = None,
    salvage: options.Salvage = False,
    fuse: Annotated[bool, typer.Option("--fuse", help="Fuse operators into kernels, as compilers do.")] = False,
    by: Annotated[str, typer.Option("--by", metavar="|".join(_BY), help="What a row of the table is.")] = "family",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the operators there (.json or .json.gz).")
    ] = None,
    top: options.Top = 14,
) -> Reply:
    """Count a step's operators, FLOPs and bytes.

    Example: foretrace operators resnet50 --batch 32, or foretrace operators model.onnx --dim batch=8
    """
    from foretrace.model.blocks import with_blocks
    from foretrace.report import operators as report

    by = resolve(by, _BY, {"families": "family", **{f"{each}s": each for each in _BY}}) or by
    if by not in _BY:
        raise ForetraceError(f"--by {by}: a row is a {', '.join(_BY[:-1])} or {_BY[-1]}.")
    if out is not None and not out.name.endswith((".json", ".json.gz")):
        raise ForetraceError(f"--out {out}: operators are written as JSON; name a file that ends in .json or .json.gz.")
    given_sizes = sizes(dim or [])
    path = Path(source)
    if path.exists() and path.suffix != ".py":
        if size:
            raise ForetraceError(f"{source} is a file, so --size means nothing; leave it out.")
        from foretrace.model.readers.sources import load_operators

        with options.progress(f"reading {path.name}") as tell:
            graph = load_operators(
                path, dims=given_sizes, step=step, rank=rank, batch=batch or 0, salvage=salvage, progress=tell
            )
    else:
        given = {
            "--dim": bool(given_sizes),
            "--step": step is not None,
            "--rank": rank is not None,
            "--salvage": salvage,
        }
        if wrong := [flag for flag, is_given in given.items() if is_given]:
            raise ForetraceError(f"{source} is no file, so {wrong[0]} means nothing; leave it out.")
        graph = _captured(source, size or "full", batch)
    if fuse:
        from foretrace.model.fusion import fuse as fused

        graph = fused(graph)
    graph = with_blocks(graph)
    view = report.operators(graph, path=source, fused=fuse)
    if by == "layer" and not view.layers:
        raise ForetraceError(f"--by layer: {source} does not name layers; leave it out, or take --by operator.")
    from foretrace.model.readers.json_form import write

    return Reply(result=view, how={"by": by}, files={out: lambda path: write(graph, path)})


def _captured(source: str, size: str, batch: int | None) -> OperatorGraph:
    """The operators of a zoo model, a decoder or a script, captured without running it."""
    from foretrace.zoo.operators import operators_of

    with options.progress(f"capturing {source}") as tell:
        return operators_of(source, size=size, batch=batch, progress=tell)


def sizes(given: list[str]) -> dict[str, int]:
    """Sizes from NAME=N."""
    found = {}
    for each in given:
        name, equals, number = each.rpartition("=")
        if not equals or not name or not number.isdecimal() or len(number) > 12 or not int(number):
            raise ForetraceError(f"--dim {each}: write NAME=N with a number from 1 on, as in --dim batch=8.")
        found[name] = int(number)
    return found
