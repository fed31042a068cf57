"""KMeans task sampling: what is chosen from pools whose answer is known, and what always holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from foretrace.errors import ForetraceError
from reproductions.cdmpp.sampling import choose_tasks, cluster


def heaps() -> np.ndarray:
    """Three heaps of 50, 30 and 10 points; the first of each heap lies exactly at its centre."""
    rng = np.random.default_rng(3)
    parts = []
    for size, at in ((50, (0.0, 0.0)), (30, (10.0, 0.0)), (10, (0.0, 10.0))):
        around = rng.normal(scale=0.1, size=((size - 1) // 2, 2))
        rest = size - 1 - 2 * len(around)
        parts.append(np.array(at) + np.concatenate([np.zeros((1 + rest, 2)), around, -around]))
    return np.concatenate(parts)


def test_one_task_of_each_heap_largest_first_at_its_centre() -> None:
    points = heaps()
    chosen = choose_tasks(points, 3)
    assert [int(np.searchsorted([50, 80, 90], row, side="right")) for row in chosen] == [0, 1, 2]
    assert np.allclose(points[chosen], [[0, 0], [10, 0], [0, 10]])


def test_clusters_of_known_heaps() -> None:
    centres, sizes = cluster(heaps(), 3)
    assert sorted(sizes.tolist()) == [10, 30, 50]
    assert np.allclose(centres[np.argsort(-sizes)], [[0, 0], [10, 0], [0, 10]])


def test_features_without_units_matter_alike() -> None:
    """A feature counted in millionths must not decide alone."""
    points = heaps()
    scaled = points * np.array([1.0, 1e6])
    assert np.array_equal(choose_tasks(points, 3), choose_tasks(scaled, 3))
    constant = np.column_stack([points, np.full(len(points), 7.0)])
    assert np.array_equal(choose_tasks(points, 3), choose_tasks(constant, 3))


def test_tasks_of_several_samples() -> None:
    """A task is as far as its samples are on average: one good sample does not make it the nearest."""
    points = np.array([[0.0], [4.0], [0.9], [1.1], [10.0], [10.0]])
    chosen = choose_tasks(points, 2, tasks=[7, 7, 3, 3, 5, 5], standardise=False)
    assert chosen.tolist() == [3, 5]


def test_all_of_a_small_pool() -> None:
    assert sorted(choose_tasks([[1.0], [2.0]], 5).tolist()) == [0, 1]
    assert choose_tasks(np.empty((0, 3)), 5).tolist() == []
    assert choose_tasks([[1.0]], 0).tolist() == []


def test_equal_points_are_taken_once_each() -> None:
    assert sorted(choose_tasks(np.ones((6, 2)), 4).tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("features", "k", "tasks", "said"),
    [
        ([1.0, 2.0], 1, None, "one row per sample"),
        ([[1.0], [np.nan]], 1, None, "row 1"),
        ([[1.0]], -1, None, "0 or more"),
        ([[1.0]], 1, [1, 2], "one per row"),
    ],
)
def test_errors_name_the_mend(features: list[float], k: int, tasks: list[int] | None, said: str) -> None:
    with pytest.raises(ForetraceError, match=said):
        choose_tasks(features, k, tasks=tasks)


@given(
    arrays(np.float64, st.tuples(st.integers(1, 40), st.integers(1, 4)), elements=st.floats(-1e6, 1e6)),
    st.integers(0, 50),
)
@settings(max_examples=60)
def test_distinct_and_the_same_each_time(points: np.ndarray, k: int) -> None:
    chosen = choose_tasks(points, k)
    assert len(chosen) == min(k, len(points)) == len(set(chosen.tolist()))
    assert np.array_equal(chosen, choose_tasks(points.copy(), k))
