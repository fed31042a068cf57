"""What a plan makes of a step, exactly, by re-simulating the part that a plan changes: the queue of the link.

When compute makes a gradient ready does not depend on the exchange as long as the update waits for all of it, so only
the transfers are simulated again (dPRO, section 5.3, partial replay). Plans that let the next forward pass begin early
(`Plan.ahead`) are simulated over several steps, compute and link together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from foretrace.arrays import Int64
from foretrace.plan.problem import CoarseStep, Plan, TransferCosts, begins_of

WARM_UP, MEASURED = 2, 3  # steps simulated before a rhythm is taken for settled, and steps that are averaged


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluator:
    """Step times of plans for one problem."""

    problem: CoarseStep
    costs: TransferCosts
    _order: Int64 = field(init=False)  # tensors as the forward pass needs them

    def __post_init__(self) -> None:
        object.__setattr__(self, "_order", np.argsort(self.problem.forward_place, kind="stable").astype(np.int64))

    @classmethod
    def of(cls, problem: CoarseStep) -> Evaluator:
        """Make it with the costs of all its buckets."""
        return cls(problem=problem, costs=TransferCosts.of(problem))

    def step_ns(self, plan: Plan) -> float:
        """Return the length of a step in the long run (ns)."""
        return self.ahead(plan)[0] if plan.ahead else float(self.steps_ns([plan])[0])

    def steps_ns(self, plans: Sequence[Plan]) -> Int64:
        """Return lengths of a step (ns) with each of several plans that send in the order of readiness."""
        from foretrace.plan import engine

        problem = self.problem
        counts = np.array([len(plan.ends) for plan in plans], dtype=np.int64)
        out = np.empty(len(plans), dtype=np.int64)
        engine.all_finish(
            problem.ready_ns,
            problem.cut_ns,
            np.concatenate([np.array(plan.ends, dtype=np.int64) for plan in plans]),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            np.concatenate([np.array(plan.chunks, dtype=np.int64) for plan in plans]),
            np.concatenate([self.costs.of_plan(plan) for plan in plans]),
            self.costs.latency_ns,
            problem.slots,
            problem.last_ns,
            out,
        )
        return out + problem.after_ns

    def ahead(self, plan: Plan) -> tuple[float, Int64]:
        """Return ns of a step whose forward groups wait for their own weights; and how long, per bucket."""
        from foretrace.plan import engine

        problem, marks = self.problem, np.empty(WARM_UP + MEASURED + 1, dtype=np.int64)
        ends, chunks = np.array(plan.ends, dtype=np.int64), np.array(plan.chunks, dtype=np.int64)
        begins, waited = begins_of(ends), np.empty_like(ends)
        engine.across_steps(
            problem.first_ns,
            problem.forward_ns,
            self._order,
            problem.backward_ns,
            problem.last_ns,
            problem.update_ns,
            problem.rest_ns,
            problem.cut_ns,
            ends,
            chunks,
            self.costs.of_buckets(begins, ends, chunks),
            np.minimum.reduceat(problem.forward_place, begins),
            self.costs.latency_ns,
            problem.slots,
            WARM_UP + MEASURED,
            marks,
            waited,
        )
        return float(marks[-1] - marks[WARM_UP]) / MEASURED, waited
