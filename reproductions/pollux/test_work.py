"""The work of a job that goodput computes is what the published simulator takes for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretrace.fleet.pollux.goodput import (
    with_work,
)
from foretrace.fleet.pollux.profiles import Profiles
from foretrace.fleet.workload import SECOND, Workload
from reproductions.pollux.simulator import PolluxSimulator


@pytest.fixture(scope="module")
def profiles(shared_data: Path) -> Profiles:
    return Profiles(shared_data / "fleet/pollux/profiles")


def job_of(model: str, gpus: int, batch: float, work_s: float = 100.0) -> Workload:
    return Workload.of(submit_s=[0], gpus=[gpus], work_s=[work_s], model=[model], batch=[batch], job=["one"])


@pytest.mark.parametrize(("model", "gpus", "batch"), [("cifar10", 6, 2048), ("deepspeech2", 8, 320), ("ncf", 1, 512)])
def test_work_is_what_a_job_alone_takes(profiles: Profiles, model: str, gpus: int, batch: float) -> None:
    workload = job_of(model, gpus, batch, float("nan"))
    work = with_work(workload, profiles).work_s[0]
    alone = PolluxSimulator().run(
        workload, policy="tiresias", cluster="16x4", seed=0, options={"profiles": str(profiles.folder)}
    )
    epochs = profiles.application(model).epochs
    assert (alone.end_ns - alone.start_ns)[0] / SECOND - 30 == pytest.approx(work, abs=0.5 * epochs)
