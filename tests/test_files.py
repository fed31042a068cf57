"""Files that are written whole or not at all, and processes that end with whoever asked for them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foretrace.errors import ForetraceError
from foretrace.executor import cores
from foretrace.files import digest, evict, part_of, write_bytes

WRITER = """
import sys
from pathlib import Path
from foretrace.executor import cores
from foretrace.files import write_bytes
for number in range(10**6):
    write_bytes(Path(sys.argv[1]), bytes([number % 256]) * (1 << 20), compress=False)
    print(number, flush=True)
"""
POOL = """
from foretrace import executor
from tests import test_files
executor.map(test_files.linger, [0, 1])
"""


def linger(item: int) -> int:
    """A worker's item that outlives any test."""
    print(os.getpid(), flush=True)
    time.sleep(600)
    return item


def test_a_file_is_old_or_new_whoever_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    chance = random.Random(3)
    for _ in range(5):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(chance.uniform(0, 0.05))
        process.kill()
        process.communicate()
        data = path.read_bytes()
        assert len(data) == 1 << 20
        assert data == data[:1] * len(data)
    whole = [each.stat().st_size for each in tmp_path.iterdir()]
    assert set(whole) == {1 << 20}  # a name is given to whole files alone


def test_two_writers_never_share_a_temporary_name(tmp_path: Path) -> None:
    names = {part_of(tmp_path / ("long" * 60)) for _ in range(100)}
    assert len(names) == 100
    for name in names:
        name.write_bytes(b"")


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    for bad in (tmp_path, Path(os.devnull), tmp_path / "no folder" / "file", tmp_path / ("n" * 300)):
        with pytest.raises(ForetraceError, match="cannot write"):
            write_bytes(bad, b"data")
    assert list(tmp_path.iterdir()) == []


def test_a_digest_is_of_the_content(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder / "deep").mkdir(parents=True)
        (tmp_path / folder / "deep" / "file").write_text("same")
    a, b = tmp_path / "a", tmp_path / "b"
    assert digest(a) == digest(b)
    assert digest(a / "deep" / "file") == digest(b / "deep" / "file")
    (b / "deep" / "file").rename(b / "deep" / "other")
    assert digest(a) != digest(b)
    with pytest.raises(ForetraceError, match="cannot read"):
        digest(tmp_path / "none")


@pytest.mark.skipif(cores() < 2, reason="a pool has a worker per core")
def test_workers_of_a_pool_end_with_the_process_that_started_them() -> None:
    process = subprocess.Popen([sys.executable, "-c", POOL], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    workers = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signal.SIGKILL)
    assert process.stdout.read() == ""  # the end of the pipe: nobody is left who holds it
    process.wait()
    process.stdout.close()
    assert len(set(workers)) == 2


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="only Linux says whether a page is in the cache")
def test_what_is_evicted_waits_for_storage(tmp_path: Path) -> None:
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(tmp_path)], capture_output=True, text=True, check=True).stdout
    if not kind.startswith(("ext", "xfs", "btrfs")):
        pytest.skip(f"files of {kind.strip()} are memory, or do not tell whether they are")
    path, into = tmp_path / "data", bytearray(1 << 16)
    path.write_bytes(os.urandom(1 << 16))
    handle = os.open(path, os.O_RDONLY)
    try:
        assert os.preadv(handle, [into], 0, os.RWF_NOWAIT) == 1 << 16
        evict([path])
        with pytest.raises(BlockingIOError):
            os.preadv(handle, [into], 0, os.RWF_NOWAIT)
    finally:
        os.close(handle)
