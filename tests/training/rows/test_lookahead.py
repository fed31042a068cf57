"""What the oracle cacher decides, against sets that are kept by hand, and the cache that obeys it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.arrays import Float32, Int64
from foretrace.errors import ForetraceError
from foretrace.testing import RowsConformance
from foretrace.testing.rows import same_bits
from foretrace.training.rows.lookahead import LookAheadRows, numbered, plan_ahead
from foretrace.training.rows.lookups import EmbeddingTable, Lookups, zipf
from foretrace.training.rows.rows import Rows, RowsInMemory


def small(seed: int, batches: int = 12) -> Lookups:
    return zipf(exponent=1.1, tables=3, rows=40, pooling=2, samples=8, batches=batches, seed=seed)


@given(st.integers(0, 99), st.integers(1, 4), st.integers(1, 14))
def test_hits_are_those_of_an_oracle_over_the_window(seed: int, trainers: int, look_ahead: int) -> None:
    lookups = small(seed)
    plan = plan_ahead(lookups, trainers=trainers, look_ahead=look_ahead)
    read = [
        [set(numbered(lookups, batch, trainer, trainers)[0].tolist()) for trainer in range(trainers)]
        for batch in range(lookups.batches)
    ]
    hits = entries = 0
    held: list[set[int]] = [set() for _ in range(trainers)]
    for batch, parts in enumerate(read):
        now, window = set.union(*parts), [set.union(*each) for each in read[max(batch - look_ahead, 0) : batch]]
        hits, entries = hits + len(now & set().union(*window)), entries + len(now)
        turns = [plan.turn(batch, trainer) for trainer in range(trainers)]
        for trainer, turn in enumerate(turns):
            assert set(turn.ids) == parts[trainer]
            assert not set(turn.fetch) & held[trainer]  # never fetched while it is held
            held[trainer] |= set(turn.fetch)
            assert parts[trainer] <= held[trainer]
        owned = [set(turn.owned.tolist()) for turn in turns]
        assert set.union(*owned) == now and sum(map(len, owned)) == len(now)  # each row is updated once
        for trainer, turn in enumerate(turns):
            assert owned[trainer] <= parts[trainer]
            for other in range(trainers):
                np.testing.assert_array_equal(turn.gradients_to[other], turns[other].gradients_from[trainer])
                np.testing.assert_array_equal(turn.values_to[other], turns[other].values_from[trainer])
                alone = set(turn.owned[: len(turn.owned)]) - set().union(*(set(g) for g in turn.gradients_from))
                assert all(sum(row in part for part in parts) == 1 for row in alone)
            held[trainer] = (held[trainer] - set(turn.evict)) | {
                int(row) for values in turn.values_from for row in values
            }
        back = set().union(*(set(turn.write_back.tolist()) for turn in turns))
        later = [set.union(*each) for each in read[batch + 1 : batch + 1 + look_ahead]]
        assert back == now - set().union(*later)
        assert max(map(len, held)) <= plan.held.max()
    assert plan.hit_rate == pytest.approx(hits / entries)
    assert not any(held)


def test_looks_no_further_ahead_than_it_says() -> None:
    lookups = small(3)
    whole, cut = (plan_ahead(lookups, trainers=2, look_ahead=4, end=end) for end in (12, 9))
    for batch in range(5):
        for trainer in range(2):
            one, other = whole.turn(batch, trainer), cut.turn(batch, trainer)
            np.testing.assert_array_equal(one.write_back, other.write_back)
            np.testing.assert_array_equal(one.fetch, other.fetch)
            for mine, its in zip(one.values_to, other.values_to, strict=True):
                np.testing.assert_array_equal(mine, its)


def test_needed_at_once_and_later_make_up_all() -> None:
    plan = plan_ahead(small(5), trainers=3, look_ahead=4)
    for batch in range(plan.end):
        following = set(plan.turn(batch + 1, 1).ids) if batch + 1 < plan.end else set()
        soon, later, both = (plan.turn(batch, 0, soon=each) for each in (True, False, None))
        assert set(soon.values_to[1]) <= following and not set(later.values_to[1]) & following
        assert set(soon.owned) | set(later.owned) == set(both.owned)
        assert len(soon.write_back) == 0


@pytest.mark.parametrize("look_ahead", [1, 3, 12])
def test_a_training_through_the_cache_is_the_training_without(look_ahead: int) -> None:
    lookups = small(7)
    plan = plan_ahead(lookups, trainers=1, look_ahead=look_ahead)
    truth = np.random.default_rng(0).standard_normal((plan.count, 4)).astype(np.float32)
    inner = RowsInMemory(truth.copy())
    with LookAheadRows(inner, plan) as rows:
        for batch in range(plan.end):
            turn = plan.turn(batch, 0)
            rows.begin(turn)
            rows.put(turn.ids, rows.get(turn.ids) * np.float32(1.5))
            rows.end(turn)
            truth[turn.ids] *= np.float32(1.5)
        assert rows.held == 0 and rows.counters.hits / (rows.counters.hits + rows.counters.misses) == plan.hit_rate
        assert inner.counters.rows_read == rows.counters.misses
    assert same_bits(inner.values, truth)


def test_a_row_that_is_no_longer_held_cannot_be_read() -> None:
    plan = plan_ahead(small(1), trainers=1, look_ahead=2)
    rows = LookAheadRows(RowsInMemory(np.ones((plan.count, 2), np.float32)), plan)
    rows.begin(plan.turn(0, 0))
    rows.poison(plan.turn(0, 0).ids[:1])
    with pytest.raises(RuntimeError, match="held"):
        rows.get(plan.turn(0, 0).ids)


def test_what_cannot_be_is_refused() -> None:
    lookups = small(0)
    plan = plan_ahead(lookups, trainers=2, look_ahead=12)
    inner = RowsInMemory(np.ones((plan.count, 2), np.float32))
    for capacity, why in ((5, "one batch"), (int(plan.held[0]) - 1, "less far")):
        with pytest.raises(ForetraceError, match=why):
            LookAheadRows(inner, plan, 0, capacity)
    with pytest.raises(ForetraceError, match="table has"):
        LookAheadRows(RowsInMemory(np.ones((3, 2), np.float32)), plan)
    for wrong in ({"trainers": 0}, {"trainers": 9}, {"look_ahead": 0}, {"begin": 12}, {"end": 13}):
        with pytest.raises(ForetraceError):
            plan_ahead(lookups, **{"trainers": 1, "look_ahead": 1} | wrong)


class TestLookAhead(RowsConformance):
    """Half of the rows are held, as in the middle of a batch; the others are asked of the table."""

    def plan_of(self, count: int) -> tuple[Lookups, Int64]:
        ids = np.arange(0, count, 2)
        table = EmbeddingTable(name="t", rows=count, ids=ids, offsets=np.array([0, len(ids)]))
        return Lookups(tables=(table,), samples=1), ids

    def rows(self, values: Float32) -> Rows:
        lookups, _ = self.plan_of(len(values))
        plan = plan_ahead(lookups, trainers=1, look_ahead=1)
        rows = LookAheadRows(RowsInMemory(values), plan)
        rows.begin(plan.turn(0, 0))
        return rows

    def too_small(self, values: Float32) -> Callable[[], Rows]:
        lookups, ids = self.plan_of(len(values))
        plan = plan_ahead(lookups, trainers=1, look_ahead=1)
        return lambda: LookAheadRows(RowsInMemory(values), plan, 0, len(ids) - 1)
