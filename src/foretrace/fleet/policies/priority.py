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
    *, preempt: bool = False, consolidate: bool = True, slurm: str = "", switches: str = "", exclusive: bool = False,
    weights: str = "",
) -> Policy:  # fmt: skip
    """The largest priority first; with `preempt` a running job of a lower one makes room.

    slurm: as Slurm's sched/backfill decides, with these SchedulerParameters ("yes": its defaults), without preemption;
    switches, exclusive: what its jobs ask for, as sbatch has it. weights: priorities are not stated but made of age and
    size, as priority/multifactor does (`weights=age=1000,size=500,max-age=60`), once a minute.
    """
    if slurm and preempt:
        raise ForetraceError("`preempt` is not simulated as Slurm does it; leave out preempt= or slurm=.")
    if weights and not slurm:
        raise ForetraceError("`weights` are those of priority/multifactor; add slurm=yes.")
    if slurm:
        return slurm_policy(
            "priority", slurm, switches=switches, exclusive=exclusive, backfill=True, by_priority=not weights,
            weights=weights,
        )  # fmt: skip
    return PriorityPolicy(
        name="priority",
        place_rule="strict" if consolidate else "greedy",
        preempt_rule="always" if preempt else "keep",
    )
