"""Shortest job first, and shortest remaining time first. Both know run times, which no real scheduler does."""

from __future__ import annotations

from dataclasses import dataclass

from foretrace.fleet.policy import Policy, estimates
from foretrace.fleet.workload import Float64, Workload


@dataclass(frozen=True, kw_only=True)
class Shortest(Policy):
    """By run time: as it is, or as the user stated it."""

    stated: bool = False

    def key(self, workload: Workload) -> Float64:
        """Return (n,) seconds."""
        return estimates(workload) if self.stated else workload.work_s


def sjf(*, stated: bool = False, consolidate: bool = True) -> Policy:
    """The shortest waiting job first; running jobs are left alone. stated: by the run time that users gave."""
    return Shortest(name="sjf", stated=stated, place_rule="strict" if consolidate else "greedy")


def srtf(*, consolidate: bool = True) -> Policy:
    """The job with the least remaining work first; a running one with more makes room."""
    return Policy(
        name="srtf",
        order_rule="remaining",
        preempt_rule="always",
        place_rule="strict" if consolidate else "greedy",
    )
