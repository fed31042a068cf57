"""`foretrace zoo`: models to try predictions on, and a few steps of one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli import completion, options

if TYPE_CHECKING:
    from foretrace.report.views import Result


def zoo(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="One model, to build and run.", autocompletion=completion.models)
    ] = "",
    size: options.Size = "tiny",
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Steps to time, after a warm-up.")] = 10,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of weights and data.")] = 0,
) -> Result:
    """List the models to verify on, or train one for some steps.

    Example: foretrace zoo resnet50
    """
    from foretrace.report.zoo import zoo
    from foretrace.zoo import registry

    if not name:
        return zoo(registry.entries().values())
    from foretrace.zoo.trial import trial

    found = registry.entry(name)
    with options.progress(f"training {name} ({size})") as progress:
        run = trial(registry.training(name, size, seed=seed), steps, progress)
    return zoo([found], run, size=size, seed=seed)
