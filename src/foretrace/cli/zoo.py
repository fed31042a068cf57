"""`foretrace zoo`: models to try predictions on, and a few steps of one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli import options

if TYPE_CHECKING:
    from foretrace.report.listings import ModelView, TrialView
    from foretrace.zoo.registry import ZooModel
    from foretrace.zoo.trial import Trial


def zoo(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="One model, to be built and run.")] = "",
    size: Annotated[
        str, typer.Option("--size", metavar="SIZE", help="tiny (for any machine) or full (as published).")
    ] = "tiny",
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Steps to time, after a warm-up.")] = 10,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of weights and data.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """List the models to verify on, or train one for some steps.

    Example: foretrace zoo resnet50
    """
    from foretrace.zoo import registry

    if name:
        from foretrace.zoo.trial import trial

        found = registry.entry(name)
        with options.progress(f"training {name} ({size})") as progress:
            run = trial(registry.training(name, size, seed=seed), steps, progress)
        if as_json:
            _print_json((found,), _measured(run, size, seed))
        else:
            _tell(found, size, run)
    elif as_json:
        _print_json(registry.ENTRIES)
    else:
        _list(registry.ENTRIES)


def _list(entries: tuple[ZooModel, ...]) -> None:
    width, wide = (max(len(getattr(each, field)) for each in entries) for field in ("name", "task"))
    print(f"{len(entries)} models in two sizes: tiny takes 20 to 170 ms per step on one core, full is as published.\n")
    print(f"{'':<{width}}  {'task':<{wide}}  {'tiny':>7}  {'full':>7}  parameters")
    for each in entries:
        tiny, full = map(_count, each.parameters)
        needs = f" (needs {each.needs})" if each.needs else ""
        print(f"{each.name:<{width}}  {each.task:<{wide}}  {tiny:>7}  {full:>7}{needs}")
        print(f"{'':<{width}}  {each.summary}")
    smallest = min(entries, key=lambda each: each.parameters[0])
    print(f"\nnext: foretrace zoo {smallest.name}")


def _tell(entry: ZooModel, size: str, run: Trial) -> None:
    from foretrace.report import units

    low, median, high = run.quantiles_s()
    unit = units.unit_for(median)
    threads = "1 thread" if run.threads == 1 else f"{run.threads} threads"
    change = "falls" if run.losses[-1] < run.losses[0] else "does not fall yet"
    print(f"{entry.name} · {entry.task} · {size} · {threads}\n")
    rate = units.digits(run.samples_per_s)
    print(f"A step of {run.batch_size} samples takes {units.seconds(median)}: {rate} samples per second.\n")
    spread = f"(p10 {units.in_unit(low, unit)} – p90 {units.in_unit(high, unit)}, {len(run.step_s)} steps)"
    print(f"  step        {units.seconds(median)} {spread}")
    print(f"  of which    {units.seconds(run.median_loading_s)} data loading")
    print(f"  parameters  {run.parameters:,}")
    print(f"  loss        {change}: {run.losses[0]:.3f} → {run.losses[-1]:.3f} in {len(run.losses)} steps")
    print(f"  {entry.summary}\n  {entry.source}")
    print(f"\nnext: foretrace verify fused-optimizer --model {entry.name}")


def _count(parameters: int) -> str:
    """A number of parameters in millions."""
    millions = parameters / 1e6
    return f"{millions:.0f} M" if millions >= 99.5 else f"{millions:.1f} M" if millions >= 1 else f"{millions:.2f} M"


def _facts(entry: ZooModel) -> ModelView:
    from foretrace.report.listings import ModelView, ParametersView

    tiny, full = entry.parameters
    return ModelView(
        name=entry.name,
        task=entry.task,
        summary=entry.summary,
        source=entry.source,
        needs=entry.needs,
        parameters=ParametersView(tiny=tiny, full=full),
    )


def _measured(run: Trial, size: str, seed: int) -> TrialView:
    from foretrace.report.listings import TrialTimeView, TrialView

    low, median, high = run.quantiles_s()
    return TrialView(
        size=size,
        seed=seed,
        step_time_s=TrialTimeView(median=median, p10=low, p90=high),
        steps=len(run.step_s),
        loading_s=run.median_loading_s,
        batch_size=run.batch_size,
        samples_per_s=run.samples_per_s,
        threads=run.threads,
        losses=run.losses,
    )


def _print_json(entries: tuple[ZooModel, ...], run: TrialView | None = None) -> None:
    from foretrace.report.jsonout import dumps
    from foretrace.report.listings import ZooView

    print(dumps(ZooView(models=tuple(map(_facts, entries)), run=run)))
