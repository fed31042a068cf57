"""`foretrace optimise`: which techniques and which buckets make a step shortest."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

from foretrace.cli import options
from foretrace.cli.answers import Reply
from foretrace.cli.options import flag, option
from foretrace.errors import ForetraceError


def optimise(
    source: options.Source,
    goal: str = option("step-time", "step-time", "What to minimise.", "--for"),
    workers: int = option(1, "N", "Workers that train together."),
    network: str = option("", "RATE[/LATENCY]|FILE", "Between the workers: 10gbit/20us."),
    backend: str = option("", "gloo|nccl", "The communication back end; by the device."),
    gradient_mb: float = option(0.0, "MB", "Size of all gradients, where the recording hides them."),
    only_buckets: bool = flag("--only-buckets", "Leave precision, compiling and the optimizer as they are."),
    memory_limit: str = option("", "SIZE", "Most memory at the peak of a step: 16GB, 900MiB."),
    seconds: float = option(60.0, "S", "For the search and its answer; reading, and compiling once, are extra."),
    resume: Path | None = option(None, "FILE", "Keep the state of the search here, and continue from it."),
    write: Path | None = option(None, "FILE", "Write the configuration, as Python (.py) or JSON (.json)."),
    calibration: options.Calibration = True,
    rank: options.Rank = None,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
) -> Reply:
    """Find the techniques and bucket sizes with the fastest step.

    Interrupt it for the best so far. Example: foretrace optimise run/ --for step-time --workers 8 --network 10gbit/20us
    """
    from foretrace.files import write_text
    from foretrace.plan import answer
    from foretrace.plan.result import OptimiseRequest, size
    from foretrace.report import optimise as report
    from foretrace.report import units

    if goal != "step-time":
        raise ForetraceError(f"--for {goal} does not exist; choose step-time.")
    if not (isfinite(seconds) and seconds > 0):
        raise ForetraceError(f"--seconds {seconds} is no time; give seconds above 0, e.g. --seconds 30.")
    if write is not None and write.suffix not in (".py", ".json"):
        raise ForetraceError(f"--write {write}: name a file that ends in .py or .json.")
    wanted = OptimiseRequest(
        workers=workers, network=network, backend=backend, gradient_mb=gradient_mb, memory_limit=size(memory_limit),
        only_buckets=only_buckets,
    ).checked()  # fmt: skip
    run = options.scenario(source, rank=rank, steps=steps, salvage=salvage)
    with options.stages("searching") as bar:
        found = (run.calibrated() if calibration else run).optimise(
            wanted,
            seconds=seconds,
            state=resume,
            tell=bar and (lambda what, share, best_s: bar(f"{what}; best {units.seconds(best_s)}", share)),
        )
    chosen = answer.configuration(found)
    return Reply(
        result=report.optimise(found, chosen, answer.snippet(chosen), source=str(source)),
        files={write: lambda path: write_text(path, answer.text(chosen, path.suffix))},
    )
