"""`Policy`: who is served next, who may be tried, where a job may go, and who has to make room.

A policy says four things. Each is either a rule by name, which the compiled engine knows, or a method that a subclass
overrides, and then the same decisions are taken step by step in Python (`stepping`). `order`, `admit`, `place` and
`preempt` are separate so that effects can be seen apart: leases with one order, the same order with another placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretrace.fleet.policy_rules import MACHINE, OrderRule, PlaceRule, PolicyRules, PreemptRule, Wait, estimates
from foretrace.fleet.workload import Int64

if TYPE_CHECKING:
    from foretrace.fleet.moment.view import View

__all__ = ["MACHINE", "OrderRule", "PlaceRule", "Policy", "PreemptRule", "Wait", "estimates"]


@dataclass(frozen=True, kw_only=True)
class Policy(PolicyRules):
    """A scheduling policy: rules, and decisions that a subclass takes itself by overriding a method."""

    def order(self, view: View, waiting: Int64) -> Sequence[int] | Int64:
        """Return the waiting jobs (positions), first served first."""
        return view.ordered(waiting)

    def admit(self, view: View, job: int) -> Wait | None:
        """Return none if the job may be tried now, else why not. It is asked in order; blocking is `view.blocked`."""
        return view.admitted(job)

    def place(self, view: View, job: int) -> Sequence[int] | Int64 | Wait:
        """Return GPUs for the job, all at once, or why it has to wait."""
        return view.placed(job)

    def preempt(self, view: View) -> Sequence[int] | Int64:
        """Return running jobs that release their GPUs before this decision; they stand in line again."""
        return view.outranked()

    def end(self, view: View) -> Sequence[int]:
        """Return running jobs that end at this moment with their work undone, as where a time limit is enforced."""
        return ()

    def requeue(self, view: View) -> Sequence[int]:
        """Return running jobs that go back to the queue now and lose their work since the last checkpoint."""
        return ()

    @property
    def makes_room(self) -> bool:
        """Whether a decision continues where no GPU is free, since it may requeue running jobs."""
        return False

    def review(self, view: View) -> int | None:
        """Return when (ns) the policy wants to decide even if nothing happens; None: at events only."""
        return None

    def overrides(self, decision: str) -> bool:
        """Return whether a subclass takes this decision itself; `stepping` then asks it."""
        return getattr(type(self), decision) is not getattr(Policy, decision)
