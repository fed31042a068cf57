"""Commands that list what there is: techniques, models of the zoo, devices."""

from __future__ import annotations

from pathlib import Path

from foretrace import experiment, hardware, report
from foretrace import zoo as zoos
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
    from foretrace.techniques import registry

    known = [registry.technique(name)] if name else registry.techniques().values()
    return report.tools.techniques(known, verified=experiment.verified_on(ledger), shipped=experiment.shipped_on())


def zoo(
    name: str = argument("", "[NAME]", "One model, to build and run.", complete=completion.models),
    size: options.Size = "tiny",
    steps: int = option(10, "N", "Steps to time, after a warm-up.", least=1),
    seed: int = option(0, "N", "Seed of weights and data.", least=0),
) -> Result:
    """List the models to verify on, or train one for some steps.

    Example: foretrace zoo resnet50
    """
    if not name:
        return report.tools.zoo(zoos.registry.entries().values())

    found = zoos.registry.entry(name)
    with options.progress(f"training {name} ({size})") as progress:
        run = zoos.run_trial(zoos.registry.training(name, size, seed=seed), steps, progress)
    return report.tools.zoo([found], run, size=size, seed=seed)


def devices(
    name: str = argument("", "[NAME]", "One device, with the source of every figure.", complete=completion.devices),
) -> Result:
    """List known devices with their rates, memory and links.

    Example: foretrace devices H100-SXM5-80GB
    """
    return report.tools.devices([hardware.named(name)] if name else hardware.catalog())
