"""Results of simulations made by hand, for what is said about them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.result import FleetResult, Segments
from foretrace.fleet.workload import SECOND, Workload
from reproductions.results import simple

S = SECOND


def segments(rows: list[tuple[int, int, int, list[int], int]], dead: int = 0) -> Segments:
    """From (job, start s, end s, devices, level)."""
    rows = sorted(rows, key=lambda row: row[1])

    def column(values: list[int]) -> npt.NDArray[np.int64]:
        return np.array(values, np.int64)

    return Segments(
        job=column([row[0] for row in rows]),
        start_ns=column([row[1] * S for row in rows]),
        end_ns=column([row[2] * S for row in rows]),
        gpus=column([len(row[3]) for row in rows]),
        level=column([row[4] for row in rows]),
        dead_ns=np.full(len(rows), dead * S, np.int64),
        offset=column(np.cumsum([0, *[len(row[3]) for row in rows]]).tolist()),
        devices=column([gpu for row in rows for gpu in row[3]]),
    )


def packed(seed: int, jobs: int, cluster: ClusterTree) -> FleetResult:
    """A first-come-first-served run that takes the lowest free GPUs, or random ones."""
    rng = np.random.default_rng(seed)
    submit = np.sort(rng.integers(0, 400, jobs))
    gpus = rng.choice([1, 2, 4, 8], jobs)
    work = rng.integers(1, 120, jobs)
    free_at = np.zeros(cluster.gpus, np.int64)
    rows, begin, previous = [], np.zeros(jobs, np.int64), 0
    for job in range(jobs):
        previous = start = max(int(submit[job]), previous, int(np.sort(free_at)[gpus[job] - 1]))
        free = np.flatnonzero(free_at <= start)
        taken = np.sort(rng.permutation(free)[: gpus[job]] if job % 2 else free[: gpus[job]])
        free_at[taken] = start + work[job]
        begin[job] = start
        level = 0 if len(taken) == 1 else 1 if taken[0] // 8 == taken[-1] // 8 else 2
        rows.append((job, start, start + int(work[job]), taken.tolist(), level))
    load = Workload.of(submit_s=submit, gpus=gpus, work_s=work, tenant=[f"t{i % 3}" for i in range(jobs)])
    return simple(
        load, policy="fifo", cluster=cluster.name, gpus=cluster.gpus, start_ns=begin * S, end_ns=(begin + work) * S,
        segments=segments(rows), waited_ns=np.stack([begin * S - load.submit_ns, np.zeros(jobs, np.int64)], 1),
    )  # fmt: skip
