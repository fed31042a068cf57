"""Two runs side by side: which task of the one is which task of the other, and where the difference lies.

Works on recordings and on predictions alike, on the same machine or on two. Tasks are matched in order, lane by
lane, first by (phase, layer, operator, name) and then, for what is left, by (phase, layer, operator): a kernel that
another library or another device replaced still finds its counterpart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrace.graph.taskgraph import Phase, TaskGraph
#from foretrace.simulate.timeline import Timeline

Int64 = npt.NDArray[np.int64]
Pair = tuple[int, int]

ROUNDS = 12  # refinements of an alignment; what is not aligned by then has no order in common
SAME = 0.02  # tasks whose durations agree to this share count as unchanged


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDifference:
    """One layer of both runs, in a typical step; times in ns.

    `before_ns` and `after_ns` are busy times (work on any lane); `critical_*_ns` are what the layer contributes to
    the critical path, waits included, so that over all layers they sum to the step.
    """

    layer: str
    phase: str
    before_ns: int
    after_ns: int
    critical_before_ns: int
    critical_after_ns: int
    matched: int
    changed: int  # matched tasks whose duration differs by more than SAME
    replaced: int  # matched tasks that carry another name
    only_before: int
    only_after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What `compare` found, rows by the size of their part in the difference of the step."""

    before_ns: int  # the typical step that was compared
    after_ns: int
    rows: tuple[LayerDifference, ...]
    matched_share: float  # share of both sides' busy time in matched tasks


def align(before: Sequence[Hashable], after: Sequence[Hashable]) -> list[Pair]:
    """Positions of equal keys that appear in the same order in both sequences, ascending.

    The n-th occurrence of a key here is the candidate for its n-th occurrence there; the longest increasing run of
    candidates is kept and the gaps between its members are aligned again in the same way. O(n log n) per round.
    """
    pairs: list[Pair] = []
    gaps = [(0, len(before), 0, len(after))]
    for _ in range(ROUNDS):
        next_gaps = []
        for a0, a1, b0, b1 in gaps:
            found = _increasing(_candidates(before, after, a0, a1, b0, b1))
            pairs += found
            if found:
                edges = [(a0 - 1, b0 - 1), *found, (a1, b1)]
                for (a, b), (c, d) in zip(edges, edges[1:], strict=False):
                    if c - a > 1 and d - b > 1:
                        next_gaps.append((a + 1, c, b + 1, d))
        if not next_gaps:
            break
        gaps = next_gaps
    return sorted(pairs)


def _candidates(
    before: Sequence[Hashable], after: Sequence[Hashable], a0: int, a1: int, b0: int, b1: int
) -> list[Pair]:
    """The n-th occurrence of every key in both ranges, ascending by the first."""
    places: dict[Hashable, list[int]] = defaultdict(list)
    for b in range(b1 - 1, b0 - 1, -1):
        places[after[b]].append(b)  # reversed, so that pop() gives the first
    pairs = []
    for a in range(a0, a1):
        left = places.get(before[a])
        if left:
            pairs.append((a, left.pop()))
    return pairs


def _increasing(pairs: Sequence[Pair]) -> list[Pair]:
    """The longest subsequence whose second members increase (the first ones already do)."""
    ends: list[int] = []  # smallest last member of an increasing run of each length
    rows: list[int] = []  # the pair that ends it
    back = [-1] * len(pairs)
    for i, (_, b) in enumerate(pairs):
        length = bisect_left(ends, b)
        back[i] = rows[length - 1] if length else -1
        if length == len(ends):
            ends.append(b)
            rows.append(i)
        else:
            ends[length], rows[length] = b, i
    kept = []
    i = rows[-1] if rows else -1
    while i >= 0:
        kept.append(pairs[i])
        i = back[i]
    return kept[::-1]
