"""One job as any scheduler is asked for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ask:
    """One job as it is asked for, whatever the scheduler, and what only the cluster's users know.

    name: its name made safe for file and object names, no two alike. level: 0 one machine, 1 one unit of the level
    above machines, and so on; level_name: what it is called; anywhere: it is the whole cluster. nodes × per_node GPUs,
    per_node 0 where machines hold unequal numbers; largest: GPUs of the largest machine it may use; leaves: fewest
    units of the level above machines that can hold it. wait_s: seconds it insists on the level, inf forever. labels:
    node label by level; resource: what Kubernetes calls a GPU; image, command: what runs.
    """

    job: str
    name: str
    gpus: int
    level: int
    level_name: str
    anywhere: bool
    nodes: int
    per_node: int
    largest: int
    leaves: int
    wait_s: float
    gpu_type: str
    queue: str
    estimate_s: float
    share: float
    labels: Mapping[str, str]
    image: str
    command: tuple[str, ...]
    resource: str
    namespace: str | None

    @property
    def pods(self) -> tuple[int, int]:
        """(pods, GPUs of each) alike: as large as a machine allows."""
        if self.per_node:
            return self.nodes, self.per_node
        size = next(size for size in range(min(self.largest, self.gpus), 0, -1) if self.gpus % size == 0)
        return self.gpus // size, size

    @property
    def within(self) -> str:
        """In words, where its GPUs should lie."""
        if self.anywhere:
            return f"{self.gpus} GPUs anywhere"
        if self.wait_s == 0:
            return f"{self.gpus} GPUs, better in one {self.level_name}"
        held = "however long that takes" if math.isinf(self.wait_s) else f"waiting {self.wait_s:g} s for it"
        return f"{self.gpus} GPUs in one {self.level_name}, {held}"


def clock(seconds: float) -> str:
    """Return seconds as Slurm writes them, [days-]hours:minutes:seconds, rounded up."""
    whole = min(math.ceil(seconds), 10**8)
    days, rest = divmod(whole, 86400)
    text = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text
