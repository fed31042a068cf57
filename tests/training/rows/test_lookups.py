"""Lookups of embedding tables: generated, split over workers, refused."""

from __future__ import annotations

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.training.rows.lookups import parse
from foretrace.training.rows.rows import RowsInMemory


def test_zipf_is_skewed_and_repeats_with_its_seed() -> None:
    lookups = parse("zipf:1.2 tables=3 rows=1000 pooling=2 samples=64 batches=5 seed=7")
    again = parse("zipf:1.2 tables=3 rows=1000 pooling=2 samples=64 batches=5 seed=7")
    assert lookups.batches == 5 and [table.pooling for table in lookups.tables] == [2, 2, 2]
    for one, other in zip(lookups.tables, again.tables, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        counts = np.sort(np.bincount(one.ids, minlength=1000))[::-1]
        expected = np.arange(1, 1001) ** -1.2
        assert counts[0] / len(one.ids) == pytest.approx(expected[0] / expected.sum(), abs=0.06)


def test_workers_read_a_batch_between_them() -> None:
    lookups = parse("zipf:1 tables=2 rows=50 pooling=3 samples=10 batches=2")
    whole = lookups.read(1)
    parts = [lookups.read(1, worker, 3) for worker in range(3)]
    for table in range(2):
        np.testing.assert_array_equal(np.concatenate([part[table][0] for part in parts]), whole[table][0])
        assert sum(len(part[table][1]) - 1 for part in parts) == 10


@pytest.mark.parametrize("text", ["zipf:", "zipf:x", "gauss:1", "zipf:1 tables=0", "zipf:1 row=4", "zipf:-1"])
def test_what_is_no_lookup_is_refused(text: str) -> None:
    with pytest.raises(ForetraceError):
        parse(text)


def test_rows_count_what_they_give_and_refuse_what_they_lack() -> None:
    rows = RowsInMemory(np.zeros((4, 2), np.float32))
    rows.add(np.array([1, 3]), np.ones((2, 2), np.float32))
    assert rows.get(np.array([3, 0, 3])).tolist() == [[1, 1], [0, 0], [1, 1]]
    assert (rows.counters.bytes_read, rows.counters.bytes_written) == (24, 16)
    for wrong in (np.array([4]), np.array([-1]), np.array([[0]]), np.array([0.5])):
        with pytest.raises(ForetraceError):
            rows.get(wrong)
    with pytest.raises(ForetraceError, match="distinct"):
        rows.add(np.array([1, 1]), np.ones((2, 2), np.float32))
    with pytest.raises(ForetraceError, match="shape"):
        rows.put(np.array([1]), np.ones((2, 2), np.float32))
