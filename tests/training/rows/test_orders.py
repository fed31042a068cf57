"""BETA and COMET: every pair meets, swaps stay near the bound, every bucket is trained once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.training.rows.orders import assign, beta, comet, swaps, swaps_bound


def sizes() -> st.SearchStrategy[tuple[int, int]]:
    return st.integers(2, 24).flatmap(lambda p: st.tuples(st.just(p), st.integers(2, p)))


@given(sizes(), st.integers(0, 2**32))
def test_beta_changes_one_partition_and_no_pair_is_missed(size: tuple[int, int], seed: int) -> None:
    partitions, buffer = size
    states = beta(partitions, buffer, np.random.default_rng(seed))
    assert all(len(set(state)) == buffer for state in states)
    assert all(len({*after} - {*before}) == 1 for before, after in pairwise(states))
    assert swaps(states) >= swaps_bound(partitions, buffer)
    buckets = np.concatenate(assign(states, partitions))
    assert len(np.unique(buckets, axis=0)) == len(buckets) == partitions**2


@pytest.mark.parametrize("partitions", [8, 16, 32, 64])
@pytest.mark.parametrize("buffer", [2, 4, 8, 16])
def test_swaps_of_beta_are_within_127_percent_of_the_bound(partitions: int, buffer: int) -> None:
    if buffer > partitions // 2:
        pytest.skip("a buffer of more than half")
    found = swaps(beta(partitions, buffer, np.random.default_rng(3))) / swaps_bound(partitions, buffer)
    assert 1.0 <= found <= 1.275


def test_known_swaps() -> None:
    assert swaps(beta(16, 4, np.random.default_rng(0))) == 42
    assert swaps_bound(16, 4) == 38
    assert swaps(comet(16, 4, np.random.default_rng(0))) == 54
    assert swaps_bound(8, 2) == 27 == swaps(beta(8, 2, np.random.default_rng(0)))  # one pair a state: none to spare
    assert swaps_bound(5, 5) == 0


@given(st.integers(2, 10), st.integers(2, 5), st.integers(1, 3), st.integers(0, 2**32))
def test_comet_trains_every_bucket_once_in_a_state_that_holds_it(groups: int, held: int, group: int, seed: int) -> None:
    partitions, buffer = groups * group, min(held, groups) * group
    random = np.random.default_rng(seed)
    states = comet(partitions, buffer, random, group=group)
    found = assign(states, partitions, random)
    for state, buckets in zip(states, found, strict=True):
        assert np.isin(buckets, state).all()
    assert len(np.unique(np.concatenate(found), axis=0)) == partitions**2 == sum(map(len, found))


def test_the_same_seed_gives_the_same_order() -> None:
    assert beta(16, 4, np.random.default_rng(5)) == beta(16, 4, np.random.default_rng(5))
    assert beta(16, 4, np.random.default_rng(5)) != beta(16, 4, np.random.default_rng(6))


def test_what_cannot_be_is_refused() -> None:
    random = np.random.default_rng(0)
    with pytest.raises(ForetraceError, match="2 to 8"):
        beta(8, 1, random)
    with pytest.raises(ForetraceError, match="2 to 8"):
        beta(8, 9, random)
    with pytest.raises(ForetraceError, match="multiples"):
        comet(8, 3, random)
    with pytest.raises(ForetraceError, match="must meet"):
        assign([(0, 1), (1, 2)], 3)
