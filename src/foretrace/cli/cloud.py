"""`foretrace cloud`: which rented machines would train a recorded job."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

from foretrace.cli import options
from foretrace.cli.answers import Reply, answers, group
from foretrace.cli.options import option
from foretrace.errors import ForetraceError

cloud = group("cloud", "Choose rented machines for a recorded job.")


@cloud.command("advise")
@answers
def advise(
    source: options.Source,
    samples: int = option(..., "N", "Samples of an epoch."),
    epochs: int = option(1, "N", "Epochs to train."),
    within: float = option(0.0, "HOURS", "Time for all epochs."),
    budget: float = option(0.0, "MONEY", "For all epochs, in the currency of the prices."),
    counts: str = option("1,2,4", "N,N", "Numbers of machines to try."),
    types: str = option("", "NAME,NAME", "Only these types; the beginning of a name will do."),
    prices: Path | None = option(None, "FILE", "Your types and prices (CSV), instead of ours."),
    step: list[str] | None = option(None, "DEVICE=SECONDS", "A step measured on one device, instead of predicted."),
    gradient_mb: float = option(0.0, "MB", "All gradients, if the recording lacks them.", least=0.0),
    plot: Path | None = option(None, "FILE.svg", "Draw time against money of all offers, too."),
    rank: options.Rank = None,
) -> Reply:
    """Predict epoch time and price on rented machines.

    Chooses the cheapest in time, or the fastest for the money.

    Example: foretrace cloud advise run/ --samples 100000 --epochs 2 --within 24 --step K80-half=0.2
    """
    from foretrace.files import write_text
    from foretrace.hardware.instances import instances
    from foretrace.plan import cloud as offers
    from foretrace.report import stash as report

    wrong = "--step {}: write the device and seconds above 0, as in T4=0.21."
    wanted = offers.RentalRequest(
        samples=samples, epochs=epochs, hours=within, dollars=budget, gradient_mb=gradient_mb, counts=_counts(counts),
        steps_s=options.pairs(step, _seconds, wrong),
    ).checked()  # fmt: skip
    types_found = instances(prices, types=types)
    scenario = options.scenario(source, rank=rank)
    with options.progress("predicting offers") as tell:
        advice = offers.advise(scenario.graph, types_found, wanted, tell)
    view = report.cloud(advice, wanted, source=str(source))
    return Reply(result=view, files={plot: lambda path: write_text(path, report.pareto_svg(view))})


def _counts(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 10_000 for part in parts):
        raise ForetraceError(f"--counts {text}: write whole numbers above 0, as in 1,2,4.")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _seconds(text: str) -> float:
    seconds = float(text)
    if not (isfinite(seconds) and seconds > 0):
        raise ValueError
    return seconds
