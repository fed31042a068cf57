"""What a change does to the run around it: streams that no longer compete, a host that runs ahead."""

from __future__ import annotations

import numpy as np

from foretrace.arrays import Int64, Mask
from foretrace.errors import NotApplicableError
from foretrace.graph.clock import host_runs_ahead, measure_on_device
from foretrace.graph.edit import cut
from foretrace.graph.taskgraph import Assumption, EdgeKind, TaskGraph
from foretrace.simulate.replay import replay


def settle(before: TaskGraph, after: TaskGraph, technique: str) -> TaskGraph:
    """Return `after`, a changed `before`, with contention ended where streams no longer meet, and steps measured
    rightly.

    Raises NotApplicableError where device work changed in a recording whose device delays are not understood.
    """
    from foretrace.simulate.check import UNEXPLAINED_REFUSE  # loads the compiler

    share = before.info.unexplained_share
    if share > UNEXPLAINED_REFUSE and _device_work(before) != _device_work(after):
        raise NotApplicableError(
            f"{technique}: device tasks of this recording started {100 * share:.0f} % of the device's span later than "
            "any known reason allows, so dependencies are missing and what-ifs on the device would be wrong; "
            "record with sync_events or ask about the host."
        )
    after = _end_contention(before, after, technique)
    _, end = replay(after)
    return measure_on_device(after) if host_runs_ahead(after, end) else after


def _end_contention(before: TaskGraph, after: TaskGraph, technique: str) -> TaskGraph:
    """Cut the contention of kernels that ran beside each other and would now run the other way round.

    Contention holds a kernel back until another stream's kernel ends. Left in place where the change lets the kernel
    run first, it would make it wait for work that does not disturb it any more.
    """
    edges = np.flatnonzero(after.edge_kind == EdgeKind.CONTENTION)
    if not len(edges):
        return after
    first = _free_starts(before)
    held = (before.edge_kind == EdgeKind.CONTENTION) & (first[before.src] <= first[before.dst])
    met = set(_pairs(before, held))
    start = _free_starts(after)
    pairs = _pairs(after, after.edge_kind == EdgeKind.CONTENTION)
    over = np.zeros(after.edges, dtype=np.bool_)
    over[edges] = (start[after.dst[edges]] < start[after.src[edges]]) & [pair in met for pair in pairs]
    if not over.any():
        return after
    ended = Assumption(
        technique=technique,
        name="kernels that no longer compete with another stream",
        value=float(over.sum()),
        low=0.0,
        high=float(over.sum()),
        unit="kernels",
        why="they would run before the kernel that held them back; new competition is not predicted",
    )
    return cut(after, over, technique=technique).noted(assumptions=(ended,))


def _device_work(graph: TaskGraph) -> tuple[int, int, int]:
    """Return what changes if device work does: number and time of its tasks, and the gaps between them."""
    live = graph.on_device & ~graph.gone
    return int(live.sum()), int(graph.dur[live].sum()), int(graph.lag[graph.edge_kind == EdgeKind.STREAM].sum())


def _free_starts(graph: TaskGraph) -> Int64:
    """Return when every task (n rows, ns) would start if streams never held each other up."""
    start, _ = replay(cut(graph, graph.edge_kind == EdgeKind.CONTENTION))
    return start


def _pairs(graph: TaskGraph, edges: Mask) -> list[tuple[int, int]]:
    """Return recorded starts of the two ends of edges: the same before and after rows were renumbered."""
    src, dst = graph.recorded[graph.src[edges]], graph.recorded[graph.dst[edges]]
    return list(zip(src.tolist(), dst.tolist(), strict=True))
