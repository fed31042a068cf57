"""How much communication slows kernels, measured: the same kernels beside collectives and without them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.simulate.flows.flows import Interference
from foretrace.simulate.overlap import covered

Int64 = npt.NDArray[np.int64]

BESIDE, ALONE = 0.9, 0.01  # shares of a kernel's time that a collective of its rank runs
FEWEST = 3  # kernels of each sort that a median needs


def measured_interference(graph: TaskGraph, start: Int64, end: Int64) -> Interference | None:
    """The slow-down that a run shows (`start`, `end`: n each, ns), None where it cannot be told.

    Kernels are compared with those of the same name, operator and input shapes: median beside collectives of the
    rank over median alone, averaged over the time beside. At least three kernels of each sort are needed. A factor
    below 1 is noise and counts as 1.
    """
    takes, rank = ~graph.gone & (end > start), graph.rank
    share = np.zeros(len(graph))
    for each in np.unique(rank):
        mine = np.flatnonzero(takes & (rank == each) & (graph.kind == TaskKind.KERNEL))
        others = np.flatnonzero(takes & (rank == each) & (graph.kind == TaskKind.COLLECTIVE))
        if len(mine) and len(others):
            share[mine] = covered(start[others], end[others], start[mine], end[mine]) / (end - start)[mine]
    kernels = np.flatnonzero(takes & (graph.kind == TaskKind.KERNEL))
    if not len(kernels):
        return None
    sort = np.unique(np.stack([graph.name, graph.op, graph.shape])[:, kernels], axis=1, return_inverse=True)[1].ravel()
    order = np.argsort(sort, kind="stable")
    alike = np.split(kernels[order], np.flatnonzero(np.diff(sort[order])) + 1)
    slowed_ns = alone_ns = 0.0
    compared = 0
    for rows in alike:
        beside, alone = rows[share[rows] >= BESIDE], rows[share[rows] <= ALONE]
        if min(len(beside), len(alone)) >= FEWEST:
            compared += len(beside)
            slowed_ns += len(beside) * float(np.median((end - start)[beside]))
            alone_ns += len(beside) * float(np.median((end - start)[alone]))
    if not compared:
        return None
    return Interference(
        factor=max(1.0, slowed_ns / alone_ns),
        why=f"{compared} kernels beside collectives against the same kernels alone, {slowed_ns / 1e6:.3g} ms against "
        f"{alone_ns / 1e6:.3g} ms",
    )
