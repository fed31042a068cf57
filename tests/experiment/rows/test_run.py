"""Trainers and their server as processes: one is killed, and the training continues to the same bits."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from foretrace.errors import ForetraceError
from foretrace.experiment.messages import RowSetup
from foretrace.experiment.rows.run import latest, running, train
from foretrace.training.rows.lookups import Lookups, zipf

pytest.importorskip("torch")


def lookups() -> Lookups:
    return zipf(exponent=1.05, tables=3, rows=200, pooling=2, samples=16, batches=24)


def setup(look_ahead: int, **given: object) -> RowSetup:
    common: dict[str, object] = {"lookups": "", "samples": 0, "rows": {}, "trainers": 2, "width": 8, "token": ""}
    return RowSetup(look_ahead={"look-ahead": look_ahead}, optimizer="adagrad", **common | given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("victim", "who"), [(1, "trainer 1"), (2, "the row server")])
def test_a_killed_process_is_one_sentence_and_the_rest_continues_to_the_same_bits(
    tmp_path: Path, victim: int, who: str
) -> None:
    given = setup(4, folder=str(tmp_path), every=8, compute_s=0.02)
    with running(lookups(), given) as run:
        run.train("look-ahead", 0, 8)
        killer = threading.Timer(0.1, os.kill, (run._workers.processes[victim].pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(ForetraceError) as ended:
            run.train("look-ahead", 8, 16)
        killer.join()
    said = str(ended.value)
    assert said.startswith(f"{who} was ended by SIGKILL") and "8 whole batches" in said and said.count(".") == 1
    assert latest(tmp_path) == 8
    continued = train(lookups(), given)
    assert latest(tmp_path) == 24
    if victim == 1:  # once: uncached and from the beginning
        assert continued == train(lookups(), setup(0))
    with pytest.raises(ForetraceError, match="another training"):
        train(lookups(), setup(4, folder=str(tmp_path), every=8, seed=1))


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    given = setup(4, folder=str(tmp_path), every=8)
    train(lookups(), given, batches=8)
    file = tmp_path / "rows-8.f32"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ForetraceError, match="must hold"):
        train(lookups(), given)
