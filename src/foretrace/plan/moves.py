"""Small changes of a plan, for every search of this room; and which tensors play the same part in repeated blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from random import Random

from foretrace.plan.problem import CHUNKS, CoarseStep, Plan

_NUMBER = re.compile(r"\d+")


def toggled(plan: Plan, boundary: int) -> Plan:
    """The plan with the bucket boundary after a tensor where there was none, or the reverse; parts as in its left."""
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
    """The plan with another number of parts of one bucket."""
    return Plan(ends=plan.ends, chunks=(*plan.chunks[:bucket], chunks, *plan.chunks[bucket + 1 :]), ahead=plan.ahead)


def random_move(plan: Plan, random: Random) -> Plan:
    """A boundary set or taken away, or other parts of a bucket."""
    n = plan.ends[-1] + 1
    if n > 1 and random.random() < 0.75:
        return toggled(plan, random.randrange(n - 1))
    return parted(plan, random.randrange(len(plan.ends)), random.choice(CHUNKS))


def all_moves(plan: Plan) -> Iterator[Plan]:
    """Every plan that one move makes."""
    for boundary in range(plan.ends[-1]):
        yield toggled(plan, boundary)
    for bucket, now in enumerate(plan.chunks):
        for chunks in CHUNKS:
            if chunks != now:
                yield parted(plan, bucket, chunks)


def around(plan: Plan, buckets: Sequence[int]) -> Iterator[Plan]:
    """Moves that change these buckets: other parts, halves, one tensor given to a neighbour, fused with a neighbour."""
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
    """Boundaries that play the same part in repeated blocks, several each (dPRO, section 5.3, symmetry).

    Alike are boundaries between tensors of the same sizes and, where names are known, of the same names up to numbers.
    """
    label = [_NUMBER.sub("#", name) for name in problem.tensors]
    groups: dict[tuple[str, int, str, int], list[int]] = {}
    for i in range(len(problem) - 1):
        key = (label[i], int(problem.nbytes[i]), label[i + 1], int(problem.nbytes[i + 1]))
        groups.setdefault(key, []).append(i)
    return [group for group in groups.values() if len(group) > 1]


def together(plan: Plan, boundaries: Sequence[int], *, apart: bool) -> Plan:
    """The plan with a boundary at all of these places, or at none of them."""
    for boundary in boundaries:
        if (boundary in plan.ends) != apart:
            plan = toggled(plan, boundary)
    return plan
