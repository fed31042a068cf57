"""`foretrace verify` for real, on a script with steps of a few milliseconds; no time is asserted."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from foretrace.experiment.ledger import Ledger
from foretrace.hardware.processor import instruction_sets
from tests.cli.conftest import Answer, Cli, cli

__all__ = ["cli"]

SCRIPT = Path(__file__).with_name("script.py")
BRIEF = ("--seconds", "1.5")

torch = pytest.importorskip("torch")


def follows(answer: dict[str, Any]) -> bool:
    """Whether a verdict is what its own figures say, by the rules of docs/verify.md."""
    predicted, value = answer["predicted"], answer["measured"]["value"]
    inside = predicted["low"] <= value <= predicted["high"]
    told = {"covered": inside, "missed": not inside, "inconclusive": bool(answer["uncertain"])}
    return told[answer["verdict"]] if answer["verdict"] in told else bool(abs(value - 1) <= answer["floor"])


@pytest.mark.slow
def test_a_run_is_answered_kept_and_predicted_again(cli: Cli, tmp_path: Path) -> None:
    ledger, kept = tmp_path / "ledger.sqlite", tmp_path / "kept"
    words = ("verify", "fused-optimizer", "--model", SCRIPT, *BRIEF, "--ledger", ledger, "--json")
    answer = cli(*words, "--keep", kept)
    assert answer.code == 0, answer.err
    found = answer.json
    assert found["headline"].startswith("Predicted ")
    assert found["predicted"]["low"] <= found["predicted"]["value"] <= found["predicted"]["high"]
    assert found["measured"]["value"] < 1  # five small operators per tensor against one
    assert found["calibrated"] == 2  # both updates were timed alone
    assert found["losses_before"] == pytest.approx(found["losses_after"], rel=1e-3)
    assert found["samples_before"] == found["samples_after"] == 32
    assert [arm["name"] for arm in found["arms"]] == ["before", "after", "again"]
    assert found["residual"]
    assert follows(found)
    asked = cli("whatif", kept / "before", "--do", "fused-optimizer", "--json")
    assert asked.code == 0, asked.err
    told = asked.json  # the same graph and the same calibration: the same prediction, to the last digit
    assert told["before_s"] == found["recorded_s"]
    assert told["after_s"] / told["before_s"] == pytest.approx(found["predicted"]["value"], rel=1e-12)
    assert [each / told["before_s"] for each in told["interval_s"]] == pytest.approx(
        [found["predicted"]["low"], found["predicted"]["high"]], rel=1e-12
    )
    assert [each["name"] for each in told["assumptions"]] == ["measured"], "the update was timed, not priced"
    (row,) = Ledger(ledger).rows()
    assert row.id == found["row"]
    assert row.model == "script.py"
    assert row.parameters == {"fused-optimizer": {"implementation": "fused"}}
    assert row.allocator["MALLOC_MMAP_THRESHOLD_"] == "33554432"
    shown = cli("ledger", "--ledger", ledger)
    assert shown.code == 0
    assert "fused-optimizer" in shown.out
    assert "1 verification" in shown.out or "none of them conclusive" in shown.out


@pytest.mark.slow
def test_several_techniques_are_applied_together_and_no_row_is_written_if_not_wanted(cli: Cli, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.sqlite"
    words = ("prefetch-data workers=1", "fused-optimizer", "--model", SCRIPT, *BRIEF)
    answer = cli("verify", *words, "--ledger", ledger, "--no-ledger")
    assert answer.code == 0, answer.err
    assert "batches from the loader" in answer.out
    assert "wall clock" in answer.out
    assert "no row was written" in answer.out
    assert not ledger.exists()


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


def refused(answer: Answer, ledger: Path) -> str:
    assert answer.code == 2, answer.err
    assert answer.out == ""
    assert not ledger.exists() or Ledger(ledger).rows() == ()
    return answer.err


def test_what_cannot_be_asked_is_said_at_once(cli: Cli, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.sqlite"
    model = ("--model", SCRIPT, "--ledger", ledger)
    assert "did you mean" in refused(cli("verify", "fused-optimiser", *model), ledger)
    assert "software does not" in refused(cli("verify", "faster-device ratio=2", *model), ledger)
    assert "choose ready or loader" in refused(cli("verify", "fused-optimizer", *model, "--batches", "x"), ledger)
    assert "does not exist" in refused(
        cli("verify", "fused-optimizer", "--model", tmp_path / "none.py", "--ledger", ledger), ledger
    )
    assert "zoo has no model" in refused(cli("verify", "fused-optimizer", "--model", "x", "--ledger", ledger), ledger)
    broken = tmp_path / "broken.sqlite"
    broken.write_text("no database at all, but long enough to be looked at" * 9)
    assert "ledger" in cli("verify", "fused-optimizer", "--model", SCRIPT, "--ledger", broken).err


@pytest.mark.slow
def test_a_script_that_fails_is_named_with_its_line(cli: Cli, tmp_path: Path) -> None:
    path, ledger = script(tmp_path, "def training():\n    return 1 / 0\n"), tmp_path / "ledger.sqlite"
    said = refused(cli("verify", "fused-optimizer", "--model", path, "--ledger", ledger), ledger)
    assert "train.py line 2 raises ZeroDivisionError: division by zero" in said
    assert "bug in foretrace" not in said


@pytest.mark.slow
def test_a_technique_that_does_not_fit_says_why(cli: Cli, tmp_path: Path) -> None:
    text = SCRIPT.read_text().replace("lr=1e-3", "lr=1e-3, fused=True")
    path, ledger = script(tmp_path, text), tmp_path / "ledger.sqlite"
    said = refused(cli("verify", "fused-optimizer", "--model", path, *BRIEF, "--ledger", ledger), ledger)
    assert "fused already" in said
    assert said.count("\n") == 1


LSTM = """
import torch
from foretrace import Training


def training():
    model = torch.nn.LSTM(8, 8)
    return Training(
        name="lstm",
        model=model,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1),),
        loader=[torch.randn(4, 2, 8) for _ in range(4)],
        loss=lambda module, batch: module(batch)[0].float().square().mean(),
    )
"""


@pytest.mark.slow
@pytest.mark.processor
@pytest.mark.skipif("sse4_1" not in (instruction_sets({}) or ()), reason="oneDNN is limited on x86 only")
def test_what_the_processor_cannot_do_is_a_sentence(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    path, ledger = script(tmp_path, LSTM), tmp_path / "ledger.sqlite"
    said = refused(cli("verify", "mixed-precision", "--model", path, *BRIEF, "--ledger", ledger), ledger)
    assert "mixed-precision: oneDNN has no LSTM in bfloat16 for AVX2" in said
    assert said.count("\n") == 1


def start(ledger: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "foretrace", "verify", "fused-optimizer", "--model", str(SCRIPT), *BRIEF]
    return subprocess.Popen(
        [*command, "--ledger", str(ledger)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        return [int(word) for word in found.read_text().split()]
    except FileNotFoundError:
        return []


def workers_of(pid: int) -> list[int]:
    """What was forked by the process that it started for that."""
    return [each for server in children(pid) for each in children(server)]


def alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def until(true: object, seconds: float = 200.0) -> bool:
    assert callable(true)
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_whoever_is_killed_the_ledger_stays_whole(tmp_path: Path) -> None:
    ledger, chance = tmp_path / "ledger.sqlite", random.Random(3)
    Ledger(ledger).checked()
    for moment in (0.1, chance.uniform(0.5, 2.0), chance.uniform(2.0, 4.0)):
        process = start(ledger)
        assert until(lambda process=process: children(process.pid) or process.poll() is not None)
        workers = [*children(process.pid), *workers_of(process.pid)]
        time.sleep(moment)
        process.kill()
        process.communicate(timeout=200)
        assert until(lambda workers=workers: not any(map(alive, workers))), "the worker continues without anybody"
    rows = len(Ledger(ledger).rows())  # a run may have been over before it was killed
    process = start(ledger)
    assert until(lambda: workers_of(process.pid))
    (worker,) = workers_of(process.pid)
    time.sleep(chance.uniform(0.1, 1.5))
    os.kill(worker, signal.SIGKILL)
    out, said = process.communicate(timeout=200)
    assert process.returncode == 2
    assert out == ""
    assert "SIGKILL" in said
    assert len(Ledger(ledger).rows()) == rows
