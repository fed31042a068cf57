"""Graphs to train on: who is a neighbour of whom, what is known of every node, and which nodes train."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foretrace.arrays import Array, Float32, Int64
from foretrace.errors import ForetraceError
from foretrace.names import numbers
from foretrace.reading import DAMAGED, TooLargeError, parse_npz, read_bytes
from foretrace.training.rows.rows import within


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

    def edges(self) -> Int64:
        """Return every undirected edge once, u <= v: (edges, 2). Self loops and repeats stay."""
        source = np.repeat(np.arange(self.nodes), self.degrees)
        once = source <= self.neighbours
        return np.stack([source[once], self.neighbours[once]], axis=1)

    @staticmethod
    def of(edges: Int64, nodes: int, *, directed: bool = False) -> Adjacency:
        """Return edges (n, 2) as neighbours, both ways unless directed. Self loops and repeats stay."""
        within(edges, nodes, "Edges must join nodes")
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

    @property
    def classes(self) -> int:
        """Number of labels."""
        return int(self.labels.max(initial=-1)) + 1


_MOST_PLANTED = 1 << 28  # edges, and numbers that are known of all nodes
_MOST_NODES = 2**31 - 1  # files of partitions name nodes by 32 bits
_SETS = {"train_idx": "train", "val_idx": "validation", "test_idx": "test"}
_PLANTED = {"nodes": 10_000, "edges": 100_000, "communities": 10, "mixing": 0.2, "features": 0, "seed": 0}


def planted(
    *, nodes: int, edges: int, communities: int = 10, mixing: float = 0.2, features: int = 0, seed: int = 0
) -> NodeData:
    """Draw a graph whose nodes have most neighbours in their own community, which is their label.

    A share `mixing` of the edges joins any two nodes, the others two of one community; without self loops, repeats may
    be. Features are the community's centre (standard normal) with noise of three times its spread, so that a node alone
    says little and its neighbours much. A tenth of the nodes trains, a tenth validates, a tenth tests.
    """
    if not (nodes >= 2 * communities >= 2 and edges >= 1 and 0 <= mixing <= 1 and min(features, seed) >= 0):
        raise ForetraceError(
            "A planted graph needs two nodes of each community, an edge, mixing from 0 to 1 and a seed of at least 0, "
            f"got nodes={nodes} edges={edges} communities={communities} mixing={mixing} features={features} "
            f"seed={seed}."
        )
    if max(edges, nodes * max(features, 1)) > _MOST_PLANTED:
        raise ForetraceError(
            f"A planted graph may have {_MOST_PLANTED:,} edges and features of all nodes; give fewer, or a file."
        )
    random = np.random.default_rng(seed)
    members = random.permutation(nodes)  # those of one community lie together
    starts = np.linspace(0, nodes, communities + 1).astype(np.int64)
    labels = np.empty(nodes, np.int64)
    labels[members] = np.repeat(np.arange(communities), np.diff(starts))
    first = random.integers(0, nodes, edges)
    own = labels[first]
    within = members[starts[own] + (random.random(edges) * (starts[own + 1] - starts[own])).astype(np.int64)]
    second = np.where(random.random(edges) < mixing, random.integers(0, nodes, edges), within)
    apart = first != second
    centres = random.standard_normal((communities, features), np.float32)
    noise = random.standard_normal((nodes, features), np.float32)
    order, tenth = random.permutation(nodes), nodes // 10
    return NodeData(
        adjacency=Adjacency.of(np.stack([first[apart], second[apart]], axis=1), nodes),
        features=centres[labels] + 3 * noise, labels=labels, train=np.sort(order[:tenth]),
        validation=np.sort(order[tenth : 2 * tenth]), test=np.sort(order[2 * tenth : 3 * tenth]),
    )  # fmt: skip


def parse(text: str) -> NodeData:
    """Return a graph as a user writes it: an NPZ file, or `planted:nodes=10000 edges=100000 communities=10
    features=16`.

    Raises ForetraceError for what is neither.
    """
    kind, colon, rest = text.partition(":")
    if kind != "planted" or not colon:
        return read(Path(text))
    return planted(**numbers(rest.split(), _PLANTED, "planted"))


def read(path: Path) -> NodeData:
    """Return a graph from an NPZ file: `edges` (n, 2) of an undirected graph, and what is known of its nodes.

    Features are dense (`x`) or compressed sparse rows (`x_data`, `x_indices`, `x_indptr`, `x_shape`); `label` is -1
    where unknown, `train_idx`, `val_idx` and `test_idx` are nodes; `nodes` says how many there are where neither
    features nor labels do. Raises ForetraceError for what is no such file.
    """
    data = read_bytes(path, mend="give an NPZ file with `edges`")
    try:
        found = parse_npz(data)
        if "edges" not in found:
            raise ValueError(f"it has {', '.join(found) or 'nothing'}, and no edges")
        edges = np.asarray(found["edges"]).reshape(-1, 2).astype(np.int64, casting="same_kind")
        features = _features(found)
        labels = np.asarray(found.get("label", np.full(0, -1)), np.int64)
        nodes = int(found.get("nodes", max(len(features), len(labels), int(edges.max(initial=-1)) + 1)))
        if nodes > _MOST_NODES:
            raise ValueError(f"it has {nodes} nodes, and may have {_MOST_NODES}")
        sets = {to: np.asarray(found.get(key, []), np.int64).ravel() for key, to in _SETS.items()}
    except (*DAMAGED, TooLargeError) as error:
        why = " ".join(str(error).split())[:200]
        raise ForetraceError(f"{path} is no graph ({why}); give an NPZ file with `edges` (n, 2).") from None
    features = features if features.size else np.zeros((nodes, 0), np.float32)
    labels = labels if len(labels) else np.full(nodes, -1)
    if nodes < 1 or len(features) != nodes or labels.shape != (nodes,):
        raise ForetraceError(f"{path} must say the same of all {nodes} nodes, got {len(features)} and {len(labels)}.")
    for key, to in _SETS.items():
        within(sets[to], nodes, f"{key} of {path} must name nodes")
    return NodeData(adjacency=Adjacency.of(edges, nodes), features=features, labels=labels, **sets)


def _features(found: dict[str, Array]) -> Float32:
    if "x_indptr" not in found:
        return np.asarray(found.get("x", np.zeros((0, 0))), np.float32)
    rows, width = (int(each) for each in found["x_shape"])
    starts: Int64 = found["x_indptr"].astype(np.int64)
    counts = np.diff(starts)
    if len(counts) != rows or (counts < 0).any() or counts.sum() != len(found["x_data"]) or rows * width > 2**31:
        raise ValueError("its sparse features do not fit together")
    dense = np.zeros((rows, width), np.float32)
    dense[np.repeat(np.arange(rows), counts), found["x_indices"].astype(np.int64)] = found["x_data"]
    return dense
