"""Neighbour samplers: distribution, caches, stores, odd graphs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.arrays import Int64
from foretrace.errors import ForetraceError
from foretrace.training.rows.graphs import Adjacency
from foretrace.training.rows.neighbours import (
    MOST_NODES,
    CachePolicy,
    NeighbourCache,
    NeighbourLists,
    blocks,
    distinct,
    draw,
    place,
    policies,
    positions,
    relabel,
)
from foretrace.training.rows.rows import RowCounters, RowsInMemory
from foretrace.training.rows.samplers import NeighborLoader, SampledBatch
from tests.training.rows import twins

POLICIES = policies(every=3)
EVERY = pytest.mark.parametrize("name", ["plain", *POLICIES])


def random_graph(nodes: int = 200, edges: int = 3000, seed: int = 0) -> Adjacency:
    """Distinct undirected edges, some of them self loops; the last node is a neighbour of all, the first of none."""
    random = np.random.default_rng(seed)
    pairs = np.unique(np.sort(random.integers(1, nodes, (edges, 2)), axis=1), axis=0)
    hub = np.stack([np.arange(1, nodes - 1), np.full(nodes - 2, nodes - 1)], axis=1)
    return Adjacency.of(np.unique(np.concatenate([pairs, hub]), axis=0), nodes)


def neighbours(adjacency: Adjacency, node: int) -> list[int]:
    found: list[int] = adjacency.neighbours[adjacency.starts[node] : adjacency.starts[node + 1]].tolist()
    return found


def array(values: object) -> Int64:
    return np.asarray(values, np.int64)


@pytest.mark.parametrize(("size", "count"), [(1, 1), (4, 1), (5, 2), (5, 3), (6, 4), (5, 5), (3, 0), (0, 0)])
def test_every_set_of_neighbours_is_equally_likely(size: int, count: int) -> None:
    """All outcomes of the random numbers are gone through: the distribution is exact, not estimated."""
    choices = [range(size - count + k + 1) for k in range(count)]
    seen: Counter[tuple[int, ...]] = Counter()
    for outcome in product(*choices):
        uniform = np.array([(each + 0.5) / len(of) for each, of in zip(outcome, choices, strict=True)])
        found = np.empty(count, np.int64)
        draw(array([7]), array([size]), array([count]), uniform, found)
        seen[tuple(sorted(found.tolist()))] += 1
    sets = list(combinations(range(7, 7 + size), count))
    assert set(seen) == set(sets)
    assert {Fraction(times, prod(map(len, choices))) for times in seen.values()} == {Fraction(1, len(sets))}


@given(st.data())
def test_draw_equals_its_twin(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 12), max_size=6))
    wanted = [data.draw(st.integers(0, size)) for size in sizes]
    begins = [data.draw(st.integers(0, 1000)) for _ in sizes]
    uniform = np.random.default_rng(data.draw(st.integers(0, 99))).random(sum(wanted))
    if len(uniform):
        uniform[0] = data.draw(st.sampled_from([0.0, 1 - 2**-53, uniform[0]]))
    found = np.empty(len(uniform), np.int64)
    draw(array(begins), array(sizes), array(wanted), uniform, found)
    assert found.tolist() == twins.draw(begins, sizes, wanted, uniform.tolist())


@given(st.data())
def test_place_and_relabel_equal_their_twins(data: st.DataObject) -> None:
    list_of = data.draw(st.permutations(range(12)))
    size = data.draw(st.integers(1, 8))
    count = data.draw(st.integers(1, size))
    kept, fresh = list_of[:size], data.draw(st.permutations(range(12)))[:count]
    slots = data.draw(st.permutations(range(size)))[:count]
    if count == size:
        slots = sorted(slots)
    here = np.array([99, *kept, 98], np.int32)
    place(here, array([1]), array([size]), array([count]), array(slots) + 1, np.array(fresh, np.int32))
    plain = list(kept)
    twins.place(plain, slots, fresh)
    assert here.tolist() == [99, *plain, 98]
    assert set(fresh) <= set(plain) and len(set(plain)) == size, "fresh ones are there, none twice"
    assert set(plain) - set(fresh) <= set(kept)

    n_id = [3, 5]
    local, buffer = np.full(12, -1, np.int32), np.zeros(30, np.int64)
    local[n_id], buffer[:2] = [0, 1], n_id
    labels = np.empty(len(list_of), np.int64)
    total = relabel(np.array(list_of, np.int32), local, buffer, 2, labels)
    assert labels.tolist() == twins.relabel(list_of, n_id) and buffer[:total].tolist() == n_id


def whole(adjacency: Adjacency, batch: SampledBatch, fan_outs: tuple[int, ...], *, distinct: bool) -> None:
    """A batch has the form of PyTorch Geometric's: edges of the graph, each hop's drawn by the hop's new nodes."""
    assert len(set(batch.n_id.tolist())) == len(batch.n_id) == sum(batch.num_sampled_nodes)
    assert batch.edge_index.shape == (2, sum(batch.num_sampled_edges))
    at = edge = 0
    for new, edges, fan_out in zip(batch.num_sampled_nodes, batch.num_sampled_edges, fan_outs, strict=False):
        sources, targets = batch.edge_index[:, edge : edge + edges]
        for target in range(at, at + new):
            node = int(batch.n_id[target])
            drawn = batch.n_id[sources[targets == target]].tolist()
            listed = neighbours(adjacency, node)
            assert set(drawn) <= set(listed)
            assert len(drawn) == (len(listed) if fan_out < 0 else min(fan_out, len(listed)))
            assert not distinct or len(set(drawn)) == len(drawn)
        assert np.all((targets >= at) & (targets < at + new))
        at, edge = at + new, edge + edges
    assert edge == batch.edge_index.shape[1]


@EVERY
@pytest.mark.parametrize("num_neighbors", [(5, 3), (10,), (3, 0, 2), (0,), ()])
def test_batches_are_subgraphs(name: str, num_neighbors: tuple[int, ...]) -> None:
    adjacency = random_graph()
    policy = POLICIES.get(name)
    loader = NeighborLoader(
        NeighbourLists.of(adjacency), num_neighbors=num_neighbors, batch_size=32, shuffle=True, cache=policy, seed=3
    )
    for _ in range(2):
        found = list(loader)
        assert len(found) == len(loader) == 7 and found[-1].batch_size == 8
        np.testing.assert_array_equal(np.sort(np.concatenate([b.n_id[: b.batch_size] for b in found])), np.arange(200))
        for batch in found:
            whole(adjacency, batch, num_neighbors, distinct="partial-fetch" not in name)
    for cache in loader.caches:
        for node in range(200):
            kept = cache.kept[cache.starts[node] : cache.starts[node + 1]].tolist()
            assert len(set(kept)) == len(kept) == min(len(neighbours(adjacency, node)), cache.size)
            assert set(kept) <= set(neighbours(adjacency, node))


def test_all_neighbours_are_drawn_for_minus_one() -> None:
    adjacency = random_graph()
    loader = NeighborLoader(NeighbourLists.of(adjacency), num_neighbors=[-1, 2], batch_size=50)
    for batch in loader:
        whole(adjacency, batch, (-1, 2), distinct=True)


@EVERY
def test_the_same_seed_gives_the_same_batches_from_every_store(name: str) -> None:
    adjacency = random_graph()
    stores = [NeighbourLists.of(adjacency)]
    stores += [NeighbourLists(adjacency.starts, RowsInMemory(blocks(adjacency, width))) for width in (1, 7, 1024)]
    told = []
    for lists in stores:
        loader = NeighborLoader(
            lists, num_neighbors=[4, 4], batch_size=20, shuffle=True, cache=POLICIES.get(name), seed=1
        )
        told.append([(b.n_id.tolist(), b.edge_index.tolist()) for _ in range(2) for b in loader])
    assert all(each == told[0] for each in told)


def test_a_read_is_split_where_its_blocks_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretrace.training.rows.neighbours.MOST_READ", 64)
    monkeypatch.setattr("foretrace.training.rows.neighbours.MOST_DRAWN", 50)
    adjacency = random_graph()
    rows = RowsInMemory(blocks(adjacency, 16))
    at = np.random.default_rng(0).permutation(len(adjacency.neighbours))[:500]
    np.testing.assert_array_equal(NeighbourLists(adjacency.starts, rows).read(at), adjacency.neighbours[at])
    assert rows.counters.gets == -(-rows.counters.rows_read // 4)
    test_batches_are_subgraphs("fcr", (5, 3))


@pytest.mark.parametrize("name", POLICIES)
def test_a_cache_larger_than_the_graph_is_plain_sampling(name: str) -> None:
    """Whole lists are kept in their order, so that the same random numbers draw the same neighbours."""
    adjacency = Adjacency.of(array([[i, (i + k) % 50] for i in range(50) for k in (1, 2, 3)]), 50)
    lists, cache = NeighbourLists.of(adjacency), POLICIES[name]
    plain = NeighborLoader(lists, num_neighbors=[5, 5], batch_size=10)
    kept = NeighborLoader(lists, num_neighbors=[5, 5], batch_size=10, cache=replace(cache, kept=20))
    random = np.random.default_rng(0)
    plain.random = random
    for each in kept.caches:
        each.random = np.random.default_rng(0)
        kept.caches = [each] * 2
    for _ in range(3):
        for one, other in zip(plain, kept, strict=True):
            np.testing.assert_array_equal(one.edge_index, other.edge_index)
    assert kept.counters.misses == 0
    assert kept.memory_bytes > plain.memory_bytes + 4 * len(adjacency.neighbours), "which takes memory for nothing"


@pytest.mark.parametrize("name", ["fcr", "otf", "otf-full-refresh", "otf-partial-fetch"])
def test_one_batch_has_the_distribution_of_plain_sampling(name: str) -> None:
    """Chi-square over the sets of 3 of 8 neighbours (served from the cache) in batches far apart from each other."""
    adjacency = Adjacency.of(array([[0, k] for k in range(1, 9)]), 9)
    lists, policy = NeighbourLists.of(adjacency), replace(POLICIES[name], kept=1.2, every=1)
    random, counters = np.random.default_rng(5), RowCounters()
    cache = NeighbourCache(lists, policy, 3, random, counters)
    assert cache.size == 4
    wanted = policy.drawn(3)
    sets = dict.fromkeys(combinations(range(1, 9), wanted), 0)
    samples = 2000
    for _ in range(samples):
        for _ in range(1 if policy.all_nodes or policy.renewed == 1 else 12):
            cache.refresh(array([0]))
        found, _ = cache.draw(array([0]), 3)
        sets[tuple(sorted(found[:wanted].tolist()))] += 1
    expected = samples / len(sets)
    chi = sum((each - expected) ** 2 / expected for each in sets.values())
    free = len(sets) - 1
    assert chi < free + 4 * (2 * free) ** 0.5  # four standard deviations


@EVERY
def test_isolated_nodes_self_loops_and_no_seeds(name: str) -> None:
    adjacency = Adjacency.of(array([[1, 1], [2, 3]]), 5)
    lists = NeighbourLists.of(adjacency)
    loader = NeighborLoader(lists, num_neighbors=[2, 2], batch_size=5, cache=POLICIES.get(name))
    for _ in range(8):
        (batch,) = loader
        pairs = {(int(batch.n_id[a]), int(batch.n_id[b])) for a, b in batch.edge_index.T}
        assert pairs == {(1, 1), (2, 3), (3, 2)} and batch.num_sampled_nodes == (5, 0, 0)
    assert list(NeighborLoader(lists, num_neighbors=[2], input_nodes=array([]), cache=POLICIES.get(name))) == []
    empty = loader.sample(array([]))
    assert empty.n_id.tolist() == [] and empty.edge_index.shape == (2, 0)
    lonely = NeighbourLists.of(Adjacency.of(np.empty((0, 2), np.int64), 3))
    (batch,) = NeighborLoader(lonely, num_neighbors=[2], batch_size=3, cache=POLICIES.get(name))
    assert batch.n_id.tolist() == [0, 1, 2] and batch.edge_index.shape == (2, 0)


def test_memory_is_the_formula() -> None:
    adjacency = random_graph()
    lists = NeighbourLists.of(adjacency)
    plain = NeighborLoader(lists, num_neighbors=[5, 3])
    for policy in POLICIES.values():
        loader = NeighborLoader(lists, num_neighbors=[5, 3], cache=policy)
        predicted = policy.memory_bytes(adjacency.degrees, (5, 3))
        assert loader.memory_bytes == plain.memory_bytes + predicted
        bound = sum(4 * 200 * policy.size(f) + 8 * 201 for f in policy.fan_outs((5, 3)))
        assert predicted <= bound


@EVERY
def test_a_hub_shows_as_many_neighbours_as_expected(name: str) -> None:
    """The published parameters, a node of 400 neighbours, 60 batches; plain sampling shows 266 of them."""
    degree, batches, seeds = 400, 60, 40
    adjacency = Adjacency.of(array([[0, k] for k in range(1, degree + 1)]), degree + 1, directed=True)
    policy = replace(POLICIES[name], every=20) if name in POLICIES else None
    told = []
    for seed in range(seeds):
        loader = NeighborLoader(
            NeighbourLists.of(adjacency), num_neighbors=[7], input_nodes=array([0]), cache=policy, seed=seed
        )
        told.append(len({int(node) for _ in range(batches) for batch in loader for node in batch.n_id[1:]}))
    expected = policy.distinct(degree, 7, batches) if policy else distinct(degree, 7, batches)
    assert np.mean(told) == pytest.approx(expected, abs=4 * np.std(told) / seeds**0.5 + 0.02 * expected)
    assert name in ("plain",) or expected < 0.85 * distinct(degree, 7, batches)


def test_hits_and_reads_are_counted() -> None:
    adjacency = random_graph()
    lists = NeighbourLists.of(adjacency)
    for name, share in (("plain", 0.0), ("fcr", 1.0), ("otf", 1.0), ("otf-partial-fetch", 0.6)):
        loader = NeighborLoader(lists, num_neighbors=[5], input_nodes=array([199]), cache=POLICIES.get(name), seed=2)
        filled = loader.counters.rows_read
        for _ in range(3):
            list(loader)
        assert loader.counters.hits == 15 * share and loader.counters.misses == 15 - 15 * share
        assert loader.counters.rows_read == filled + loader.counters.misses
        list(loader)  # the fourth one refreshes
        refreshed = loader.counters.rows_read - filled - loader.counters.misses
        if name == "fcr":
            assert refreshed == np.minimum(adjacency.degrees, 10)[adjacency.degrees > 10].sum()
        else:
            assert refreshed == {"plain": 0, "otf": 2, "otf-partial-fetch": 2}[name]


@pytest.mark.parametrize("wrong", [
    {"kept": 0.0}, {"kept": float("nan")}, {"kept": 1.0, "renewed": 0.0}, {"kept": 1.0, "served": 1.5},
    {"kept": 1.0, "every": 0},
])  # fmt: skip
def test_a_policy_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ForetraceError, match="A cache must keep"):
        CachePolicy(**wrong)  # type: ignore[arg-type]


def test_what_cannot_be_sampled_is_refused() -> None:
    lists = NeighbourLists.of(random_graph())
    for wrong in ({"batch_size": 0}, {"num_neighbors": [-2]}, {"input_nodes": array([200])},
                  {"input_nodes": array([1, 1])}, {"num_neighbors": [-1], "cache": POLICIES["otf"]},
                  {"num_neighbors": [4], "cache": CachePolicy(kept=0.5)}):  # fmt: skip
        with pytest.raises(ForetraceError):
            NeighborLoader(lists, **{"num_neighbors": [2], **wrong})  # type: ignore[arg-type]
    huge = Adjacency(starts=np.broadcast_to(array(0), MOST_NODES + 2), neighbours=array([]))
    with pytest.raises(ForetraceError, match="at most"):
        blocks(huge, 8)


def test_a_loader_goes_on_after_a_store_failed() -> None:
    adjacency = random_graph()
    rows = RowsInMemory(blocks(adjacency, 8))
    loaders = [NeighborLoader(NeighbourLists(adjacency.starts, rows), num_neighbors=[3, 3]) for _ in range(2)]
    get = rows._get
    rows._get = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        loaders[0].sample(array([5, 6]))
    rows._get = get  # type: ignore[method-assign]
    for loader in loaders:
        loader.random = np.random.default_rng(0)
    first, second = (loader.sample(array([6, 5])) for loader in loaders)
    np.testing.assert_array_equal(first.edge_index, second.edge_index)


def test_positions_of_nothing() -> None:
    assert positions(array([]), array([]), array([]), np.random.default_rng(0)).tolist() == []
