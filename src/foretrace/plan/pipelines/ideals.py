"""Ideals of a directed acyclic graph: sets of nodes closed under predecessors. A stage is the difference of two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter

import numpy as np
import numpy.typing as npt

from foretrace.errors import ForetraceError

MOST = 20_000


def ideals(nodes: int, edges: Iterable[tuple[int, int]], *, most: int = MOST) -> list[int]:
    """All ideals as bit masks, the empty one first, sorted by size.

    Raises ForetraceError where the graph has a cycle, or more ideals than `most`.
    """
    before: list[int] = [0] * nodes
    follow: list[list[int]] = [[] for _ in range(nodes)]
    sorter: TopologicalSorter[int] = TopologicalSorter(dict.fromkeys(range(nodes), ()))
    for u, v in edges:
        before[v] |= 1 << u
        follow[u].append(v)
        sorter.add(v, u)
    try:
        sorter.prepare()
    except CycleError as error:
        raise ForetraceError(f"the graph has a cycle through node {error.args[1][0]}; give one without.") from None
    layer = {0: sum(1 << v for v in range(nodes) if not before[v])}  # ideal -> nodes that can be added
    found: list[int] = []
    while layer:
        found += layer
        if len(found) > most:
            raise ForetraceError(
                f"the graph has more than {most:,} ways to be cut in two; merge nodes that belong together."
            )
        following: dict[int, int] = {}
        for ideal, ready in layer.items():
            for v in range(nodes):
                bit = 1 << v
                if ready & bit:
                    grown = ideal | bit
                    if grown not in following:
                        opened = sum(1 << w for w in set(follow[v]) if before[w] & ~grown == 0)
                        following[grown] = (ready & ~bit) | opened
        layer = following
    return found


def inside(found: Sequence[int], nodes: int) -> npt.NDArray[np.bool_]:
    """Whether ideal a (rows) is a proper subset of ideal b (columns)."""
    words = -(-max(nodes, 1) // 64)
    bits = np.array([[each >> 64 * w & (2**64 - 1) for w in range(words)] for each in found], dtype=np.uint64)
    subset = np.ones((len(found), len(found)), dtype=np.bool_)
    for w in range(words):
        subset &= (bits[:, None, w] & ~bits[None, :, w]) == 0
    np.fill_diagonal(subset, False)
    return subset


def totals(found: Sequence[int], values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The sum of a value per node over each ideal."""
    each = np.asarray(values, dtype=np.float64)
    member = np.array([[ideal >> v & 1 for v in range(len(each))] for ideal in found], dtype=np.float64)
    return member.reshape(len(found), len(each)) @ each
