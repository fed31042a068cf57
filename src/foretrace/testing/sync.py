"""`SyncPolicyConformance`: what every policy by which workers agree must do, as tests to inherit from.

Counts bytes as they are sent, gives the same bits for the same seed, is synchronous training to the bit where its knob
says so, loses no commit of a worker that dies, and continues after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from foretrace.arrays import Float32
from foretrace.errors import ForetraceError
from foretrace.graph.sound import verify
from foretrace.plan.sync import lower
from foretrace.simulate.timeline import simulate
from foretrace.training.workers.policies import Synchronous
from foretrace.training.workers.policy import NUMBER, Commit, Server, SyncPolicy, message_bytes
from foretrace.training.workers.virtual import SyncRun, WorkerTimes, train

_ELEMENTS, _COMMITS = 12, 40
_STEP_S = (0.1, 0.1, 0.2, 0.3)


@dataclass
class Quadratic:
    """A worker's copy that falls towards a point of its own, with noise of its own."""

    seed: int
    flat: Float32 = field(default_factory=lambda: np.ones(_ELEMENTS, np.float32))
    buffers: Float32 = field(default_factory=lambda: np.zeros(0, np.float32))

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.to = self.random.standard_normal(_ELEMENTS).astype(np.float32)

    def gradient(self) -> tuple[float, Float32]:
        off = self.flat - self.to
        noise = self.random.standard_normal(_ELEMENTS).astype(np.float32)
        return float(off @ off) / 2, off + np.float32(0.1) * noise

    def update(self, gradient: Float32) -> Float32:
        return gradient * np.float32(-0.1)

    def accuracy(self, state: Float32 | None = None) -> float:
        return 1.0


class SyncPolicyConformance:
    """Tests of one policy: override `policy`; `synchronous` where a knob makes it synchronous training."""

    def policy(self) -> SyncPolicy:
        """Return the policy."""
        raise NotImplementedError("override policy() and return yours")

    def synchronous(self) -> SyncPolicy | None:
        """Return the policy with the knob that makes it synchronous training; None where there is none."""
        return None

    def played(self, policy: SyncPolicy, *, workers: int = 4, **given: object) -> SyncRun:
        """Return a run of so many commits."""
        times = WorkerTimes(step_s=_STEP_S[:workers], commit_s=0.02, dies_s=given.pop("dies_s", {}))  # type: ignore[arg-type]
        replicas = [Quadratic(each) for each in range(workers)]
        return train(policy, replicas, times, commits=_COMMITS, **given)  # type: ignore[arg-type]

    def test_gives_the_same_bits_again(self) -> None:
        one, other = self.played(self.policy()), self.played(self.policy())
        assert one.turns == other.turns
        assert one.server.model.tobytes() == other.server.model.tobytes()

    def test_counts_commits_steps_and_bytes_as_they_are_sent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[Commit] = []
        taken = Server.commit

        def commit(server: Server, commit: Commit, now_s: float) -> object:
            seen.append(commit)
            return taken(server, commit, now_s)

        monkeypatch.setattr(Server, "commit", commit)
        run = self.played(self.policy())
        for worker in range(4):
            mine = [each for each in seen if each.worker == worker]
            assert run.commits[worker] == len(mine)
            assert run.steps[worker] == sum(each.steps for each in mine)
            assert run.sent_bytes[worker] == sum(message_bytes(_ELEMENTS, len(each.values)) for each in mine)
        assert sum(run.commits) == _COMMITS
        assert all(each.nbytes <= NUMBER * _ELEMENTS for each in seen)

    def test_is_synchronous_training_to_the_bit_where_its_knob_says_so(self) -> None:
        policy = self.synchronous()
        if policy is None:
            pytest.skip("no knob of this policy makes it synchronous training")
        for workers in (1, 3, 4):
            one, other = (self.played(each, workers=workers) for each in (policy, Synchronous()))
            assert one.server.model.tobytes() == other.server.model.tobytes()

    def test_one_worker_alone_trains(self) -> None:
        run = self.played(self.policy(), workers=1)
        assert run.commits == (_COMMITS,) and run.waited_s == (0.0,)

    def test_no_commit_is_lost_and_training_goes_on_when_a_worker_dies(self) -> None:
        whole = self.played(self.policy())
        when = whole.turns[len(whole.turns) // 2].arrived_s
        run = self.played(self.policy(), dies_s={1: when})
        last = max(each.arrived_s for each in run.turns if each.worker == 1)
        before = sum(each.arrived_s <= last and each.worker == 1 for each in run.turns)
        assert run.commits[1] == before > 0  # what had been sent before the end counts
        assert sum(run.commits) == _COMMITS and run.ended_s > when
        assert 1 not in run.server.live and not run.server.waiting()[4:]

    def test_a_worker_that_never_commits_holds_up_only_those_who_wait(self) -> None:
        replicas = [Quadratic(each) for each in range(2)]
        times = WorkerTimes(step_s=(0.1, float("inf")))
        policy = self.policy()
        if policy.lag == float("inf"):
            assert train(policy, replicas, times, commits=9).commits == (9, 0)
        else:
            with pytest.raises(ForetraceError, match="worker 1 never commits, and worker 0 waits"):
                train(policy, replicas, times, commits=9)

    def test_its_turns_are_a_task_graph_that_takes_as_long(self) -> None:
        run = self.played(self.policy())
        graph = lower(run, WorkerTimes(step_s=_STEP_S, commit_s=0.02))
        verify(graph)
        latest = max(each.arrived_s for each in run.turns)
        assert abs(simulate(graph).window_ns - 1e9 * latest) <= 10 * len(run.turns)
