"""Batches of nodes with neighbours drawn at random, hop by hop, in the interface of PyTorch Geometric's NeighborLoader.

    loader = NeighborLoader(NeighbourLists.of(adjacency), num_neighbors=[10, 10], input_nodes=train, batch_size=512)
    for batch in loader:
        x = features[batch.n_id]  # the first batch.batch_size rows are the nodes to predict

Without a cache (FBL in GraphSnapShot) every set of neighbours of a node is equally likely (Hamilton et al., 2017).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from foretrace.arrays import Int32, Int64
from foretrace.errors import ForetraceError
from foretrace.training.rows.neighbours import CachePolicy, NeighbourCache, NeighbourLists, relabel
from foretrace.training.rows.rows import RowCounters, within


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBatch:
    """A sampled subgraph. `torch.from_numpy` makes tensors of its arrays without a copy."""

    n_id: Int64  # nodes of the graph, the first batch_size of them those to predict
    edge_index: Int64  # (2, edges): from a neighbour to the node that drew it, as places in n_id
    batch_size: int
    num_sampled_nodes: tuple[int, ...]  # new at every hop, the nodes to predict first
    num_sampled_edges: tuple[int, ...]  # of every hop


class NeighborLoader:
    """Yield a `SampledBatch` for every `batch_size` of `input_nodes`; the last one may be smaller.

    Args:
        lists: the graph.
        num_neighbors: how many neighbours of a node to draw at every hop, -1 for all.
        input_nodes: distinct nodes to predict (n,), all by default.
        batch_size: how many of them in a batch.
        shuffle: put them in a random order in every epoch.
        cache: keep samples of the lists in memory and draw from those.
        seed: two loaders with the same arguments yield the same batches; or what draws.

    Raises ForetraceError for nodes, sizes or a cache that cannot be.

    """

    def __init__(
        self, lists: NeighbourLists, *, num_neighbors: Sequence[int], input_nodes: Int64 | None = None,
        batch_size: int = 1, shuffle: bool = False, cache: CachePolicy | None = None,
        seed: int | np.random.Generator = 0,
    ) -> None:  # fmt: skip
        nodes = len(lists.starts) - 1
        self.input_nodes = np.arange(nodes) if input_nodes is None else np.asarray(input_nodes, np.int64)
        if batch_size < 1 or min(num_neighbors, default=0) < -1:
            raise ForetraceError(
                "`batch_size=` must be at least 1 and each of `num_neighbors=` at least -1, got "
                f"{batch_size} and {list(num_neighbors)}."
            )
        within(self.input_nodes, nodes, "`input_nodes=` must be")
        if len(np.unique(self.input_nodes)) != len(self.input_nodes):
            raise ForetraceError("`input_nodes=` must be distinct.")
        self.lists, self.num_neighbors, self.batch_size = lists, tuple(num_neighbors), batch_size
        self.shuffle, self.policy = shuffle, cache
        self.random = np.random.default_rng(seed)
        self.counters = RowCounters()  # of neighbours: hits of a cache, misses, and rows_read from the lists in all
        self.batches = 0
        sizes = cache.fan_outs(self.num_neighbors) if cache else ()
        self._made = [NeighbourCache(lists, cache, each, self.random, self.counters) for each in sizes if cache]
        self.caches = self._made * len(self.num_neighbors) if cache and cache.shared else self._made
        self._local = np.full(nodes, -1, np.int32)

    @property
    def memory_bytes(self) -> int:
        """Bytes of lists in memory, caches, and four per node to number those of a batch."""
        return self.lists.memory_bytes + self._local.nbytes + sum(each.memory_bytes for each in self._made)

    def __len__(self) -> int:
        return ceil(len(self.input_nodes) / self.batch_size)

    def __iter__(self) -> Iterator[SampledBatch]:
        nodes = self.random.permutation(self.input_nodes) if self.shuffle else self.input_nodes
        for begin in range(0, len(nodes), self.batch_size):
            yield self.sample(nodes[begin : begin + self.batch_size])

    def sample(self, seeds: Int64) -> SampledBatch:
        """Return the batch of these distinct nodes."""
        policy = self.policy if self.batches and self.policy and self.batches % self.policy.every == 0 else None
        self.batches += 1
        if policy and policy.all_nodes:
            for cache in self._made:
                cache.refresh(np.arange(len(self._local)))
        n_id, known, first = seeds, len(seeds), 0
        edges, new = [np.empty((2, 0), np.int64)], [known]
        self._local[seeds] = np.arange(known)
        try:
            for hop, fan_out in enumerate(self.num_neighbors):
                if policy and not policy.all_nodes:
                    self.caches[hop].refresh(n_id[first:])
                found, places = self._draw(hop, n_id[first:], fan_out)
                edges.append(np.stack([np.empty_like(places), places + first]))
                n_id = np.concatenate([n_id, np.empty(len(found), np.int64)])
                total = relabel(found, self._local, n_id, known, edges[-1][0])
                n_id, first, known = n_id[:total], known, total
                new.append(total - first)
        finally:
            self._local[n_id[:known]] = -1
        return SampledBatch(
            n_id=n_id, edge_index=np.concatenate(edges, axis=1), batch_size=len(seeds), num_sampled_nodes=tuple(new),
            num_sampled_edges=tuple(each.shape[1] for each in edges[1:]),
        )  # fmt: skip

    def _draw(self, hop: int, nodes: Int64, fan_out: int) -> tuple[Int32, Int64]:
        if self.caches:
            return self.caches[hop].draw(nodes, fan_out)
        sizes = self.lists.sizes(nodes)
        wanted = sizes if fan_out < 0 else np.minimum(sizes, fan_out)
        found = self.lists.draw(nodes, wanted, self.random)
        self.counters.misses += len(found)
        self.counters.rows_read += len(found)
        return found, np.repeat(np.arange(len(nodes)), wanted)
