"""Commands that list what there is: techniques, models of the zoo, devices."""

from __future__ import annotations

from pathlib import Path

from foretrace import report
from foretrace.cli import completion, options
from foretrace.cli.answers import Result
from foretrace.cli.options import argument, option


def techniques(
    name: str = argument("", "[NAME]", "One technique, with all its parameters.", complete=completion.techniques),
    ledger: Path | None = option(None, "FILE", "Where verified rows are; by default the user's own."),
) -> Result:
    """List all techniques, or explain one.

    Example: foretrace techniques prefetch-data
    """
    from foretrace.experiment.ledger import shipped_on, verified_on
    from foretrace.techniques import registry

    known = [registry.technique(name)] if name else registry.techniques().values()
    return report.tools.techniques(known, verified=verified_on(ledger), shipped=shipped_on())


def zoo(
    name: str = argument("", "[NAME]", "One model, to build and run.", complete=completion.models),
    size: options.Size = "tiny",
    steps: int = option(10, "N", "Steps to time, after a warm-up.", least=1),
    seed: int = option(0, "N", "Seed of weights and data.", least=0),
) -> Result:
    """List the models to verify on, or train one for some steps.

    Example: foretrace zoo resnet50
    """
    from foretrace.zoo import registry

    if not name:
        return report.tools.zoo(registry.entries().values())
    from foretrace.zoo.trial import trial

    found = registry.entry(name)
    with options.progress(f"training {name} ({size})") as progress:
        run = trial(registry.training(name, size, seed=seed), steps, progress)
    return report.tools.zoo([found], run, size=size, seed=seed)


def devices(
    name: str = argument("", "[NAME]", "One device, with the source of every figure.", complete=completion.devices),
) -> Result:
    """List known devices with their rates, memory and links.

    Example: foretrace devices H100-SXM5-80GB
    """
    from foretrace.hardware.devices import catalog, named

    return report.tools.devices([named(name)] if name else catalog())
