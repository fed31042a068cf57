"""Options that several commands share, and how a command gets its run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.flow import Scenario
    from foretrace.report.views import View
    from foretrace.trace.trace import Trace

Source = Annotated[
    Path,
    typer.Argument(metavar="TRACE", help="A recording, an archive or folder of ranks, or a saved graph."),
]
Rank = Annotated[
    int | None, typer.Option("--rank", metavar="N", help="The rank to look at; by default the lowest one.")
]
Steps = Annotated[
    str,
    typer.Option("--steps", metavar="STEPS", help="Recorded steps to keep: 5, 5-8 or 5,7; by default all."),
]
Salvage = Annotated[
    bool, typer.Option("--salvage", help="Use the good part of a damaged file and say what was left out.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON (docs/json.md) instead of text.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a self-contained page, too.")]
Perfetto = Annotated[
    Path | None,
    typer.Option("--perfetto", metavar="FILE", help="Write both timelines for Perfetto (.json or .json.gz), too."),
]
Top = Annotated[int, typer.Option("--top", metavar="N", min=1, help="Rows of a ranking to print.")]


def scenario(
    source: Path,
    *,
    rank: int | None = None,
    steps: str = "",
    salvage: bool = False,
    as_recorded: bool = False,
) -> Scenario:
    """The run in `source`: a recording that is read and built, or a graph that was saved."""
    run, _ = scenario_and_trace(source, rank=rank, steps=steps, salvage=salvage, as_recorded=as_recorded)
    return run


def scenario_and_trace(
    source: Path,
    *,
    rank: int | None = None,
    steps: str = "",
    salvage: bool = False,
    as_recorded: bool = False,
) -> tuple[Scenario, Trace | None]:
    """As `scenario`, and the recording that it was built from; None for a saved graph."""
    from foretrace import flow

    if _is_graph(source):
        given = {"--rank": rank is not None, "--steps": bool(steps), "--salvage": salvage}
        if unfit := [name for name, used in given.items() if used]:
            raise ForetraceError(f"{source} is a saved graph, which {' and '.join(unfit)} cannot change; leave it out.")
        return flow.load(source), None
    with progress(f"reading {source.name}") as report:
        run = flow.read(
            source,
            ranks=None if rank is None else [rank],
            steps=step_numbers(steps),
            salvage=salvage,
            progress=report,
        )
    for dropped in run.trace.dropped if salvage else ():
        say(
            f"{dropped.where}: left out {dropped.count:,} events ({dropped.reason})"
            if dropped.count
            else dropped.reason
        )
    return run.graph(rank=rank, as_recorded=as_recorded), run.trace


def _is_graph(source: Path) -> bool:
    if not source.is_file():
        return False
    from foretrace.graph.store import MAGIC

    with source.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def step_numbers(text: str) -> list[int] | None:
    """Numbers from "5", "5-8" or "5,7-9"; None where all steps are meant. Raises ForetraceError."""
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


def answer(view: View, *, as_json: bool, top: int = 12) -> None:
    """Print a view on standard output, as JSON or for people."""
    if as_json:
        from foretrace.report import jsonout

        print(jsonout.dumps(view))
        return
    import os

    from foretrace.report.terminal import Terminal, render

    print(render(view, Terminal.of(sys.stdout, os.environ), rows=top), end="")


def wrote(*files: Path | None, quiet: bool = False) -> None:
    """Name the files that were written, as the last lines of the answer."""
    for file in files:
        if file is not None and not quiet:
            print(f"  wrote {file}")


def say(line: str) -> None:
    """One line on standard error, beside the answer."""
    print(f"foretrace: {line}", file=sys.stderr)


@contextmanager
def progress(what: str) -> Iterator[Callable[[float], None] | None]:
    """A bar on standard error while something long runs; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share: bar.update(task, completed=share)
