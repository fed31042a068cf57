"""What a graph shows of its data loader, and the worker processes that a recording never shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.graph.insert import extend
from foretrace.graph.select import HOST, select
from foretrace.graph.taskgraph import NO_RELEASE, Change, EdgeKind, Lane, Phase, TaskGraph, TaskKind
from foretrace.trace.trace import LaneKind

Int64 = npt.NDArray[np.int64]

WORKER = "fetch batch (worker)"
MOST_WORKERS = 4  # where nobody says how many


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fetches:
    """Batches that one thread takes from a loader; arrays have one entry per batch."""

    lane: int
    first: Int64  # first DATA task of the batch
    rest: Int64  # every other DATA task of these batches
    ns: Int64  # time of all its DATA tasks
    before: Int64  # task before it on its thread, −1 if none
    processes: bool  # the loader already has worker processes


def find_fetches(graph: TaskGraph) -> tuple[Fetches, ...]:
    """One entry per thread that loads data. A batch is a run of DATA tasks, whatever step marks lie in it."""
    loading = (graph.kind == TaskKind.DATA) & ~graph.gone
    apart = np.isin(graph.kind, HOST) & ~np.isin(graph.kind, (TaskKind.MARK, TaskKind.JOIN)) & ~loading
    apart &= graph.phase != Phase.DATA  # calls that a fetch makes
    hosts = np.flatnonzero([lane.kind == LaneKind.CPU for lane in graph.lanes])
    many = select(graph, name="*_MultiProcessingDataLoaderIter*")
    found = []
    for lane in hosts[np.isin(hosts, graph.lane[loading])].tolist():
        rows = np.flatnonzero(graph.lane == lane)
        data = rows[loading[rows]]
        batch = np.cumsum(apart[rows])[loading[rows]]
        new = np.append(True, np.diff(batch) > 0)
        place = np.searchsorted(rows, data[new])
        found.append(
            Fetches(
                lane=lane,
                first=data[new],
                rest=data[~new],
                ns=np.bincount(np.cumsum(new) - 1, weights=graph.dur[data]).astype(np.int64),
                before=np.where(place > 0, rows[np.maximum(place - 1, 0)], -1),
                processes=bool(many[data].any()),
            )
        )
    return tuple(found)


def add_workers(
    graph: TaskGraph, fetches: Fetches, batch_ns: Int64, *, workers: int, ahead: int, change: Change
) -> TaskGraph:
    """Let worker processes prepare the batches; each batch's first DATA task then waits for its worker.

    Batch i is prepared by worker i mod `workers`, not before batch i − `ahead` was taken over. What workers
    have done when the recording begins is unknown; they are taken to be evenly spread over their batches with
    nothing in store, which is the steady state both of a loader that keeps up and of one that does not.
    """
    count, n = len(fetches.first), len(graph)
    batch = np.arange(count)
    row = n + batch
    lane = graph.lanes[fetches.lane]
    opening = batch[: min(workers, count)]
    anchored = opening[fetches.before[:1].repeat(len(opening)) >= 0]
    start = (batch_ns.mean() * (opening / workers - 1)).astype(np.int64)
    release = np.full(count, NO_RELEASE, dtype=np.int64)
    if not len(anchored):
        release[opening] = graph.release[fetches.first[0]] + start
    following, ordered = batch[workers:], batch[ahead:]
    parts = [
        (row[following - workers], row[following], EdgeKind.PROGRAM, 0),
        (fetches.first[ordered - ahead], row[ordered], EdgeKind.DATA, 0),
        (fetches.before[:1].repeat(len(anchored)), row[anchored], EdgeKind.DATA, start[: len(anchored)]),
        (row, fetches.first, EdgeKind.DATA, 0),
    ]
    src, dst = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    sizes = [len(part[0]) for part in parts]
    result, _ = extend(
        graph,
        {
            "kind": np.full(count, TaskKind.DATA),
            "phase": np.full(count, Phase.DATA),
            "lane": len(graph.lanes) + batch % workers,
            "name": np.full(count, len(graph.names)),
            "step": graph.step[fetches.first],
            "dur": batch_ns,
            "recorded": graph.recorded[fetches.first],
            "release": release,
        },
        {
            "src": src,
            "dst": dst,
            "edge_kind": np.repeat([int(part[2]) for part in parts], sizes),
            "lag": np.concatenate([np.broadcast_to(part[3], size) for part, size in zip(parts, sizes, strict=True)]),
        },
        names=(WORKER,),
        lanes=[Lane(rank=lane.rank, kind=LaneKind.MODEL, stream=i, label=f"loader worker {i}") for i in range(workers)],
        change=change,
    )
    return result


def recorded_loader(graph: TaskGraph) -> dict[str, Any]:
    """What the recorder stored about the loader that the training thread reads; empty if nothing."""
    loaders = graph.info.recording.get("loaders", [])
    return next((each for each in loaders if each.get("read_by_step_thread")), {})


def cores(graph: TaskGraph) -> float | None:
    """Cores that the recorded process could use, None if the recording does not say."""
    machine = graph.info.recording.get("machine", {})
    counts = [len(machine["affinity"])] if machine.get("affinity") else []
    counts += [machine[key] for key in ("cores", "cpu_quota", "usable_cores") if machine.get(key)]
    return float(min(counts)) if counts else None


def free_workers(cores: float | None, threads: int) -> int:
    """Worker processes that have a core of their own beside so many threads of training: 1 to MOST_WORKERS.

    Where the recording does not say how many cores there are, MOST_WORKERS.
    """
    return MOST_WORKERS if cores is None else min(max(int(cores) - threads, 1), MOST_WORKERS)
