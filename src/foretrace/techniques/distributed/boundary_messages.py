"""Messages of workers that share a model, as a recording shows them: collectives, or threads that wait for gloo.

gloo's calls return at once; what follows on the thread that made one waits for it, and the transfer itself, if it
shows, is on a lane of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import msgspec
import numpy as np

from foretrace.arrays import Int64
from foretrace.graph.taskgraph import TaskGraph, TaskKind

_FLOAT = 4  # bytes
_CALL = "c10d::"


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundaryMessages:
    """Messages in order; a column each."""

    rows: Int64  # what a step waits in
    nbytes: Int64
    links: Int64  # the transfer beside it, −1 where there is none

    def where(self, chosen: Int64) -> BoundaryMessages:
        """Return those of these rows."""
        mask = np.isin(self.rows, chosen)
        return BoundaryMessages(rows=self.rows[mask], nbytes=self.nbytes[mask], links=self.links[mask])


def boundary_messages(graph: TaskGraph, words: Sequence[str]) -> BoundaryMessages:
    """Return the messages whose names have one of these words."""
    named = np.array([any(word in name.lower() for word in words) for name in graph.names], dtype=np.bool_)[graph.name]
    named &= ~graph.gone & (graph.step >= 0)
    moving = named & (graph.kind == TaskKind.COLLECTIVE)
    rows = np.flatnonzero(moving & (graph.nbytes > 0))
    if len(rows):
        return BoundaryMessages(rows=rows, nbytes=graph.nbytes[rows], links=np.full(len(rows), -1, dtype=np.int64))
    issued = np.array([name.startswith(_CALL) for name in graph.names], dtype=np.bool_)[graph.name]
    links = np.flatnonzero(moving)
    links = links[np.argsort(graph.recorded[links], kind="stable")]
    found: list[tuple[int, int, int]] = []
    for call in np.flatnonzero(named & issued & (graph.kind == TaskKind.OPERATOR)).tolist():
        lane = np.flatnonzero((graph.lane == graph.lane[call]) & ~graph.gone)
        after = lane[np.searchsorted(lane, call, side="right") :][:1].tolist()
        nbytes, at = _nbytes(graph, call), int(np.searchsorted(graph.recorded[links], graph.recorded[call]))
        if after and nbytes:
            found.append((after[0], nbytes, int(links[at]) if at < len(links) else -1))
    table = np.array(found, dtype=np.int64).reshape(-1, 3)
    return BoundaryMessages(rows=table[:, 0], nbytes=table[:, 1], links=table[:, 2])


def _nbytes(graph: TaskGraph, call: int) -> int:
    """Return bytes of the float32 tensors that a call names first; 0 where they are not recorded."""
    if graph.shape[call] < 0:
        return 0
    dims: list[list[int]] = msgspec.json.decode(graph.shapes[graph.shape[call]])[0][0]
    return sum(_FLOAT * prod(each) for each in dims)
