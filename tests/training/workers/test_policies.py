"""Every policy on the virtual clock: what all must do, and what each is for."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.testing.sync import SyncPolicyConformance
from foretrace.training.workers.adsp import Adsp, reward
from foretrace.training.workers.policies import (
    POLICIES,
    AdaComm,
    DeepCompression,
    Gaia,
    LocalSGD,
    StaleSynchronous,
    Synchronous,
    parse,
)
from foretrace.training.workers.policy import SyncPolicy
from foretrace.training.workers.virtual import WorkerTimes, foresee, train
from foretrace.zoo.partitioned import PartitionedJob


class TestSynchronous(SyncPolicyConformance):
    def policy(self) -> SyncPolicy:
        return Synchronous()


class TestStaleSynchronous(SyncPolicyConformance):
    def policy(self) -> SyncPolicy:
        return StaleSynchronous()

    def synchronous(self) -> SyncPolicy:
        return StaleSynchronous(staleness=0)


class TestLocalSGD(SyncPolicyConformance):
    def policy(self) -> SyncPolicy:
        return LocalSGD(every=3)

    def synchronous(self) -> SyncPolicy:
        return LocalSGD(every=1)


class TestAdaComm(SyncPolicyConformance):
    def policy(self) -> SyncPolicy:
        return AdaComm(every=4, interval_s=2.0)

    def synchronous(self) -> SyncPolicy:
        return AdaComm(every=1)


class TestGaia(SyncPolicyConformance):
    def policy(self) -> SyncPolicy:
        return Gaia(threshold=0.2)

    def synchronous(self) -> SyncPolicy:
        return Gaia(threshold=0)


class TestDeepCompression(SyncPolicyConformance):
    def policy(self) -> SyncPolicy:
        return DeepCompression(share=0.2, momentum=0.5)

    def synchronous(self) -> SyncPolicy:
        return DeepCompression(share=1, momentum=0.5)


class TestAdsp(SyncPolicyConformance):
    def policy(self) -> SyncPolicy:
        return Adsp(period_s=1.0)


def test_policies_are_read_as_they_are_written() -> None:
    for name, kind in POLICIES.items():
        assert parse(name) == kind()
    assert parse("fedavg every=5") == LocalSGD(every=5)


@pytest.mark.parametrize(
    ("text", "words"),
    [("gaia threshold=-1", "0 to 1e"), ("dgc share=2", "share of dgc"), ("local-sgd every=0", "1 to"),
     ("gya", "did you mean gaia"), ("ssp staleness=x", "whole number, got x"), ("adsp commits=nan", "must be"),
     ("", "no policy"), ('"', "no policy")],
)  # fmt: skip
def test_what_is_no_policy_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ForetraceError, match=words):
        parse(text)


def test_adsp_never_waits_and_all_commit_equally_often() -> None:
    times = WorkerTimes(step_s=(0.01, 0.01, 0.02, 0.07), commit_s=0.01)
    run = foresee(Adsp(period_s=1.0, commits=2), times, until_s=20.0)
    assert set(run.waited_s) == {0.0} and max(run.commits) - min(run.commits) <= 1
    assert min(run.commits) >= 38


def test_a_worker_a_thousand_times_slower_holds_up_only_those_who_wait() -> None:
    times = WorkerTimes(step_s=(0.1, 0.1, 100.0))
    assert foresee(Adsp(period_s=1.0, commits=1), times, until_s=50.0).commits[:2] == (50, 50)
    assert foresee(Synchronous(), times, until_s=450.0).commits == (5, 5, 4)  # the fifth of the quick ones waits
    ahead = foresee(StaleSynchronous(staleness=3), times, until_s=450.0).commits
    assert max(ahead) - min(ahead) <= 4


def test_the_reward_is_the_slope_whatever_level_a_period_begins_at() -> None:
    for start in (0.3, 2.0):
        seen = [(t, 1 / (0.5 * t + start), 1) for t in np.linspace(0, 4, 20).tolist()]
        assert reward(seen) == pytest.approx(0.5, rel=1e-6)
    assert reward([(t, 1.0 + t, 1) for t in range(5)]) == 0.0


def test_real_gradients_learn_and_a_searched_adsp_reaches_the_loss_sooner() -> None:
    job = PartitionedJob(rate=0.1, noise=2.0, seed=7)
    times, judge = WorkerTimes(step_s=(0.1, 0.1, 0.1, 0.3), commit_s=0.2), job.judge(training=True)
    reached = {}
    for policy in (Synchronous(), Adsp(period_s=1.0)):
        run = train(policy, job.replicas(), times, until_s=100.0, every_s=0.5, target=0.3,
                    evaluate=lambda *state: judge(*state)[0])  # fmt: skip
        assert run.reached_s is not None
        reached[policy.name] = run.reached_s
    assert reached["adsp"] < reached["synchronous"]


def test_a_run_must_have_an_end() -> None:
    with pytest.raises(ForetraceError, match="must have an end"):
        foresee(Synchronous(), WorkerTimes(step_s=(1.0,)), until_s=inf)
