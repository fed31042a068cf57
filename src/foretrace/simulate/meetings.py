"""The collectives of a joined graph: who meets, which task is whose arrival and transfer, and what is sent."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrace.graph.alignment import ClockOffsets
from foretrace.graph.matching import Matching
from foretrace.graph.taskgraph import EdgeKind, TaskGraph, TaskKind

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """One collective: its kind in PyTorch's words, bytes (−1 if unknown), ranks recorded and ranks of its group.

    `paired` marks a transfer from one rank to another.
    """

    kind: str
    nbytes: int
    recorded: int
    size: int
    paired: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Meetings:
    """Collectives of a graph of several ranks, and the parts that ranks have in them.

    `arrival`, `transfer` (rows of tasks) and `which` (index into `meetings`) have one entry per part; `edge` (m) is
    the index of the collective that an edge belongs to, −1 for all other edges.
    """

    meetings: tuple[Meeting, ...]
    arrival: Int64
    transfer: Int64
    which: Int64
    edge: Int64


def meetings_of(graph: TaskGraph, matching: Matching, clock: ClockOffsets) -> Meetings:
    """The collectives of a graph that `join(..., matching=matching, clock=clock)` made."""
    dst = graph.dst
    of_collective = graph.edge_kind == EdgeKind.COLLECTIVE
    arrives = of_collective & (graph.kind[graph.src] == TaskKind.ARRIVAL)
    own = np.flatnonzero(
        arrives & (graph.kind[dst] == TaskKind.COLLECTIVE) & (graph.lane[graph.src] == graph.lane[dst])
    )
    arrival, transfer = graph.src[own].astype(np.int64), dst[own].astype(np.int64)
    places = _places(matching, clock)
    rank = graph.rank
    which = np.array(
        [places[int(rank[row]), int(graph.recorded[row])].pop(0) for row in arrival.tolist()], dtype=np.int64
    )
    of_task = np.full(len(graph), -1, dtype=np.int64)
    of_task[arrival] = of_task[transfer] = which
    into_join = arrives & (graph.kind[dst] == TaskKind.JOIN)
    of_task[dst[into_join]] = of_task[graph.src[into_join]]
    meets = of_collective & (of_task[graph.src] >= 0) & (of_task[graph.src] == of_task[dst])
    return Meetings(
        meetings=tuple(
            Meeting(
                kind=each.what.kind,
                nbytes=each.what.nbytes,
                recorded=len(each.members),
                size=each.size,
                paired=bool(each.what.peers),
            )
            for each in matching.matches
        ),
        arrival=arrival,
        transfer=transfer,
        which=which,
        edge=np.where(meets, of_task[graph.src], -1),
    )


def _places(matching: Matching, clock: ClockOffsets) -> dict[tuple[int, int], list[int]]:
    """Indices of the matches in which a rank arrives at a time of the common clock."""
    places: dict[tuple[int, int], list[int]] = defaultdict(list)
    which, rank, _ = matching.flat
    starts = matching.starts.copy()
    for i in range(len(matching.ranks)):
        mine = rank == i
        starts[mine] = clock.aligned(i, starts[mine])
    for match, member, start in zip(which.tolist(), rank.tolist(), starts.tolist(), strict=True):
        places[matching.ranks[member], start].append(match)
    return places
