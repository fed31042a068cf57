"""Trainers and their server as processes: one is killed, and the training continues to the same bits."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.experiment.messages import RowSetup
from foretrace.experiment.rows.run import RowWeights, running, train
from foretrace.training.rows.kept import BatchLog, file_of, latest, logged
from foretrace.training.rows.lookups import Lookups, zipf

pytest.importorskip("torch")


def lookups() -> Lookups:
    return zipf(exponent=1.05, tables=3, rows=200, pooling=2, samples=16, batches=24)


def setup(look_ahead: int, **given: object) -> RowSetup:
    common: dict[str, object] = {"lookups": "", "samples": 0, "rows": {}, "trainers": 2, "width": 8, "token": ""}
    return RowSetup(look_ahead={"look-ahead": look_ahead}, optimizer="adagrad", **common | given)  # type: ignore[arg-type]


def records(folder: Path, begin: int) -> list[int]:
    """Batches that each trainer has logged."""
    return [sum(1 for _ in logged(file_of(folder, f"log{rank}", begin), 8)) for rank in range(2)]


@pytest.fixture(scope="module")
def truth() -> RowWeights:
    """Uncached, and never ended."""
    return train(lookups(), setup(0))


@pytest.mark.parametrize(("victim", "who"), [(1, "trainer 1"), (2, "the row server")])
def test_a_killed_process_is_one_sentence_and_the_rest_continues_to_the_same_bits(
    tmp_path: Path, truth: RowWeights, victim: int, who: str
) -> None:
    job = setup(4, folder=str(tmp_path), every=8, compute_s=0.02)
    with running(lookups(), job) as run:
        run.train("look-ahead", 0, 8)
        assert not list(tmp_path.glob("*-0.f32"))  # what is older than the whole table is gone
        killer = threading.Timer(0.1, os.kill, (run._workers.processes[victim].pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(ForetraceError) as ended:
            run.train("look-ahead", 8, 16)
        killer.join()
    said, have = str(ended.value), records(tmp_path, 8)
    assert said.startswith(f"{who} was ended by SIGKILL") and said.count(".") == 1
    assert latest(tmp_path) == 8 and max(have) - min(have) <= 1  # only the batch under way is lost
    assert f"{8 + min(have)} whole batches" in said or victim == 2  # trainers may go on without the server a while
    assert train(lookups(), job) == truth
    assert latest(tmp_path) == 24
    with pytest.raises(ForetraceError, match="another training"):
        train(lookups(), setup(4, folder=str(tmp_path), every=8, seed=1))


def _killed(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, 9)


def test_all_killed_at_any_time_lose_the_batch_under_way_alone(tmp_path: Path, truth: RowWeights) -> None:
    job = setup(4, folder=str(tmp_path), compute_s=0.01)  # no whole table but the first
    with running(lookups(), job) as run:
        pids = [each.pid for each in run._workers.processes]
        killer = threading.Timer(np.random.default_rng().uniform(0.02, 0.3), _killed, [pids])
        killer.start()
        with contextlib.suppress(ForetraceError):  # it may be at its end
            run.train("look-ahead", 0, 24)
        killer.join()
    have = records(tmp_path, 0)
    assert max(have) - min(have) <= 1
    assert train(lookups(), job) == truth
    assert latest(tmp_path) == min(have)


def logs_of(folder: Path, count: int) -> BatchLog:
    log = BatchLog(folder, 0, 0)
    for batch in range(count):
        log.append(np.arange(batch), np.full((batch, 8), batch, np.float32), np.ones(5, np.float32))
    return log


@given(size=st.integers(0, 3000), flipped=st.integers(0, 2999))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_torn_or_damaged_record_ends_a_log(tmp_path: Path, size: int, flipped: int) -> None:
    log = logs_of(tmp_path, 10)
    log.close()
    whole, ends = log.path.read_bytes(), np.cumsum([20 + batch * 40 + 20 for batch in range(10)])
    assert len(whole) == ends[-1]
    log.path.write_bytes(whole[:size])
    found = list(logged(log.path, 8))
    assert len(found) == (ends <= size).sum()
    assert all((values == batch).all() and len(ids) == batch for batch, (ids, values, _) in enumerate(found))
    at = min(flipped, len(whole) - 1)
    log.path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert len(list(logged(log.path, 8))) == (ends <= at).sum()


def test_a_full_disk_is_one_sentence_and_costs_no_whole_batch(tmp_path: Path) -> None:
    log = logs_of(tmp_path, 3)
    before, signals = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 50, before[1]))
    try:
        with pytest.raises(ForetraceError, match="make room"):
            log.append(np.arange(4), np.ones((4, 8), np.float32), np.ones(5, np.float32))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, signals)
        log.close()
    assert len(list(logged(log.path, 8))) == 3


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    job = setup(4, folder=str(tmp_path), every=8)
    train(lookups(), job, batches=8)
    file = tmp_path / "rows-8.f32"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ForetraceError, match="must hold"):
        train(lookups(), job)
