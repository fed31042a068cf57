"""`foretrace calibrate`: what it prints, stores and refuses; run with real operators."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import foretrace
from foretrace import flow
from foretrace.cli.app import run
from foretrace.cost.operators.bench import OperatorTimings, measure
from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import Operator
from foretrace.report.jsonout import schema
from foretrace.techniques.compute.fused_optimizer import FusedOptimizer
from foretrace.techniques.measuring import calibrated
from tests.report.test_jsonout import check

DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model recorded here, with the allocator settings that the tests run with."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    folder = tmp_path_factory.mktemp("recorded")
    with foretrace.record(folder, wait=2, active=3, skip_first=2, rehearse=False) as recorder:
        for _ in range(14):
            optimizer.zero_grad()
            model(torch.randn(8, 32)).sum().backward()
            optimizer.step()
            recorder.step()
    torch.set_num_threads(before)
    return folder


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run(["calibrate", *words])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_device_prints_and_stores(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capsys, "device", "--threads", "1", "--seconds", "1")
    assert code == 0
    assert "bfloat16 takes" in out.splitlines()[0]
    assert "with 1 thread" in out
    assert "no time was left" in " ".join(out.split())
    stored = Path(out.split("stored in ")[1].splitlines()[0])
    assert json.loads(stored.read_text())["machine"]["threads"] == 1


def test_device_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capsys, "device", "--threads", "1", "--seconds", "1", "--json")
    assert code == 0
    answer = json.loads(out)
    rules = schema("calibrate")
    assert not check(answer, rules, rules["$defs"])
    assert answer["of"] == "device"
    assert answer["seconds"]
    assert Path(answer["stored"]).is_file()


def test_run_times_what_a_technique_wants(capsys: pytest.CaptureFixture[str], recording: Path) -> None:
    code, out, err = command(capsys, "run", str(recording), "--do", "fused-optimizer", "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert len(answer["seconds"]) == 2
    assert not answer["failed"]
    graph = flow.read(recording).graph().graph
    assert set(Calibration.load_for(graph).seconds) >= set(answer["seconds"])
    code, out, _ = command(capsys, "run", str(recording), "--do", "fused-optimizer")
    assert code == 0
    assert "Nothing to time" in out


@pytest.mark.slow
def test_run_takes_over_the_allocator_of_the_recording(recording: Path, tmp_path: Path) -> None:
    """The command starts again with the recorded settings; the stored file says so."""
    changed = tmp_path / "changed.json.gz"
    with gzip.open(recording / "rank0.json.gz") as file:
        content = json.load(file)
    content["foretrace"]["environment"]["MALLOC_TOP_PAD_"] = "1048576"
    changed.write_bytes(gzip.compress(json.dumps(content).encode()))
    words = [sys.executable, "-m", "foretrace", "calibrate", "run", str(changed), "--do", "fused-optimizer", "--json"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120, env=dict(os.environ))
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["machine"]["allocator"]["MALLOC_TOP_PAD_"] == "1048576"


def rewritten(recording: Path, folder: Path, **facts: Any) -> Path:
    with gzip.open(recording / "rank0.json.gz") as file:
        content = json.load(file)
    content["foretrace"] |= facts
    path = folder / "other.json.gz"
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path


def test_a_recording_of_another_machine_is_refused(
    capsys: pytest.CaptureFixture[str], recording: Path, tmp_path: Path
) -> None:
    other = rewritten(recording, tmp_path, torch="1.0.0")
    code, out, err = command(capsys, "run", str(other), "--do", "fused-optimizer")
    assert (code, out) == (2, "")
    assert "recorded elsewhere: PyTorch (1.0.0, not" in err


def test_a_recording_that_says_too_little_is_refused(
    capsys: pytest.CaptureFixture[str], recording: Path, tmp_path: Path
) -> None:
    silent = rewritten(recording, tmp_path, machine={})
    code, _, err = command(capsys, "run", str(silent), "--do", "fused-optimizer")
    assert code == 2
    assert "record it with foretrace record" in err


def test_techniques_are_asked_in_their_order(recording: Path) -> None:
    graph = flow.read(recording).graph().graph
    asked: list[list[Operator]] = []

    def timing(operators: Sequence[Operator], *, budget_s: float) -> OperatorTimings:
        asked.append(list(operators))
        return measure(operators, budget_s=budget_s, target_s=0.0)

    found = calibrated(graph, [FusedOptimizer()], timing)
    assert len(asked) == 1
    assert set(found.seconds) >= {each.key for each in asked[0]}
    assert Calibration.of(found.graph).ratio(asked[0][0], asked[0][1]) is not None
    assert not graph.info.calibration
    again = calibrated(found.graph, [FusedOptimizer()], timing)
    assert len(asked) == 1
    assert not again.seconds
