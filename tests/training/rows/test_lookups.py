"""Lookups of embedding tables: generated, split over workers, refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.training.rows.lookups import parse, read
from foretrace.training.rows.rows import RowsInMemory


def test_zipf_is_skewed_and_repeats_with_its_seed() -> None:
    lookups = parse("zipf:1.2 tables=3 rows=1000 pooling=2 samples=64 batches=5 seed=7")
    again = parse("zipf:1.2 tables=3 rows=1000 pooling=2 samples=64 batches=5 seed=7")
    assert lookups.batches == 5 and [len(table.ids) for table in lookups.tables] == [2 * 64 * 5] * 3
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


def test_files_are_read_as_what_samples_read(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"users": [[3, 1], [], [3]], "items": [9, 8, 9]}), tmp_path / "a.parquet")
    arrays: dict[str, Any] = {
        "users.ids": np.array([3, 1, 3]),
        "users.offsets": np.array([0, 2, 2, 3]),
        "items.ids": np.array([9, 8, 9]),
    }
    np.savez(tmp_path / "a.npz", **arrays)
    for name in ("a.parquet", "a.npz"):
        found = read(tmp_path / name, samples=2, rows={"items": 20})
        assert [(table.name, table.rows, len(table.ids)) for table in found.tables] == [
            ("users", 4, 3),
            ("items", 20, 3),
        ]
        assert found.batches == 1
        assert [[each.tolist() for each in table] for table in found.read(0)] == [
            [[3, 1], [0, 2, 2]],
            [[9, 8], [0, 1, 2]],
        ]
        assert read(tmp_path / name).samples == 3
    assert read("zipf:1 tables=1 rows=9 samples=4 batches=2").batches == 2


def _npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    named: dict[str, Any] = {name.replace("_", "."): array for name, array in arrays.items()}
    np.savez(file, **named)
    return file.getvalue()


@pytest.mark.parametrize(
    "data, says",
    [
        (b"", "NPZ|zip"),
        (_npz(a_ids=[0.5]), "list of int64"),
        (_npz(a_ids=[[1]]), "list of int64"),
        (_npz(a_ids=[-1]), "from 0 to"),
        (_npz(a_ids=[1, 2], a_offsets=[0, 1]), "rise from 0 to its 2 ids"),
        (_npz(a_ids=[1, 2], b_ids=[1]), "same number of samples"),
        (_npz(a_ids=np.zeros(0, np.int64)), "no samples"),
        (_npz(other=[1]), "no samples"),
    ],
)
def test_what_is_no_file_of_ids_is_refused(data: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(ForetraceError, match=says) as error:
        read(tmp_path / "a.npz")
    assert "\n" not in str(error.value)


def test_sizes_that_are_given_must_fit(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(_npz(a_ids=[1, 7]))
    for rows, says in (({"a": 5}, "from 0 to 4, got 7"), ({"b": 5}, "no table b")):
        with pytest.raises(ForetraceError, match=says):
            read(tmp_path / "a.npz", rows=rows)
    with pytest.raises(ForetraceError, match="does not exist"):
        read(tmp_path / "b.npz")
    with pytest.raises(ForetraceError, match="say their samples"):
        read("zipf:1", samples=4)
