"""Graphs to train on: who is a neighbour of whom, what is known of every node, and which nodes train."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Float32, Int64
from foretrace.errors import ForetraceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjacency:
    """Neighbours of node i are `neighbours[starts[i] : starts[i + 1]]`; int64 (nodes + 1,) and (edges,)."""

    starts: Int64
    neighbours: Int64

    @property
    def nodes(self) -> int:
        """Number of nodes, those without a neighbour included."""
        return len(self.starts) - 1

    @property
    def degrees(self) -> Int64:
        """Neighbours of every node: (nodes,)."""
        return np.diff(self.starts)

    @staticmethod
    def of(edges: Int64, nodes: int, *, directed: bool = False) -> Adjacency:
        """Edges (n, 2) as neighbours; each edge counts both ways unless directed. Self loops and repeats stay."""
        if len(edges) and not 0 <= edges.min() <= edges.max() < nodes:
            wrong = int(edges.min() if edges.min() < 0 else edges.max())
            raise ForetraceError(f"Edges must join nodes from 0 to {nodes - 1}, got {wrong}.")
        both = edges if directed else np.concatenate([edges, edges[edges[:, 0] != edges[:, 1]][:, ::-1]])
        order = np.argsort(both[:, 0], kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(both[:, 0], minlength=nodes))])
        return Adjacency(starts=starts.astype(np.int64), neighbours=both[order, 1].astype(np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeData:
    """A graph, features (nodes, width) and labels (nodes,) of its nodes, -1 where unknown, and three sets of nodes."""

    adjacency: Adjacency
    features: Float32
    labels: Int64
    train: Int64
    validation: Int64
    test: Int64
