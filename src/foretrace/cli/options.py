"""Options that several commands share, and how a command gets its run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from foretrace import experiment
from foretrace.cli import completion
from foretrace.errors import ForetraceError
from foretrace.plaintext import visible

if TYPE_CHECKING:
    from foretrace.flow import Scenario
    from foretrace.graph.taskgraph import TaskGraph
    from foretrace.techniques.base import Technique

Number = TypeVar("Number", int, float)


def option(
    default: Any,
    metavar: str,
    help: str,
    *names: str,
    least: float | None = None,
    most: float | None = None,
    complete: completion.Offers | None = None,
    hidden: bool = False,
) -> Any:
    """Return an option of a command, called as its parameter is unless `names` are given; `...` is no default."""
    return typer.Option(
        default, *names, metavar=metavar or None, help=help, min=least, max=most, autocompletion=complete,
        hidden=hidden, case_sensitive=False,
    )  # fmt: skip


def flag(name: str, help: str, *, default: Any = False, hidden: bool = False) -> Any:
    """Return an option that is given or not."""
    return typer.Option(default, name, help=help, hidden=hidden)


def argument(default: Any, metavar: str, help: str, *, complete: completion.Offers | None = None) -> Any:
    """Return what a command is about; `...` where it must be given."""
    return typer.Argument(default, metavar=metavar, help=help, autocompletion=complete, show_default=False)


# What means one thing has one name in all commands.
Source = Annotated[Path, argument(..., "TRACE", "A recording, an archive or folder of ranks, or a saved graph.")]
Rank = Annotated[int | None, option(..., "N", "The rank to use; by default the lowest one.")]
AllRanks = Annotated[
    bool, flag("--all-ranks", "Use all recorded ranks as one graph, joined by their collectives.", default=...)
]
Steps = Annotated[str, option(..., "STEPS", "Recorded steps to keep: 5, 5-8 or 5,7; by default all.")]
Salvage = Annotated[
    bool, flag("--salvage", "Use the good part of a damaged file and say what was left out.", default=...)
]
Calibration = Annotated[
    bool,
    option(
        ..., "", "Use operator times that foretrace calibrate stored for the recorded machine.",
        "--calibration/--no-calibration",
    ),
]  # fmt: skip
Perfetto = Annotated[Path | None, option(..., "FILE", "Write the timelines for Perfetto (.json or .json.gz), too.")]
On = Annotated[str, option(..., "here|ray", "Where ranks are read: on this machine's cores, or a Ray cluster.")]
Batch = Annotated[int | None, option(..., "N", "Samples per step.", least=1)]
Precision = Annotated[
    str,
    option(
        ..., "NAME",
        "fp32, bf16, fp16 (autocast), bf16-weights, fp16-weights. Default: fp32; of a decoder bf16-weights.",
    ),
]  # fmt: skip
Inference = Annotated[bool, flag("--inference", "The forward pass alone, without gradients.", default=...)]
Size = Annotated[str, option(..., "tiny|full", "Size of a zoo model.")]
Threads = Annotated[int, option(..., "N", "Intra-op threads.", least=1, most=1024)]
Do = Annotated[
    list[str] | None,
    option(
        ..., '"NAME KEY=VALUE ..."', "A technique; several are applied in this order. See foretrace techniques.",
        complete=completion.techniques,
    ),
]  # fmt: skip
Model = Annotated[
    str,
    option(..., "NAME|SCRIPT", "A zoo model, or a script with training().", complete=completion.models),
]
Device = Annotated[str, option(..., "NAME", "As foretrace devices lists them.", complete=completion.devices)]
Techniques = Annotated[
    list[str],
    argument(
        ..., '"TECHNIQUE [KEY=VALUE ...]" ...', "What to verify; several are applied together, in order.",
        complete=completion.techniques,
    ),
]  # fmt: skip
Grid = Annotated[float | None, option(..., "G", "Grams of CO2 per kWh of electricity; none is assumed.", least=0.0)]
Strategy = Annotated[str, option(..., "NAME", "Also search by it: hybrid:cmaes, hybrid:dqn, mcmc, random, ...")]
Calls = Annotated[int, option(..., "N", "By --strategy, those it learns from included.", least=1, most=100_000)]
Top = Annotated[int, option(..., "N", "Rows of a ranking to print.", least=1)]
LedgerFile = Annotated[
    Path | None, option(..., "FILE", "The ledger; by default $FORETRACE_LEDGER or your data folder.")
]


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """Which part of a recording a question is about that needs one rank."""

    rank: Rank = None
    steps: Steps = ""
    salvage: Salvage = False

    def of(self, source: Path, **how: Any) -> Scenario:
        """Return the run in `source`, as far as it is asked about; `how` as in `flow.scenario`."""
        asked = {name: getattr(self, name) for name in ("rank", "steps", "salvage", "all_ranks") if hasattr(self, name)}
        return scenario(source, **asked | how)


@dataclass(frozen=True, kw_only=True)
class PartOptions(RankOptions):
    """Which part of a recording a question is about."""

    all_ranks: AllRanks = False


@dataclass(frozen=True, kw_only=True)
class RunOptions(PartOptions):
    """A recording, or a part of it."""

    source: Source

    @property
    def path(self) -> str:
        """As the user named it."""
        return str(self.source)

    def read(self, **how: Any) -> Scenario:
        """Return the run in it; `how` as in `flow.scenario`."""
        return self.of(self.source, **how)


@dataclass(frozen=True, kw_only=True)
class LedgerOptions:
    """Where rows of what ran go."""

    ledger: LedgerFile = None
    no_ledger: Annotated[bool, flag("--no-ledger", "Write no row.", default=...)] = False

    def keeper(self, *, run: bool = True) -> Callable[..., tuple[str, str]]:
        """Return what adds rows and names the ledger and the last row; names nothing where none is to be added.

        The ledger is checked before anything runs. Raises ForetraceError where it cannot be written.
        """
        if self.no_ledger or not run:
            return lambda *rows: ("", "")

        return experiment.Ledger(self.ledger).checked().keep


def scenario(source: Path, *, steps: str = "", **how: Any) -> Scenario:
    """Return the run in `source`, read as `flow.scenario` is told; what was left out is said on standard error."""
    from foretrace import flow

    with progress(f"reading {source.name}") as report:
        run = flow.scenario(source, steps=step_numbers(steps), progress=report, **how)
    for each in run.left_out:
        say(each)
    return run


def rank_graphs(source: Path, *, steps: str = "", salvage: bool = False, on: str = "here") -> tuple[TaskGraph, ...]:
    """Return the graph of every rank of a recording; what was left out of them is said on standard error."""
    from foretrace import flow

    with progress(f"reading {source.name}") as report:
        graphs = flow.rank_graphs(source, steps=step_numbers(steps), salvage=salvage, on=on, progress=report)
    for each in flow.left_out(graphs) if salvage else ():
        say(each)
    return graphs


def is_recording(what: str) -> bool:
    """Return whether `what`, which may also be a script or a model of the zoo, is written as a recording is."""
    path = Path(what)
    return path.suffix != ".py" and (path.exists() or bool(path.suffix) or path.parent != Path())


def step_numbers(text: str) -> list[int] | None:
    """Return numbers from "5", "5-8" or "5,7-9"; None where all steps are meant. Raises ForetraceError."""
    if not text:
        return None
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(first + last) > 18:
            raise ForetraceError(f"--steps {text}: {part!r} is no step; write 5, 5-8 or 5,7.")
        low, high = int(first), int(last or first)
        if not 0 <= high - low < 100_000:
            raise ForetraceError(f"--steps {text}: {part!r} is no range; write the smaller number first.")
        numbers += range(low, high + 1)
    return numbers


def pairs(given: list[str] | None, number: Callable[[str], Number], wrong: str) -> dict[str, Number]:
    """Parse NAME=NUMBER pairs; `wrong` says of another text what to write. Raises ForetraceError."""
    found: dict[str, Number] = {}
    for text in given or ():
        name, _, value = text.rpartition("=")
        if name in found:
            raise ForetraceError(f"{name} has two values, {found[name]} and {value}; give one.")
        try:
            found[name] = number(value if name else "")
        except ValueError:
            raise ForetraceError(wrong.format(text)) from None
    return found


def parsed(do: list[str] | None) -> tuple[Technique, ...]:
    """Return techniques by their names and parameters. Raises ForetraceError."""
    if not do:  # loading all techniques takes a while
        return ()
    from foretrace.techniques.arguments import parse_all

    return parse_all(do)


def degrees(fixed: list[str] | None) -> dict[str, int]:
    """Return degrees of parallelism from KEY=N. Raises ForetraceError."""
    return pairs(fixed, int, "--fix {}: write KEY=N with a whole number, as in --fix tensor=8.")


def sizes(dims: list[str] | None) -> dict[str, int]:
    """Return sizes of open dimensions from NAME=N. Raises ForetraceError."""

    def size(text: str) -> int:
        if not text.isdecimal() or len(text) > 12 or not int(text):
            raise ValueError
        return int(text)

    return pairs(dims, size, "--dim {}: write NAME=N with a number from 1 on, as in --dim batch=8.")


def wrote(*files: Path | None, quiet: bool = False) -> None:
    """Name the files that were written, as the last lines of the answer."""
    for file in files:
        if file is not None and not quiet:
            print(f"  wrote {file}")


def say(line: str) -> None:
    """Write one line on standard error, beside the answer."""
    print(f"foretrace: {visible(line)}", file=sys.stderr)


@contextmanager
def progress(what: str) -> Iterator[Callable[[float], None] | None]:
    """Show a bar on standard error while something long runs; None where nobody watches."""
    with stages(what) as tell:
        yield None if tell is None else partial(tell, what)


@contextmanager
def stages(first: str = "starting") -> Iterator[Callable[[str, float], None] | None]:
    """Show a bar on standard error that says what is being done; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(first, total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
