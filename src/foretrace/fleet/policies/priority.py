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
        """Return (n,) sorted ascending."""
        return -workload.priority


def priority(
    *, preempt: bool = False, consolidate: bool = True, slurm: str = "", switches: str = "", exclusive: bool = False,
    weights: str = "", drain: str = "", reservation: str = "", preempt_mode: str = "", priority_tier: str = "",
    qos: str = "",
) -> Policy:  # fmt: skip
    """The largest priority first; with `preempt` a running job of a lower one makes room.

    slurm: as Slurm's sched/backfill decides, with these SchedulerParameters ("yes": its defaults); switches, exclusive:
    what its jobs ask for, as sbatch has it. weights: priorities are not stated but made of age, size, QOS and fair
    share of users, as priority/multifactor does (`weights=age=1000,size=500,max-age=60`), once a minute. drain,
    reservation: nodes that take no new jobs, or that are reserved for maintenance (`reservation=0-3@600-1200`).
    priority_tier: of partitions, which tenants are (`priority-tier=high=10,low=1`); qos: priorities of what a column
    `qos` of the jobs names (`qos=high=10,low=1`); preempt_mode: requeue or suspend those of lower partitions for one
    that waits; suspended jobs keep their GPUs, so that nobody starts in their place.
    """
    if slurm and preempt:
        raise ForetraceError("`preempt` is not as Slurm does it; write preempt-mode=requeue, or leave out slurm=.")
    made = slurm_policy(
        "priority", slurm, switches=switches, exclusive=exclusive, drain=drain, reservation=reservation, backfill=True,
        by_priority=True, weights=weights, preempt_mode=preempt_mode, priority_tier=priority_tier, qos=qos,
    )  # fmt: skip
    return made or PriorityPolicy(
        name="priority",
        place_rule="strict" if consolidate else "greedy",
        preempt_rule="always" if preempt else "keep",
    )
