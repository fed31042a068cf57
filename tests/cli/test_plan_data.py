"""`plan data` and its trial, for real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli


@pytest.mark.slow("plans, then trains in processes of its own")
def test_a_plan_is_made_and_tried(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="trains; install the extra torch")
    words = ["plan", "data", "planted:nodes=4000 edges=40000 communities=40", "--memory", "18MB", "--batch", "500"]
    answer = cli(*words, "--run", "--epochs", "3", "--ledger", str(tmp_path / "ledger.sqlite"), "--json",
                 "--perfetto", str(tmp_path / "epoch.json"))  # fmt: skip
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert {"choice", "predicted_epoch_s", "memory_bytes", "swaps", "swaps_bound", "runners_up"} <= found.keys()
    assert found["memory_bytes"] <= 18_000_000
    assert 0 < found["busy_s"]["training"] <= found["predicted_epoch_s"] * (1 + 1e-9)
    assert "train" in (tmp_path / "epoch.json").read_text()
    trial = found["trial"]
    assert 0 < trial["peak_bytes"] <= 18_000_000
    assert trial["quality"] > 0.6 and trial["in_memory_quality"] > 0.6
    assert len(trial["epochs_s"]) == 3 and found["row"]


def test_what_cannot_be_is_one_sentence(cli: Cli, tmp_path: Path) -> None:
    for words, said in (
        (["missing.npz", "--memory", "1GB"], "missing.npz"),
        ([str(tmp_path), "--memory", "1GB"], "graph.json"),
        (["planted:nodes=100 edges=300", "--memory", "x"], "--memory x"),
        (["planted:nodes=100 edges=300", "--memory", "1MB"], "the least that works is"),
        (["planted:nodes=100 edges=300", "--memory", "1GB", "--task", "nodes"], "--task"),
    ):
        answer = cli("plan", "data", *words)
        assert answer.code == 2 and said in answer.err and answer.err.count("\n") == 1, answer.err
