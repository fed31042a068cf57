"""Options that several commands share, and how a command gets its run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli.answers import AsJson, Html
from foretrace.errors import ForetraceError
from foretrace.plaintext import visible

if TYPE_CHECKING:
    from foretrace.flow import Run, Scenario
    from foretrace.graph.taskgraph import TaskGraph
    from foretrace.trace.trace import Trace

__all__ = ["AsJson", "Html"]

Source = Annotated[
    Path,
    typer.Argument(metavar="TRACE", help="A recording, an archive or folder of ranks, or a saved graph."),
]
Rank = Annotated[
    int | None, typer.Option("--rank", metavar="N", help="The rank to look at; by default the lowest one.")
]
AllRanks = Annotated[
    bool, typer.Option("--all-ranks", help="Look at all recorded ranks as one graph, tied by their collectives.")
]
Steps = Annotated[
    str,
    typer.Option("--steps", metavar="STEPS", help="Recorded steps to keep: 5, 5-8 or 5,7; by default all."),
]
Salvage = Annotated[
    bool, typer.Option("--salvage", help="Use the good part of a damaged file and say what was left out.")
]
Calibration = Annotated[
    bool,
    typer.Option(
        "--calibration/--no-calibration",
        help="Use operator times that foretrace calibrate stored for the recorded machine.",
    ),
]
Perfetto = Annotated[
    Path | None,
    typer.Option("--perfetto", metavar="FILE", help="Write both timelines for Perfetto (.json or .json.gz), too."),
]
On = Annotated[
    str,
    typer.Option("--on", metavar="here|ray", help="Where ranks are read: on this machine's cores, or a Ray cluster."),
]
Batch = Annotated[int | None, typer.Option("--batch", metavar="N", min=1, help="Samples per step.")]
Precision = Annotated[
    str,
    typer.Option(
        "--precision",
        metavar="NAME",
        help="fp32, bf16, fp16 (autocast), bf16-weights, fp16-weights. Default: fp32; of a decoder bf16-weights.",
    ),
]
Inference = Annotated[bool, typer.Option("--inference", help="The forward pass alone, without gradients.")]
Size = Annotated[str, typer.Option("--size", metavar="tiny|full", help="Size of a zoo model.")]
Top = Annotated[int, typer.Option("--top", metavar="N", min=1, help="Rows of a ranking to print.")]


def scenario(
    source: Path,
    *,
    rank: int | None = None,
    steps: str = "",
    salvage: bool = False,
    as_recorded: bool = False,
    together: bool = False,
) -> Scenario:
    """The run in `source`: a recording that is read and built, or a graph that was saved.

    With `together` (--all-ranks), all ranks as one graph, as they were recorded.
    """
    if together:
        return _together(source, rank=rank, steps=steps, salvage=salvage, as_recorded=as_recorded)
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
    found = recorded(source, rank=rank, steps=steps, salvage=salvage)
    if found is None:
        from foretrace import flow

        return flow.load(source), None
    return found.graph(rank=rank, as_recorded=as_recorded), found.trace


def all_ranks(
    source: Path, *, rank: int | None = None, steps: str = "", salvage: bool = False, on: str = "here"
) -> Scenario:
    """As `scenario`; a recording of several ranks that their collectives tie together is one graph, without `rank`."""
    from foretrace import flow

    if rank is not None or is_graph(source):
        if on != "here":
            reason = "is a saved graph" if rank is None else f"is read for rank {rank} alone"
            raise ForetraceError(f"{source} {reason}, which needs no --on {on}; leave it out.")
        return scenario(source, rank=rank, steps=steps, salvage=salvage)
    if source.is_dir() or on != "here":
        return flow.joined(rank_graphs(source, steps=steps, salvage=salvage, on=on), alone=True)
    found = recorded(source, steps=steps, salvage=salvage)
    assert found is not None  # no graph, see above
    return found.graph() if len(found.trace.ranks) < 2 else found.global_graph(alone=True)


def _together(source: Path, *, rank: int | None, steps: str, salvage: bool, as_recorded: bool) -> Scenario:
    """What --all-ranks asks for; refuses what holds one rank, or ranks that nothing ties together."""
    from foretrace import flow

    if rank is not None:
        raise ForetraceError(f"--all-ranks and --rank {rank} contradict each other; give one of them.")
    if is_graph(source):
        saved = scenario(source, steps=steps, salvage=salvage)
        if len({lane.rank for lane in saved.graph.lanes if lane.rank >= 0}) < 2:
            raise ForetraceError(f"{source} is a saved graph of one rank; leave --all-ranks out.")
        return saved
    graphs = rank_graphs(source, steps=steps, salvage=salvage)
    if len(graphs) < 2:
        raise ForetraceError(f"{source} is a recording of one rank; leave --all-ranks out.")
    run = flow.joined(graphs, as_recorded=as_recorded)
    if not run.graph.info.collectives["what"]:
        raise ForetraceError(
            f"no collective ties the {len(graphs)} ranks of {source} together; look at one of them with --rank."
        )
    return run


def rank_graphs(source: Path, *, steps: str = "", salvage: bool = False, on: str = "here") -> tuple[TaskGraph, ...]:
    """The graph of every rank of a recording; what was left out of them is said on standard error."""
    from foretrace import flow

    with progress(f"reading {source.name}") as report:
        graphs = flow.rank_graphs(source, steps=step_numbers(steps), salvage=salvage, on=on, progress=report)
    for graph in graphs if salvage else ():
        for note in graph.info.notes:
            if "left out" in note or "tells no rank" in note:
                say(f"{graph.info.source}: {note}")
    return graphs


def recorded(source: Path, *, rank: int | None = None, steps: str = "", salvage: bool = False) -> Run | None:
    """The recording in `source`, read; None for a saved graph."""
    from foretrace import flow

    if is_graph(source):
        given = {"--rank": rank is not None, "--steps": bool(steps), "--salvage": salvage}
        if unfit := [name for name, used in given.items() if used]:
            raise ForetraceError(f"{source} is a saved graph, which {' and '.join(unfit)} cannot change; leave it out.")
        return None
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
    return run


def is_graph(source: Path) -> bool:
    """Whether a file holds a saved graph."""
    from foretrace.graph.store import MAGIC

    try:
        with source.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):  # whoever reads it says why it cannot be read
        return False


def is_recording(what: str) -> bool:
    """Whether `what`, which may also be a script or a model of the zoo, is written as a recording is."""
    path = Path(what)
    return path.suffix != ".py" and (path.exists() or bool(path.suffix) or path.parent != Path())


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


def wrote(*files: Path | None, quiet: bool = False) -> None:
    """Name the files that were written, as the last lines of the answer."""
    for file in files:
        if file is not None and not quiet:
            print(f"  wrote {file}")


def say(line: str) -> None:
    """One line on standard error, beside the answer."""
    print(f"foretrace: {visible(line)}", file=sys.stderr)


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
