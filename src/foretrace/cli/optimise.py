"""`foretrace optimise`: which techniques and which buckets make a step shortest."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path

from foretrace.cli import options
from foretrace.cli.answers import Reply
from foretrace.cli.options import option
from foretrace.errors import ForetraceError
from foretrace.names import resolve

_SIZE = re.compile(r"(?P<value>\d+(\.\d*)?|\.\d+)\s*(?P<unit>[kmgt]?i?b?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def optimise(
    source: options.Source,
    goal: str = option("step-time", "step-time", "What to minimise.", "--for"),
    workers: int = option(1, "N", "Workers that train together."),
    network: str = option("", "RATE[/LATENCY]|FILE", "Between the workers: 10gbit/20us."),
    backend: str = option("", "gloo|nccl", "The communication back end; by the device."),
    gradient_mb: float = option(0.0, "MB", "Size of all gradients, where the recording hides them."),
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
    from foretrace.plan import answer as answers
    from foretrace.plan.memory import Peak
    from foretrace.plan.optimise import Optimiser
    from foretrace.plan.result import OptimiseRequest
    from foretrace.report import optimise as report
    from foretrace.simulate.memory import split

    if goal != "step-time":
        raise ForetraceError(f"--for {goal} does not exist; choose step-time.")
    if not (isfinite(seconds) and seconds > 0):
        raise ForetraceError(f"--seconds {seconds} is no time; give seconds above 0, e.g. --seconds 30.")
    backend = resolve(backend, ("gloo", "nccl")) or backend
    if backend not in ("", "gloo", "nccl"):
        raise ForetraceError(f"--backend {backend} does not exist; choose gloo or nccl.")
    if write is not None and write.suffix not in (".py", ".json"):
        raise ForetraceError(f"--write {write}: name a file that ends in .py or .json.")
    wanted = OptimiseRequest(
        workers=workers,
        network=network,
        backend=backend,
        gradient_mb=gradient_mb,
        memory_limit=size(memory_limit),
    ).checked()
    run = options.scenario(source, rank=rank, steps=steps, salvage=salvage)
    if calibration:
        run = run.calibrated()
    memory = None if run.trace is None else split(run.trace)
    with _progress() as tell:
        found = Optimiser(
            recorded=run.graph,
            wanted=wanted,
            peak=None if memory is None else Peak.of(memory),
            state=resume,
            tell=tell,
        ).run(seconds)
    chosen = answers.configuration(found)
    python = answers.snippet(chosen)
    import json

    text = (
        python if write is not None and write.suffix == ".py" else json.dumps(answers.as_json(chosen), indent=2) + "\n"
    )
    return Reply(
        result=report.optimise(found, chosen, python, source=str(source)),
        files={write: lambda path: write_text(path, text)},
    )


def size(text: str) -> int | None:
    """Bytes of "16GB", "900MiB" or "1e9"; None for no text. Raises ForetraceError."""
    if not text.strip():
        return None
    found = _SIZE.fullmatch(text.strip())
    value = float(found["value"]) * _UNITS[found["unit"].lower().removesuffix("b")] if found else 0.0
    if not (isfinite(value) and value >= 1):
        raise ForetraceError(f"--memory-limit {text} is no size above 0; write 16GB or 900MiB.")
    return round(value)


@contextmanager
def _progress() -> Iterator[Callable[[str, float, float], None] | None]:
    """A bar on standard error with what is tried and the best step so far; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from foretrace.report.units import seconds

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("searching", total=1.0)
        yield lambda what, share, best_s: bar.update(
            task, description=f"{what}; best {seconds(best_s)}", completed=share
        )
