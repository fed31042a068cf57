"""Transfers that share a link: shares are counted and given back, and buckets in flight wait longer for each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.replay import replay
from foretrace.simulate.sharing import alone_ns, durations_together, shared_ends
from tests.strategies import task_graphs

times = st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 5_000)), min_size=1, max_size=12)


def test_a_link_that_two_share() -> None:
    start = np.array([0.0, 10.0, 100.0])
    ends = shared_ends(start, np.array([20.0, 20.0, 5.0]))
    assert ends == pytest.approx([30, 40, 105])  # both halve their pace from 10 to 30; the third is alone
    assert alone_ns(start, ends) == pytest.approx([20, 20, 5])


@given(times)
def test_work_that_is_counted_ends_as_it_did(each: list[tuple[int, int]]) -> None:
    start, alone = np.array(each, dtype=np.float64).T
    ends = shared_ends(start, alone)
    assert np.all(ends >= start + alone - 1e-6)
    assert shared_ends(start, alone_ns(start, ends)) == pytest.approx(ends, abs=0.1)
    # The link is busy as long as anything is in flight, and everything takes part in it.
    assert ends.max() <= start.max() + alone.sum() + 1e-6
    assert alone_ns(start, ends).sum() == pytest.approx(alone.sum(), abs=0.1)


def test_moments_too_large_for_a_fraction_of_a_nanosecond_end() -> None:
    start = 1e16 + np.array([0.0, 4.0])
    assert shared_ends(start, np.array([0.3, 0.0015])) == pytest.approx(start, abs=4)


@given(times, st.floats(1, 4))
def test_longer_transfers_end_later(each: list[tuple[int, int]], factor: float) -> None:
    start, alone = np.array(each, dtype=np.float64).T
    assert np.all(shared_ends(start, factor * alone) >= shared_ends(start, alone) - 1e-3)


@given(task_graphs(max_tasks=30, gone=False, loose=False), st.data())
def test_what_waits_for_a_transfer_moves_with_its_end(graph: TaskGraph, data: st.DataObject) -> None:
    """However many transfers wait for each other: ends of the replay are those of equal shares."""
    graph = replace(graph, lag=np.maximum(graph.lag, 0))  # nothing begins before what it waits for
    rows = np.array(sorted(data.draw(st.sets(st.integers(0, len(graph) - 1), min_size=1))), dtype=np.int64)
    alone = graph.dur.astype(np.float64)
    alone[rows] *= data.draw(st.integers(1, 4))
    dur = durations_together(graph, [rows], alone)
    begin, _ = replay(graph.with_columns(dur=dur))
    start = begin[rows].astype(np.float64)
    assert shared_ends(start, alone[rows]) - start == pytest.approx(dur[rows], abs=2)
    others = np.setdiff1d(np.arange(len(graph)), rows)
    assert np.array_equal(dur[others], graph.dur[others])
