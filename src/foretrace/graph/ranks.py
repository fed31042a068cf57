"""Task graphs of all ranks of a run, each read and built apart from the others, on the machine or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from foretrace import executor
from foretrace.errors import TraceError
from foretrace.graph.builder import build
from foretrace.graph.taskgraph import NO_RELEASE, TaskGraph
from foretrace.trace.read import Steps, listed, rank_numbers, read_apart, shown
from foretrace.trace.stream import stored_files

POOL_PAYS_BYTES = 8 << 20  # stored bytes whose reading takes longer than starting processes; recordings are gzipped


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    """What a worker made of one recording; without a graph where its rank was not asked for."""

    name: str
    told: int | None
    base_ns: int = 0
    graph: TaskGraph | None = None
    notes: tuple[str, ...] = ()


def rank_graphs(
    path: str | Path | Sequence[str | Path],
    *,
    ranks: Collection[int] | None = None,
    steps: Steps | None = None,
    salvage: bool = False,
    on: str = "here",
    progress: Callable[[float], None] | None = None,
) -> tuple[TaskGraph, ...]:
    """Return the graph of every rank of a run, as recorded, by rank, on one clock that begins with the first event.

    The same graphs as `build(read(path), rank)` gives one after the other, up to the numbering of names. `ranks`,
    `steps` and `salvage` are those of `read`; what was left out is said in the notes of the graph. `on` is where the
    files are read (`executor.map`); workers open them by the same path. `progress` is called with the share
    of files read.

    Raises:
        TraceError, GraphError: as `read` and `build` do; from another machine, too.
        ForetraceError: `on` does not exist or cannot be had, or a worker died.

    """
    executor.check_place(on)
    files = stored_files(path)
    wanted = None if ranks is None else frozenset(ranks)
    read_one = partial(_read_one, ranks=wanted, steps=steps, salvage=salvage)
    size = sum(file.stat().st_size for file, _ in files)
    read = executor.map(read_one, files, on=on, pool=size > POOL_PAYS_BYTES, progress=progress)
    parts = [part for found, _ in read for part in found]
    refused = [error for _, errors in read for error in errors]
    if not parts:
        raise refused[0]
    numbers = rank_numbers([(part.name, part.told) for part in parts])
    if wanted is not None and (missing := sorted(wanted - set(numbers))):
        raise TraceError(f"{shown(path)} has no rank {listed(missing)}: choose from {listed(sorted(numbers))}.")
    kept = [
        (rank, part, part.graph)
        for rank, part in sorted(zip(numbers, parts, strict=True), key=lambda each: each[0])
        if part.graph is not None and (wanted is None or rank in wanted)
    ]
    if not kept:
        raise TraceError(f"{shown(path)}: no rank was asked for: name at least one.")
    zero = min(part.base_ns for _, part, _ in kept)
    left_out = tuple(f"file left out: {error}" for error in refused)
    return tuple(
        _placed(graph, rank, part, zero, len(numbers), left_out if i == 0 else ())
        for i, (rank, part, graph) in enumerate(kept)
    )


def _read_one(
    file: tuple[Path, bool], *, ranks: frozenset[int] | None, steps: Steps | None, salvage: bool
) -> tuple[list[_Built], list[TraceError]]:
    """Read and build the recordings of one stored file."""
    path, alone = file
    parts, refused = read_apart(path, alone=alone, ranks=ranks, steps=steps, salvage=salvage)
    return [
        _Built(name=part.name, told=part.told)
        if part.trace is None
        else _Built(
            name=part.name,
            told=part.told,
            base_ns=part.trace.ranks[0].base_ns,
            graph=build(part.trace),
            notes=tuple(
                f"left out {each.count:,} events ({each.reason})." if each.count else f"{each.reason}."
                for each in part.trace.dropped
            ),
        )
        for part in parts
    ], refused


def _placed(graph: TaskGraph, rank: int, part: _Built, zero: int, files: int, left_out: tuple[str, ...]) -> TaskGraph:
    """Return the graph under its rank's number, on the clock that starts at `zero` (ns since the epoch)."""
    later = part.base_ns - zero
    first, last = graph.info.window_ns
    placed = () if part.told is not None or files == 1 else (f"file tells no rank: taken as rank {rank} by its place.",)
    info = replace(
        graph.info,
        window_ns=(first + later, last + later),
        world_size=max(graph.info.world_size, files),
        notes=(*left_out, *graph.info.notes, *part.notes, *placed),
    )
    return replace(
        graph,
        recorded=graph.recorded + later,
        release=np.where(graph.release == NO_RELEASE, graph.release, graph.release + later),
        lanes=tuple(replace(lane, rank=rank) for lane in graph.lanes),
        info=info,
    )
