"""The protocol in small: a run that reaches its target, and one that is not run twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from reproductions.kaisa.protocol import Runs, main, train
from reproductions.kaisa.tasks import TASKS


def test_the_protocol_prints_both_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"sgd": ({"lr": 0.1},), "adam": ({"lr": 0.01},), "kfac": ({"lr": 0.1, "damping": 0.1, "clip": 0.03},)}
    monkeypatch.setattr("reproductions.kaisa.protocol.SETTINGS", short)
    assert main(["--task", "deep-tanh", "--steps", "10", "--seeds", "1"]) == 0
    text = capsys.readouterr().out
    assert text.count("| deep-tanh | 250 |") == 2 and "not reached" in text


def test_a_target_ends_a_run_and_what_was_run_is_kept(tmp_path: Path) -> None:
    task = replace(TASKS[2], target=1.0)
    found = train(task, 250, "kfac", {"lr": 0.1, "damping": 0.1, "clip": 0.03}, 0, 20)
    assert found.steps == 10 and found.cpu_s is not None
    runs = Runs(tmp_path / "runs.jsonl", 10)
    first = runs.get(TASKS[2], 250, "sgd", {"lr": 0.1}, 0)
    assert Runs(tmp_path / "runs.jsonl", 10).known == {first.key: first}
