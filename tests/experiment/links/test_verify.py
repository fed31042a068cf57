"""A whole session, and what commands refuse."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace import deadline
from foretrace.cli.app import run
from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Ledger
from foretrace.experiment.links import calibrate, measure, netns
from foretrace.experiment.links.calibrate import MOST_SPREAD, alone
from foretrace.experiment.links.hosts import TimeHosts
from foretrace.experiment.links.job import LinkJob
from foretrace.experiment.links.judge import rows_of, setting
from foretrace.experiment.links.measure import check, completed, verify
from foretrace.experiment.messages import RunSteps, TimedSteps
from foretrace.experiment.processes import Workers

pytest.importorskip("torch")

EMULATED = ["--link", "100mbit", "--emulate", "4x128kb/5ms"]


@pytest.mark.slow("a real link, timed until times agree")
def test_a_calibrated_link_carries_nearly_what_was_stated(
    able: netns.Capability, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "TimeHosts", partial(TimeHosts, turns=3))  # they compute all the while
    try:
        found = alone(2, "20mbit", tmp_path / "network.json")
    except ForetraceError as error:
        assert "varies too much" in str(error)
        pytest.skip(f"the machine is too busy: {error}")
    assert 17 < found.mbit_s < 20
    assert found.spread <= MOST_SPREAD
    assert (tmp_path / "network.json").is_file()


@pytest.mark.slow("real workers on a shaped link, in turns")
def test_a_session_predicts_then_measures(able: netns.Capability, tmp_path: Path) -> None:
    arms = (("data-parallel bucket_mb=0.25",), ("data-parallel bucket_mb=25",))
    job = LinkJob(work="6x128kb/5ms", link="100mbit", workers=2, arms=arms, seconds=1.0)
    try:
        outcome = verify(job)
    except ForetraceError as error:
        assert "varies too much" in str(error)
        pytest.skip(f"the machine is too busy: {error}")
    first, second = outcome.arms
    assert first.buckets == first.predicted_buckets == (256 * 1024,) * 3
    assert second.buckets == second.predicted_buckets == (6 * 128 * 1024,)
    assert outcome.recorded_s > 6 * 0.005
    for arm in outcome.arms:  # no message is free, and nothing is faster than its link
        assert min(arm.predicted_s, arm.trial.after.median_s) > 6 * 128 * 1024 * 8 / 100e6
    rows = rows_of(outcome)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert ledger.add(rows) == 2
    kept = ledger.rows(technique="data-parallel")
    assert [row.techniques for row in kept] == [
        "data-parallel workers=2 network=100mbit bucket_mb=0.25",
        "data-parallel workers=2 network=100mbit bucket_mb=25.0",
    ]
    assert kept[0].arms["rig"]["buckets"] == [256 * 1024] * 3
    assert kept[0].size == "2 workers, 100mbit"
    assert not [name for name in netns._namespaces() if name.startswith(netns._mine())]


def test_techniques_are_given_the_rigs_workers_and_network() -> None:
    (text,) = completed(["data-parallel bucket_mb=4"], 3, "100mbit")
    assert text == "data-parallel bucket_mb=4 workers=3 network=100mbit"
    assert completed(["fused-optimizer"], 3, "100mbit") == ("fused-optimizer",)
    assert completed(["data-parallel workers=3"], 3, "1gbit") == ("data-parallel workers=3 network=1gbit",)


def test_what_a_row_calls_its_setting() -> None:
    job = LinkJob(work="resnet50", link="1gbit", workers=2, arms=(("data-parallel",),))
    assert setting(job) == "tiny, 2 workers, 1gbit"


def test_real_compute_needs_a_core_per_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretrace.executor.cores", lambda: 2)
    with pytest.raises(ForetraceError, match="4 workers compute on 2 cores"):
        check(LinkJob(work="resnet50", link="1gbit", workers=4, arms=(("data-parallel",),)))


@given(seconds=st.floats(0.1, 100.0), every=st.integers(1, 7))
def test_blocks_are_whole_periods_of_an_arm(seconds: float, every: int) -> None:
    """Of the arm that averages every few steps alone."""
    used = (f"local-steps workers=2 network=1gbit every={every}",)
    arms = [
        measure._Planned(name=str(i), used=each, shown=(), predicted=None, step_s=0.1)
        for i, each in enumerate((used, ()))
    ]
    job = LinkJob(work="1x1mb/1ms", link="1gbit", workers=2, arms=(used,), seconds=seconds)
    steps = measure._turns(job, arms).steps
    assert steps["0"] >= every and steps["0"] % every == 0 and steps["1"] >= 1


@given(
    steps_s=st.lists(st.floats(1e-3, 2.0), min_size=2, max_size=4),
    seconds=st.floats(1.0, 200.0),
    slow=st.floats(0.7, 1.5),
)
def test_turns_keep_their_time(steps_s: list[float], seconds: float, slow: float) -> None:
    """On a clock that moves with steps; they last `slow` times as long as predicted."""
    arms = [measure._Planned(name=str(i), used=(), shown=(), predicted=None, step_s=s) for i, s in enumerate(steps_s)]
    job = LinkJob(work="1x1mb/1ms", link="1gbit", workers=2, arms=(("data-parallel",),), seconds=seconds)
    turns = measure._turns(job, arms)
    now = [0.0]

    class Asked:
        def ask(self, _: object, request: RunSteps, *__: object, **___: object) -> list[TimedSteps]:
            now[0] += (request.discarded + request.steps) * slow * steps_s[int(request.name)]
            return [TimedSteps(wall_s=1.0, cpu_s=1.0, loss=None)] * 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deadline, "uncompiled", lambda: now[0])
        found = measure._run(cast(Workers, Asked()), turns, lambda share: None)
    rounds = {len(each) for each in found.values()}
    least = slow * sum(steps_s) * (measure._FIRST + 2 * measure.LEAST_ROUNDS)
    assert rounds <= set(range(measure.LEAST_ROUNDS, measure.MOST_ROUNDS + 1)) and len(rounds) == 1
    assert now[0] <= max(seconds * max(slow, 1.0), least) * (1 + 1e-9)


@pytest.mark.parametrize(("words", "reason"), [
    (["data-parallel", "--link", "-1mbit", "--emulate", "1x1mb/1ms"], "is no link"),
    (["data-parallel", "--link", "0mbit", "--emulate", "1x1mb/1ms"], "is no link"),
    (["data-parallel", "--link", "nan", "--emulate", "1x1mb/1ms"], "is no link"),
    (["data-parallel", "--link", "100gbit", "--emulate", "1x1mb/1ms"], "cannot be shaped"),
    (["data-parallel", "--link", "1gbit"], "give one of --emulate"),
    (["data-parallel", "--link", "1gbit", "--emulate", "1x1mb/1ms", "--model", "bert"], "give one of --emulate"),
    (["data-parallel", "--link", "1gbit", "--emulate", "1x"], "is no emulated training"),
    (["data-parallel", "--link", "1gbit", "--model", "no-model"], "no model 'no-model'"),
    (["no-technique", *EMULATED], "no technique 'no-technique'"),
    (["data-parallel network=1gbit", *EMULATED], "leave network= out"),
    (["data-parallel workers=4", *EMULATED], "leave workers= out"),
    (["data-parallel", "--workers", "1", *EMULATED], "1 workers make no rig"),
    (["data-parallel", "--workers", "-2", *EMULATED], "-2 workers make no rig"),
    (["data-parallel", "--seconds", "inf", *EMULATED], "--seconds inf must be finite"),
    (["cuda-graphs", *EMULATED, "--against", "data-parallel bucket_mb=x"], "is not a number"),
])  # fmt: skip
def test_mistakes_are_sentences(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rig", "verify", *words]) == 2
    said = capsys.readouterr()
    assert reason in said.err
    assert said.out == ""
    assert "Traceback" not in said.err


def test_check_and_clean_answer_in_json(able: netns.Capability, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rig", "check", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True and found["missing"] == [] and found["delay"] is able.delay
    assert run(["rig", "clean", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"] == "rig clean"


def test_check_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        netns, "probe", lambda: netns.Capability(missing=("the kernel has no token bucket",), delay=False)
    )
    assert run(["rig", "check"]) == 1
    assert "No rig here: the kernel has no token bucket." in capsys.readouterr().out
    assert run(["rig", "clean"]) == 2
    assert "no rig on this machine: the kernel has no token bucket." in capsys.readouterr().err
