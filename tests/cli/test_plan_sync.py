"""`foretrace plan sync`: what is known of four workers, and what cannot be asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.graph.rank_sets import Job

CNN = Path(__file__).parents[1] / "data" / "cnn.json.gz"


def test_nobody_waits_for_the_slowest(cli: Cli) -> None:
    """Without costs of commits, synchronous training makes 4 steps per 0.3 s, and workers that never wait 10 / 0.3."""
    answer = cli("plan", "sync", "100,100,100,300ms", "--json")
    assert answer.code == 0, answer.err
    found = {each["policy"].split()[0]: each for each in json.loads(answer.out)["policies"]}
    assert found["synchronous"]["over_synchronous"] == 1.0
    assert found["synchronous"]["waited"] == pytest.approx(0.5, abs=0.01)  # three of four wait 0.2 s of 0.3
    assert found["adsp"]["over_synchronous"] == pytest.approx(2.5, rel=0.02) and found["adsp"]["waited"] == 0.0
    assert max(found["adsp"]["commits"]) - min(found["adsp"]["commits"]) <= 1  # all commit equally often
    for each in found.values():
        assert each["interval_s"][0] < each["seconds"] < each["interval_s"][1]


def test_where_a_run_ends_decides_nothing(cli: Cli) -> None:
    """Equal workers without costs of commits make equally many steps, however many a commit has."""
    policies = json.loads(cli("plan", "sync", "100,100,100,100ms", "--json").out)["policies"]
    assert {round(each["over_synchronous"], 9) for each in policies} == {1.0}
    late = json.loads(cli("plan", "sync", "100,100,100,300ms", "--commit-ms", "200", "--json").out)["policies"]
    (local,) = (each["over_synchronous"] for each in late if each["policy"] == "local-sgd")
    assert local == pytest.approx(8 / (8 * 0.3 + 0.2) * (0.3 + 0.2), rel=0.002)  # eight steps and a commit


def test_a_worker_a_thousand_times_slower_holds_up_those_who_wait(cli: Cli) -> None:
    found = {
        each["policy"].split()[0]: each
        for each in json.loads(cli("plan", "sync", "1,1,1000ms", "--json").out)["policies"]
    }
    assert found["adsp"]["over_synchronous"] == pytest.approx(2001 / 3, rel=0.05)  # 1,000 + 1,000 + 1 steps for 3
    assert found["synchronous"]["waited"] == pytest.approx(2 / 3, abs=0.01)


def test_one_worker_agrees_with_itself(cli: Cli) -> None:
    answer = cli("plan", "sync", "100ms", "--json")
    assert {each["waited"] for each in json.loads(answer.out)["policies"]} == {0.0}


def test_step_times_are_read_off_a_recording_of_unlike_ranks(cli: Cli, tmp_path: Path) -> None:
    """The others wait in the collective for the last rank, which is not their own time."""
    folder = Job(work_us=[[[1000.0 * (3 if rank == 3 else 1)]] * 5 for rank in range(4)]).write(tmp_path)
    found = json.loads(cli("plan", "sync", str(folder), "--json").out)
    assert found["step_s"] == pytest.approx([1e-3, 1e-3, 1e-3, 3e-3], rel=0.05)
    best = max(found["policies"], key=lambda each: each["over_synchronous"])
    assert best["policy"].startswith("adsp") and best["over_synchronous"] == pytest.approx(10 / 4, rel=0.1)
    advice = cli("advise", str(folder), "--all-ranks")
    assert f"times the quickest's: foretrace plan sync {folder}" in " ".join(advice.out.split()), advice.err
    assert re.search(r"adsp period_s=0\.06\d* 2\.[45]\d*×.* the steps per second", " ".join(advice.out.split()))
    assert "cuda-graphs: no step launches two kernels of" in " ".join(advice.out.split())
    assert any("medians of the recorded steps" in each for each in found["notes"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["100,ms"], "Step times must be numbers with one unit"),
        (["100,300ms", "--policy", "adspp"], "adsp"),
        (["100,300ms", "--policy", "gaia threshold=-1"], "threshold of gaia must be 0 to 1e+06, got -1"),
        (["100,300ms", "--policy", "adsp commits=-1"], "commits of adsp must be 0 to 1e+06, got -1"),
        (["100,300ms", "--share", "2"], "share must be above 0 and at most 1, got 2"),
        (["0,300ms"], "above 0"),
        ([f"{'100,' * 2_000}100ms"], "Workers must be 1 to 1024, got 2001"),
        (["9" * 400 + "ms"], "worker 0 never commits"),
        ([str(CNN)], "must be of several workers"),
        (
            ["1,1,10000ms", "--run", "--no-ledger", "--policy", "adsp"],
            "must make 6 commits within 60 s, got 3; give fewer --commits",
        ),
        (
            ["1,1,100000ms", "--run", "--no-ledger"],
            "0.001 to 10 s, got 3 with 0.001 to 100 s; leave out --run",
        ),
    ],
)
def test_what_cannot_be_is_a_sentence(cli: Cli, words: list[str], says: str) -> None:
    answer = cli("plan", "sync", *words)
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert says in answer.err
