"""`foretrace cloud`: which rented machines would train a recorded job."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

from foretrace.cli import options
from foretrace.cli.answers import Reply, answers
from foretrace.errors import ForetraceError

cloud = typer.Typer(
    name="cloud",
    help="Choose rented machines for a recorded job.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@cloud.callback()
def _cloud() -> None:
    """Keeps `advise` a command of its own while it is the only one."""


@cloud.command("advise")
@answers
def advise(
    source: options.Source,
    samples: Annotated[int, typer.Option("--samples", metavar="N", help="Samples of an epoch.")],
    epochs: Annotated[int, typer.Option("--epochs", metavar="N", help="Epochs to train.")] = 1,
    within: Annotated[float, typer.Option("--within", metavar="HOURS", help="Time for all epochs.")] = 0.0,
    budget: Annotated[float, typer.Option("--budget", metavar="DOLLARS", help="Money for all epochs.")] = 0.0,
    counts: Annotated[str, typer.Option("--counts", metavar="N,N", help="Numbers of machines to try.")] = "1,2,4",
    types: Annotated[
        str, typer.Option("--types", metavar="NAME,NAME", help="Only these types; the beginning of a name will do.")
    ] = "",
    prices: Annotated[
        Path | None, typer.Option("--prices", metavar="FILE", help="Your types and prices (CSV), instead of ours.")
    ] = None,
    step: Annotated[
        list[str] | None,
        typer.Option("--step", metavar="DEVICE=SECONDS", help="A step measured on one device, instead of predicted."),
    ] = None,
    gradient_mb: Annotated[
        float, typer.Option("--gradient-mb", metavar="MB", min=0.0, help="All gradients, if the recording lacks them.")
    ] = 0.0,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw time against money of all offers, too.")
    ] = None,
    rank: options.Rank = None,
) -> Reply:
    """Predict epoch time and price on rented machines; choose the cheapest in time or the fastest for the money.

    Example: foretrace cloud advise run/ --samples 100000 --epochs 2 --within 24 --step K80-half=0.2
    """
    from foretrace.files import write_text
    from foretrace.hardware.instances import instances
    from foretrace.plan import cloud as offers
    from foretrace.report import stash as report

    if samples < 1 or epochs < 1:
        raise ForetraceError(f"--samples {samples} --epochs {epochs} trains nothing; give both above 0.")
    for name, value in (("--within", within), ("--budget", budget), ("--gradient-mb", gradient_mb)):
        if not isfinite(value) or value < 0:
            raise ForetraceError(f"{name} {value} is no amount; give a number above 0, or leave it out.")
    found = [each for each in instances(prices) if _named(each.name, types)]
    if not found:
        raise ForetraceError(f"--types {types}: no instance type begins so.")
    wanted = offers.RentalRequest(
        samples=samples,
        epochs=epochs,
        hours=within,
        dollars=budget,
        counts=_counts(counts),
        gradient_mb=gradient_mb,
        steps_s=_steps(step or []),
    )
    scenario = options.scenario(source, rank=rank)
    with options.progress("predicting offers") as tell:
        advice = offers.advise(scenario.graph, found, wanted, tell)
    view = report.cloud(advice, wanted, source=str(source))
    return Reply(result=view, files={plot: lambda path: write_text(path, report.pareto_svg(view))})


def _named(name: str, types: str) -> bool:
    return not types or any(name.startswith(each.strip()) for each in types.split(",") if each.strip())


def _counts(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 10_000 for part in parts):
        raise ForetraceError(f"--counts {text}: write whole numbers above 0, as in 1,2,4.")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _steps(texts: list[str]) -> dict[str, float]:
    found = {}
    for text in texts:
        device, _, value = text.partition("=")
        try:
            seconds = float(value)
        except ValueError:
            seconds = float("nan")
        if not device or not isfinite(seconds) or seconds <= 0:
            raise ForetraceError(f"--step {text}: write the device and seconds above 0, as in T4=0.21.")
        found[device] = seconds
    return found
