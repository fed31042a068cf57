"""The genetic search behind Pollux: fronts, rules that states keep, and the best of few."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reproductions.pollux.genetic import Aim, _fronts, search


def test_front_against_its_definition() -> None:
    values = np.random.default_rng(3).integers(0, 12, (60, 2)).astype(float)
    front, crowd = _fronts(values)
    left = np.arange(len(values))
    for rank in range(front.max() + 1):
        better = [any((values[b] <= values[a]).all() and (values[b] < values[a]).any() for b in left) for a in left]
        assert front[left[~np.array(better)]].tolist() == [rank] * (len(left) - sum(better))
        left = left[np.array(better)]
    assert not len(left)
    ends = [values[front == 0][:, 0].argmin(), values[front == 0][:, 0].argmax()]
    assert np.isinf(crowd[front == 0][ends]).all()
    line = np.array([[0.0, 4.0], [1.0, 2.0], [2.0, 1.0], [4.0, 0.0]])
    assert _fronts(line)[1].tolist() == [np.inf, (2 / 4 + 3 / 4) / 2, (3 / 4 + 2 / 4) / 2, np.inf]


def aim_of(jobs: int, nodes: int, seed: int) -> Aim:
    random = np.random.default_rng(seed)
    return Aim(
        base=random.integers(0, 2, (jobs, nodes)).astype(np.int16),
        nodes=np.full(nodes, 4, np.int16),
        most=random.integers(1, 9, jobs),
        speedup=random.random((jobs, nodes + 1, 4 * nodes + 1)),
        kept=random.random(jobs),
    )


@settings(max_examples=25)
@given(jobs=st.integers(1, 6), nodes=st.integers(1, 5), seed=st.integers(0, 999))
def test_repaired_states_keep_to_the_rules(jobs: int, nodes: int, seed: int) -> None:
    aim, random = aim_of(jobs, nodes, seed), np.random.default_rng(seed)
    states = random.integers(0, 5, (20, jobs, nodes)).astype(np.int16)
    for repaired in (aim.repair(states.copy(), random), aim.repair(aim.mutate(states, random), random)):
        assert (repaired >= 0).all()
        assert (repaired.sum(axis=1) <= 4).all()
        assert (repaired.sum(axis=2) <= aim.most).all()
        spread = (np.count_nonzero(repaired, axis=2) > 1)[:, :, None] & (repaired > 0)
        assert (spread.sum(axis=1) <= 1).all()


def test_judged_as_defined() -> None:
    aim = aim_of(4, 3, 5)
    random = np.random.default_rng(0)
    states = aim.repair(random.integers(0, 3, (15, 4, 3)).astype(np.int16), random)
    for state, (mean, useful) in zip(states, aim.judge(states), strict=True):
        inverse, total = 0.0, 0.0
        for j, row in enumerate(state):
            speed = aim.speedup[j, np.count_nonzero(row), row.sum()]
            total += speed if row.sum() else 0
            scaled = speed * 3 / 12 * (1 if (row == aim.base[j]).all() else aim.kept[j])
            inverse += 1 / (scaled + 1e-3)
        assert -mean == pytest.approx(4 / inverse)
        used = 4 * np.count_nonzero(state.sum(axis=0))
        assert -useful == pytest.approx(total / used if used else 0)


def test_search_finds_the_best_of_few_states() -> None:
    """One job, two nodes: all states can be tried."""
    aim = aim_of(1, 2, 11)
    random = np.random.default_rng(1)
    every = np.array([[[a, b]] for a in range(5) for b in range(5) if a + b <= aim.most[0]], np.int16)
    found = search(aim, aim.base[None], 20, 30, random)
    assert aim.judge(found)[:, 0].min() == aim.judge(every)[:, 0].min()
