"""The best buckets, with a proof: dynamic programming over the tensors sent; and the best that two numbers say.

dPRO's theorems (MLSys 2022, section 5.2) give the first plan and prune. Setting: transfers in the order of readiness,
one at a time, each not interrupted. Of two neighbours, p is when the compute of the second ends, q when the link has
sent the first or what lies before it, t(s) what a transfer takes. *Gain* is the compute that fusing both operators
saves; their gradients are then ready together. What we found to hold (tests/plan/test_buckets.py tries it on random
instances):

- Theorem 2 (tensor fusion), q_first > p + t(both) − t(second), is exact where the link has sent everything before the
  first tensor by p. Otherwise fusing pays whenever t(both) < t(first) + t(second). `walk` compares both ends, which is
  exact for both.
- Theorem 1 (operator fusion), t(first) ≤ gain, is sufficient where the link is idle at p: the second transfer then ends
  no later. It is not necessary: with the tensors fused as well (Theorem 3) the condition is t(both) − t(second) ≤ gain,
  which is what `operators_pay` asks, and which is exact there for the end of the second transfer. It says nothing about
  the end of the step where compute, and not the link, ends last: every gain pays then.
- k* = 1 (partition): parts of a message pay in this setting only where the network makes parts cheaper than the whole;
  `parts_pay` asks the costs. They do pay where a later message may overtake (`Plan.ahead`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Int64
from foretrace.plan.evaluate import Evaluator
from foretrace.plan.problem import CoarseStep, Plan, TransferCosts

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
    """Return what DistributedDataParallel does unless told otherwise."""
    return Plan.capped(problem.nbytes, DDP_CAP, DDP_FIRST)


def seeds(problem: CoarseStep, costs: TransferCosts) -> list[Plan]:
    """Return plans to begin with: what DDP does, caps of all sizes, dPRO's walk."""
    total = int(problem.nbytes.sum())
    caps = np.unique(np.geomspace(max(total / 256, 1), max(total, 2), 24).astype(np.int64)).tolist()
    found = [default(problem), Plan.whole(len(problem)), Plan.single(len(problem)), walk(problem, costs)]
    return list(dict.fromkeys([*found, *(Plan.capped(problem.nbytes, cap) for cap in caps)]))


def best_buckets(evaluator: Evaluator, *, most: int = MOST_STATES) -> BucketPlan:
    """Return the buckets with the shortest step among all that send neighbours in the order of readiness.

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
    """Return when an exchange ends at the earliest: compute, and the bytes of every tail of the backward pass."""
    from foretrace.plan import engine

    problem, costs = evaluator.problem, evaluator.costs
    left = engine.least_work(costs.table, costs.chunks, costs.latency_ns)
    tails = problem.ready_ns[0] + left[0]
    last = problem.ready_ns[-1] + int(costs.table[:, -1, -1].min())
    return int(max(problem.ready_ns[-1] + problem.last_ns, tails, last))


def least_step(evaluator: Evaluator) -> float:
    """Return a step (ns) than which no plan, those with `ahead` among them, has a shorter one in the long run.

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
    """Return per tensor the least time of any bucket that holds it."""
    n = table.shape[1]
    whole = table.min(axis=0)
    whole = np.where(np.triu(np.ones((n, n), dtype=np.bool_)), whole, np.iinfo(np.int64).max)
    over = np.minimum.accumulate(np.minimum.accumulate(whole, axis=0)[:, ::-1], axis=1)[:, ::-1]
    return np.asarray(np.diagonal(over))


def by_caps(evaluator: Evaluator, *, single: bool = False) -> tuple[Plan, int, int]:
    """Return the best plan that two numbers describe, or one: (plan, first cap, cap) in bytes."""
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


def operators_pay(*, both: float, second: float, gain: float) -> bool:
    """Return whether operators and tensors of two neighbours are to be fused if the link waits for the second."""
    return both - second <= gain


def parts_pay(costs: TransferCosts) -> bool:
    """Return whether any bucket is sent faster in parts, one after the other, than whole."""
    whole = costs.table[costs.chunks == 1]
    if not len(whole):
        return True
    parts = costs.table * costs.chunks[:, None, None]
    if costs.latency_ns:  # the next part leaves before the one before it has arrived
        parts = np.maximum(costs.table - costs.latency_ns, 0) * costs.chunks[:, None, None] + costs.latency_ns
    return bool((parts < whole[0]).any())


def walk(problem: CoarseStep, costs: TransferCosts) -> Plan:
    """Return buckets by one walk over neighbouring tensors: fuse where the theorems say so (dPRO, algorithm 1).

    A good plan in linear time, not the best one: fusing is decided with the transfers before it as they are.
    """
    table, ready = costs.table[int(np.argmin(costs.chunks))], problem.ready_ns
    begins, sent = [0], [0, int(ready[0] + table[0, 0])]  # sent[b]: when the first b buckets are
    extra = 0
    for i in range(1, len(problem)):
        begin = begins[-1]
        apart = extra + int(problem.cut_ns[i - 1])
        both, second = int(table[begin, i]), int(table[i, i])
        alone = max(sent[-1], int(ready[i]) + apart) + second
        together = max(sent[-2], int(ready[i]) + extra) + both
        if together < alone or (apart > extra and operators_pay(both=both, second=second, gain=apart - extra)):
            sent[-1] = together
        else:
            extra = apart
            begins.append(i)
            sent.append(alone)
    ends = (*(begin - 1 for begin in begins[1:]), len(problem) - 1)
    return Plan(ends=ends, chunks=(1,) * len(ends))
