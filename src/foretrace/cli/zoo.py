"""`foretrace zoo`: models to try predictions on, and a few steps of one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretrace.cli import completion, options
from foretrace.cli.options import argument, option

if TYPE_CHECKING:
    from foretrace.report.views import Result


def zoo(
    name: str = argument("", "[NAME]", "One model, to build and run.", complete=completion.models),
    size: options.Size = "tiny",
    steps: int = option(10, "N", "Steps to time, after a warm-up.", least=1),
    seed: int = option(0, "N", "Seed of weights and data.", least=0),
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
