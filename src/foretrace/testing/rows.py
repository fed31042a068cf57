"""`RowsConformance`: what every store of rows and every cache around one must do, as tests to inherit from.

Reads and writes as a plain array would have them, to the bit; counts calls and bytes; refuses what is no row or does
not fit; says in one sentence that its store is gone, and never gives or keeps a part of a row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from foretrace.arrays import Float32, Int64
from foretrace.errors import ForetraceError
from foretrace.training.rows.rows import Rows

_COUNT, _WIDTH, _TRIES = 97, 5, 40


def _values(count: int = _COUNT, width: int = _WIDTH, seed: int = 0) -> Float32:
    """Return numbers whose bits are easily lost: zeros of both signs, denormals and infinity among others."""
    random = np.random.default_rng(seed)
    found = random.standard_normal((count, width)).astype(np.float32)
    odd = np.array([0.0, -0.0, 1e-42, -1e-42, np.inf, 3.0], np.float32)
    found.flat[random.permutation(found.size)[: found.size // 4]] = random.choice(odd, found.size // 4)
    return found


def same_bits(one: Float32, other: Float32) -> bool:
    """Return whether two arrays hold the same numbers, NaN and the sign of zero included."""
    return one.shape == other.shape and bool((one.view(np.uint32) == other.view(np.uint32)).all())


class RowsConformance:
    """Tests of one kind of rows: override `rows`; `kill`, `reopen` and `too_small` where there is such a thing."""

    def rows(self, values: Float32) -> Rows:
        """Return rows that hold a copy of `values` (count, width). They are closed by the tests."""
        raise NotImplementedError("override rows() and return yours")

    def kill(self, rows: Rows) -> bool:
        """End the store behind open rows without a warning; False where there is none (an array of this process)."""
        return False

    def reopen(self, rows: Rows) -> Rows | None:
        """Return the store of closed rows, opened again; None where nothing outlives them."""
        return None

    def too_small(self, values: Float32) -> Callable[[], Rows] | None:
        """Return what makes a cache that cannot hold one batch; None for what is no cache."""
        return None

    def test_is_as_a_plain_array_to_the_bit(self) -> None:
        truth, random = _values(), np.random.default_rng(1)
        with self.rows(truth.copy()) as rows:
            assert (rows.count, rows.width) == truth.shape
            for turn in range(_TRIES):
                ids = self._some(random, turn)
                new = _values(len(ids), seed=turn)
                if turn % 3 == 0:
                    rows.put(ids, new)
                    truth[ids] = new
                elif turn % 3 == 1:
                    new[~np.isfinite(new)] = 1.0
                    rows.add(ids, new)
                    truth[ids] += new
                asked = random.integers(0, _COUNT, size=turn)  # any order, some twice, at first none
                assert same_bits(rows.get(asked), truth[asked])

    def test_gives_copies_and_keeps_copies(self) -> None:
        truth = _values()
        with self.rows(truth.copy()) as rows:
            ids, new = np.arange(3), np.ones((3, _WIDTH), np.float32)
            rows.put(ids, new)
            new[:] = 5.0
            rows.get(ids)[:] = 7.0
            assert (rows.get(ids) == 1.0).all()

    def test_counts_calls_rows_and_bytes(self) -> None:
        with self.rows(_values()) as rows:
            rows.get(np.array([3, 3, 1]))
            rows.put(np.array([2, 4]), np.zeros((2, _WIDTH), np.float32))
            rows.add(np.array([5]), np.zeros((1, _WIDTH), np.float32))
            found = rows.counters
            assert (found.gets, found.rows_read, found.bytes_read) == (1, 3, 3 * _WIDTH * 4)
            assert (found.writes, found.rows_written, found.bytes_written) == (2, 3, 3 * _WIDTH * 4)
            assert found.wait_s >= 0

    def test_refuses_what_is_no_row_and_changes_nothing(self) -> None:
        truth = _values()
        with self.rows(truth.copy()) as rows:
            for wrong in (np.array([_COUNT]), np.array([-1]), np.array([[0]]), np.array([0.5])):
                with pytest.raises(ForetraceError):
                    rows.get(wrong)
                with pytest.raises(ForetraceError):
                    rows.put(wrong, np.ones((1, _WIDTH), np.float32))
            with pytest.raises(ForetraceError, match="distinct"):
                rows.add(np.array([1, 1]), np.ones((2, _WIDTH), np.float32))
            with pytest.raises(ForetraceError, match="shape"):
                rows.put(np.array([1]), np.ones((1, _WIDTH + 1), np.float32))
            assert same_bits(rows.get(np.arange(_COUNT)), truth)

    def test_closes_twice_and_keeps_what_outlives_it(self) -> None:
        truth = _values()
        rows = self.rows(truth.copy())
        new = _values(4, seed=9)
        rows.put(np.arange(4), new)
        truth[:4] = new
        rows.close()
        rows.close()
        if (again := self.reopen(rows)) is not None:
            with again:
                assert same_bits(again.get(np.arange(_COUNT)), truth)

    def test_says_in_a_sentence_that_its_store_is_gone(self) -> None:
        rows = self.rows(_values())
        try:
            rows.get(np.arange(2))
            if not self.kill(rows):
                pytest.skip("these rows live in this process: nothing else can end")
            with pytest.raises(ForetraceError) as gone:
                for _ in range(3):  # what was sent before the end was seen may be lost without a word, once
                    rows.put(np.arange(2), np.ones((2, _WIDTH), np.float32))
                    rows.get(np.arange(2))
            assert str(gone.value).strip().endswith(".") and "\n" not in str(gone.value)
        finally:
            rows.close()

    def test_never_gives_a_part_of_a_row_while_its_store_is_ended(self) -> None:
        values = np.zeros((_COUNT, _WIDTH), np.float32)
        with self.rows(values.copy()) as other:
            if not self.kill(other):
                pytest.skip("these rows live in this process: nothing else can end")
        rows, ids = self.rows(values), np.arange(_COUNT)
        killer = threading.Timer(0.05, self.kill, (rows,))
        killer.start()
        found, turn = values, 0
        try:
            with pytest.raises(ForetraceError):
                while turn < 1_000_000:
                    turn += 1
                    rows.put(ids, np.full((_COUNT, _WIDTH), turn, np.float32))
                    found = rows.get(ids)
                    assert (found == turn).all()
        finally:
            killer.join()
            rows.close()
        if (again := self.reopen(rows)) is not None:
            with again:
                kept = again.get(ids)
                assert (kept == kept[:, :1]).all()

    def test_a_cache_that_cannot_hold_one_batch_is_refused(self) -> None:
        make = self.too_small(_values())
        if make is None:
            pytest.skip("these rows are no cache")
        with pytest.raises(ForetraceError, match="batch"):
            make()

    def _some(self, random: np.random.Generator, turn: int) -> Int64:
        """Return distinct rows, sometimes none, sometimes all."""
        return random.permutation(_COUNT)[: (0, _COUNT, 7, 31)[turn % 4]].astype(np.int64)
