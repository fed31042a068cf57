"""`foretrace show` and `foretrace align` on several ranks, whole sets and broken ones."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.conftest import Answer, Cli
from tests.graph.rank_sets import Collective, Job, work

RANDOM = np.random.default_rng(31)


def slow_rank(ranks: int = 3, **more: Any) -> Job:
    """A job whose last rank works 500 us longer in every step."""
    times = np.full((ranks, 4, 1), 300.0)
    times[-1] = 800.0
    return Job(work_us=times.tolist(), **more)


def refused(answer: Answer) -> str:
    """The one line of a user's mistake."""
    assert answer.code == 2
    assert answer.out == ""
    assert "Traceback" not in answer.err
    lines = [line for line in answer.err.splitlines() if line]
    assert len(lines) == 1
    return lines[0]


def test_show_leads_with_who_waits_for_whom_and_why(cli: Cli, tmp_path: Path) -> None:
    slow_rank().write(tmp_path)
    answer = cli("show", tmp_path)
    assert answer.code == 0
    head = " ".join(answer.out.split("\n\n")[1].split())
    assert head.startswith("The ranks wait for each other: 333 µs in collectives per step of 849 µs, and 40.0 µs of tr")
    assert "rank 2 arrives last at 4 of 4 collectives: its host works 500 µs longer" in head
    assert "others wait for it" in answer.out
    assert f"next: foretrace blame {tmp_path} --rank 2" in answer.out


def test_show_says_it_in_json(cli: Cli, tmp_path: Path) -> None:
    slow_rank(offset_us=(0, 2500, -60)).write(tmp_path)
    view = cli("show", tmp_path, "--json").json
    found, clock = view["collectives"], view["clock"]
    assert (found["matched"], found["unmatched"], found["missing"]) == (4, [], [])
    assert found["last_arriver"] == [2, 2, 2, 2]
    assert found["wait_s_mean"] == pytest.approx(2 / 3 * 500e-6, rel=1e-3)
    assert found["transfer_s_mean"] == pytest.approx(40e-6, rel=1e-3)
    assert found["straggler"]["rank"] == 2
    assert clock["offsets_s"] == pytest.approx({"0": 0.0, "1": 2.5e-3, "2": -60e-6}, abs=2e-9)
    assert 0 < clock["uncertainty_s"] < 1e-6
    assert (view["ranks"], view["rank_numbers"], view["world_size"]) == (3, [0, 1, 2], 3)
    assert sum(view["breakdown_s"].values()) == pytest.approx(view["step_time_s"]["median"], abs=1e-8)


def test_one_rank_can_still_be_looked_at(cli: Cli, tmp_path: Path) -> None:
    slow_rank().write(tmp_path)
    view = cli("show", tmp_path, "--rank", "1", "--json").json
    assert view["rank_numbers"] == [1]
    assert view["collectives"] is None and view["clock"] is None


def test_balanced_ranks_keep_pace(cli: Cli, tmp_path: Path) -> None:
    Job(work_us=np.full((2, 4, 1), 900.0).tolist()).write(tmp_path)
    assert "The ranks keep pace: 0 of waiting for each other and 40.0 µs of transfer per step" in " ".join(
        cli("show", tmp_path).out.split()
    )


def test_align_gives_the_offsets_alone(cli: Cli, tmp_path: Path) -> None:
    Job(work_us=work(RANDOM, 3, 5), offset_us=(0, 1234.5, -4000)).write(tmp_path)
    answer = cli("align", tmp_path, "--json")
    assert answer.code == 0
    assert answer.json["command"] == "align"
    assert answer.json["offsets_s"] == pytest.approx({"0": 0.0, "1": 1234.5e-6, "2": -4e-3}, abs=2e-9)
    assert answer.json["uncertainty_s"] < 1e-6
    assert answer.json["drift"] == {}
    assert answer.json["matched"] == 5


def test_align_reads_like_a_table(cli: Cli, tmp_path: Path) -> None:
    Job(work_us=work(RANDOM, 2, 5), offset_us=(0, 1500)).write(tmp_path)
    out = cli("align", tmp_path).out
    assert out.startswith("The clocks of 2 of 2 ranks lie within 1.50 ms, known to ±")
    assert "ahead of rank 0" in out and re.search(r"^ +1 +1\.50 ms$", out, re.M)


def test_align_of_one_rank_is_refused(cli: Cli, tmp_path: Path, cnn: Path) -> None:
    assert "holds one rank, whose clock has none to be compared with" in refused(cli("align", cnn))


def test_align_of_a_saved_graph_is_refused(cli: Cli, tmp_path: Path, cnn: Path) -> None:
    saved = tmp_path / "cnn.graph"
    assert cli("graph", cnn, "--out", saved).code == 0
    assert "is a saved graph; name the folder of the ranks' recordings" in refused(cli("align", saved))


def test_drift_is_told(cli: Cli, tmp_path: Path) -> None:
    job = Job(work_us=work(RANDOM, 2, 40, most=60_000), drift=(0, 5e-5))
    job.write(tmp_path)
    assert cli("align", tmp_path, "--json").json["drift"]["1"] == pytest.approx(5e-5, rel=0.05)
    assert "drifting 50" in cli("align", tmp_path).out


def test_a_killed_rank_is_named_and_the_rest_can_be_read(cli: Cli, tmp_path: Path) -> None:
    slow_rank().write(tmp_path)
    file = tmp_path / "rank1.json"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    for command in ("show", "align"):
        assert "rank1.json ends in the middle of an event" in refused(cli(command, tmp_path))
    answer = cli("show", tmp_path, "--salvage", "--json")
    assert answer.code == 0
    assert answer.json["ranks"] == 3
    assert answer.json["collectives"]["matched"] < 4


def test_a_deleted_file_is_said_to_be_missing(cli: Cli, tmp_path: Path) -> None:
    slow_rank().write(tmp_path)
    (tmp_path / "rank1.json").unlink()
    view = cli("show", tmp_path, "--json").json
    assert view["collectives"]["matched"] == 4
    assert view["collectives"]["missing"][0].startswith("1 of 3 ranks are not in this set (1)")
    assert "ranks are missing, and waiting for them counts as transfer" in view["headline"]


@pytest.mark.parametrize("command", ["show", "align"])
def test_ranks_of_different_jobs_are_one_clear_sentence(cli: Cli, tmp_path: Path, command: str) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    slow_rank(described=False).write(ours)
    slow_rank(world_size=16).write(theirs)
    shutil.copy(theirs / "rank2.json", ours / "rank2.json")
    line = refused(cli(command, ours))
    assert "rank 0 is one of 3 ranks and rank 2 one of 16: these are recordings of different jobs" in line
    slow_rank(described=False, collectives=(Collective(kind="AllGather"),)).write(theirs)
    for rank in (1, 2):
        shutil.copy(theirs / f"rank{rank}.json", ours / f"rank{rank}.json")
    (ours / "rank2.json").unlink()
    assert "have no collective in common (rank 0 runs 4 all_reduce" in refused(cli(command, ours))


@pytest.mark.parametrize("command", ["show", "align"])
def test_the_same_rank_twice_and_an_empty_folder_are_refused(cli: Cli, tmp_path: Path, command: str) -> None:
    assert "holds no recording" in refused(cli(command, tmp_path))
    slow_rank().write(tmp_path)
    shutil.copy(tmp_path / "rank1.json", tmp_path / "again.json")
    assert "are both rank 1" in refused(cli(command, tmp_path))
    assert "--rank" in refused(cli(command, tmp_path / "nowhere")) or command


def test_ranks_without_collectives_are_answered_one_by_one(cli: Cli, tmp_path: Path) -> None:
    slow_rank().write(tmp_path)
    for file in tmp_path.glob("*.json"):
        recording = json.loads(file.read_text())
        recording["traceEvents"] = [e for e in recording["traceEvents"] if not e["name"].startswith("nccl")]
        file.write_text(json.dumps(recording))
    view = cli("show", tmp_path, "--json").json
    assert view["collectives"]["matched"] == 0
    assert view["rank_numbers"] == [0]
    assert "no collective ties the 3 ranks together." in view["notes"]
    answer = cli("align", tmp_path, "--json").json
    assert answer["offsets_s"] == {"0": 0.0, "1": None, "2": None}
    assert answer["uncertainty_s"] is None


def test_the_eight_ranks_of_a_recommender(cli: Cli, shared_data: Path) -> None:
    folder = shared_data / "traces/param/dlrm_kineto_8rank"
    view = cli("show", folder, "--json").json
    found = view["collectives"]
    assert (found["matched"], found["unmatched"]) == (8, [])
    assert found["wait_s_mean"] == pytest.approx(5.86e-3, abs=0.01e-3)
    assert found["transfer_s_mean"] == pytest.approx(0.21e-3, abs=0.01e-3)
    assert found["last_arriver"] == [7, 7, 7, 7, 7, 5, 5, 4]
    assert found["straggler"]["cause"] == "entry"
    assert "rank 7 arrives last at 5 of 8 collectives: it enters the step" in view["headline"]
    assert 0 <= found["saved_if_free_s"] <= 20e-6
    offsets = cli("align", folder, "--json").json["offsets_s"]
    assert offsets == view["clock"]["offsets_s"]
    assert max(map(abs, offsets.values())) < 3e-6


def test_two_sampled_ranks_of_many(cli: Cli, shared_data: Path, tmp_path: Path) -> None:
    for name in ("timeline_analysis_sampled_rank-0.json.gz", "trace_filter_sampled_rank-1.json.gz"):
        (tmp_path / name).write_bytes((shared_data / "traces/hta" / name).read_bytes())
    view = cli("show", tmp_path, "--json").json
    assert "126 of 128 ranks are not in this set" in view["collectives"]["missing"][0]
    assert view["collectives"]["matched"] >= 4
    assert view["collectives"]["unmatched"]


def test_a_recording_of_another_day_is_refused(cli: Cli, shared_data: Path, tmp_path: Path) -> None:
    first = next((shared_data / "traces/param/dlrm_kineto_8rank").glob("worker0*"))
    for source, name in ((first, "a"), (shared_data / "traces/hta/trace_diff_control.json.gz", "b")):
        (tmp_path / f"{name}.json.gz").write_bytes(source.read_bytes())
    assert "rank 3 was recorded 381 days before rank 0" in refused(cli("show", tmp_path))
