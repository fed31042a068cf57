"""A `ClusterTree` from nodes that each know the units above them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.cluster import ClusterTree

MOST_PER_NODE = 4096


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """One machine: its name, GPUs (0 leaves it out), their kind, and the units that hold it, outermost first."""

    name: str
    gpus: int
    gpu_type: str = ""
    above: tuple[str, ...] = ()


def tree(where: str, nodes: Sequence[ClusterNode], levels: Sequence[str], *, name: str) -> ClusterTree:
    """Nodes as innermost units, `levels` (outermost first) above them, the whole cluster last.

    Units keep the order in which they first appear, and nodes theirs within a unit. Raises ForetraceError where no
    node has a GPU, a node stands twice or has another depth than `levels`.
    """
    kept = [node for node in nodes if node.gpus]
    if not kept:
        raise ForetraceError(f"{where}: no node has a GPU; name a description of nodes with GPUs.")
    seen: set[str] = set()
    rank: dict[tuple[str, ...], int] = {}
    for node in kept:
        if node.name in seen:
            raise ForetraceError(f"{where}: node {node.name!r} stands twice; name every node once.")
        seen.add(node.name)
        if len(node.above) != len(levels):
            raise ForetraceError(f"{where}: node {node.name!r} lies at another depth than others; correct its units.")
        if node.gpus > MOST_PER_NODE:
            raise ForetraceError(f"{where}: node {node.name!r} cannot have {node.gpus:,} GPUs; correct their number.")
        for depth in range(1, len(levels) + 1):
            rank.setdefault(node.above[:depth], len(rank))

    def place(node: ClusterNode) -> tuple[int, ...]:
        return tuple(rank[node.above[:depth]] for depth in range(1, len(levels) + 1))

    kept.sort(key=place)  # stable
    counts = np.array([node.gpus for node in kept], np.int64)
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    starts, names = [ends], [tuple(node.name for node in kept)]
    for depth in range(len(levels), 0, -1):
        firsts = [at for at in range(len(kept)) if at == 0 or kept[at].above[:depth] != kept[at - 1].above[:depth]]
        starts.append(np.append(ends[firsts], ends[-1]).astype(np.int64))
        names.append(tuple(kept[at].above[depth - 1] for at in firsts))
    kinds = tuple(dict.fromkeys(node.gpu_type for node in kept))
    codes = np.array([kinds.index(node.gpu_type) for node in kept], np.int64)
    return ClusterTree(
        name=name,
        levels=("node", *reversed(levels), "cluster"),
        starts=(*starts, np.array([0, int(ends[-1])], np.int64)),
        gpu_type=np.repeat(codes, counts),
        types=kinds,
        names=(*names, ()),
    )
