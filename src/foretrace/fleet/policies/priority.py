"""By stated priority."""

from __future__ import annotations

from dataclasses import dataclass

from foretrace.errors import ForetraceError
from foretrace.fleet.policies.slurm import slurm_policy
from foretrace.fleet.policy import Policy
from foretrace.fleet.workload import Float64, Workload


@dataclass(frozen=True, kw_only=True)
class PriorityPolicy(Policy):
    """The largest `priority` first, equal ones by submission."""

    def key(self, workload: Workload) -> Float64:
        """(n,) sorted ascending."""
        return -workload.priority


def priority(
    *, preempt: bool = False, consolidate: bool = True, slurm: str = "", switches: str = "", exclusive: bool = False
) -> Policy:
    """The largest priority first; with `preempt` a running job of a lower one makes room.

    slurm: as Slurm's sched/backfill decides, with these SchedulerParameters ("yes": its defaults), without preemption;
    switches, exclusive: what its jobs ask for, as sbatch has it.
    """
    if slurm and preempt:
        raise ForetraceError("`preempt` is not simulated as Slurm does it; leave out preempt= or slurm=.")
    if slurm:
        return slurm_policy("priority", slurm, switches=switches, exclusive=exclusive, backfill=True, by_priority=True)
    return PriorityPolicy(
        name="priority",
        place_rule="strict" if consolidate else "greedy",
        preempt_rule="always" if preempt else "keep",
    )
