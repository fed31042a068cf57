"""Damaged logs end in a workload or in an error for the user; own files come back as they were written."""

from __future__ import annotations

import gzip
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.fleet.formats import read, write_csv
from foretrace.fleet.workload import LONGEST_S, SECOND, Workload
from tests.fleet.format_samples import SAMPLES

STRAYS = [
    b'"',
    b",",
    b"\t",
    b"|",
    b"\n",
    b"\x00",
    b"-",
    b"e9",
    b"nan",
    b"inf",
    b"1_0",
    b"null",
    b"{}",
    b"[",
    b"\xff",
    b"9" * 400,
]


@st.composite
def mutations(draw: st.DrawFn, text: bytes) -> bytes:
    """Bytes overwritten, cut out, doubled or put in."""
    data = bytearray(text)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.integers(0, 4)):
            case 0:
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case 1:
                del data[at : at + draw(st.integers(1, 40))]
            case 2:
                data[at:at] = data[at : at + draw(st.integers(1, 60))]
            case 3:
                data[at:at] = draw(st.sampled_from(STRAYS))
            case _:
                end = at + draw(st.integers(1, 8))
                data[at:end] = draw(st.sampled_from(STRAYS))
    return bytes(data)


def accounted(workload: Workload) -> int:
    notes = (re.match(r"(\d+) rows ", note) for note in workload.origin.notes)
    return len(workload) + len(workload.origin.refused) + sum(int(note[1]) for note in notes if note)


@pytest.mark.parametrize("name", SAMPLES)
def test_damage_ends_in_a_workload_or_an_error(name: str) -> None:
    text, format = SAMPLES[name]
    read_at_all = 0

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"

        @settings(max_examples=40)
        @example(data=text.encode(), forced=True, salvage=True)
        @given(data=mutations(text.encode()), forced=st.booleans(), salvage=st.booleans())
        def damaged(data: bytes, forced: bool, salvage: bool) -> None:
            nonlocal read_at_all
            path.write_bytes(data)
            try:
                made = read(path, format if forced else "auto", salvage=salvage)
            except ForetraceError as error:
                assert str(error).endswith("."), error
                assert "\n" not in str(error)
                return
            made.validate()
            assert accounted(made) == made.origin.rows
            read_at_all += 1

        damaged()
    assert read_at_all  # the whole file at least, else this test would see errors only


@settings(max_examples=40)
@given(data=st.binary(max_size=200), packed=st.booleans())
def test_any_bytes(data: bytes, packed: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_bytes(gzip.compress(data)[: len(data) + 30] if packed else data)
        with pytest.raises(ForetraceError):
            read(path)


names = st.text(max_size=8)
numbers = st.floats(allow_nan=True, allow_infinity=False)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    n = draw(st.integers(1, 6))

    def column(each: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(each, min_size=n, max_size=n))

    gpus = np.array(column(st.integers(1, 1_000_000)), np.int64)
    submit = np.sort(np.array(column(st.integers(0, 8_999_999_999 * SECOND)), np.int64))
    columns: dict[str, Any] = {key: np.array(column(names), object) for key in ("model", "tenant", "user", "gpu_type")}
    columns |= {key: column(numbers) for key in ("estimate_s", "iterations", "batch", "priority")}
    made = Workload.of(
        job=draw(st.lists(names, min_size=n, max_size=n, unique=True)),
        submit_s=np.arange(n),
        gpus=gpus,
        work_s=column(st.floats(1e-300, LONGEST_S) | st.just(float("nan"))),
        min_gpus=np.maximum(1, gpus - draw(st.integers(0, 9))),
        max_gpus=gpus + draw(st.integers(0, 9)),
        share=column(st.floats(0, 1, exclude_min=True)),
        **columns,
        epoch_s=draw(st.floats(0, 4e9)),
        details={
            "a:b": np.array(column(numbers)),
            "t": np.array(column(names), object),
            "i": np.array(column(st.integers(-(2**63), 2**63 - 1)), np.int64),
            "f": np.array(column(st.booleans())),
        },
    )
    stamps = [np.array(column(st.integers(-1, 8_999_999_999 * SECOND)), np.int64) for _ in range(2)]
    priority = np.where(np.isnan(made.priority), 0.0, made.priority)  # a blank cell says the usual priority
    return made.with_columns(submit_ns=submit, logged_start_ns=stamps[0], logged_end_ns=stamps[1], priority=priority)


@settings(max_examples=30)
@given(workload=workloads(), packed=st.booleans())
def test_own_files_come_back_as_they_were(workload: Workload, packed: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_csv(workload, Path(folder) / ("own.csv.gz" if packed else "own.csv"))
        again = read(path)
    assert again.origin.format == "foretrace"
    assert again.origin.rows == len(workload)
    assert again.epoch_s == workload.epoch_s
    for key in (
        "job", "submit_ns", "gpus", "work_s", "model", "tenant", "user", "gpu_type", "min_gpus", "max_gpus",
        "estimate_s", "priority", "share", "iterations", "batch", "logged_start_ns", "logged_end_ns",
    ):  # fmt: skip
        ours, theirs = getattr(workload, key), getattr(again, key)
        assert ours.dtype == theirs.dtype, key
        np.testing.assert_array_equal(ours, theirs, err_msg=key)
    assert list(again.details) == list(workload.details)
    for name, values in workload.details.items():
        assert again.details[name].dtype == values.dtype
        np.testing.assert_array_equal(again.details[name], values)


@pytest.mark.parametrize("name", SAMPLES)
def test_what_any_reader_returns_can_be_kept_as_own_file(name: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(SAMPLES[name][0])
    made = read(log)
    again = read(write_csv(made, tmp_path / "own.csv"))
    assert again.job.tolist() == made.job.tolist()
    assert (again.submit_ns == made.submit_ns).all()
    np.testing.assert_array_equal(again.work_s, made.work_s)
    assert set(again.details) == set(made.details)


def test_own_files_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "hand.csv"
    path.write_text("submit_s,gpus,work_s\n5,2,10\n0.5,1,20\n")
    made = read(path)
    assert (made.job.tolist(), made.submit_ns.tolist()) == (["1", "0"], [SECOND // 2, 5 * SECOND])
    path.write_text('job,submit_s,gpus,work_s\n"a\nb",0,1,5\nc"",x",0,1,5\n"d"e,0,1,5\nf,0,1,5\n,,,\n')
    with pytest.raises(ForetraceError, match="3 of 5 rows cannot be read, the first at line 4"):
        read(path)
    assert read(path, salvage=True).job.tolist() == ["a\nb", "f"]
    path.write_text("submit_s,gpus,work_s,speed\n5,2,10,1\n")
    with pytest.raises(ForetraceError, match="'speed' that is unknown"):
        read(path)


def test_a_detail_with_several_values_is_not_written(tmp_path: Path) -> None:
    made = Workload.of(submit_s=[0, 1], gpus=[1, 1], work_s=[1, 1], details={"pair": np.zeros((2, 2))})
    with pytest.raises(ForetraceError, match="not one value per job"):
        write_csv(made, tmp_path / "x.csv")
