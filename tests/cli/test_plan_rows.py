"""`foretrace plan rows`: a placement made, run for real, and what cannot be asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

LOOKUPS = "zipf:1.1 tables=2 rows=300 samples=32 batches=6"


def test_a_placement_is_made_and_run(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "placement.npz"
    answer = cli("plan", "rows", LOOKUPS, "--devices", "2", "--width", "8", "--run", "--out", str(out), "--json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    found = found.get("answer", found)
    assert found["ok"] and found["run"][0]["name"] == "plan"
    assert all(each["equal"] and each["counted_bytes"] == each["predicted_bytes"] for each in found["run"])
    assert {each["predicted_s"] for each in found["run"]} == {None}  # no link, so no seconds and no row
    assert found["ledger"] == "" and out.stat().st_size


def test_on_one_device_all_placements_are_equal(cli: Cli) -> None:
    answer = cli("plan", "rows", LOOKUPS, "--devices", "1", "--memory", "1GB", "--json")
    found = json.loads(answer.out)
    assert found["busiest_bytes"] == 0 and set(found["baselines"].values()) == {1.0}


def test_the_timeline_of_a_batch_is_written(cli: Cli, tmp_path: Path) -> None:
    trace = tmp_path / "batch.json"
    answer = cli(
        "plan", "rows", LOOKUPS, "--devices", "2", "--width", "8", "--between", "8mbit", "--perfetto", trace, "--json"
    )
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    found = found.get("answer", found)
    assert 0 < found["exchange_s"] < found["busiest_bytes"] / 1e6 * 1.5  # no more than all its bytes one by one
    names = {each["name"] for each in json.loads(trace.read_text())["traceEvents"] if each["ph"] == "X"}
    assert {"ids", "rows and sums", "gradients"} <= names
    refused = cli("plan", "rows", LOOKUPS, "--perfetto", trace)
    assert refused.code == 2 and "--between RATE" in refused.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--between", "50mbit"], "--between RATE is the link of a run or a timeline"),
        (["--devices", "1", "--run"], "One device exchanges nothing"),
        (["--memory", "1KB"], "does not hold the tables"),
    ],
)
def test_what_cannot_be_is_a_sentence(cli: Cli, words: list[str], says: str) -> None:
    answer = cli("plan", "rows", LOOKUPS, *words)
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert says in answer.err
