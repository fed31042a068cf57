"""`foretrace rewrite`: a model as an equal one with faster operators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretrace.cli.answers import Reply
from foretrace.errors import ForetraceError, MissingExtraError

if TYPE_CHECKING:
    from torch import nn

    from foretrace.plan.rewrite.costs import OperatorCosts


def rewrite(
    source: Annotated[str, typer.Argument(metavar="MODEL", help="A model of the zoo, or a script with training().")],
    alpha: Annotated[
        float, typer.Option("--alpha", metavar="A", help="Follow graphs that cost up to A times the best; 1 is greedy.")
    ] = 1.05,
    budget: Annotated[int, typer.Option("--budget", metavar="N", help="Graphs to expand per part of the model.")] = 60,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            metavar="S",
            help="For the search, then the best so far; capturing, checking and measuring are extra.",
        ),
    ] = None,
    rules: Annotated[
        Path | None, typer.Option("--rules", metavar="FILE", help="More rules: the file of TASO's generator (.pb).")
    ] = None,
    size: Annotated[str, typer.Option("--size", metavar="tiny|full", help="Size of a zoo model.")] = "tiny",
    batch: Annotated[int | None, typer.Option("--batch", metavar="N", min=1, help="Samples of a run.")] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="Costs by a roofline of this device instead of measured.")
    ] = "",
    threads: Annotated[int, typer.Option("--threads", metavar="N", min=1, help="Intra-op threads.")] = 1,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Run both models in turns on this machine.")
    ] = True,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="PATH", help="Write the model: a .pt2 file, or a folder with code.")
    ] = None,
) -> Reply:
    """Rewrite a model into an equivalent one with faster operators.

    Inference only: weights are folded. Example: foretrace rewrite actor-critic --alpha 1.05 --budget 20
    """
    with _progress() as tell:
        try:
            import torch
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                'foretrace rewrite needs torch, which is not installed: pip install "foretrace[torch]"'
            ) from error
        from foretrace.plan.rewrite import write
        from foretrace.plan.rewrite.session import RewriteRequest
        from foretrace.plan.rewrite.session import rewrite as rewritten
        from foretrace.report import rewriting as report

        if out is not None:
            write.checked(out)
        wanted = RewriteRequest(alpha=alpha, budget=budget, seconds=seconds, rules=rules, measure=measure).checked()
        costs = _costs(device)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            model, args, kwargs, count = _model(source, size, batch)
            found = rewritten(model, args, kwargs, name=source, wanted=wanted, costs=costs, tell=tell)
        finally:
            torch.set_num_threads(before)
    if out is not None and not found.check.equal:
        raise ForetraceError(
            f"{source} was not written: rewritten, it differs from the original by {found.check.float64:.1g} in "
            f"float64 and {found.check.float32:.1g} in float32; please report it with the model."
        )
    return Reply(
        result=report.rewriting(
            found, wanted, source=source, size="" if source.endswith(".py") else size, batch=count,
            wrote=str(out) if out else "",
        ),
        files={out: lambda path: write.write(found.emitted, path)},
    )  # fmt: skip


def _model(source: str, size: str, batch: int | None) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], int]:
    """(model, arguments, keyword arguments, samples). Untrained models get the statistics of their own batch."""
    from foretrace.plan.rewrite.capture import of_training, settled
    from foretrace.training.batches import size as samples
    from foretrace.zoo.registry import job, script_mistakes

    with script_mistakes(source):
        training = job(source, size)()
        model, args, kwargs = of_training(training, batch)
    if not source.endswith(".py"):
        settled(model, args, kwargs)
    return model, args, kwargs, samples(args) or samples(kwargs)


def _costs(device: str) -> OperatorCosts | None:
    if not device:
        return None
    from foretrace.cost.devices.roofline import Roofline
    from foretrace.hardware.devices import named
    from foretrace.plan.rewrite.costs import ModelCosts

    return ModelCosts(Roofline(), named(device))


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None] | None]:
    """A bar on standard error with what is done; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
