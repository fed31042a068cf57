"""`foretrace codesign`: its answer, and what it suggests."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from foretrace.cli.app import run
from foretrace.report import jsonout

SMALL = ["codesign", "gpt2-medium", "--devices", "8", "--batch", "64", "--area", "8"]


def test_the_answer_and_what_it_suggests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "winner.json"
    assert run([*SMALL, "--no-layer", "--json", "--perfetto", str(path)]) == 0
    found = jsonout.loads(capsys.readouterr().out, "codesign")
    assert found.proven and found.designs > 1000 and not found.layer
    assert found.interval_s[0] <= found.iteration_s <= found.interval_s[1]
    assert found.throughput == pytest.approx(64 / found.iteration_s)
    assert found.simulated_s == pytest.approx(found.iteration_s, rel=1e-6)
    assert found.area == found.design.area <= 8
    assert found.energy_interval_j[0] < found.energy_j < found.energy_interval_j[1]
    assert [each.link for each in found.links] == ["4 GiB/s", "50 GB/s", "4 TiB/s"]
    assert all(each.ratio_interval[0] <= each.ratio <= each.ratio_interval[1] for each in found.baselines.values())
    assert max(each.throughput for each in found.pareto) == pytest.approx(found.throughput)
    assert json.loads(path.read_text())["traceEvents"]
    assert run([*shlex.split(found.next)[1:], "--json"]) == 0
    planned = jsonout.loads(capsys.readouterr().out, "plan transformer")
    assert planned.device == found.design.text
    assert planned.best.step_s <= found.iteration_s * (1 + 1e-9)  # that planner has more plans


def test_text_and_page_say_what_was_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ortools", reason="OR-Tools is not installed")
    path = tmp_path / "winner.html"
    assert run([*SMALL, "--decode", "64", "--html", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    drawn = path.read_text()
    assert drawn.count("<polyline") == 1 and drawn.count("<rect") > 10, "the front and a layer's operators"
    for words in (
        "proven best within the model", "the plan alone gains",
        "a layer forward", "not modelled: overlap", "4 TiB/s", "one word behind 64",
    ):  # fmt: skip
        assert words in said
    assert "TPU-like, balanced vector units" in drawn and "search rule" in drawn
    assert "a layer backward" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["codesign", "gpt2-medium", "--area", "1"], "no accelerator has an area of at most 1 mm²"),
        (["codesign", "gpt2-medium", "--link", "fast"], "no link"),
        (["codesign", "gpt2-medium", "--decode", "2000000"], "must be 1 to 1000000"),
        (["codesign", "gpt2-medium", "--link", "50GB/s/10us"], "must be a rate alone"),
        (["codesign", "resnet50"], "no transformer 'resnet50'"),
        (["plan", "gpt2-medium", "--device", "accelerator:buffer=1KB"], "must hold one tile"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
