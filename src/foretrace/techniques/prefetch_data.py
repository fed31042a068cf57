"""`prefetch-data`: a data loader with worker processes, which prepare batches while the step computes.

The time that the training thread spends in `DataLoader.__next__` becomes the hand-over of a finished batch; the
preparation moves to workers, one lane each, with PyTorch's rules: batch i is prepared by worker i mod N, and a new
batch is ordered when one is handed over, `prefetch_factor` · N ahead. The workers run beside the recorded machine's
own work, which slows both: that part is assumed, with a range, because other processes are in no recording.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from foretrace.graph import edit
from foretrace.graph.insert import extend
from foretrace.graph.select import Mask, select
from foretrace.graph.taskgraph import (
    NO_RELEASE,
    Assumption,
    Change,
    EdgeKind,
    Lane,
    Phase,
    TaskGraph,
    TaskKind,
)
from foretrace.simulate.replay import replay
from foretrace.techniques.base import Prior, Technique, parameter, prior
from foretrace.trace.trace import LaneKind

Int64 = npt.NDArray[np.int64]

_STAGED_BYTES = 64 * 1024  # smaller pageable copies go through the driver's own buffer
_SINGLE, _MULTI = "*_SingleProcessDataLoaderIter*", "*_MultiProcessingDataLoaderIter*"


@dataclass(frozen=True, kw_only=True)
class PrefetchData(Technique):
    """Hide data loading behind computing by `workers` processes."""

    name: ClassVar[str] = "prefetch-data"
    summary: ClassVar[str] = "data loader with worker processes: batches are prepared while the step computes"
    source: ClassVar[str] = "torch.utils.data.DataLoader (num_workers, prefetch_factor); DS-Analyzer (VLDB 2021)"

    workers: int = parameter(4, doc="number of worker processes")
    prefetch_factor: int = parameter(2, doc="batches ordered ahead per worker")
    hand_over_ms: float | None = prior(
        1.0,
        0.2,
        2.0,
        unit="ms",
        doc="time to take over a finished batch from a worker",
        why="a queue, unpickling, and mapping a few shared-memory tensors: 0.1 to 1.5 ms in recordings of loaders",
    )
    fetch: float | None = prior(
        1.0,
        0.95,
        1.25,
        doc="time to prepare a batch in a worker, relative to the training process",
        why="a worker has no training loop beside it, but copies the batch to shared memory and shares caches",
    )
    host_contention: float | None = prior(
        1.1,
        1.0,
        1.3,
        doc="slow-down of the training process while a worker runs",
        why="shared caches, memory bandwidth and turbo clock (up to 1.2 between one and all cores busy)",
    )
    copy_contention: float | None = prior(
        1.5,
        1.0,
        2.0,
        doc="slow-down of copies from pageable memory",
        why="the processor stages them: it reads pages that another process wrote, out of a shared memory bandwidth",
    )

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        found = dict(super().priors(graph))
        if not _pageable_copies(graph).any():
            del found["copy_contention"]
        if graph.info.platform == "cpu" and _cores(graph) is not None:
            found["host_contention"] = Prior(
                value=1.02,
                low=0.97,
                high=1.15,
                unit="×",
                why="cores are shared by count (see the changes); beyond that caches and memory bandwidth, where "
                "vectorised operators were seen to slow by 0 to 10 %",
            )
        return found

    def change(self, graph: TaskGraph) -> TaskGraph:
        if self.workers < 1 or self.prefetch_factor < 1:
            raise self.refuse("workers and prefetch_factor must be 1 or more.")
        loaders = _loaders(graph)
        if not loaders:
            raise self.refuse("the recording shows no data loading (no enumerate(DataLoader) ranges).")
        hand_over = self.value("hand_over_ms", graph) * 1e6
        result = graph
        before = edit_time = np.zeros(0)
        for lane in sorted(loaders):
            fetches = _loaders(result)[lane]
            ready = self._batch_ns(result, fetches)
            result = self._hide(result, fetches, ready * self.value("fetch", graph), hand_over)
        del before, edit_time
        return result
