"""dPRO's theorems (MLSys 2022, section 5.2) as rules for neighbours, and the walk that applies them.

Setting: transfers in the order of readiness, one at a time, each not interrupted. Of two neighbours, p is when the
compute of the second ends, q when the link has sent the first (`sent_first`) or what lies before it (`sent_before`),
t(s) what a transfer takes. *Gain* is the compute that fusing both operators saves; their gradients are then ready
together.

What we found to hold (tests/plan/test_theorems.py tries it on random instances):

- Theorem 2 (tensor fusion), q_first > p + t(both) − t(second), is exact where the link has sent everything before the
  first tensor by p. Otherwise fusing pays whenever t(both) < t(first) + t(second). `tensors_pay` is exact for both.
- Theorem 1 (operator fusion), t(first) ≤ gain, is sufficient where the link is idle at p: the second transfer then ends
  no later. It is not necessary: with the tensors fused as well (Theorem 3) the condition is t(both) − t(second) ≤ gain,
  which is what `operators_pay` asks, and which is exact there for the end of the second transfer. It says nothing about
  the end of the step where compute, and not the link, ends last: every gain pays then.
- k* = 1 (partition): parts of a message pay in this setting only where the network makes parts cheaper than the whole;
  `parts_pay` asks the costs. They do pay where a later message may overtake (`Plan.ahead`).
"""

from __future__ import annotations

import numpy as np

from foretrace.plan.problem import CoarseStep, Plan, TransferCosts


def tensors_pay(*, sent_before: float, sent_first: float, ready_second: float, both: float, second: float) -> bool:
    """Whether one transfer of both tensors ends earlier than two; times of one unit, `both` and `second` are t(s)."""
    return max(sent_before, ready_second) + both < max(sent_first, ready_second) + second


def operators_pay(*, both: float, second: float, gain: float) -> bool:
    """Whether operators and tensors of two neighbours are to be fused where the link waits for the second operator."""
    return both - second <= gain


def parts_pay(costs: TransferCosts) -> bool:
    """Whether any bucket is sent faster in parts, one after the other, than whole."""
    whole = costs.table[costs.chunks == 1]
    if not len(whole):
        return True
    parts = costs.table * costs.chunks[:, None, None]
    if costs.latency_ns:  # the next part leaves before the one before it has arrived
        parts = np.maximum(costs.table - costs.latency_ns, 0) * costs.chunks[:, None, None] + costs.latency_ns
    return bool((parts < whole[0]).any())


def walk(problem: CoarseStep, costs: TransferCosts) -> Plan:
    """Buckets by one walk over neighbouring tensors: fuse where the theorems say so (dPRO, algorithm 1).

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
