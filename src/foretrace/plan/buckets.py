"""The best buckets, with a proof: dynamic programming over the tensors sent; and the best that two numbers say."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrace.plan.evaluate import Evaluator
from foretrace.plan.problem import CoarseStep, Plan, TransferCosts
from foretrace.plan.theorems import parts_pay, walk

Int64 = npt.NDArray[np.int64]

MIB = 1024 * 1024
DDP_FIRST, DDP_CAP = 1 * MIB, 25 * MIB  # of DistributedDataParallel where the user sets nothing
MOST_STATES = 200  # kept per tensor; beyond, a plan is good but not proven best


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """A plan that sends in the order of readiness, and how near it is to the best one."""

    plan: Plan
    step_ns: float
    bound_ns: float  # no such plan has a shorter step
    states: int  # that were looked at

    @property
    def proven(self) -> bool:
        """Whether no other plan of this kind is better."""
        return self.step_ns <= self.bound_ns


def default(problem: CoarseStep) -> Plan:
    """What DistributedDataParallel does unless told otherwise."""
    return Plan.capped(problem.nbytes, DDP_CAP, DDP_FIRST)


def seeds(problem: CoarseStep, costs: TransferCosts) -> list[Plan]:
    """Plans to begin with: what DDP does, caps of all sizes, dPRO's walk."""
    total = int(problem.nbytes.sum())
    caps = np.unique(np.geomspace(max(total / 256, 1), max(total, 2), 24).astype(np.int64)).tolist()
    found = [default(problem), Plan.whole(len(problem)), Plan.single(len(problem)), walk(problem, costs)]
    return list(dict.fromkeys([*found, *(Plan.capped(problem.nbytes, cap) for cap in caps)]))


def best_buckets(evaluator: Evaluator, *, most: int = MOST_STATES) -> BucketPlan:
    """The buckets with the shortest step among all that send neighbours in the order of readiness.

    Exact by dynamic programming with dominance, see `engine.best_buckets`; the theorems give the first bound.
    """
    from foretrace.plan import engine

    problem, costs = evaluator.problem, evaluator.costs
    begin = seeds(problem, costs)
    times = evaluator.steps_ns(begin)
    first = begin[int(np.argmin(times))]
    bound = int(times.min()) - problem.after_ns
    kept = slice(None) if parts_pay(costs) else costs.chunks == 1
    end, ends, kinds, states, complete = engine.best_buckets(
        problem.ready_ns,
        problem.cut_ns,
        np.ascontiguousarray(costs.table[kept]),
        np.ascontiguousarray(costs.chunks[kept]),
        costs.latency_ns,
        problem.slots,
        problem.last_ns,
        bound,
        most,
    )
    states += len(begin)
    plan, reached = first, bound
    if end <= bound:
        chunks = costs.chunks[kept][kinds]
        plan, reached = Plan(ends=tuple(ends.tolist()), chunks=tuple(chunks.tolist())), end
    least = reached if complete else least_end(evaluator)
    return BucketPlan(
        plan=plan,
        step_ns=float(reached + problem.after_ns),
        bound_ns=float(min(least, reached) + problem.after_ns),
        states=states,
    )


def least_end(evaluator: Evaluator) -> int:
    """No exchange that the update waits for ends earlier: compute, and the bytes of every tail of the backward pass."""
    from foretrace.plan import engine

    problem, costs = evaluator.problem, evaluator.costs
    left = engine.least_work(costs.table, costs.chunks, costs.latency_ns)
    tails = problem.ready_ns[0] + left[0]
    last = problem.ready_ns[-1] + int(costs.table[:, -1, -1].min())
    return int(max(problem.ready_ns[-1] + problem.last_ns, tails, last))


def least_step(evaluator: Evaluator) -> float:
    """No plan at all, those with `ahead` among them, has a shorter step in the long run (ns).

    A step lasts as long as its compute, as its messages hold the wire, and as every loop through one weight: from its
    forward group to its gradient, through its message, to its update.
    """
    from foretrace.plan import engine

    problem, costs = evaluator.problem, evaluator.costs
    wire = int(engine.least_work(costs.table, costs.chunks, costs.latency_ns)[0])
    n = len(problem)
    order = np.argsort(problem.forward_place, kind="stable")
    later = np.empty(n, dtype=np.int64)  # forward compute from the group of a tensor on
    later[order] = np.cumsum((problem.forward_ns + problem.update_ns)[order][::-1])[::-1]
    rounds = -(-costs.chunks // problem.slots)
    within = _least_containing(costs.table * rounds[:, None, None])
    loops = later + np.cumsum(problem.backward_ns) + within
    return float(max(problem.compute_ns, wire, int(loops.max())))


def _least_containing(table: Int64) -> Int64:
    """Per tensor the least time of any bucket that holds it."""
    n = table.shape[1]
    whole = table.min(axis=0)
    whole = np.where(np.triu(np.ones((n, n), dtype=np.bool_)), whole, np.iinfo(np.int64).max)
    over = np.minimum.accumulate(np.minimum.accumulate(whole, axis=0)[:, ::-1], axis=1)[:, ::-1]
    return np.asarray(np.diagonal(over))


def by_caps(evaluator: Evaluator, *, single: bool = False) -> tuple[Plan, int, int]:
    """The best plan that two numbers describe, or one: (plan, first cap, cap) in bytes."""
    problem = evaluator.problem
    prefix = np.concatenate([[0], np.cumsum(problem.nbytes)])
    firsts = sorted({int(each) for each in prefix[1:]})[:: max(len(problem) // 48, 1)]
    total = int(prefix[-1])
    caps = np.unique(np.geomspace(max(total / 512, 1), total, 96).astype(np.int64)).tolist()
    pairs = [(cap, cap) for cap in caps]
    if not single:
        pairs += [(first, cap) for first in firsts for cap in caps[::2] if first < cap]
    plans = [Plan.capped(problem.nbytes, cap, first) for first, cap in pairs]
    times = evaluator.steps_ns(plans)
    best = int(np.argmin(times))
    return plans[best], *pairs[best]
