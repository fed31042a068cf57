"""`prefetch-data`: a data loader with worker processes, which prepare batches while the step computes.

The time that the training thread spends in `DataLoader.__next__` becomes the hand-over of a finished batch;
the preparation moves to workers, one lane each. They run beside the training process, which slows both: that
part is assumed, with a range, because other processes are in no recording.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foretrace.arrays import Float64, Int64, Mask
from foretrace.graph import edit
from foretrace.graph.insert import extend
from foretrace.graph.select import HOST, select
from foretrace.graph.taskgraph import NO_RELEASE, Change, EdgeKind, Lane, Phase, TaskGraph, TaskKind
from foretrace.hardware.processor import usable_cores
from foretrace.simulate.replay import replay
from foretrace.techniques.base import Prior, Technique, parameter, prior
from foretrace.trace.trace import LaneKind
from foretrace.training.batches import rebuilt
from foretrace.training.training import Training

WORKER = "fetch batch (worker)"
MOST_WORKERS = 4  # where nobody says how many

# Processes, and batches that each may have ready.
_FEW: dict[str, Any] = {"least": 1, "most": 10_000, "hint": "cores and memory allow few"}


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
    """Return one entry per thread that loads data. A batch is a run of DATA tasks, whatever step marks lie in it."""
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
                lane=lane, first=data[new], rest=data[~new], processes=bool(many[data].any()),
                ns=np.bincount(np.cumsum(new) - 1, weights=graph.dur[data]).astype(np.int64),
                before=np.where(place > 0, rows[np.maximum(place - 1, 0)], -1),
            )
        )  # fmt: skip
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
            "kind": np.full(count, TaskKind.DATA), "phase": np.full(count, Phase.DATA),
            "lane": len(graph.lanes) + batch % workers, "name": np.full(count, len(graph.names)), "dur": batch_ns,
            "step": graph.step[fetches.first], "recorded": graph.recorded[fetches.first], "release": release,
        },
        {
            "src": src, "dst": dst, "edge_kind": np.repeat([int(part[2]) for part in parts], sizes),
            "lag": np.concatenate([np.broadcast_to(part[3], size) for part, size in zip(parts, sizes, strict=True)]),
        },
        names=(WORKER,), change=change,
        lanes=[Lane(rank=lane.rank, kind=LaneKind.MODEL, stream=i, label=f"loader worker {i}") for i in range(workers)],
    )  # fmt: skip
    return result


def cores(graph: TaskGraph) -> float | None:
    """Return cores that the recorded process could use, None if the recording does not say."""
    machine = graph.info.recording.get("machine", {})
    counts = [len(machine["affinity"])] if machine.get("affinity") else []
    counts += [machine[key] for key in ("cores", "cpu_quota", "usable_cores") if machine.get(key)]
    return float(min(counts)) if counts else None


def free_workers(cores: float | None, threads: int) -> int:
    """Return worker processes that have a core of their own beside so many threads of training: 1 to MOST_WORKERS.

    Where the recording does not say how many cores there are, MOST_WORKERS.
    """
    return MOST_WORKERS if cores is None else min(max(int(cores) - threads, 1), MOST_WORKERS)


_STAGED_BYTES = 64 * 1024  # smaller pageable copies go through a buffer of the driver


@dataclass(frozen=True, kw_only=True)
class PrefetchData(Technique):
    """Hide data loading behind computing by `workers` processes."""

    across = "each"
    summary = "data loader with worker processes: batches are prepared while the step computes"
    source = "torch.utils.data.DataLoader (num_workers, prefetch_factor); DS-Analyzer (VLDB 2021)"
    effort = "one argument of the DataLoader; memory and cores for its workers"

    workers: int | None = parameter(
        None, doc=f"number of worker processes; by default one per core that is free, 1 to {MOST_WORKERS}", **_FEW
    )
    prefetch_factor: int = parameter(2, doc="batches ordered ahead per worker", **_FEW)
    pinned: bool = parameter(False, doc="batches in pinned memory, whose copies do not block the host")
    hand_over_ms: float | None = prior(
        1.0, 0.2, 2.0, unit="ms", doc="time to take over a finished batch from a worker",
        why="a queue, unpickling, and mapping a few tensors of shared memory: 0.1 to 1.5 ms where recorded",
    )  # fmt: skip
    fetch: float | None = prior(
        1.0, 0.95, 1.25, doc="time to prepare a batch in a worker, relative to the training process",
        why="a worker has no training loop in its caches, but copies each batch to shared memory",
    )  # fmt: skip
    host_contention: float | None = prior(
        1.1, 1.0, 1.4, doc="slow-down of the training process while a worker runs",
        why="one-core against all-core clock of server processors (up to 1.33), hardware threads, caches, bandwidth",
    )  # fmt: skip
    copy_contention: float | None = prior(
        1.5, 1.0, 2.0, doc="slow-down of copies from pageable memory",
        why="the processor stages them, from pages that another process wrote, over shared bandwidth",
    )  # fmt: skip

    pinned_copy: float | None = prior(
        0.8, 0.5, 1.0, doc="time of a copy from pinned memory relative to one from pageable memory",
        why="without the driver's staging buffer a copy runs at the rate of the bus; staging reached half to all of it",
    )  # fmt: skip

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        found = dict(super().priors(graph))
        pageable = bool(_pageable_copies(graph).any())
        if not pageable or self.pinned:
            del found["copy_contention"]
        if not pageable or not self.pinned:
            del found["pinned_copy"]
        if graph.info.platform == "cpu" and cores(graph) is not None:
            found["host_contention"] = Prior(
                1.02, 0.97, 1.15, why="shared caches and memory bandwidth; the sharing of cores is counted, not assumed"
            )
        return found

    def change(self, graph: TaskGraph) -> TaskGraph:
        if self.pinned and not graph.on_device.any():
            raise self.refuse("pinned memory matters for copies to a device, and the recording shows none.")
        lanes = find_fetches(graph)
        if not lanes:
            raise self.refuse("the recording shows no data loading (no enumerate(DataLoader) ranges).")
        for at in range(len(lanes)):
            graph = self._hide(graph, find_fetches(graph)[at])
        return self._pin(graph) if self.pinned else graph

    def _pin(self, graph: TaskGraph) -> TaskGraph:
        """Return copies from pinned memory: faster, and their calls return at once."""
        copies = _pageable_copies(graph)
        if not copies.any():
            raise self.refuse("the recording shows no copies from pageable memory that pinning could speed up.")
        faster = edit.scale(graph, copies, self.values(graph)["pinned_copy"])
        back = (faster.edge_kind == EdgeKind.SYNC) & (faster.kind[faster.dst] == TaskKind.RETURN) & copies[faster.src]
        return edit.cut(faster, back) if back.any() else faster

    def realise(self, training: Training) -> Training:
        pinning = {"pin_memory": True} if self.pinned else {}
        loader = rebuilt(
            training.loader, num_workers=self._workers_here(training), prefetch_factor=self.prefetch_factor, **pinning
        )
        return replace(training, loader=loader)

    def workers_for(self, graph: TaskGraph) -> int:
        """Return worker processes: as many as asked for, else those that the recorded process had cores for."""
        return free_workers(cores(graph), _threads(graph)) if self.workers is None else self.workers

    def _workers_here(self, training: Training) -> int:
        """Return the same, of this process."""
        import torch

        threads = torch.get_num_threads() if training.device == "cpu" else 1
        return free_workers(usable_cores(), threads) if self.workers is None else self.workers

    def _hide(self, graph: TaskGraph, fetches: Fetches) -> TaskGraph:
        """Move the preparation of one thread's batches to workers."""
        values, workers = self.values(graph), self.workers_for(graph)
        hand_over = 1e6 * values["hand_over_ms"]
        batch = (self._preparation(graph, fetches, hand_over) * values["fetch"]).astype(np.int64)
        loading = graph.mask(np.append(fetches.first, fetches.rest))
        left = np.zeros(len(graph))
        left[fetches.first] = hand_over
        alone = graph.with_columns(dur=np.where(loading, left, graph.dur).astype(np.int64))
        what = (
            f"moved {len(batch)} batches of {batch.mean() / 1e6:.3g} ms to {workers} "
            f"worker{'s' * (workers > 1)}; taking one over costs {hand_over / 1e6:.2g} ms"
        )
        result = add_workers(
            alone, fetches, batch, workers=workers, ahead=workers * self.prefetch_factor,
            change=Change(what=what, tasks=int(loading.sum()) + len(batch)),
        )  # fmt: skip
        batches = _inside(graph, fetches)
        return self._contend(result, _period(alone, batches), float(batch.mean()), batches)

    def _preparation(self, graph: TaskGraph, fetches: Fetches, hand_over: float) -> Float64:
        """Return the time to prepare each batch in the training process, ns."""
        if not fetches.processes:
            return fetches.ns.astype(np.float64)
        loaders = graph.info.recording.get("loaders", [])
        recorded: dict[str, Any] = next((each for each in loaders if each.get("read_by_step_thread")), {})
        has = int(recorded.get("num_workers") or 0)
        if not has:
            raise self.refuse("the loader already has worker processes, and the recording does not say how many.")
        if has >= self.workers_for(graph):
            raise self.refuse(f"the loader already has {has} workers; ask for more than that, e.g. workers={has + 1}.")
        used = recorded.get("workers") or {}
        busy = used["cpu_ns"] / used["batches"] if used.get("batches") else 0.0
        waited = float(np.maximum(fetches.ns - hand_over, 0).mean())
        if waited < 0.02 * _period(graph, len(fetches.first)):
            raise self.refuse(f"nothing to hide: a step waits {waited / 1e6:.2g} ms for the loader's {has} workers.")
        # The step waits for its workers, so these never rest: each takes `has` steps for a batch.
        return np.full(len(fetches.first), max(has * _period(graph, len(fetches.first)), busy))

    def _contend(self, graph: TaskGraph, alone_ns: float, batch_ns: float, batches: int) -> TaskGraph:
        """Return slow the training process, its copies and the workers by what they take from each other.

        `alone_ns` is the step without loading, `batch_ns` what a batch costs a worker. With too few cores the
        work of all processes cannot be done faster than (step · threads + batch) / cores.
        """
        period = _period(graph, batches)
        shared = cores(graph)
        crowd = 1.0
        host = select(graph, kind=("cpu", "operator", "python", "call")) & ~_staging(graph)
        workers = select(graph, name=WORKER)
        if shared is not None and period > 0:
            crowd = max((alone_ns * _threads(graph) + batch_ns) / shared / period, 1.0)
        busy = min(batch_ns / period, 1.0) if period > 0 else 0.0
        slower = 1 + (self.values(graph)["host_contention"] - 1) * busy
        result = edit.scale(graph, host, slower * crowd)
        if crowd > 1:
            result = edit.scale(result, workers, crowd)
        copies = _pageable_copies(graph)
        if copies.any() and not self.pinned:
            result = edit.scale(result, copies | _staging(graph), self.values(graph)["copy_contention"])
        return result


def _threads(graph: TaskGraph) -> int:
    """Return cores that the recorded process kept busy by itself."""
    return int(graph.info.recording.get("threads", {}).get("intra_op", 1)) if graph.info.platform == "cpu" else 1


def _inside(graph: TaskGraph, fetches: Fetches) -> int:
    """Return batches taken between the first and the last mark."""
    return int(((fetches.first > graph.marks[0]) & (fetches.first < graph.marks[-1])).sum())


def _period(graph: TaskGraph, batches: int) -> float:
    """Return the time per batch between the first and the last mark, ns."""
    _, end = replay(graph)
    return float(end[graph.marks[-1]] - end[graph.marks[0]]) / max(batches, 1)


def _pageable_copies(graph: TaskGraph) -> Mask:
    """Return copies to the device that the processor stages."""
    copies = select(graph, kind="copy", name=("*HtoD*", "*HostToDevice*")) & ~select(graph, name="*Pinned*")
    return np.asarray(copies & ((graph.nbytes < 0) | (graph.nbytes > _STAGED_BYTES)))


def _staging(graph: TaskGraph) -> Mask:
    """Return the calls of these copies."""
    calls = np.zeros(len(graph), dtype=np.bool_)
    edges = (graph.edge_kind == EdgeKind.LAUNCH) & _pageable_copies(graph)[graph.dst]
    calls[graph.src[edges]] = True
    return np.asarray(calls & (graph.kind == TaskKind.CALL))
