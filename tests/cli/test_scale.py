"""`foretrace scale`: many ranks out of a few, for people and as JSON; mistakes are one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foretrace.report.jsonout import schema
from tests.cli.conftest import Cli
from tests.graph.rank_sets import Collective, Job, work
from tests.report.test_jsonout import check


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks that all-reduce in pairs, then all together."""
    pairs = Collective(kind="AllGather", groups=((0, 1), (2, 3)), elements=512)
    job = Job(work_us=work(np.random.default_rng(2), 4, 5, 2), collectives=(pairs, Collective(elements=1 << 20)))
    return job.write(tmp_path_factory.mktemp("ranks"))


def test_the_answer_for_people(cli: Cli, ranks: Path) -> None:
    answer = cli("scale", ranks, "--ranks", "64", "--top", "2")
    assert answer.code == 0, answer.err
    assert "On 64 ranks a step takes" in answer.out and "% interval" in answer.out
    assert "noise between 5 steps, by class of work" in answer.out
    assert "assumed: growth of transfers" in answer.out and "--network" in answer.out
    assert "2 more: --top 4 or --json." in answer.out
    assert f"next: foretrace show {ranks}" in answer.out


def test_the_answer_as_json(cli: Cli, ranks: Path) -> None:
    found = cli("scale", ranks, "--ranks", "64", "--network", "10gbit/5us", "--json").json
    rules = schema("scale")
    assert not check(found, rules, rules["$defs"])
    low, high = found["interval_s"]
    assert low <= found["predicted_step_s"] <= high
    assert (found["growing"], found["kept"]) == (5, 10)  # per step one among all, one among each pair
    rank = found["per_rank"]
    assert [len(rank[key]) for key in rank] == [64] * 5
    assert rank["recorded_rank"][:5] == [0, 1, 2, 3, 0]
    assert sum(rank["last_share"]) == pytest.approx(1)
    assert np.mean(rank["wait_s"]) == pytest.approx(found["wait_s"]["predicted"])
    assert [each["copies"] for each in found["classes"]] == [16] * 4
    assert found["transfer_ratio"] is not None
    names = {each["name"] for each in found["assumptions"]}
    assert {"ranks alike", "collectives that do not grow"} <= names


def test_as_many_ranks_as_recorded_are_as_recorded(cli: Cli, ranks: Path) -> None:
    found = cli("scale", ranks, "--ranks", "4", "--samples", "0", "--json").json
    assert found["predicted_step_s"] == found["folded_step_s"] == found["recorded_step_s"]
    assert found["wait_s"]["predicted"] == pytest.approx(found["wait_s"]["recorded"])
    assert "as on the 4 recorded" in found["headline"]


def test_seeds(cli: Cli, ranks: Path) -> None:
    answers = [cli("scale", ranks, "--ranks", "16", "--samples", "3", "--seed", seed, "--json").out for seed in "112"]
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--ranks", "2"), "fewer than the 4 that were recorded"),
        (("--ranks", "0"), "--ranks"),
        (("--ranks", "-8"), "--ranks"),
        (("--ranks", "many"), "--ranks"),
        (("--ranks", "1000000"), "at most 16,384"),
        (("--ranks", "6"), "a multiple of 4 ranks, as 4"),
        (("--ranks", "8", "--network", "-1gbit"), "-1gbit"),
        (("--ranks", "8", "--network", "nan"), "nan"),
        (("--ranks", "8", "--network", "nowhere.yaml"), "nowhere.yaml"),
        (("--ranks", "8", "--samples", "-1"), "--samples"),
        (("--ranks", "8", "--on", "mars"), "--on mars does not exist"),
        (("--ranks", "8", "--steps", "77"), "has no step 77"),
        ((), "--ranks"),
    ],
)
def test_mistakes(cli: Cli, ranks: Path, arguments: tuple[str, ...], says: str) -> None:
    answer = cli("scale", ranks, *arguments)
    assert answer.code == 2 and answer.out == ""
    assert says in answer.err and answer.err.count("\n") == 1


def test_recordings_that_cannot_be_scaled(cli: Cli, ranks: Path, cnn: Path, tmp_path: Path) -> None:
    one = cli("scale", cnn, "--ranks", "8")
    assert one.code == 2 and "is one rank" in one.err
    nowhere = cli("scale", tmp_path / "nowhere", "--ranks", "8")
    assert nowhere.code == 2 and "does not exist" in nowhere.err
    empty = cli("scale", tmp_path, "--ranks", "8")
    assert empty.code == 2 and "holds no recording" in empty.err
    pairs = Job(work_us=work(np.random.default_rng(2), 4, 2), collectives=(Collective(groups=((0, 1), (2, 3))),)).write(
        tmp_path
    )
    apart = cli("scale", pairs, "--ranks", "8")
    assert apart.code == 2 and "no collective joins all 4 recorded ranks" in apart.err
    graph = tmp_path / "saved.graph"
    assert cli("graph", cnn, "--out", graph).code == 0
    saved = cli("scale", graph, "--ranks", "8")
    assert saved.code == 2, saved.err


def test_the_help_has_an_example(cli: Cli) -> None:
    text = cli("scale", "--help").out
    assert all(option in text for option in ("--ranks", "--network", "--on", "--samples", "--json"))
    assert "foretrace scale run/ --ranks 1024" in " ".join(text.split())
