"""`Snapshot`: jobs, nodes, partitions and switches of a Slurm cluster at one moment.

Times are seconds on the cluster's own clock (local times taken as if they were UTC; JSON counts real seconds).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from foretrace.errors import ForetraceError
from foretrace.fleet.formats.slurm import RUNNING, WAITING
from foretrace.fleet.policies.slurm_options import SchedulerParameters

# Flags of a node (scontrol(1)) with which it takes no job.
UNUSABLE = frozenset({
    "DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "ERROR", "INVAL", "INVALID_REG", "NOT_RESPONDING",
    "MAINT", "MAINTENANCE", "POWERED_DOWN", "POWERING_DOWN", "PERFCTRS", "REBOOT", "REBOOT_ISSUED", "UNKNOWN", "FUTURE",
    "RESERVED", "BLOCKED", "PLANNED_DOWN",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """A job of the queue, waiting or running, as Slurm knows it.

    nodes: how many it requests at least, or holds. per_node, gpus, cpus: GPUs on each node (0: not said), GPUs in all
    and cores in all. limit_s: its time limit, inf where there is none, nan where it is not said. eligible_s, start_s:
    nan where unknown; the start of a waiting job is what `squeue --start` says. held: node → GPUs, where it runs.
    switches, switch_wait_s: leaf switches it insists on and for how long. after: what it depends on, as written.
    tasks: how many it stands for (a waiting array is one record); throttle: how many of these may run at once.
    """

    job: str
    state: str
    reason: str = ""
    name: str = ""
    user: str = ""
    account: str = ""
    partition: str = ""
    priority: float = 0.0
    nodes: int = 1
    per_node: int = 0
    gpus: int = 0
    cpus: int = 1
    exclusive: bool = False
    limit_s: float = math.nan
    submit_s: float = math.nan
    eligible_s: float = math.nan
    start_s: float = math.nan
    ran_s: float = 0.0
    held: Mapping[str, int] = field(default_factory=dict)
    switches: int = 0
    switch_wait_s: float = math.inf
    after: str = ""
    features: str = ""
    only: tuple[str, ...] = ()  # nodes it insists on
    without: tuple[str, ...] = ()
    tasks: int = 1
    throttle: int = 0
    array: str = ""
    reservation: str = ""

    @property
    def running(self) -> bool:
        """Whether it holds nodes."""
        return self.state in RUNNING

    @property
    def waiting(self) -> bool:
        """Whether it is in line."""
        return self.state in WAITING


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode:
    """A node: `usable` where no flag of its state keeps jobs away."""

    name: str
    gpus: int
    cpus: int
    state: str
    partitions: tuple[str, ...] = ()
    features: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether it takes jobs."""
        flags = {each.rstrip("*~#!%$@^-") for each in self.state.upper().replace(" ", "+").split("+")}
        return "*" not in self.state and not flags & UNUSABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmPartition:
    """A partition: times in seconds (inf: no limit); `tier` as PriorityTier; whole: OverSubscribe=EXCLUSIVE."""

    nodes: frozenset[str]
    limit_s: float = math.inf
    default_s: float = math.nan
    tier: int = 1
    up: bool = True
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The cluster at `now_s`. leaves: leaf switch → its nodes; backfill: False with SchedulerType=sched/builtin.

    partitions: by name. notes: what was not read, one sentence each.
    """

    source: str
    now_s: float
    version: str
    jobs: tuple[QueuedJob, ...]
    nodes: tuple[SlurmNode, ...]
    partitions: Mapping[str, SlurmPartition]
    leaves: Mapping[str, tuple[str, ...]]
    parameters: SchedulerParameters = field(default_factory=SchedulerParameters)
    backfill: bool = True
    notes: tuple[str, ...] = ()

    def find(self, job: str) -> QueuedJob:
        """Return the job of this number; raises ForetraceError."""
        for each in self.jobs:
            if each.job == job or (each.array and each.array == job):
                return each
        some = ", ".join(each.job for each in self.jobs if each.waiting) or "none that waits"
        raise ForetraceError(f"{self.source} has no job {job!r}; it has {some[:120]}.")
