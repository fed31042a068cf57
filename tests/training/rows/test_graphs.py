"""Graphs: read, generated, partitioned; what is damaged or does not fit is one sentence."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from foretrace.arrays import Int64
from foretrace.errors import ForetraceError
from foretrace.training.rows import graphs, partitions
from foretrace.training.rows.graphs import Adjacency, NodeData
from foretrace.training.rows.links import draw


def ordered(edges: Int64) -> Int64:
    """Undirected edges in an order of their own."""
    sorted_ = np.sort(edges, axis=1)
    return sorted_[np.lexsort(sorted_.T)]


def odd(nodes: int = 9) -> NodeData:
    """Self loops, a repeat, and isolated nodes; nothing is known of the nodes."""
    edges = np.array([(0, 0), (0, 1), (1, 0), (3, 2), (2, 2), (5, 8)])
    nothing = np.zeros(0, np.int64)
    return NodeData(
        adjacency=Adjacency.of(edges, nodes), features=np.zeros((nodes, 0), np.float32), labels=np.full(nodes, -1),
        train=nothing, validation=nothing, test=nothing,
    )  # fmt: skip


def test_citation_graphs_are_read_as_published(shared_data: Path) -> None:
    for name, nodes, edges, width, classes, isolated in (
        ("cora", 2_708, 5_278, 1_433, 7, 0), ("citeseer", 3_327, 4_552, 3_703, 6, 48),
    ):  # fmt: skip
        found = graphs.read(shared_data / "graphs" / f"{name}.npz")
        assert (found.adjacency.nodes, len(found.adjacency.edges())) == (nodes, edges)
        assert found.features.shape == (nodes, width)
        assert (found.classes, int((found.adjacency.degrees == 0).sum())) == (classes, isolated)


def test_a_graph_is_read_as_it_was_written(tmp_path: Path) -> None:
    for data in (odd(), graphs.planted(nodes=50, edges=200, communities=4, features=3)):
        write(tmp_path / "graph.npz", data)
        found = graphs.parse(str(tmp_path / "graph.npz"))
        np.testing.assert_array_equal(ordered(found.adjacency.edges()), ordered(data.adjacency.edges()))
        for name in ("features", "labels", "train", "validation", "test"):
            np.testing.assert_array_equal(getattr(found, name), getattr(data, name))


def test_a_planted_graph_keeps_to_its_communities() -> None:
    data = graphs.parse("planted:nodes=1000 edges=20000 communities=10 mixing=0.2 features=8 seed=3")
    edges = data.adjacency.edges()
    assert 19_000 < len(edges) <= 20_000
    assert not (edges[:, 0] == edges[:, 1]).any()
    inside = (data.labels[edges[:, 0]] == data.labels[edges[:, 1]]).mean()
    assert inside == pytest.approx(0.8 + 0.2 / 10, abs=0.02)
    assert (np.bincount(data.labels) == 100).all()
    assert len({*data.train.tolist(), *data.validation.tolist(), *data.test.tolist()}) == 300
    again = graphs.parse("planted:nodes=1000 edges=20000 communities=10 mixing=0.2 features=8 seed=3")
    np.testing.assert_array_equal(again.features, data.features)


@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_partitions_hold_every_edge_once(tmp_path: Path, count: int) -> None:
    for data in (odd(), graphs.planted(nodes=103, edges=900, communities=4, features=3)):
        written = partitions.write(data, tmp_path / "graph", partitions=count)
        found = partitions.read(tmp_path / "graph")
        assert found.sizes == written.sizes
        size, seen = found.size, []
        for i, j in itertools.product(range(count), repeat=2):
            edges = found.edges_of(np.array([(i, j)]))
            assert (edges // size == (i, j)).all()
            seen.append(edges)
        both = found.order[np.concatenate([*seen, found.held_out])]
        np.testing.assert_array_equal(ordered(both), ordered(data.adjacency.edges()))
        np.testing.assert_array_equal(data.labels[found.order], found.labels)
        np.testing.assert_array_equal(np.sort(found.order[found.train]), np.sort(data.train))


def test_training_nodes_come_first_and_pairs_are_drawn_from_what_is_held(tmp_path: Path) -> None:
    data = graphs.planted(nodes=100, edges=300, communities=4, features=3)
    found = partitions.write(data, tmp_path / "graph", partitions=8)  # of 13 nodes: the last one has 9
    np.testing.assert_array_equal(found.train, np.arange(10))
    drawn = draw(found, (2, 7), 5_000, np.random.default_rng(0))
    held = np.concatenate([np.arange(26, 39), np.arange(91, 100)])
    np.testing.assert_array_equal(np.unique(drawn), held)
    np.testing.assert_allclose(np.bincount(drawn)[held] / 5_000, 1 / 22, atol=0.015)


def test_what_is_no_graph_is_refused(tmp_path: Path) -> None:
    for words, problem in (
        ({"x": np.ones((2, 2))}, "edges"),
        ({"edges": np.array([[0, 5]]), "label": np.array([0, 1])}, "all 6 nodes"),
        ({"edges": np.array([[0, -1]])}, "from 0 to"),
        ({"edges": np.array([[0.5, 1]])}, "edges"),
        ({"edges": np.array([[0, 1]]), "train_idx": np.array([2])}, "train_idx"),
        ({"edges": np.zeros((0, 2), np.int64)}, "0 nodes"),
    ):
        np.savez(tmp_path / "graph.npz", **words)
        with pytest.raises(ForetraceError, match=problem):
            graphs.read(tmp_path / "graph.npz")
    (tmp_path / "text.npz").write_text("none")
    for text in (str(tmp_path / "text.npz"), "missing.npz", "planted:nodes=x", "planted:nodes=1", "planted:node=3"):
        with pytest.raises(ForetraceError):
            graphs.parse(text)


def test_damaged_partitions_are_refused(tmp_path: Path) -> None:
    partitions.write(odd(), tmp_path / "graph", partitions=3)
    with pytest.raises(ForetraceError, match="1 to 9 partitions"):
        partitions.write(odd(), tmp_path / "graph", partitions=10)
    for name in ("graph.json", "edges.bin", "starts.npy", "order.npy"):
        path = tmp_path / "graph" / name
        kept = path.read_bytes()
        for damaged in (kept[:-1], b""):
            path.write_bytes(damaged)
            with pytest.raises(ForetraceError, match="partition"):
                partitions.read(tmp_path / "graph")
        path.write_bytes(kept)
    order = np.load(tmp_path / "graph" / "order.npy")
    np.save(tmp_path / "graph" / "order.npy", order + 1)
    with pytest.raises(ForetraceError, match="no whole graph"):
        partitions.read(tmp_path / "graph")


def write(path: Path, data: graphs.NodeData) -> None:
    np.savez(
        path, edges=data.adjacency.edges(), x=data.features, label=data.labels, nodes=np.int64(data.adjacency.nodes),
        train_idx=data.train, val_idx=data.validation, test_idx=data.test,
    )  # fmt: skip
