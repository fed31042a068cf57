"""Points and splits of a real model, in real processes; times are compared with nothing."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from foretrace.errors import ForetraceError
from foretrace.hardware import processor
from foretrace.serving.server import measure
from foretrace.serving.server.measure import LatencyProfile, facts_of, measure_profile, points, run_in_turns, running
from foretrace.serving.server.models import ModelSource
from foretrace.serving.server.run import usable
from foretrace.serving.server.split import CoreSplit, ModelInstance

SCRIPT = """
import torch

def small():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)), torch.ones(2, 8)

class Picky(torch.nn.Module):
    def forward(self, x):
        if len(x) > 3:
            raise ValueError("too many")
        return x

def picky():
    return Picky(), torch.ones(2, 8)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "nets.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_profile_is_measured_resumed_and_kept_from_others(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "ATTEMPTS", 1)
    monkeypatch.setattr(measure, "MOST_SPREAD", 1e9)  # the machine of a test may be busy
    source, path, told = ModelSource(name=f"{script}:small"), tmp_path / "profile.csv", list[str]()
    cores = usable(1)
    found = measure_profile(
        source, facts_of(source, cores), cores=cores, batch=2, path=path, tell=lambda what, share: told.append(what)
    )
    assert told == ["1 threads, batch 1", "1 threads, batch 2"] and found.refused == ()
    assert list(found.samples_s) == [ModelInstance(1, 1), ModelInstance(1, 2)]
    assert all(len(each) >= measure.SAMPLES and each.min() > 0 for each in found.samples_s.values())
    measure_profile(
        source, facts_of(source, cores), cores=cores, batch=4, path=path, tell=lambda what, share: told.append(what)
    )
    assert told[2:] == ["1 threads, batch 4"], "what is in the file is not measured again"

    (kept,) = measure.read(path)
    assert "module" in kept.origin and "torch" in kept.origin
    LatencyProfile(model=source.name, samples_s=kept.samples_s, origin="another machine").save(path)
    with pytest.raises(ForetraceError, match=r"holds a profile of .* from elsewhere \(another machine\)"):
        measure_profile(source, facts_of(source, cores), cores=cores, batch=2, path=path)
    again = measure_profile(source, facts_of(source, cores), cores=cores, batch=1, path=path, ours=True)
    assert again.origin == kept.origin


def test_a_point_that_others_disturb_is_measured_again_and_refused(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = list[int]()

    def disturbed(worker: object, size: int, samples: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        attempts.append(size)
        spread = 0.5 if size == 2 else 0.2 / attempts.count(size)  # batch 1 calms down, batch 2 does not
        return np.array([1.0] * 5 + [1 + spread] * 5 + [1 + 2 * spread] * 5)

    monkeypatch.setattr(measure, "_latencies", disturbed)
    source = ModelSource(name=f"{script}:small")
    cores = usable(1)
    found = measure_profile(source, facts_of(source, cores), cores=cores, batch=2, path=tmp_path / "profile.csv")
    assert attempts == [1, 2, 1, 2, 1, 2] and found.refused == (ModelInstance(1, 2),)
    assert found.samples_s[ModelInstance(1, 1)].max() == pytest.approx(1 + 0.4 / 3), "the calmest attempt"


def test_instances_of_splits_run_at_once_and_in_turns(script: str) -> None:
    cores = usable()
    splits = {"fat": CoreSplit.fat(len(cores), 4), "thin": CoreSplit.thin(len(cores), 4)}
    runs = run_in_turns(ModelSource(name=f"{script}:small"), splits, cores=cores, seconds=0.1, batches=30)
    rounds = {len(blocks) for blocks in runs.values()}
    assert runs.keys() == splits.keys() and len(rounds) == 1
    assert all(sum(map(len, blocks)) >= 30 and np.min(blocks) > 0 for blocks in runs.values())
    with running(ModelSource(name=f"{script}:small"), splits["thin"].instances, cores) as workers:
        assert [each.cores for each in workers] == [(core,) for core in cores[: len(workers)]]


def test_a_model_that_raises_is_said(script: str) -> None:
    source = ModelSource(name=f"{script}:picky")
    with pytest.raises(ForetraceError, match="too many"), running(source, [ModelInstance(1, 4)], usable(1)):
        pass
    with running(source, [ModelInstance(1, 2)], usable(1)) as (worker,):
        os.kill(worker.pid, 9)
        with pytest.raises(ForetraceError, match="was ended by SIGKILL in a batch of 2 samples"):
            measure.run_batch([worker], [2])


def test_cores_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 5, 7}, raising=False)
    monkeypatch.setattr(processor, "cpu_quota", lambda: None)
    assert usable() == (2, 5, 7) and usable(2) == (2, 5)
    with pytest.raises(ForetraceError, match="`threads=4`: this process may use 3 cores"):
        usable(4)
    monkeypatch.setattr(processor, "cpu_quota", lambda: 1.5)
    assert usable() == (2,) and usable(3) == (2, 5, 7)
    monkeypatch.setattr(processor, "cpu_quota", lambda: 0.5)
    assert usable() == (2,)


def test_points_hold_what_fat_thin_and_powers_of_two_need() -> None:
    assert points(2, 4) == tuple(ModelInstance(t, b) for t in (1, 2) for b in (1, 2, 4))
    assert {*CoreSplit.fat(4, 100).instances, *CoreSplit.thin(4, 100).instances} <= set(points(4, 100))
    assert {*CoreSplit.thin(6, 20).instances} <= set(points(6, 20))
    assert points(2, 16, fixed=8) == (ModelInstance(1, 8), ModelInstance(2, 8))
