"""`foretrace energy`: settings at which the same work takes less energy, and joules that hardware counts."""

from __future__ import annotations

from functools import partial

from foretrace import report, serving
from foretrace.cli import completion, options
from foretrace.cli.answers import Result, group
from foretrace.cli.options import argument, flag, option
from foretrace.errors import ForetraceError


def tune(
    target: list[str] = argument(
        ..., "TARGET", "A command, after --; or zeus:FOLDER workload=NAME [gpu=NAME] [target=X], recorded by Zeus."),
    slo: str = option(
        "1.1x", "TIME", "The longest it may take: 250ms, 2s; 1.1x of the default, of a record's fastest."),
    set_: list[str] | None = option(
        None, "NAME[=V,V]", "What may be set: {NAME} of the command, cpu-frequency, gpu-power-limit ...; several.",
        "--set"),
    evaluations: int = option(16, "N", "Settings to measure at most.", least=1),
    apply: bool = flag(
        "--apply", "Change settings of the machine; without it a command is not run where that is needed."),
    seed: int = option(0, "N", "Seed of the search.", least=0),
    top: options.Top = 12,
) -> Result:  # fmt: skip
    """Find the setting of least energy within a time limit.

    In few measurements, by constrained Bayesian optimisation.

    Example: foretrace energy tune --set batch=1,2,4 -- python bench.py --batch {batch}
    """
    values = dict(_values(text) for text in set_ or ())
    search = partial(serving.energy_tuning.tune, slo=slo, evaluations=evaluations, seed=seed)
    if target[0].startswith(serving.recorded_energy.PREFIX):
        if values or apply:
            raise ForetraceError("a recorded environment has its own settings; leave out `set=` and `apply=`.")
        return report.energy.tuned(search(serving.recorded_energy.read(target)), slo=slo)
    journal = serving.energy_command.journal()
    environment = serving.energy_command.environment(target, values)
    if environment.setters and not apply:
        return report.energy.dry_run(environment, slo=slo)
    with environment.restored(journal), options.progress("measuring settings") as tell:
        return report.energy.tuned(search(environment, tell=tell), slo=slo)


def measure(
    target: list[str] = argument(..., "COMMAND", "What to run, after --."),
    grid: options.Grid = None,
) -> Result:
    """Measure the joules of a command by hardware counters.

    Example: foretrace energy measure -- python bench.py
    """
    found = serving.energy_command.CommandEnvironment(
        name=" ".join(target), command=tuple(target), knobs=(), setters={}, meters=serving.energy_command.meters()
    )
    return report.energy.measured(found.name, found.measure(()), tuple(each.name for each in found.meters), grid)


def colocate(
    model: str = argument(..., "MODEL", "Whose requests come: a model of the zoo.", complete=completion.models),
    tuned: str = argument(..., "TUNED", "What is fine-tuned beside it, of the zoo.", complete=completion.models),
    slo: str = option("1.5x", "TIME", "The longest a request may take: 250ms; 1.5x of the largest one alone."),
    size: options.Size = "tiny",
    seconds: float = option(20.0, "S", "Of requests; measuring pairs before them is extra.", least=0.1),
    seed: int = option(0, "N", "Seed of the sizes of requests.", least=0),
    rows: options.LedgerOptions = options.LedgerOptions(),
) -> Result:
    """Fine-tune beside inference on one core.

    Predicts what requests take then, and admits steps that keep the limit.

    Example: foretrace energy colocate mobilenet-v2 ncf --seconds 5
    """
    keep = rows.keeper()
    with options.progress("serving beside fine-tuning") as tell:
        found = serving.colocation.colocate(
            model, tuned, slo=slo, size=size, seconds=seconds, core=serving.server_run.usable()[0], seed=seed, tell=tell
        )
    return report.energy.colocated(found, keep(*found.rows())[0], len(found.rows()))


def _values(text: str) -> tuple[str, tuple[float, ...]]:
    """Return NAME and values from NAME=V,V; no values stand for all that there are."""
    name, equals, given = text.partition("=")
    try:
        values = tuple(map(float, given.split(","))) if equals else ()
    except ValueError:
        values = (-1.0,)
    if any(not 0 < each < float("inf") for each in values):
        raise ForetraceError(f"`set={text}`: values must be numbers above 0, as in batch=1,2,4.")
    return name, values


energy = group(
    "energy", "Tune settings for less energy, and measure it.", tune=tune, measure=measure, colocate=colocate
)
