"""What a re-created simulator returns: a `FleetResult` from starts and ends alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from foretrace.fleet.result import FleetResult
from foretrace.fleet.workload import Int64, Workload


def simple(
    workload: Workload, *, policy: str, cluster: str, gpus: int, start_ns: Int64, end_ns: Int64, **known: Any
) -> FleetResult:
    """Jobs held from start to end, nothing else known unless given."""
    n = len(workload)
    held = known.pop("held_ns", np.where(end_ns >= 0, end_ns - start_ns, 0))
    zero = np.zeros(n, np.int64)
    columns: dict[str, Any] = {
        "held_ns": held,
        "gpu_ns": held * workload.gpus * workload.share,
        "dead_ns": zero,
        "comm_ns": np.zeros(n),
        "starts": (start_ns >= 0).astype(np.int64),
        "preempted": zero,
        "failed": zero,
        "waited_ns": np.zeros((n, 0), np.int64),
        "never": np.zeros(n, bool),
    }
    return FleetResult(
        workload=workload, policy=policy, cluster=cluster, gpus=gpus, start_ns=start_ns, end_ns=end_ns,
        **(columns | known),
    )  # fmt: skip
