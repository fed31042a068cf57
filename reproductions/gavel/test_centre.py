"""The centres of optimal faces that an interior solver returns: feasible, as good as the vertex, alike for alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from foretrace.fleet import allocations
from reproductions.gavel.allocations import most_progress
from reproductions.gavel.centre import inside_centre, level_centre, total_centre
from tests.fleet.test_allocations import CASE, cases, feasible

pytest.importorskip("scipy")


@given(cases())
@settings(max_examples=25)
def test_the_level_of_max_min(case: CASE) -> None:
    rates, scale, workers, rng = case
    weights = rng.choice([1.0, 5.0], len(rates))
    gain = allocations.normalised(rates, scale, workers, weights)
    reached = (gain * allocations.max_min(rates, scale, workers, weights)).sum(axis=1).min()
    centre = level_centre(gain, scale, workers)
    assert feasible(centre, scale, workers, 1e-6)
    assert (gain * centre).sum(axis=1).min() == pytest.approx(reached, rel=1e-5)


@given(cases())
@settings(max_examples=25)
def test_the_inside_of_makespan(case: CASE) -> None:
    rates, scale, workers, rng = case
    left = rng.uniform(1, 1000, len(rates))
    _, seconds = allocations.makespan(rates, scale, workers, left)
    inside = inside_centre(rates * 1.05 * seconds / left[:, None], scale, workers)
    assert feasible(inside, scale, workers, 1e-6)
    assert ((rates * inside).sum(axis=1) * 1.05 * seconds >= left * (1 - 1e-5)).all()


@given(cases())
@settings(max_examples=25)
def test_the_total_of_most_progress(case: CASE) -> None:
    rates, scale, workers, _ = case
    centre = total_centre(rates, scale, workers)
    assert feasible(centre, scale, workers, 1e-6)
    best = (rates * most_progress(rates, scale, workers)).sum()
    assert (rates * centre).sum() == pytest.approx(best, rel=1e-5)


def test_alike_jobs_get_exactly_alike_in_the_interior() -> None:
    gain = np.tile([[3.0, 1.0, 2.0], [1.0, 1.5, 0.5]], (5, 1))
    x = level_centre(gain, np.ones(10), [2, 2, 2])
    assert (x[0::2] == x[0]).all()
    assert (x[1::2] == x[1]).all()
    assert np.linalg.matrix_rank(x) == 2
