"""A graph on disk in partitions of its nodes, and its edges in buckets: (i, j) holds those from partition i to j.

A folder: `graph.json`, written last, says the sizes; `edges.bin` has int32 pairs, bucket after bucket; `features.rows`
is a table of `disk.create`; arrays are `.npy` files. Nodes have new numbers: those that train come first, then all
others in random order, so that partition k holds the nodes from k * size on.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from foretrace.arrays import Array, Int32, Int64
from foretrace.errors import ForetraceError
from foretrace.files import write_bytes
from foretrace.reading import read_bytes
from foretrace.training.rows import disk
from foretrace.training.rows.graphs import NodeData

HELD_OUT = 20_000  # edges that are not trained, at most
HELD_SHARE = 0.02
_ARRAYS = ("order", "starts", "held_out", "labels", "train", "test")


class GraphSizes(msgspec.Struct, frozen=True, kw_only=True):
    """What `graph.json` says."""

    nodes: int
    edges: int  # that are trained, each once
    partitions: int
    features: int  # width; 0 without any
    classes: int
    kind: Literal["foretrace graph"] = "foretrace graph"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedGraph:
    """A folder of `write`. Arrays are int64 and name nodes by their new numbers.

    `order` (nodes,) are the old numbers of the new nodes; `starts` (partitions² + 1,) where the buckets begin in the
    file of edges; `held_out` (n, 2) edges that are not trained.
    """

    folder: Path
    sizes: GraphSizes
    order: Int64
    starts: Int64
    held_out: Int64
    labels: Int64
    train: Int64
    test: Int64

    @property
    def size(self) -> int:
        """Nodes of a partition; the last ones may have fewer, or none."""
        return -(-self.sizes.nodes // self.sizes.partitions)

    @property
    def features(self) -> Path:
        """The table of features."""
        return self.folder / "features.rows"

    def nodes_of(self, partition: int) -> tuple[int, int]:
        """Return the first node of a partition, and the one after its last."""
        return min(partition * self.size, self.sizes.nodes), min((partition + 1) * self.size, self.sizes.nodes)

    def bucket_edges(self, buckets: Int64) -> Int64:
        """Return edges of each of `buckets` (n, 2): (n,)."""
        found: Int64 = np.diff(self.starts)[buckets[:, 0] * self.sizes.partitions + buckets[:, 1]]
        return found

    def edges_of(self, buckets: Int64) -> Int32:
        """Return the edges of some buckets, one bucket after the other: (n, 2). Raises ForetraceError."""
        counts = self.bucket_edges(buckets)
        edges = np.empty((int(counts.sum()), 2), np.int32)
        at = 0
        with disk.said(path := self.folder / "edges.bin"), path.open("rb") as file:
            for (i, j), count in zip(buckets.tolist(), counts.tolist(), strict=True):
                file.seek(8 * int(self.starts[i * self.sizes.partitions + j]))
                part = edges[at : at + count]
                if count and file.readinto(part.data) < part.nbytes:
                    raise ForetraceError(f"{path} ends too early; copy it again.")
                at += count
            disk.forget(file.fileno())
        return edges


def write(data: NodeData, folder: Path, *, partitions: int, seed: int = 0, hold_out: bool = True) -> PartitionedGraph:
    """Write a graph in partitions; raises ForetraceError where that cannot be.

    With `hold_out` a share of the edges (2 %, at most 20,000) is kept apart to judge what was learnt by.
    """
    nodes = data.adjacency.nodes
    if not 1 <= partitions <= nodes:
        raise ForetraceError(f"A graph of {nodes} nodes must have 1 to {nodes} partitions, got {partitions}.")
    if nodes >= 2**31:
        raise ForetraceError(f"A graph must have fewer than 2^31 nodes, got {nodes}.")
    random = np.random.default_rng([seed, 1])  # `planted` permutes nodes by its seed alone: not by community again
    trains = np.zeros(nodes, bool)
    trains[data.train] = True
    shuffled = random.permutation(nodes)
    order = np.concatenate([shuffled[trains[shuffled]], shuffled[~trains[shuffled]]])
    new = np.empty(nodes, np.int64)
    new[order] = np.arange(nodes)
    edges = new[data.adjacency.edges()].astype(np.int32)
    held = random.random(len(edges)) < min(HELD_SHARE, HELD_OUT / max(len(edges), 1)) * hold_out
    held_out, edges = edges[held].astype(np.int64), edges[~held]
    part = edges // -(-nodes // partitions)
    bucket = part[:, 0] * partitions + part[:, 1]
    starts = np.concatenate([[0], np.cumsum(np.bincount(bucket, minlength=partitions**2))])
    sizes = GraphSizes(
        nodes=nodes, edges=len(edges), partitions=partitions, features=data.features.shape[1], classes=data.classes
    )
    found = PartitionedGraph(
        folder=folder, sizes=sizes, order=order, starts=starts, held_out=held_out, labels=data.labels[order],
        train=np.sort(new[data.train]), test=np.sort(new[data.test]),
    )  # fmt: skip
    with disk.said(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "graph.json").unlink(missing_ok=True)
    write_bytes(folder / "edges.bin", edges[np.argsort(bucket, kind="stable")].tobytes())
    for name in _ARRAYS:
        held_bytes = io.BytesIO()
        np.save(held_bytes, getattr(found, name))
        write_bytes(folder / f"{name}.npy", held_bytes.getvalue())
    if sizes.features:
        disk.create(
            found.features, nodes, sizes.features, partitions, lambda begin, end: data.features[order[begin:end]]
        )
    write_bytes(folder / "graph.json", msgspec.json.encode(sizes))
    os.sync()  # of what is measured afterwards, nothing is the writing of these files
    return found


def read(folder: Path) -> PartitionedGraph:
    """Return a folder of `write`; features and edges stay on disk. Raises ForetraceError for what is none."""
    mend = "name a folder that foretrace partitioned"
    text = read_bytes(folder / "graph.json", mend=mend)
    try:
        sizes = msgspec.json.decode(text, type=GraphSizes)
        arrays: dict[str, Array] = {}
        for name in _ARRAYS:
            with disk.said(folder / f"{name}.npy"), (folder / f"{name}.npy").open("rb") as file:
                arrays[name] = np.load(file, allow_pickle=False).astype(np.int64, casting="safe", copy=False)
    except (msgspec.DecodeError, ValueError, TypeError, EOFError) as error:
        why = " ".join(str(error).split())[:200]
        raise ForetraceError(f"{folder} is no graph in partitions ({why}); {mend}.") from None
    found = PartitionedGraph(folder=folder, sizes=sizes, **arrays)
    _check(found)
    return found


def _check(graph: PartitionedGraph) -> None:
    """Raise ForetraceError where files do not fit together."""
    sizes, folder = graph.sizes, graph.folder
    good = 1 <= sizes.partitions <= sizes.nodes < 2**31
    good = good and graph.starts.shape == (sizes.partitions**2 + 1,) and graph.starts[0] == 0
    good = good and bool((np.diff(graph.starts) >= 0).all()) and graph.starts[-1] == sizes.edges
    good = good and graph.order.shape == graph.labels.shape == (sizes.nodes,) and sizes.features >= 0
    named: Sequence[Int64] = (graph.order, graph.held_out, graph.train, graph.test)
    good = good and all(not len(each) or 0 <= each.min() <= each.max() < sizes.nodes for each in named)
    good = good and graph.held_out.ndim == 2 and graph.held_out.shape[1] == 2
    good = good and int(graph.labels.max(initial=-1)) + 1 <= sizes.classes
    with disk.said(folder / "edges.bin"):
        good = good and (folder / "edges.bin").stat().st_size == 8 * sizes.edges
    if not good:
        raise ForetraceError(f"{folder} is no whole graph in partitions; partition it again.")
