"""Allocation rules: feasible, as good as brute force on tiny cases, never worse than anything random."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.fleet import allocations
from foretrace.fleet.workload import Float64

pytest.importorskip("scipy")
CASE = tuple[Float64, Float64, Float64, np.random.Generator]


@st.composite
def cases(draw: st.DrawFn) -> CASE:
    """(rates, scale, workers, random numbers): up to 7 jobs on up to 3 types; some rates are 0."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    m, n = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    rates = 10.0 ** rng.uniform(-1, 2, (m, n)) * (rng.random((m, n)) > 0.2)
    rates[rates.sum(axis=1) == 0, 0] = 1.0
    return rates, rng.choice([1.0, 2.0, 4.0], m), rng.integers(1, 9, n).astype(float), rng


def feasible(x: Float64, scale: Float64, workers: Float64, slack: float = 1e-9) -> bool:
    return bool(
        (x >= -slack).all()
        and (x.sum(axis=1) <= 1 + slack).all()
        and ((scale[:, None] * x).sum(axis=0) <= workers * (1 + slack)).all()
    )


def random_allocation(scale: Float64, workers: Float64, rng: np.random.Generator) -> Float64:
    """Some of the room, sometimes all of it."""
    x = rng.random((len(scale), len(workers))) ** 3
    x /= np.maximum(x.sum(axis=1), 1.0)[:, None]
    over = (scale[:, None] * x).sum(axis=0) / workers
    made: Float64 = x / max(over.max(), x.sum(axis=1).max())
    return made


@given(cases())
@settings(max_examples=40)
def test_max_min_is_feasible_and_no_random_allocation_is_better(case: CASE) -> None:
    rates, scale, workers, rng = case
    weights = rng.choice([1.0, 5.0], len(rates))
    gain = allocations.normalised(rates, scale, workers, weights)
    x = allocations.max_min(rates, scale, workers, weights)
    assert feasible(x, scale, workers)
    reached = (gain * x).sum(axis=1).min()
    for _ in range(20):
        other = random_allocation(scale, workers, rng)
        assert (gain * other).sum(axis=1).min() <= reached * (1 + 1e-6)


@given(cases())
@settings(max_examples=25)
def test_makespan_is_the_shortest(case: CASE) -> None:
    rates, scale, workers, rng = case
    left = rng.uniform(1, 1000, len(rates))
    x, seconds = allocations.makespan(rates, scale, workers, left)
    assert feasible(x, scale, workers)
    assert (left / (rates * x).sum(axis=1)).max() == pytest.approx(seconds)
    for _ in range(20):
        progress = (rates * random_allocation(scale, workers, rng)).sum(axis=1)
        assert (left >= progress * seconds * (1 - 1e-6)).any()


@given(cases())
@settings(max_examples=25)
def test_finish_time_fairness_is_the_smallest_worst_ratio(case: CASE) -> None:
    rates, scale, workers, rng = case
    left, past = rng.uniform(1, 1000, len(rates)), rng.uniform(0, 1000, len(rates))
    own = (rates * allocations.isolated(scale, workers)).sum(axis=1)
    alone = past * rng.uniform(0.2, 1.5) + left / own
    x, rho = allocations.finish_time_fairness(rates, scale, workers, elapsed=past, remaining=left, alone=alone)
    assert feasible(x, scale, workers)
    assert ((past + left / (rates * x).sum(axis=1)) / alone).max() == pytest.approx(rho)
    # a ρ smaller by a ten-thousandth asks for more than there is
    wanted = left / np.maximum((1 - 1e-4) * rho * alone - past, 1e-12)
    assert allocations.best_worst(rates / wanted[:, None], scale, workers)[1] < 1.0


@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 3), st.integers(0, 10**6))
@settings(max_examples=40)
def test_allox_starts_what_brute_force_starts(m: int, one: int, two: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rates, left = rng.uniform(1, 10, (m, 2)), rng.uniform(10, 100, m)
    waited = rng.uniform(0, 50, m)
    chosen = allocations.allox(rates, left, waited, [one, two])
    gpus = [0] * one + [1] * two
    if not gpus:
        assert (chosen == -1).all()
        return
    run = left[:, None] / rates[:, gpus]

    def total(lists: tuple[int, ...], order: tuple[int, ...]) -> float:
        clock = [0.0] * len(gpus)
        done = 0.0
        for job in order:
            clock[lists[job]] += run[job, lists[job]]
            done += clock[lists[job]]
        return done

    best = min(
        (
            (total(lists, order), lists, order)
            for lists in itertools.product(range(len(gpus)), repeat=m)
            for order in itertools.permutations(range(m))
        ),
        key=lambda each: each[0],
    )
    assert (np.bincount(chosen[chosen >= 0], minlength=2) <= [one, two]).all()
    # the same completion times come out if what AlloX starts first runs first, on the type it chose
    firsts = {job for job in range(m) if chosen[job] >= 0}
    kept = [
        total(lists, order)
        for lists in itertools.product(range(len(gpus)), repeat=m)
        for order in itertools.permutations(range(m))
        if all(gpus[lists[job]] == chosen[job] for job in firsts)
        and {next(j for j in order if lists[j] == g) for g in set(lists)} == firsts
    ]
    assert min(kept) == pytest.approx(best[0])


def test_allox_with_few_of_the_oldest() -> None:
    rates = np.ones((4, 1))
    left = np.array([100.0, 1.0, 2.0, 3.0])
    assert allocations.allox(rates, left, [9, 1, 1, 1], [1]).tolist() == [-1, 0, -1, -1]
    assert allocations.allox(rates, left, [9, 1, 1, 1], [1], alpha=0.2).tolist() == [0, -1, -1, -1]


def test_allox_starts_nobody_where_it_cannot_run() -> None:
    assert allocations.allox([[0.0, 1.0]], [10.0], [0.0], [1, 0]).tolist() == [-1]


def test_two_jobs_that_each_prefer_one_type_get_it() -> None:
    x = allocations.max_min([[10.0, 1.0], [1.0, 10.0]], [1, 1], [1, 1])
    assert np.allclose(x, np.eye(2))
    assert allocations.makespan([[10.0, 1.0], [1.0, 10.0]], [1, 1], [1, 1], [100, 50])[1] == pytest.approx(10.0)


def test_jobs_that_run_nowhere_and_no_jobs_at_all() -> None:
    x = allocations.max_min([[1.0, 1.0], [0.0, 0.0]], [1, 1], [1, 1])
    assert x[0].sum() == pytest.approx(1.0)
    assert x[1].tolist() == [0.0, 0.0]
    assert allocations.makespan([[0.0]], [1], [1], [5])[1] == float("inf")
    empty = np.zeros((0, 2))
    assert allocations.max_min(empty, [], [1, 1]).shape == (0, 2)
    assert allocations.isolated([], [1, 1]).shape == (0, 2)
    assert allocations.finish_time_fairness(empty, [], [1, 1], elapsed=[], remaining=[], alone=[])[1] == 0.0
    assert allocations.allox(empty, [], [], [1, 1]).shape == (0,)
