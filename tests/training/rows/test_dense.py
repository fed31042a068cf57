"""Samples that all layers use (DENSE) against plain recursion over the same one-hop samples, and their distribution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.arrays import Float64, Int64
from foretrace.errors import ForetraceError
from foretrace.training.rows.graphs import Adjacency
from foretrace.training.rows.neighbours import NeighbourLists
from foretrace.training.rows.samplers import NeighborLoader, SampledBatch


def graph(nodes: int, edges: int, seed: int) -> Adjacency:
    """With self loops, repeats and isolated nodes."""
    return Adjacency.of(np.random.default_rng(seed).integers(0, max(nodes // 2, 1), (edges, 2)), nodes)


def sample(adjacency: Adjacency, targets: Int64, fanouts: list[int], random: np.random.Generator) -> SampledBatch:
    loader = NeighborLoader(
        NeighbourLists.of(adjacency), num_neighbors=fanouts, input_nodes=targets, batch_size=len(targets), seed=random
    )
    return next(iter(loader))


def lists(read: SampledBatch) -> dict[int, Int64]:
    """The one-hop sample of every node that has one."""
    drawn, owner = read.edge_index
    owners = read.n_id[: sum(read.num_sampled_nodes[:-1])].tolist()
    return {node: read.n_id[drawn[owner == at]] for at, node in enumerate(owners)}


def plain(node: int, layers: int, own: dict[int, Int64], values: Float64) -> float:
    """Layers h <- 2 h + sum of neighbours' h, by recursion."""
    if not layers:
        return float(values[node])
    below = sum(plain(int(each), layers - 1, own, values) for each in own[node])
    return 2 * plain(node, layers - 1, own, values) + below


def by_dense(read: SampledBatch, layers: int, values: Float64) -> Float64:
    found, (drawn, owner) = values[read.n_id], read.edge_index
    for hops in range(layers, 0, -1):
        count, edges = sum(read.num_sampled_nodes[:hops]), sum(read.num_sampled_edges[:hops])
        sums = np.zeros(count)
        np.add.at(sums, owner[:edges], found[drawn[:edges]])
        found = 2 * found[:count] + sums
    return found


@given(st.integers(2, 30), st.integers(0, 80), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32))
def test_layers_equal_plain_recursion(nodes: int, edges: int, layers: int, fanout: int, seed: int) -> None:
    adjacency, random = graph(nodes, edges, seed), np.random.default_rng(seed)
    targets = random.permutation(nodes)[: max(nodes // 3, 1)]
    read = sample(adjacency, targets, [fanout] * layers, random)
    assert len(np.unique(read.n_id)) == len(read.n_id)
    np.testing.assert_array_equal(read.n_id[: read.batch_size], targets)
    values, own = random.integers(0, 9, nodes).astype(np.float64), lists(read)
    expected = [plain(int(each), layers, own, values) for each in targets]
    np.testing.assert_array_equal(by_dense(read, layers, values), expected)
    for node, drawn in own.items():
        mine = adjacency.neighbours[adjacency.starts[node] : adjacency.starts[node + 1]].tolist()
        assert len(drawn) == min(len(mine), fanout)
        assert all(drawn.tolist().count(each) <= mine.count(each) for each in drawn.tolist())


def test_samples_are_uniform_without_replacement() -> None:
    adjacency = Adjacency.of(np.array([(0, each) for each in range(1, 8)]), 8)
    random, seen = np.random.default_rng(1), np.zeros((8, 8))
    for _ in range(6_000):
        read = sample(adjacency, np.zeros(1, np.int64), [3], random)
        drawn = read.n_id[read.edge_index[0]]
        assert len(set(drawn.tolist())) == 3
        seen[np.ix_(drawn, drawn)] += 1
    share = seen / 6_000
    np.testing.assert_allclose(np.diag(share)[1:], 3 / 7, atol=0.03)
    pairs = share[1:, 1:][~np.eye(7, dtype=bool)]
    np.testing.assert_allclose(pairs, 3 / 7 * 2 / 6, atol=0.03)


def test_targets_are_distinct_nodes() -> None:
    adjacency, random = graph(6, 5, 0), np.random.default_rng(0)
    with pytest.raises(ForetraceError, match="distinct"):
        sample(adjacency, np.array([1, 1]), [2], random)
    with pytest.raises(ForetraceError, match="0 to 5"):
        sample(adjacency, np.array([6]), [2], random)
