"""Sharing by pairs and most progress: feasible, and no worse than what they are compared with."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings

from foretrace.errors import ForetraceError
from foretrace.fleet import allocations
from reproductions.gavel.allocations import max_min_shared, most_progress
from tests.fleet.test_allocations import CASE, cases, feasible, random_allocation

pytest.importorskip("scipy")


@given(cases())
@settings(max_examples=25)
def test_most_progress_by_cost(case: CASE) -> None:
    rates, scale, workers, rng = case
    cost = rng.uniform(0.1, 3, len(workers))
    x = most_progress(rates, scale, workers, cost=cost)
    assert feasible(x, scale, workers)
    for _ in range(20):
        other = random_allocation(scale, workers, rng)
        assert (rates / cost * other).sum() <= (rates / cost * x).sum() * (1 + 1e-6)
    least = (rates * allocations.isolated(scale, workers)).sum(axis=1) * 0.9
    x = most_progress(rates, scale, workers, at_least=least)
    assert ((rates * x).sum(axis=1) >= least * (1 - 1e-6)).all()


@given(cases())
@settings(max_examples=25)
def test_sharing_is_feasible_and_never_worse_than_not_sharing(case: CASE) -> None:
    rates, scale, workers, rng = case
    m, n = rates.shape
    pairs = [(i, j) for i, j in itertools.combinations(range(m), 2) if scale[i] == scale[j]]
    members = [(i, -1) for i in range(m)] + pairs
    both = np.zeros((len(members), n, 2))
    both[:m, :, 0] = rates
    for at, (i, j) in enumerate(pairs, start=m):
        both[at] = np.stack([rates[i], rates[j]], axis=1) * rng.uniform(0, 1, (n, 2))
    x = max_min_shared(members, both, scale, workers)
    time, progress = np.zeros(m), np.zeros(m)
    base = rates.mean(axis=1) if n == 1 else (rates * workers / workers.sum()).sum(axis=1)
    for at, entry in enumerate(members):
        for place, job in enumerate(entry):
            if job >= 0:
                time[job] += x[at].sum()
                progress[job] += (both[at, :, place] * x[at]).sum() * scale[job] / base[job]
    assert (x >= 0).all()
    assert (time <= 1 + 1e-9).all()
    used = scale[[entry[0] for entry in members]]
    assert ((used[:, None] * x).sum(axis=0) <= workers * (1 + 1e-9)).all()
    alone = allocations.max_min(rates, scale, workers)
    level = (allocations.normalised(rates, scale, workers) * alone).sum(axis=1).min()
    assert progress.min() >= level * (1 - 1e-6)


def test_two_jobs_on_one_gpu_gain_by_sharing() -> None:
    rates = [[[10.0, 0.0]], [[10.0, 0.0]], [[8.0, 8.0]]]
    x = max_min_shared([(0, -1), (1, -1), (0, 1)], rates, [1, 1], [1])
    assert np.allclose(x, [[0], [0], [1]])


def test_progress_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(ForetraceError, match="lower it or add GPUs"):
        most_progress([[1.0], [1.0]], [1, 1], [1], at_least=[1.0, 1.0])
