"""Workers of unlike speed as processes: as on the virtual clock, and one that is killed is waited for no longer."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from foretrace.errors import ForetraceError
from foretrace.experiment.unlike import UnlikeSetup, run
from foretrace.training.workers.policies import parse
from foretrace.training.workers.virtual import WorkerTimes, train
from foretrace.zoo.partitioned import PartitionedJob


def test_processes_train_as_the_virtual_clock_does() -> None:
    job = PartitionedJob(workers=2)
    for policy in ("synchronous", "gaia threshold=0.05"):
        setup = UnlikeSetup(policy=policy, step_s=(0.01, 0.02), commits=8)
        *trainers, server = run(setup)
        virtual = train(parse(policy), job.replicas(), WorkerTimes(step_s=setup.step_s), commits=8)
        assert server.state == sha256(virtual.server.model.tobytes()).hexdigest()
        assert (server.commits, server.sent_bytes) == (virtual.commits, virtual.sent_bytes)
        assert len(trainers) == 2


def test_training_goes_on_when_a_process_is_killed() -> None:
    *trainers, server = run(UnlikeSetup(policy="synchronous", step_s=(0.02, 0.02, 0.02), commits=40, dies_s={1: 0.2}))
    assert server.left == (1,) and len(trainers) == 2
    assert sum(server.commits) == 40 and 0 < server.commits[1] < server.commits[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_s": (11.0,)},
        {"step_s": (1e-4,)},
        {"step_s": ()},
        {"commits": 0},
        {"dies_s": {4: 0.1}},
        {"policy": "none"},
    ],
)
def test_what_cannot_be_run_is_one_sentence(wrong: dict[str, Any]) -> None:
    with pytest.raises(ForetraceError, match=r"^[^\n]*[.?]$"):
        given: dict[str, Any] = {"policy": "synchronous", "step_s": (0.1,), "commits": 1}
        UnlikeSetup(**given | wrong)
