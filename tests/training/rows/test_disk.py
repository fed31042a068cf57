"""Rows in partitions on disk: as an array, whole after every fault, and not secretly in the page cache."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from foretrace.arrays import Float32
from foretrace.errors import ForetraceError
from foretrace.testing import RowsConformance
from foretrace.training.rows.disk import BLOCK, RowsOnDisk, create, read_whole
from foretrace.training.rows.orders import beta, swaps
from foretrace.training.rows.rows import Rows


def made(path: Path, values: Float32, partitions: int = 8) -> Path:
    create(path, len(values), values.shape[1], partitions, lambda begin, end: values[begin:end])
    return path


class TestOnDisk(RowsConformance):
    """A buffer with all partitions, and (below) one with none."""

    buffer = 8

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "table.rows"

    def rows(self, values: Float32) -> Rows:
        return self.held(made(self.path, values))

    def reopen(self, rows: Rows) -> Rows | None:
        return self.held(self.path)

    def held(self, path: Path) -> Rows:
        found = RowsOnDisk(path, buffer=self.buffer)
        list(found.visit([tuple(range(self.buffer))]))
        return found


class TestOnDiskWithoutABuffer(TestOnDisk):
    buffer = 0


class TestOnDiskWithSome(TestOnDisk):
    buffer = 3


@pytest.mark.parametrize(("spare", "direct"), [(0, True), (1, True), (3, True), (1, False)])
def test_a_buffer_in_any_order_is_as_an_array(tmp_path: Path, spare: int, direct: bool) -> None:
    random = np.random.default_rng(spare)
    truth = random.standard_normal((1_001, 33)).astype(np.float32)
    path = made(tmp_path / "table.rows", truth, 16)
    for _ in range(3):
        states = beta(16, 4, random)
        with RowsOnDisk(path, buffer=4, spare=spare, direct=direct) as rows:
            for state in rows.visit(states):
                ids = np.unique(random.integers(0, 1_001, 200))
                ids = ids[np.isin(ids // rows.size, state) | (random.random(len(ids)) < 0.05)]
                np.testing.assert_array_equal(rows.get(ids), truth[ids])
                truth[ids] += 1
                rows.put(ids, truth[ids])
            rows.commit()
            assert rows.disk.gets == 4 + swaps(states)
    np.testing.assert_array_equal(read_whole(path), truth)
    assert list(tmp_path.iterdir()) == [path]


def test_partitions_may_be_empty(tmp_path: Path) -> None:
    values = np.arange(10, dtype=np.float32).reshape(5, 2)
    with RowsOnDisk(made(tmp_path / "table.rows", values, 4), buffer=4) as rows:  # of two rows: 2, 2, 1, 0
        assert list(rows.visit([(2, 3), (0, 3), (3,)])) == [(2, 3), (0, 3), (3,)]
        rows.put(np.array([4]), np.array([[7.0, 7.0]], np.float32))
    np.testing.assert_array_equal(read_whole(tmp_path / "table.rows")[4], [7, 7])


def test_without_a_commit_the_table_stays(tmp_path: Path) -> None:
    path = made(tmp_path / "table.rows", np.zeros((40, 3), np.float32))

    def fail() -> None:
        with RowsOnDisk(path, buffer=2) as rows:
            for state in rows.visit([(0, 1), (2, 3)]):
                rows.put(np.array([state[0] * rows.size]), np.ones((1, 3), np.float32))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not read_whole(path).any()
    assert list(tmp_path.iterdir()) == [path]


def test_the_page_cache_does_not_hold_what_was_moved(tmp_path: Path) -> None:
    if not hasattr(os, "preadv") or not hasattr(os, "RWF_NOWAIT"):
        pytest.skip("this system cannot say whether it holds a page")
    # The system lets go of pages when it can: others that use the disk just then may keep it from that for once.
    assert 0 in (_held(tmp_path / f"{number}.rows") for number in range(3))


def _held(file_path: Path) -> int:
    """Blocks of a table in the page cache after all of it was moved."""
    path = made(file_path, np.ones((4_096, 64), np.float32))
    with RowsOnDisk(path, buffer=2) as rows:
        if not rows.direct:
            pytest.skip("the file system of the temporary folder has no direct reads")
        for state in rows.visit(beta(8, 2, np.random.default_rng(0))):
            rows.put(np.array([state[0] * rows.size]), np.zeros((1, 64), np.float32))
        rows.commit()
    file, held = os.open(path, os.O_RDONLY), 0
    for block in range(1, path.stat().st_size // BLOCK, 7):
        try:
            held += os.preadv(file, [bytearray(BLOCK)], block * BLOCK, os.RWF_NOWAIT) > 0
        except OSError:  # it would have to be read from the disk
            continue
    os.close(file)
    return held


_LIMITED = """
import resource, signal, sys
import numpy as np
from pathlib import Path
from foretrace.errors import ForetraceError
from foretrace.training.rows.disk import RowsOnDisk
from foretrace.training.rows.orders import beta
when = sys.argv[2]
def full():
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    with RowsOnDisk(Path(sys.argv[1]), buffer=2) as rows:
        if when == "from the start":
            full()
        for k, state in enumerate(rows.visit(beta(8, 2, np.random.default_rng(0)))):
            ids = np.arange(state[0] * rows.size, (state[0] + 1) * rows.size)
            rows.put(ids, np.ones((len(ids), 64), np.float32))
            if k == 3 and when == "while writing back":
                full()
        rows.commit()
except ForetraceError as error:
    print(error)
    sys.exit(2)
"""


@pytest.mark.parametrize("when", ["from the start", "while writing back"])
def test_a_full_disk_is_one_sentence_and_the_table_stays(tmp_path: Path, when: str) -> None:
    pytest.importorskip("resource", reason="limits of file sizes are of Unix")
    path = made(tmp_path / "table.rows", np.zeros((2_048, 64), np.float32))
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(path), when], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "is whole as of commit 0; make room" in done.stdout and done.stdout.count("\n") == 1
    assert not read_whole(path).any()


_COUNTING = """
import sys
import numpy as np
from pathlib import Path
from foretrace.training.rows.disk import RowsOnDisk
from foretrace.training.rows.orders import beta
with RowsOnDisk(Path(sys.argv[1]), buffer=2) as rows:
    while True:
        done = set()
        for state in rows.visit(beta(8, 2, np.random.default_rng(0))):
            for each in set(state) - done:
                ids = np.arange(each * rows.size, (each + 1) * rows.size)
                rows.put(ids, rows.get(ids) + 1)
            done |= set(state)
        rows.commit()
        print(rows.commits, flush=True)
"""


@pytest.mark.parametrize("wait_s", [0.0, 0.013, 0.031])
def test_killed_at_any_time_the_last_commit_is_whole(tmp_path: Path, wait_s: float) -> None:
    path = made(tmp_path / "table.rows", np.zeros((2_048, 16), np.float32))
    command = [sys.executable, "-c", _COUNTING, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [int(process.stdout.readline()) for _ in range(3)][-1]
        time.sleep(wait_s)
        process.send_signal(signal.SIGKILL)
        said = max([said, *(int(line) for line in process.stdout.read().split())])
    values = read_whole(path)
    assert (values == values[0, 0]).all()
    assert values[0, 0] in (said, said + 1)
    with RowsOnDisk(path, buffer=2) as rows:
        assert rows.commits == values[0, 0]
        rows.put(np.array([0]), np.zeros((1, 16), np.float32))  # what was left beside it is in nobody's way
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "table.rows", np.zeros((40, 3), np.float32))
    with pytest.raises(ForetraceError, match="0 to 8 partitions"):
        RowsOnDisk(path, buffer=9)
    with RowsOnDisk(path, buffer=1) as rows, pytest.raises(ForetraceError, match="at most"):
        next(rows.visit([(0, 1)]))
    (tmp_path / "cut").write_bytes(path.read_bytes()[:-1])
    (tmp_path / "none").write_bytes(b"{}")
    for name, words in (("cut", "no whole table"), ("none", "no table"), ("missing", "cannot read")):
        with pytest.raises(ForetraceError, match=words):
            RowsOnDisk(tmp_path / name, buffer=1)
    with pytest.raises(ForetraceError, match="1 to 40"):
        made(tmp_path / "more", np.zeros((40, 3), np.float32), 41)
