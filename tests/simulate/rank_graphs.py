"""Recorded ranks that meet in collectives, with times that fit together, for tests with known answers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foretrace.graph.assemble import assemble
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, GraphInfo, Lane, TaskGraph, TaskKind
from foretrace.trace.trace import LaneKind

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def rank_set(work: npt.NDArray[np.int64], transfer: int, *, first: int = 0, world: int = 0) -> list[TaskGraph]:
    """Ranks that compute and then all-reduce, per step: `work` (ranks, steps, collectives of a step), ns.

    All enter at 0; the host waits for the last collective of a step, which is where the next one begins. The first
    rank is number `first`.
    """
    ranks, steps, each = work.shape
    now = np.zeros(ranks, dtype=np.int64)
    begin, arrive, end = (np.zeros((ranks, steps, each), dtype=np.int64) for _ in range(3))
    for s in range(steps):
        for c in range(each):
            begin[:, s, c] = now
            arrive[:, s, c] = now + work[:, s, c]
            now = np.full(ranks, arrive[:, s, c].max() + transfer)
            end[:, s, c] = now
    return [_rank(first + r, world or ranks, begin[r], arrive[r], end[r]) for r in range(ranks)]


def _rank(
    rank: int, world: int, begin: npt.NDArray[np.int64], arrive: npt.NDArray[np.int64], end: npt.NDArray[np.int64]
) -> TaskGraph:
    steps, each = begin.shape
    n = 2 * steps * each
    kernel = np.arange(0, n, 2)
    collective = kernel + 1
    mark = n + np.arange(steps + 1)
    step = np.repeat(np.arange(steps), each)
    recorded = np.concatenate([np.stack([begin.ravel(), arrive.ravel()], axis=1).ravel(), [0, *end[:, -1]]])
    dur = np.stack([(arrive - begin).ravel(), (end - arrive).ravel()], axis=1).ravel()
    release = np.full(n + steps + 1, NO_RELEASE)
    release[[0, n]] = 0
    pairs = [
        (np.arange(n - 1), np.arange(1, n), EdgeKind.STREAM),
        (mark[:-1], mark[1:], EdgeKind.PROGRAM),
        (collective[each - 1 :: each], mark[1:], EdgeKind.SYNC),
    ]
    return assemble(
        {
            "kind": np.append(np.tile([TaskKind.KERNEL, TaskKind.COLLECTIVE], n // 2), [TaskKind.MARK] * (steps + 1)),
            "lane": np.repeat([1, 0], [n, steps + 1]),
            "name": np.concatenate([np.tile([0, 1], n // 2), np.full(steps + 1, 2)]),
            "dur": np.concatenate([dur, np.zeros(steps + 1)]),
            "step": np.concatenate([np.repeat(step, 2), np.arange(steps), [-1]]),
            "release": release,
            "recorded": recorded,
        },
        {
            "src": np.concatenate([a for a, _, _ in pairs]),
            "dst": np.concatenate([b for _, b, _ in pairs]),
            "edge_kind": np.concatenate([np.full(len(a), kind) for a, _, kind in pairs]),
            "lag": np.zeros(sum(len(a) for a, _, _ in pairs)),
        },
        marks=mark,
        names=("gemm", ALL_REDUCE, "step"),
        layers=(),
        lanes=(
            Lane(rank=rank, kind=LaneKind.CPU, stream=1, label="main"),
            Lane(rank=rank, kind=LaneKind.GPU, device=0, stream=7, label="stream 7"),
        ),
        info=GraphInfo(
            source=f"rank{rank}.json", platform="cuda", steps=tuple(range(steps)), step_source="ProfilerStep",
            world_size=world, window_ns=(0, int(end[-1, -1])),
        ),
    )  # fmt: skip
