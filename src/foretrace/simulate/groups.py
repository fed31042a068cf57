"""Groups: which COLLECTIVE an ARRIVAL holds its slot for, and who waits for whom when nothing can continue.

What a group is and does is part of the definition in `foretrace.simulate.schedule`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Int32, Mask, UInt8
from foretrace.graph.taskgraph import EdgeKind, TaskGraph, TaskKind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """`holds` (n, 0 or 1) marks ARRIVALs that keep their slot, `arrivals` (n) counts those that a COLLECTIVE frees.

    Both are None where a graph has no groups. `collectives` is the number of tasks with arrivals.
    """

    holds: UInt8 | None
    arrivals: Int32 | None
    collectives: int


def groups(graph: TaskGraph) -> Groups:
    """Return the groups of a graph, as the loops read them."""
    own = own_collective(graph)
    holds = own >= 0
    if not holds.any():
        return Groups(holds=None, arrivals=None, collectives=0)
    arrivals = np.bincount(own[holds], minlength=len(graph)).astype(np.int32)
    return Groups(holds=holds.astype(np.uint8), arrivals=arrivals, collectives=int(np.count_nonzero(arrivals)))


def own_collective(graph: TaskGraph) -> Int32:
    """Return the row of the COLLECTIVE up to whose end each ARRIVAL holds its slot (n), −1 for all other tasks."""
    n, n_lanes = len(graph), len(graph.lanes)
    own = np.full(n, n, dtype=np.int32)
    unordered = ~np.array([lane.ordered for lane in graph.lanes], dtype=np.bool_)
    arrival = (graph.kind == TaskKind.ARRIVAL) & ~graph.gone & unordered[graph.lane]
    if not arrival.any():
        return np.full(n, -1, dtype=np.int32)
    transfer, join = (graph.kind == TaskKind.COLLECTIVE) & ~graph.gone, graph.kind == TaskKind.JOIN
    edges = np.flatnonzero(graph.edge_kind == EdgeKind.COLLECTIVE)
    src = graph.src[edges]
    dst = (np.searchsorted(graph.in_ptr, edges, side="right") - 1).astype(np.int32)
    direct = arrival[src] & transfer[dst] & (graph.lane[src] == graph.lane[dst])
    np.minimum.at(own, src[direct], dst[direct])
    leave, enter = join[src] & transfer[dst], arrival[src] & join[dst]
    if leave.any() and enter.any():
        # The first transfer behind every (join, lane), then the one on its own lane for every arrival before a join.
        behind = src[leave].astype(np.int64) * n_lanes + graph.lane[dst[leave]]
        by_key = np.lexsort((dst[leave], behind))
        keys, first = np.unique(behind[by_key], return_index=True)
        wanted = dst[enter].astype(np.int64) * n_lanes + graph.lane[src[enter]]
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        found = keys[at] == wanted
        np.minimum.at(own, src[enter][found], dst[leave][by_key][first][at[found]])
    return np.where(own == n, np.int32(-1), own)


def deadlock(graph: TaskGraph, holds: Mask, decided: Int32) -> str | None:
    """Return who waits for whom in a run that got no further than the rows `decided`; None if no group is to blame.

    `holds` (m) marks the edges that the run respects.
    """
    done = graph.mask(decided)
    own = own_collective(graph)
    held = np.flatnonzero((own >= 0) & done & ~done[own])  # arrivals that hold a slot
    if not len(held):
        return None
    waits: list[tuple[int, int]] = []  # (transfer that cannot begin, task that it needs and that finds no slot)
    arrival = int(held[0])
    while True:
        blocked = _first_blocked(graph, holds, done, int(own[arrival]))
        here = held[graph.lane[held] == graph.lane[blocked]]
        if not len(here) or blocked == own[arrival]:
            return None  # it waits for something else: a flow
        waits.append((int(own[arrival]), blocked))
        arrival = int(here[0])
        known = [transfer for transfer, _ in waits]
        if own[arrival] in known:
            cycle = waits[known.index(int(own[arrival])) :]
            break
    parts = [
        f"{_task(graph, transfer)} holds {_lane(graph, transfer)} and waits for {_task(graph, blocked)}, which waits "
        f"for {_lane(graph, blocked)}"
        for transfer, blocked in cycle
    ]
    return (
        f"the collectives wait for each other forever: {'; '.join(parts)}: let every rank enter them in the same "
        "order, or give these lanes more slots."
    )


def _first_blocked(graph: TaskGraph, holds: Mask, done: Mask, row: int) -> int:
    """Return the undecided task that `row` waits for in the end: everything that it needs itself has been decided."""
    while True:
        edges = slice(int(graph.in_ptr[row]), int(graph.in_ptr[row + 1]))
        before = graph.src[edges]
        needed = before[~done[before] & holds[edges]]
        if not len(needed):
            return row
        row = int(needed.min())


def _task(graph: TaskGraph, row: int) -> str:
    return f"task {row} ({graph.names[graph.name[row]]})"


def _lane(graph: TaskGraph, row: int) -> str:
    lane = graph.lanes[graph.lane[row]]
    return f"lane {lane.label or lane.stream} of rank {lane.rank}"
