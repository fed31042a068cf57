"""The ledger: what goes in comes out, whoever writes at the same time and whoever is killed meanwhile."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import APPLICATION, Ledger, csv, default_path, verified_on, write
from tests.experiment.ledger_rows import make_row
from verify_zoo import concluded

ROOT = Path(__file__).resolve().parents[2]
WRITER = """
import sys
from pathlib import Path
from foretrace.experiment.ledger import Ledger
from tests.experiment.ledger_rows import make_row

ledger = Ledger(Path(sys.argv[1]))
for number in range(int(sys.argv[2])):
    ledger.add([make_row(seed=number)])
    print(number, flush=True)
"""


def writer(path: Path, rows: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), str(rows)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def integrity(path: Path) -> str:
    with contextlib.closing(sqlite3.connect(path)) as base:
        return str(base.execute("PRAGMA integrity_check").fetchone()[0])


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "deep" / "ledger.sqlite")
    rows = [make_row(seed=i, covered=i % 2 == 0) for i in range(3)]
    assert ledger.add(rows) == 3
    assert ledger.rows() == tuple(rows)
    assert ledger.add(rows) == 0


def test_rows_are_chosen_by_model_and_technique(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    one = make_row()
    other = make_row(model="gpt2", techniques="a + b", parameters={"a": {}, "b": {}})
    refused = make_row(model="llama", verdict="inconclusive")
    ledger.add([one, other, refused])
    assert ledger.rows(model="gpt2") == ledger.rows(technique="b") == (other,)
    assert ledger.rows(technique="mixed-precision", model="bert") == (one,)
    assert ledger.rows(technique="c") == ()
    assert concluded(ledger, ["mixed-precision"], "bert")
    assert not concluded(ledger, ["mixed-precision"], "gpt2")
    assert not concluded(ledger, ["mixed-precision"], "llama")  # nothing was concluded there
    assert verified_on(ledger.path) == {"mixed-precision": ("bert",)}


def test_without_a_ledger(tmp_path: Path) -> None:
    nothing = tmp_path / "none.sqlite"
    assert verified_on(nothing) == {}
    assert not concluded(Ledger(nothing), ["mixed-precision"], "bert")
    with pytest.raises(ForetraceError, match="there is no ledger"):
        Ledger(nothing).rows()
    assert not nothing.exists()


def test_an_export_is_imported_once(tmp_path: Path) -> None:
    first, second, lines = Ledger(tmp_path / "a.sqlite"), Ledger(tmp_path / "b.sqlite"), tmp_path / "rows.jsonl"
    first.add([make_row(seed=i) for i in range(5)])
    write(first.rows(), lines)
    assert second.import_jsonl(lines) == 5
    assert second.import_jsonl(lines) == 0
    assert second.rows() == first.rows()
    assert csv(second.rows()).count("\n") == 6


def test_a_broken_line_is_named_and_nothing_is_added(tmp_path: Path) -> None:
    ledger, lines = Ledger(tmp_path / "a.sqlite"), tmp_path / "rows.jsonl"
    ledger.add([make_row()])
    write(ledger.rows(), lines)
    lines.write_text(lines.read_text() + '{"id": 3}\n')
    other = Ledger(tmp_path / "b.sqlite")
    with pytest.raises(ForetraceError, match=r"rows\.jsonl, line 2 is no row"):
        other.import_jsonl(lines)
    assert not other.path.exists()
    with pytest.raises(ForetraceError, match="cannot read"):
        other.import_jsonl(tmp_path / "none.jsonl")


def test_files_that_are_no_ledger(tmp_path: Path) -> None:
    text = tmp_path / "text.sqlite"
    text.write_text("this is a text, long enough to be taken for a header of something else" * 20)
    other = tmp_path / "other.sqlite"
    with contextlib.closing(sqlite3.connect(other)) as base:
        base.execute("CREATE TABLE t (x)")
    for path in (text, other):
        before = path.read_bytes()
        for call in (Ledger(path).rows, lambda path=path: Ledger(path).add([make_row()])):
            with pytest.raises(ForetraceError, match="ledger"):
                call()
        assert path.read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["other.sqlite", "text.sqlite"]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("measured", math.nan, "measured of a row of the ledger must be a finite number, got nan"),
        ("predicted_high", math.inf, "predicted_high of a row of the ledger must be a finite number, got inf"),
        ("error", -math.inf, "error of a row"),
        ("seed", 2**63, "seed of a row of the ledger must be below 2"),
    ],
)
def test_a_number_that_no_ledger_can_hold_is_refused(tmp_path: Path, field: str, value: float, reason: str) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    row = make_row(**{field: value})
    with pytest.raises(ForetraceError, match=reason):
        ledger.add([make_row(), row])
    with pytest.raises(ForetraceError, match=reason):
        write([row], tmp_path / "rows.jsonl")
    assert not ledger.path.exists()
    assert not (tmp_path / "rows.jsonl").exists()


@given(
    texts=st.lists(st.text(st.characters(codec=None), max_size=12), min_size=3, max_size=3),
    numbers=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=2),
    seed=st.integers(-(2**63), 2**63 - 1),
    free=st.dictionaries(st.text(st.characters(codec=None), max_size=4), st.floats() | st.integers() | st.text()),
)
@settings(max_examples=40)
def test_any_row_survives_storing_exporting_and_importing(
    texts: list[str], numbers: list[float], seed: int, free: dict[str, Any]
) -> None:
    """With ends of lines that are none in JSON, lone surrogates, the largest seeds, NaN in what is kept as JSON."""
    row = make_row(
        model=texts[0], notes=(texts[1],), device=texts[2], measured=numbers[0], error=numbers[1], seed=seed, arms=free
    )
    with tempfile.TemporaryDirectory() as folder:
        first, second, lines = Ledger(Path(folder, "a")), Ledger(Path(folder, "b")), Path(folder, "rows.jsonl")
        assert first.add([row]) == 1
        write(first.rows(), lines)
        assert second.import_jsonl(lines) == 1
        (kept,) = second.rows()
        assert first.rows() == (kept,)
        assert (kept.measured, kept.error, kept.seed) == (row.measured, row.error, row.seed)
        if all(text.isprintable() for text in texts):
            assert (kept.model, kept.notes, kept.device) == (row.model, row.notes, row.device)


def test_a_ledger_that_may_only_be_read() -> None:
    code = (
        "import os, sys; from pathlib import Path; from foretrace.experiment.ledger import Ledger\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"  # who may do everything would prove nothing
        "sys.exit(len(Ledger(Path(sys.argv[1])).rows()))"
    )
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder, "ledger.sqlite"))
        ledger.add([make_row()])
        Path(folder).chmod(0o555)
        try:
            reader = subprocess.run([sys.executable, "-c", code, str(ledger.path)], check=False)
            there = sorted(each.name for each in Path(folder).iterdir())
        finally:
            Path(folder).chmod(0o755)
    assert reader.returncode == 1
    assert there == ["ledger.sqlite"]


def test_a_later_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path).add([make_row()])
    with contextlib.closing(sqlite3.connect(path)) as base:
        assert base.execute("PRAGMA application_id").fetchone()[0] == APPLICATION
        base.execute("PRAGMA user_version = 99")
    with pytest.raises(ForetraceError, match="schema version 99"):
        Ledger(path).rows()
    with pytest.raises(ForetraceError, match="schema version 99"):
        Ledger(path).add([make_row()])


def test_a_damaged_file_is_said_to_be_so(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path).add([make_row(seed=i) for i in range(50)])
    data = bytearray(path.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(ForetraceError, match="ledger"):
        Ledger(path).rows()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ForetraceError, match="cannot use the ledger"):
        Ledger(tmp_path / "file" / "ledger.sqlite").checked()
    with pytest.raises(ForetraceError, match="ledger"):
        Ledger(tmp_path).checked()


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORETRACE_LEDGER", str(tmp_path / "mine.sqlite"))
    assert default_path() == tmp_path / "mine.sqlite"
    monkeypatch.delenv("FORETRACE_LEDGER")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    if sys.platform.startswith("linux"):
        assert default_path() == tmp_path / "foretrace" / "ledger.sqlite"


def test_two_processes_writing_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    processes = [writer(path, 100) for _ in range(2)]  # they also race for making the file
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == 0
    rows = Ledger(path).rows()
    assert sorted(row.seed for row in rows) == sorted([*range(100)] * 2)
    assert integrity(path) == "ok"


def test_writers_that_are_killed_leave_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    chance = random.Random(1)
    said = 0
    for _ in range(6):
        process = writer(path, 100_000)
        assert process.stdout is not None
        process.stdout.readline()  # its first row
        time.sleep(chance.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate(timeout=200)
        said += 1 + rest.count("\n")
    rows = Ledger(path).rows()  # decodes every one
    assert said <= len(rows) <= said + 6  # a row may have been written and not yet said
    assert integrity(path) == "ok"
    assert Ledger(path).add([make_row()]) == 1
