"""What Tiresias' simulator knows of a job and of a cluster, and where it puts a job.

Source of the mechanism: SymbioticLab/Tiresias, simulator, revision 959f9b0 (cluster.py, switch.py, node.py, jobs.py).
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from foretrace import reading
from foretrace.errors import ForetraceError

NEVER = 2**63 - 1
PENDING, RUNNING, ENDED = 0, 1, 2


@dataclass(slots=True, eq=False)
class Job:
    at: int
    gpus: int
    submit: int
    duration: int
    state: int = PENDING
    start: int = NEVER
    end: int = -1
    checked: int = 0  # when executed or waited seconds were last brought up to date
    total: int = 0  # executed seconds
    executed: int = 0  # the same since the last promotion: what queues go by
    pending: int = 0
    waited: int = 0  # pending since the last promotion, from the first start on
    queue: int = 0
    rank: float = float(NEVER)
    expected: float = 0.0
    preempted: int = 0
    resumed: int = 0
    promoted: int = 0
    place: list[tuple[int, int, int, float]] = field(default_factory=list)  # node, GPUs, CPUs, GB

    @property
    def remaining(self) -> int:
        return self.duration - self.total


@dataclass(frozen=True, slots=True)
class Cluster:
    switches: int
    nodes: int
    gpus: int
    cpus: int = 64
    memory: int = 256

    @classmethod
    def read(cls, text: str) -> Cluster:
        """`switches x nodes x GPUs`, or a csv file of the original."""
        parts = text.lower().split("x")
        if len(parts) == 3 and all(part.strip().isdigit() and int(part) > 0 for part in parts):
            return cls(*map(int, parts))
        path = Path(text)
        if not path.is_file():
            raise ForetraceError(
                f"cluster {text!r} is neither SWITCHESxNODESxGPUS (1x32x4) nor a cluster file; write one."
            )
        columns = ("num_switch", "num_node_p_switch", "num_gpu_p_node", "num_cpu_p_node", "mem_p_node")
        text = reading.read_text(path)
        try:
            rows = list(csv.DictReader(io.StringIO(text, newline="")))
            values = [int(rows[-1][column]) for column in columns]
        except (KeyError, IndexError, TypeError, ValueError, csv.Error):
            raise ForetraceError(
                f"{path}: a cluster file has one row of whole numbers under {', '.join(columns)}; mend it."
            ) from None
        if min(values) < 1 or max(values) > 1_000_000:
            raise ForetraceError(f"{path}: every count of a cluster must be from 1 to a million; mend that row.")
        return cls(*values)

    @property
    def total(self) -> int:
        return self.switches * self.nodes * self.gpus


class Scheme(Protocol):
    def free(self) -> int: ...
    def take(self, job: Job) -> bool: ...
    def release(self, job: Job) -> None: ...
    def empty(self) -> None: ...


class Count:
    """Only the number of free GPUs matters."""

    def __init__(self, gpus: int) -> None:
        self.gpus = self.left = gpus

    def free(self) -> int:
        return self.left

    def take(self, job: Job) -> bool:
        if self.left < job.gpus:
            return False
        self.left -= job.gpus
        return True

    def release(self, job: Job) -> None:
        self.left = min(self.gpus, self.left + job.gpus)

    def empty(self) -> None:
        self.left = self.gpus


class Yarn:
    """One node where the job fits into one, else whole nodes and a rest, all under one switch; first fit."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        nodes = cluster.switches * cluster.nodes
        self.gpus, self.cpus = [cluster.gpus] * nodes, [cluster.cpus] * nodes
        self.memory = [float(cluster.memory)] * nodes

    def free(self) -> int:
        return sum(self.gpus)

    def take(self, job: Job) -> bool:
        job.place.clear()
        per = self.cluster.nodes
        fit = self._spread if job.gpus > self.cluster.gpus else self._single
        return any(fit(job, range(s * per, s * per + per)) for s in range(self.cluster.switches))

    def _hold(self, job: Job, node: int, gpus: int, cpus: int, memory: float) -> None:
        self.gpus[node] -= gpus
        self.cpus[node] -= cpus
        self.memory[node] -= memory
        job.place.append((node, gpus, cpus, memory))

    def _single(self, job: Job, nodes: range) -> bool:
        cpus = 2 if job.gpus == 1 else 6 * job.gpus
        for node in nodes:
            if self.gpus[node] >= job.gpus and self.cpus[node] >= cpus and self.memory[node] >= 5:
                self._hold(job, node, job.gpus, cpus, 5)
                return True
        return False

    def _spread(self, job: Job, nodes: range) -> bool:
        whole, rest = divmod(job.gpus, self.cluster.gpus)
        each = 6 + job.gpus * 0.1 + 5  # GB per GPU: a parameter server and a worker
        size = self.cluster.gpus

        def fits(node: int, gpus: int) -> bool:
            return self.cpus[node] >= 6 * gpus and self.memory[node] >= each * gpus

        full = [n for n in nodes if self.gpus[n] == size and fits(n, size)][:whole]
        if len(full) < whole:
            return False
        last = next((n for n in nodes if n not in full and self.gpus[n] >= rest and fits(n, rest)), None)
        if rest and last is None:
            return False
        for node in full:
            self._hold(job, node, size, 6 * size, each * size)
        if rest and last is not None:
            self._hold(job, last, rest, 6 * rest, each * rest)
        return True

    def release(self, job: Job) -> None:
        for node, gpus, cpus, memory in job.place:
            self.gpus[node] = min(self.cluster.gpus, self.gpus[node] + gpus)
            self.cpus[node] = min(self.cluster.cpus, self.cpus[node] + cpus)
            self.memory[node] += memory

    def empty(self) -> None:
        # memory is not given back: see the head of this file
        self.gpus = [self.cluster.gpus] * len(self.gpus)
        self.cpus = [self.cluster.cpus] * len(self.cpus)
