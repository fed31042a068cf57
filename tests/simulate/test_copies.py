"""Copies side by side are the run of one large graph, and equal their definition in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.graph.taskgraph import EdgeKind, TaskGraph
from foretrace.simulate.replay import replay, replay_copies
from tests.simulate import twins
from tests.simulate.unfolded import unfolded
from tests.strategies import task_graphs


@given(task_graphs(ranks=2), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_copies_equal_their_twin_and_the_unfolded_graph(
    graph: TaskGraph, copies: int, n_groups: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    # What meets goes from a row to later rows only, or copies would wait for each other in a circle.
    meets = (graph.edge_kind == EdgeKind.COLLECTIVE) & (random.random(graph.edges) < 0.7)
    group = random.integers(-1, n_groups, len(graph)).astype(np.int32)
    scale = random.choice([0.0, 0.25, 1.0, 1.7, random.random()], (n_groups, copies))
    rows = random.permutation(len(graph)).astype(np.int32)
    ends = replay_copies(graph, meets, group, scale, rows)
    assert ends.tolist() == np.array(twins.replay_copies(graph, meets, group, scale))[rows].tolist()

    whole, row = unfolded(graph, meets, copies)
    factor = np.where(group[:, None] >= 0, scale[group], 1.0)
    dur = np.empty(len(whole), dtype=np.int64)
    dur[row] = np.rint(graph.dur[:, None] * factor)
    _, end = replay(whole.with_columns(dur=dur))
    assert np.array_equal(end[row[rows]], ends)
    assert len(whole) == copies * len(graph)


@given(task_graphs(ranks=2))
def test_edges_of_another_graph_are_refused(graph: TaskGraph) -> None:
    nobody = np.full(len(graph), -1, dtype=np.int32)
    meets = np.zeros(graph.edges + 1, dtype=bool)
    with pytest.raises(ValueError, match=f"meets: want {graph.edges} edges"):
        replay_copies(graph, meets, nobody, np.ones((1, 2)), np.zeros(1, dtype=np.int32))
