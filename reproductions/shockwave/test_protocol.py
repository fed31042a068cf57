"""The comparison with real runs, on results that are a subset of the study's, or hold policies nobody knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reproductions.__main__ import main
from reproductions.shockwave import protocol

KEY = "tacc_32gpus_comparison|{}|physical"


@pytest.fixture(autouse=True)
def few_runs(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (shared_data / "fleet" / "shockwave").is_dir():
        pytest.skip("the study's job list is not among the shared data")
    monkeypatch.setattr(protocol, "RUNS", 2)


def results(shared_data: Path, tmp_path: Path, *policies: str, **changed: object) -> Path:
    whole = json.loads((shared_data / "fleet" / "shockwave" / "tacc_32gpus_results.json").read_text())
    entry = whole[KEY.format("allox")] | changed
    path = tmp_path / "results.json"
    path.write_text(json.dumps({KEY.format(policy): entry for policy in policies}))
    return path


def test_an_unknown_policy_is_passed_over_and_what_is_absent_is_no_number(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = results(shared_data, tmp_path, "allox", "themis_next", cluster_util=None)
    assert main(["shockwave", "--shared-data", str(shared_data), "--results", str(path)]) == 0
    said = capsys.readouterr().out
    assert "| allox | – |" in said and "themis_next (the simulator has no such policy)" in said
    assert "nan" not in said.lower()
    found = protocol.run(shared_data / "fleet" / "shockwave", path, False)
    assert found["mean"]["all runs"]["theirs"] == dict.fromkeys(("jct", "makespan", "per_job_log", "per_job"))
    json.dumps(found, allow_nan=False)


def test_a_run_that_reports_more_gpu_hours_is_called_slow(shared_data: Path, tmp_path: Path) -> None:
    used = 0.6297  # of the run as recorded
    for factor, slow in ((1.0, False), (1.1, True)):
        path = results(shared_data, tmp_path, "allox", cluster_util=used * factor)
        found = protocol.run(shared_data / "fleet" / "shockwave", path, False)["policies"]["allox"]
        assert found["recorded"]["slow"] is slow
        assert found["recorded"]["gpu_h"] == pytest.approx(factor * 178.9, rel=1e-3)
    assert found["ours with its GPU-hours"]["jct"] > found["ours"]["jct"] + 0.05  # jobs that are slower take longer


def test_no_known_policy_is_a_sentence(shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = results(shared_data, tmp_path, "themis_next")
    assert main(["shockwave", "--shared-data", str(shared_data), "--results", str(path)]) == 2
    assert "themis_next (the simulator has no such policy)" in capsys.readouterr().err
