"""By stated priority."""

from __future__ import annotations

from dataclasses import dataclass

from foretrace.fleet.policy import Policy
from foretrace.fleet.workload import Float64, Workload


@dataclass(frozen=True, kw_only=True)
class PriorityPolicy(Policy):
    """The largest `priority` first, equal ones by submission."""

    def key(self, workload: Workload) -> Float64:
        """(n,) sorted ascending."""
        return -workload.priority


def priority(*, preempt: bool = False, consolidate: bool = True) -> Policy:
    """The largest priority first; with `preempt` a running job of a lower one makes room."""
    return PriorityPolicy(
        name="priority",
        place_rule="strict" if consolidate else "greedy",
        preempt_rule="always" if preempt else "keep",
    )
