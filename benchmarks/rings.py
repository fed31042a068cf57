"""Graphs of ring all-reduces, chunk by chunk, and a plain-Python replayer of the published kind to run beside ours."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from foretrace.graph.assemble import assemble
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, GraphInfo, Lane, TaskGraph, TaskKind
from foretrace.trace.trace import LaneKind

Int64 = npt.NDArray[np.int64]


def ring_graph(workers: int, tensors: int, per_worker: int, *, ordered: bool, seed: int = 0) -> TaskGraph:
    """One step of `workers` that compute, then average every tensor by a chunked ring: SEND and RECV of every chunk.

    `per_worker` is the number of computing tasks of a worker; after evenly spaced ones a tensor is ready. In each of
    the 2 (W − 1) rounds of a tensor every worker sends one chunk to its right neighbour: a SEND on its outgoing link,
    which waits for what the round before brought and for its buffer, and a RECV at the neighbour. `ordered` links run
    in the order in which tensors are ready; unordered ones decide as they run.
    """
    random = np.random.default_rng(seed)
    rounds = 2 * (workers - 1)
    compute = np.arange(workers * per_worker).reshape(workers, per_worker)
    send = compute.size + np.arange(workers * tensors * rounds).reshape(workers, tensors, rounds)
    recv = send + send.size
    n = compute.size + 2 * send.size
    lane, dur = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    worker = np.arange(workers)
    lane[compute], dur[compute] = worker[:, None], random.integers(50_000, 150_000, compute.shape)
    lane[send], dur[send] = workers + worker[:, None, None], random.integers(8_000, 12_000, send.shape)
    lane[recv], dur[recv] = 2 * workers + worker[:, None, None], random.integers(1_000, 2_000, recv.shape)
    left = np.roll(worker, 1)
    ready = compute[:, np.linspace(per_worker // tensors - 1, per_worker - 1, tensors).astype(int)]
    pairs = [
        (compute[:, :-1], compute[:, 1:], EdgeKind.STREAM),
        (ready, send[:, :, 0], EdgeKind.DATA),
        (recv[:, :, :-1], send[:, :, 1:], EdgeKind.DATA),
        (send[left], recv, EdgeKind.DATA),
        (send[:, :, :-1], send[:, :, 1:], EdgeKind.DATA),
    ]
    for lanes_of in (send, recv):
        flat = lanes_of.reshape(workers, -1)
        pairs.append((flat[:, :-1], flat[:, 1:], EdgeKind.STREAM))
    src = np.concatenate([a.ravel() for a, _, _ in pairs])
    dst = np.concatenate([b.ravel() for _, b, _ in pairs])
    kind = np.concatenate([np.full(a.size, k) for a, _, k in pairs])
    release = np.full(n, NO_RELEASE)
    release[compute[:, 0]] = 0
    labels = ("compute", "send", "recv")
    return assemble(
        {
            "kind": np.repeat([TaskKind.KERNEL, TaskKind.COPY], [compute.size, 2 * send.size]),
            "lane": lane,
            "name": np.repeat([0, 1, 2], [compute.size, send.size, send.size]),
            "dur": dur,
            "release": release,
            "recorded": np.zeros(n),
        },
        {"src": src, "dst": dst, "edge_kind": kind, "lag": np.zeros(len(src))},
        marks=np.array([compute[0, 0], recv[-1, -1, -1]]),
        names=labels,
        layers=(),
        lanes=tuple(
            Lane(
                rank=w, kind=LaneKind.LINK if label else LaneKind.GPU, label=labels[label], ordered=ordered or not label
            )
            for label in range(3)
            for w in range(workers)
        ),
        info=GraphInfo(platform="cuda", steps=(0,)),
    )


class Plain:
    """A graph as Python lists, for `kahn`: preparing it does not count as replaying it."""

    def __init__(self, graph: TaskGraph, *, decide: bool) -> None:
        """`decide` leaves the order on unordered lanes to the replay: edges that keep it are taken out."""
        dst = graph.dst
        kept = np.ones(graph.edges, dtype=np.bool_)
        if decide:
            order = np.isin(graph.edge_kind, (EdgeKind.STREAM, EdgeKind.PROGRAM))
            free = ~np.array([lane.ordered for lane in graph.lanes])[graph.lane[dst]]
            kept = ~(order & free & (graph.lane[graph.src] == graph.lane[dst]))
        self.successors: list[list[tuple[int, int, bool]]] = [[] for _ in range(len(graph))]
        columns = (graph.src[kept], dst[kept], graph.lag[kept], graph.from_start[kept])
        for u, v, lag, from_start in zip(*(c.tolist() for c in columns), strict=True):
            self.successors[u].append((v, lag, from_start))
        self.in_degree = np.bincount(dst[kept], minlength=len(graph)).tolist()
        self.lane, self.dur = graph.lane.tolist(), graph.dur.tolist()
        self.delay, self.release = graph.delay.tolist(), graph.release.tolist()
        self.lanes = len(graph.lanes)


def kahn(graph: Plain) -> list[int]:
    """Ends of all tasks by Kahn's algorithm with a clock and a sorted queue per device (dPRO, MLSys 2022).

    The device that is free first among those with work in their queue runs the head of its queue. Devices are kept in
    a heap here, which is faster than going through all of them.
    """
    in_degree, ready = list(graph.in_degree), list(graph.release)
    end = [0] * len(ready)
    queues: list[list[tuple[int, int]]] = [[] for _ in range(graph.lanes)]
    free = [NO_RELEASE] * graph.lanes
    devices: list[tuple[int, int]] = []

    def enqueue(v: int) -> None:
        lane = graph.lane[v]
        if not queues[lane]:
            heapq.heappush(devices, (free[lane], lane))
        heapq.heappush(queues[lane], (ready[v] + graph.delay[v], v))

    for v, degree in enumerate(in_degree):
        if degree == 0:
            enqueue(v)
    while devices:
        _, lane = heapq.heappop(devices)
        at, v = heapq.heappop(queues[lane])
        start = max(at, free[lane])
        end[v] = free[lane] = start + graph.dur[v]
        if queues[lane]:
            heapq.heappush(devices, (free[lane], lane))
        for w, lag, from_start in graph.successors[v]:
            ready[w] = max(ready[w], (start if from_start else end[v]) + lag)
            in_degree[w] -= 1
            if in_degree[w] == 0:
                enqueue(w)
    return end
