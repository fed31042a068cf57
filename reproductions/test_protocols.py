"""Every protocol in small, as `make reproduce` calls it; those with tests of their own folder run there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from reproductions import ROOT
from reproductions.__main__ import NAMES, main
from tests.fleet.test_pollux_profiles import write_profile

JOBS = str(ROOT / "examples" / "jobs.csv")


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_tiresias_plays_any_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("tiresias", "play", JOBS, "--format", "auto", "--policy", "dlas", "--cluster", "1x2x4", "--jobs", "20")
    found = json.loads(answer(capsys, *words, "--json", "--out", str(tmp_path / "rows.csv")))
    assert found["jobs"] == 20 and found["command"] == "fleet run"
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 21
    assert "20 jobs" in answer(capsys, *words)


def test_pollux_plays_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_profile(tmp_path / "profiles" / "toy")
    log = tmp_path / "log.csv"
    log.write_text("name,time,application,num_replicas,batch_size\na,60,toy,2,16\n")
    words = ("pollux", "play", str(log), "--policy", "tiresias", "--cluster", "1x4")
    found = json.loads(answer(capsys, *words, "--option", f"profiles={tmp_path / 'profiles'}", "--json"))
    assert found["mean_jct_s"] == 176.0, "worked out by hand in test_pollux.py"


def test_gavel_draws_jobs(shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = next((shared_data / "fleet" / "gavel").glob("*throughputs*.json*"))
    out = tmp_path / "jobs.csv"
    words = ("gavel", "generate", "--throughputs", str(table), "--jobs", "5", "--seed", "42", "--out", str(out))
    assert "5 jobs are in" in answer(capsys, *words)
    assert len(out.read_text().splitlines()) >= 6


def test_known_answers(shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(answer(capsys, "tiresias", "--json"))
    assert [row["ours_s"] for row in rows] == pytest.approx([row["published_s"] for row in rows], abs=5e-4)
    assert {row["jobs_alike"] for row in rows} == {500}


@pytest.mark.parametrize("given", [
    ("tiresias", "play", JOBS, "--policy", "dlas", "--jobs", "-3"),
    ("tiresias", "play", JOBS, "--policy", "dlas", "--option", "a"),
    ("gavel", "play", JOBS, "--policy", "allox"),
    ("nas_bench_201", "--archs", "none.csv", "--latencies", "none.csv"),
    ("mlperf", "--labels", "none.csv"),
])  # fmt: skip
def test_mistakes_are_one_line(given: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(given) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{given[0]}: ") and said.count("\n") == 1
    assert said.count(f"{given[0]}: ") == 1


@pytest.mark.parametrize("text", ["benchmark,round,org\n", "a,b\n1,2\n", "", "\xff"])
def test_a_file_without_runs_is_no_table_of_mlperf(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.csv"
    path.write_bytes(text.encode("latin-1"))
    assert main(["mlperf", "--labels", str(path)]) == 2
    said = capsys.readouterr().err
    assert ("is no table of MLPerf runs" in said or "is no text" in said) and said.count("\n") == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_reproduction_calls_itself_by_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: reproductions {name} ")


def test_the_table_of_compression_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rows that are kept give the page that is kept, but for its first line."""
    from reproductions.compression_utility import protocol

    kept = protocol.HERE / "README.md"
    (tmp_path / "README.md").write_text(kept.read_text(encoding="utf-8"), encoding="utf-8")
    words = [f"--{name}={protocol.HERE / f'{name}.jsonl'}" for name in ("predicted", "measured", "coded")]
    monkeypatch.setattr(protocol, "HERE", tmp_path)
    assert main(["compression_utility", "table", *words]) == 0

    def tables(path: Path) -> str:
        return path.read_text(encoding="utf-8").partition("## By model")[2]

    assert tables(tmp_path / "README.md") == tables(kept) and tables(kept).count("\n| ") > 20
    assert (tmp_path / "README.md").read_text(encoding="utf-8").startswith("---\npaper: ")


def test_the_search_of_dpro_is_checked_on_the_global_graph() -> None:
    from reproductions.dpro.protocol import NETWORKS, searched, shaped_problem

    layers = [(f"layer{i}", 10**5 * (i + 1), 1e-3) for i in range(4)]
    found = searched(shaped_problem("small", layers, NETWORKS[0]), 2)
    assert found.off == 0 and found.gap >= 0 and found.tasks > 100


def test_programs_never_seen_are_scored_with_the_kept_weights() -> None:
    from reproductions.cdmpp import data, score
    from reproductions.cdmpp.ast import encode
    from reproductions.cdmpp.predictor import load

    recording = data.read()
    _, _, test = score.split(recording)
    held = score.of_tasks(recording, test)
    found = load().predict_encoded(encode(recording.programs(0)).take(held))
    error = score.metrics(found.seconds, recording.seconds[held, 0], recording.task_of[held])
    assert 100 * error["mape"] == pytest.approx(28.4, abs=0.1), "as transformer.md has it"
    assert np.all(found.low_s <= found.high_s)


def test_structured_dropout_is_timed() -> None:
    pytest.importorskip("torch")
    from reproductions.structured_dropout.protocol import speed

    row = speed(hidden=16, p=0.5, connections="both", blocks=1)
    assert row.ordinary_ms > 0 and row.row().startswith("| 16 | 0.5 | both | ")


def test_the_predictor_of_programs_is_scored_on_tasks_left_out() -> None:
    from foretrace.cost.programs.predictor import fit_formula
    from reproductions.cdmpp import data, study

    quiet, recording = data.quiet(), data.read()
    assert quiet.rows.shape[:2] == quiet.seconds.T.shape == (2, len(recording.task_of))
    out = study._folds(recording.task_of)[0]
    found = fit_formula(quiet.rows[0][~out], quiet.seconds[~out, 0]).seconds(quiet.rows[0][out])
    assert np.median(np.abs(found / quiet.seconds[out, 0] - 1)) < 0.3
