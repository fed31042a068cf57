"""Ideals of a directed acyclic graph: sets of nodes closed under predecessors. A stage is the difference of two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from foretrace.errors import ForetraceError
from foretrace.plan.placement.blocks import PlacementBlocks
from foretrace.plan.placement.ideals import lattice, words

MOST = 20_000


def ideals(nodes: int, edges: Iterable[tuple[int, int]], *, most: int = MOST) -> list[int]:
    """All ideals as bit masks, the empty one first, sorted by size.

    Raises ForetraceError where the graph has a cycle, or more ideals than `most`.
    """
    found = lattice(PlacementBlocks.of(((v,) for v in range(nodes)), set(edges)), most)
    if found is None:
        raise ForetraceError(
            f"the graph has more than {most:,} ways to be cut in two; merge nodes that belong together."
        )
    if found[-1] != 2**nodes - 1:
        raise ForetraceError("the edges of the graph form a cycle; give one without.")
    return found


def inside(found: Sequence[int], nodes: int) -> npt.NDArray[np.bool_]:
    """Whether ideal a (rows) is a proper subset of ideal b (columns)."""
    subset = np.ones((len(found), len(found)), dtype=np.bool_)
    for word in words(found, nodes).T:
        subset &= (word[:, None] & ~word[None, :]) == 0
    np.fill_diagonal(subset, False)
    return subset


def totals(found: Sequence[int], values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The sum of a value per node over each ideal."""
    each = np.asarray(values, dtype=np.float64)
    member = np.array([[ideal >> v & 1 for v in range(len(each))] for ideal in found], dtype=np.float64)
    return member.reshape(len(found), len(each)) @ each
