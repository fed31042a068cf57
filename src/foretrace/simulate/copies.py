"""Copies: one run of many copies of a graph that meet in some collectives, without a graph of them all.

The graph holds the ranks that were recorded. A run of N ranks is ceil(N / recorded ranks) copies of it: everything is
as recorded inside a copy, and through the edges of collectives that grow with the job (`meets`) a task waits for
its source in all copies. `replay_copies` keeps copies side by side, as `replay_variants` keeps variants, so the
memory it takes does not grow with the graph.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foretrace.graph.sound import fixed
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.replay import (
    LAG_CEILING_WHEN_GONE,
    LANES_OF_A_VECTOR,
    check_groups,
    edge_classes,
    effective,
    structure,
)
from foretrace.simulate.unwritten import unwritten, written

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def replay_copies(graph: TaskGraph, meets: Mask, group: Int32, scale: Float64, rows: Int32) -> Int64:
    """Ends (ns) of some tasks in one run of K copies of the graph (len(rows) x K).

    Args:
        graph: all lanes ordered.
        meets: edges (m) through which a task waits for its source in every copy. Nothing of a removed task meets.
        group: label below G of every task (n), −1 for none.
        scale: factor of the durations of a group in a copy (G x K), finite, 0 or more.
        rows: the tasks that are asked for.

    Equal to the replay of one graph with all copies in it, bit for bit.

    """
    from foretrace.simulate import engine

    n_groups, copies = check_groups(graph, group, scale)
    if meets.shape != (graph.edges,) or copies < 1:
        raise ValueError(f"meets: want {graph.edges} edges, and at least one copy")
    columns = effective(graph)
    width = -(-copies // LANES_OF_A_VECTOR) * LANES_OF_A_VECTOR
    factors = np.ones((n_groups + 1, width))
    factors[1:, :copies] = scale
    factors[1:, copies:] = scale[:, :1]  # what fills the last vector arrives with the first copy
    into_gone = np.repeat(graph.gone, np.diff(graph.in_ptr))
    in_ptr, src, from_start = structure(graph)
    read, slot, used = engine.value_slots(in_ptr, src, from_start)
    in_order = np.argsort(rows, kind="stable")
    out = unwritten((len(rows), width))
    engine.replay_variants(
        in_ptr, read, slot, unwritten((used, width)), fixed(edge_classes(graph)), fixed(columns.lag),
        fixed(columns.dur), fixed(columns.delay), fixed(graph.release), fixed(group), factors[None],
        np.full((1, 1, width), -1, dtype=np.int64), np.zeros((1, n_groups + 1), dtype=np.uint8), LAG_CEILING_WHEN_GONE,
        rows[in_order], out, fixed(meets & ~into_gone).view(np.uint8),
    )  # fmt: skip
    ends = unwritten((len(rows), copies))
    ends[in_order] = out[:, :copies]
    written(ends)
    return ends
