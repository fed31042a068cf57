"""`foretrace utilisation`: the answer for people and scripts, and mistakes in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from foretrace.cli.app import run
from foretrace.report.jsonout import schema
from foretrace.report.models import UtilisationView

GRAPH = """{"format": "foretrace operators", "version": 1, "name": "layer", "batch": 8, "tensors": [
  {"dims": [4096, 4096], "role": "input"}, {"dims": [4096, 4096], "role": "weight"}, {"dims": [4096, 4096]},
  {"dims": [4096, 4096], "of": 2}], "nodes": [{"op": "aten::mm", "inputs": [0, 1], "outputs": [2]},
  {"op": "aten::relu_", "inputs": [2], "outputs": [3]}]}"""


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    path = tmp_path / "layer.json"
    path.write_text(GRAPH)
    return path


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert run(["utilisation", *words, "--json"]) == 0
    text = capsys.readouterr().out
    msgspec.json.decode(text, type=UtilisationView)
    found: dict[str, object] = json.loads(text)
    assert set(found) == set(schema("utilisation")["properties"])
    return found


def test_a_model_that_never_ran(layer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usage = answer(capsys, str(layer), "--device", "a100")["usage"]
    assert isinstance(usage, dict)
    assert usage["flops"] == 2 * 4096**3 and usage["precision"] == "fp32"
    assert usage["of_peak_flops"] == pytest.approx(usage["flops"] / 19.49e12 / usage["step_time_s"])
    low, high = usage["of_peak_flops_range"]
    assert 0 < low < usage["of_peak_flops"] < high <= 1
    assert usage["intensity"] == pytest.approx(4096 / 6) and usage["bound"] == "compute"
    assert 0.5 < usage["busy"] <= 1
    assert run(["utilisation", str(layer), "--device", "a100"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "compute-bound as a whole" in text and "of the peak of A100" in text


def test_measured_times_stand_before_predictors(
    layer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "times.csv"
    table.write_text("device,family,precision,m,n,k,ms\na100,gemm,fp32,4096,4096,4096,20\n")
    found = answer(capsys, str(layer), "--device", "a100", "--measured", str(table))["usage"]
    assert isinstance(found, dict)
    assert found["cost_sources"]["measured"] > 0.9
    assert found["step_time_s"] > 0.02
    other = answer(capsys, str(layer), "--device", "v100", "--measured", str(table))
    assert any("no call of the model" in note for note in other["notes"])  # type: ignore[attr-defined]


@pytest.mark.parametrize(("words", "says"), [
    ([], "MODEL"),
    (["resnet50", "--device", "abacus"], "abacus"),
])  # fmt: skip
def test_mistakes_are_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["utilisation", *words]) == 2
    complaint = capsys.readouterr().err
    assert says in complaint and complaint.count("\n") == 1 and "Traceback" not in complaint
