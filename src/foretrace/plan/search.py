"""Search for plans that let the next forward pass begin early, driven by what compute waits for.

Where the update waits for all messages, `buckets.best_buckets` has the answer with its proof, and no search is needed.
Where messages may overtake each other across steps, plans are the points of a `Space` whose neighbours are, in this
order, moves of the buckets that compute waits for (the critical path leads through them alone), of their neighbours,
of all boundaries that are alike in repeated blocks (dPRO, MLSys 2022, section 5.3), at last any move; `Descent` goes
through them from the best simple plans, and from the best plan shaken or walked from. Of a few tensors, all plans are
tried instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import combinations, product
from math import prod
from random import Random
from typing import Any

import numpy as np

from foretrace.plan.buckets import best_buckets, default, least_step, seeds
from foretrace.plan.evaluate import Evaluator
from foretrace.plan.problem import CHUNKS, CoarseStep, Plan
from foretrace.search.minimise import Found, minimise
from foretrace.search.space import Problem, Space
from foretrace.search.strategies import Descent, Exhaustive

_NUMBER = re.compile(r"\d+")
_MET = 1e-4  # a step this near to its bound needs no better plan
_FEW = 2_500  # plans, of five tensors, that are all tried in less time than descents take


def overtaking(evaluator: Evaluator, **given: Any) -> Found[Plan]:
    """Return the best plan with `ahead` that is found, of few the best one; `given`: budgets, ... of `minimise`."""
    problem = Ahead(evaluator)
    strategy = Exhaustive() if problem.space.size <= _FEW else Descent()
    return minimise(problem, strategy=strategy, starts=simple(evaluator), gap=_MET, **given)


def simple(evaluator: Evaluator) -> list[Plan]:
    """Return plans to begin with: the best without `ahead`, simple ones in all numbers of parts, the default."""
    first = [best_buckets(evaluator).plan, *seeds(evaluator.problem, evaluator.costs)]
    usual = default(evaluator.problem).ends
    return [
        Plan(ends=ends, chunks=(count,) * len(ends), ahead=True)
        for ends, counts in [*dict.fromkeys((plan.ends, CHUNKS) for plan in first), (usual, CHUNKS[:1])]
        for count in counts
    ]


class Ahead(Problem[Plan]):
    """The step (ns) with plans whose messages overtake each other."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator, self.space, self.bound = evaluator, Plans(evaluator), least_step(evaluator)

    def costs(self, points: Sequence[Plan]) -> list[float]:
        return [self.evaluator.ahead(plan)[0] for plan in points]


class Plans(Space[Plan]):
    """All plans for one step; a move sets or takes away a boundary, or changes the parts of a bucket."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self.size = prod([len(CHUNKS) + 1.0] * (len(evaluator.problem) - 1), start=len(CHUNKS))  # of hundreds: inf

    def points(self) -> Iterator[Plan]:
        last = len(self.evaluator.problem) - 1
        for count in range(last + 1):
            for cuts in combinations(range(last), count):
                for chunks in product(CHUNKS, repeat=count + 1):
                    yield Plan(ends=(*cuts, last), chunks=chunks, ahead=True)

    @cached_property
    def _groups(self) -> list[list[int]]:
        return alike(self.evaluator.problem)

    def neighbour(self, plan: Plan, rng: Random) -> Plan:
        return random_move(plan, rng)

    def moves(self, plan: Plan) -> Iterator[Plan]:
        return all_moves(plan)

    def neighbours(self, plan: Plan, rng: Random) -> Iterator[Plan]:
        """Yield moves on what compute waits for, most first; then of all that is alike; then the others."""
        _, waited = self.evaluator.ahead(plan)
        critical = [int(b) for b in np.argsort(-waited, kind="stable") if waited[b] > 0]
        if not critical:  # compute alone decides, and boundaries add to it
            yield from (toggled(plan, end) for end in plan.ends[:-1] if self.evaluator.problem.cut_ns[end])
            return
        yield from around(plan, critical[:8])
        # What is on the wire when a message that compute waits for becomes ready: those ready before it.
        blocking = sorted({b for c in critical[:4] for b in range(max(c - 3, 0), c)} - set(critical[:8]))
        yield from around(plan, blocking)
        for group in self._groups:
            yield together(plan, group, apart=True)
            yield together(plan, group, apart=False)
        others = list(all_moves(plan))
        rng.shuffle(others)
        yield from others


def toggled(plan: Plan, boundary: int) -> Plan:
    """Return the plan with a boundary after a tensor, or without the one there was; parts as in the left bucket."""
    if boundary in plan.ends:
        b = plan.ends.index(boundary)
        return Plan(
            ends=plan.ends[:b] + plan.ends[b + 1 :], chunks=plan.chunks[:b] + plan.chunks[b + 1 :], ahead=plan.ahead
        )
    b = next(i for i, end in enumerate(plan.ends) if end > boundary)
    return Plan(
        ends=(*plan.ends[:b], boundary, *plan.ends[b:]),
        chunks=(*plan.chunks[: b + 1], *plan.chunks[b:]),
        ahead=plan.ahead,
    )


def parted(plan: Plan, bucket: int, chunks: int) -> Plan:
    """Return the plan with another number of parts of one bucket."""
    return Plan(ends=plan.ends, chunks=(*plan.chunks[:bucket], chunks, *plan.chunks[bucket + 1 :]), ahead=plan.ahead)


def random_move(plan: Plan, random: Random) -> Plan:
    """Return a boundary set or taken away, or other parts of a bucket."""
    n = plan.ends[-1] + 1
    if n > 1 and random.random() < 0.75:
        return toggled(plan, random.randrange(n - 1))
    return parted(plan, random.randrange(len(plan.ends)), random.choice(CHUNKS))


def all_moves(plan: Plan) -> Iterator[Plan]:
    """Yield every plan that one move makes."""
    for boundary in range(plan.ends[-1]):
        yield toggled(plan, boundary)
    for bucket, now in enumerate(plan.chunks):
        for chunks in CHUNKS:
            if chunks != now:
                yield parted(plan, bucket, chunks)


def around(plan: Plan, buckets: Sequence[int]) -> Iterator[Plan]:
    """Yield changes of these buckets: other parts, halves, one tensor to a neighbour, fused with a neighbour."""
    for b in buckets:
        begin, end, now = plan.begins[b], plan.ends[b], plan.chunks[b]
        at = CHUNKS.index(now)
        for chunks in CHUNKS[max(at - 1, 0) : at + 2]:
            if chunks != now:
                yield parted(plan, b, chunks)
        inside = {begin, (begin + end) // 2, end - 1, begin + (end - begin) // 4, begin + 3 * (end - begin) // 4}
        for boundary in sorted(i for i in inside if begin <= i < end):
            yield toggled(plan, boundary)
        if b > 0:
            left = plan.ends[b - 1]
            yield toggled(plan, left)
            if end > begin:
                yield toggled(toggled(plan, begin), left)
        if end < plan.ends[-1]:
            yield toggled(plan, end)
            if end > begin:
                yield toggled(toggled(plan, end - 1), end)


def alike(problem: CoarseStep) -> list[list[int]]:
    """Return boundaries that play the same part in repeated blocks, several each (dPRO, section 5.3, symmetry).

    Alike are boundaries between tensors of the same sizes and, where names are known, of the same names up to numbers.
    """
    label = [_NUMBER.sub("#", name) for name in problem.tensors]
    groups: dict[tuple[str, int, str, int], list[int]] = {}
    for i in range(len(problem) - 1):
        key = (label[i], int(problem.nbytes[i]), label[i + 1], int(problem.nbytes[i + 1]))
        groups.setdefault(key, []).append(i)
    return [group for group in groups.values() if len(group) > 1]


def together(plan: Plan, boundaries: Sequence[int], *, apart: bool) -> Plan:
    """Return the plan with a boundary at all of these places, or at none of them."""
    for boundary in boundaries:
        if (boundary in plan.ends) != apart:
            plan = toggled(plan, boundary)
    return plan
