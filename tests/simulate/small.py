"""Task graphs written by hand, for tests with known answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretrace.graph.assemble import assemble
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, GraphInfo, Lane, TaskGraph, TaskKind
from foretrace.trace.trace import LaneKind

NAMES = ("cudaLaunchKernel", "kernel", "cudaStreamSynchronize", "other")
_NAME_OF = {TaskKind.CALL: 0, TaskKind.KERNEL: 1, TaskKind.RETURN: 2}


def small_graph(
    tasks: Sequence[tuple[int, int, int]],
    edges: list[tuple[int, int, EdgeKind, int, bool]],
    *,
    ordered: bool = True,
) -> TaskGraph:
    """Rows (lane, kind, dur) and (src, dst, kind, lag, from_start); lane 0 is a thread, the others are streams.

    Tasks without predecessor are released at 0. The marks are the first and the last task.
    """
    n_lanes = max(lane for lane, _, _ in tasks) + 1
    targets = {dst for _, dst, _, _, _ in edges}
    columns = list(zip(*edges, strict=True)) or [()] * 5
    return assemble(
        {
            "lane": np.array([lane for lane, _, _ in tasks]),
            "kind": np.array([kind for _, kind, _ in tasks]),
            "dur": np.array([dur for _, _, dur in tasks]),
            "name": np.array([_NAME_OF.get(TaskKind(kind), 3) for _, kind, _ in tasks]),
            "release": np.array([NO_RELEASE if row in targets else 0 for row in range(len(tasks))]),
            "step": np.zeros(len(tasks)),
            "recorded": np.arange(len(tasks)),
        },
        {
            "src": np.array(columns[0], dtype=np.int64),
            "dst": np.array(columns[1], dtype=np.int64),
            "edge_kind": np.array(columns[2], dtype=np.int64),
            "lag": np.array(columns[3], dtype=np.int64),
            "from_start": np.array(columns[4], dtype=np.bool_),
        },
        marks=np.array([0, len(tasks) - 1]),
        names=NAMES,
        layers=(),
        lanes=tuple(Lane(rank=0, kind=LaneKind.GPU if i else LaneKind.CPU, ordered=ordered) for i in range(n_lanes)),
        info=GraphInfo(steps=(0,)),
    )
