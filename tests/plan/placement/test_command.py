"""`foretrace plan place` on models and files, and what it says of what cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from foretrace.cli.app import run
from foretrace.report import jsonout
from foretrace.zoo.registry import entries


def _problem(**changes: Any) -> dict[str, Any]:
    nodes = [
        {"id": each, "cpuLatency": 10.0, "fpgaLatency": 1.0, "size": 1e9, "supportedOnFpga": 1, "isBackwardNode": 0}
        for each in range(4)
    ]
    edges = [{"sourceId": each, "destId": each + 1, "cost": 0.5} for each in range(3)]
    return {"maxSizePerFPGA": 2e9, "maxFPGAs": 2, "maxCPUs": 0, "nodes": nodes, "edges": edges} | changes


def _said(tmp_path: Path, capsys: pytest.CaptureFixture[str], problem: Any, *words: str) -> tuple[int, str, str]:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(problem))
    code = run(["plan", "place", str(path), *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _said(tmp_path, capsys, _problem(), "--json")
    found = jsonout.loads(out, "plan place")
    assert (code, found.objective_value, found.proven, found.interval) == (0, 2.5, True, None)
    assert [each.nodes for each in found.devices] == [(0, 1), (2, 3)]


def test_model(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert run(["plan", "place", "ncf", "--device", "h100", "--devices", "2", "--size", "tiny", "--json"]) == 0
    found = jsonout.loads(capsys.readouterr().out, "plan place")
    assert found.interval[0] <= found.objective_value <= found.interval[1]
    assert found.bound <= found.objective_value


@pytest.mark.parametrize(
    "model",
    ["gan", "gnn", "lstm-lm", "seq2seq", "transformer", "detector", "deepspeech2", "actor-critic", "dlrm"],
)
def test_models_of_other_kinds_are_planned(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Models of the zoo that are no chains; that they are no transformers is said in a sentence."""
    pytest.importorskip("torch")
    there = [model, "--device", "h100", "--devices", "2", "--size", "tiny"]
    for words in (["place"], ["place", "--objective", "latency", "--seconds", "0", "--inference"], ["pipeline"]):
        assert run(["plan", words[0], *there, *words[1:]]) == 0
    assert run(["plan", "transformer", model, "--device", "h100", "--devices", "8"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"foretrace plan place {model}." in said


# All of them take minutes: a quick run takes one of each kind (branches, an optimizer alone, transformers).
_FULL = ("inception-v3", "ncf", "vit-b-16") if os.environ.get("FORETRACE_EXAMPLES") == "quick" else tuple(entries())


@pytest.mark.slow("captures models at their full size, and plans each in seven ways")
@pytest.mark.parametrize("model", _FULL)
def test_every_model_is_planned_or_refused_at_full_size(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    there = [model, "--device", "a100-80gb", "--devices", "4"]
    for command, *words in (
        ["place"], ["place", "--objective", "latency", "--seconds", "2", "--inference"], ["pipeline"],
        ["pipeline", "--planner", "piper"], ["pipeline", "--planner", "pipedream"], ["soap", "--calls", "100"],
        ["transformer"],
    ):  # fmt: skip
        code = run(["plan", command, *there, *words])
        said = capsys.readouterr().err.splitlines()
        assert code == 0 or (code == 2 and len(said) == 1), (command, words, said)


_WRONG: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    ({"maxSizePerFPGA": 0.9e9}, (), "what must stay together with node 0 has 1 GB; give --memory-limit 2001MB"),
    ({"maxFPGAs": 1}, (), "does not fit on 1 accelerator of 2 GB; give --memory-limit 4001MB or --devices 2"),
    ({"nodes": []}, (), "has no nodes"),
    ({"edges": [{"sourceId": 0, "destId": 9, "cost": 1}]}, (), "an edge names node 9"),
    ({"edges": [{"sourceId": 0, "destId": 1, "cost": 1}, {"sourceId": 1, "destId": 0, "cost": 1}]}, (),
     "wait for each other in a circle"),
    ({"edges": [{"sourceId": 0, "destId": 1, "cost": 1}, {"sourceId": 0, "destId": 2, "cost": 2}]}, (),
     "edges of node 0 must have one cost"),
    ({}, ("--objective", "energy"), "--objective must be throughput or latency"),
    ({}, ("--objective", "latency", "--any-sets"), "runs its operators as one piece"),
    ({}, ("--device", "h100"), "so --device means nothing; leave it out"),
    ({}, ("--batch", "4"), "so --batch means nothing; leave it out"),
    ({}, ("--inference",), "so --inference means nothing; leave it out"),
    ({}, ("--seconds", "inf"), "--seconds inf must be finite"),
    ({"nodes": "none"}, (), "must be a placement problem"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words", "said"), _WRONG)
def test_what_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: tuple[str, ...], said: str
) -> None:
    code, out, err = _said(tmp_path, capsys, _problem(**changes), *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_a_recording_is_placed(capsys: pytest.CaptureFixture[str]) -> None:
    recording = str(Path(__file__).parents[2] / "data" / "cnn.json.gz")
    assert run(["plan", "place", recording, "--device", "h100", "--devices", "2"]) == 0
    assert "kB" in capsys.readouterr().out  # its weights are small, and not nothing


def test_unknown_sizes_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [each | {"size": 0} for each in _problem()["nodes"]]
    _, out, _ = _said(tmp_path, capsys, _problem(nodes=nodes), "--json")
    found = jsonout.loads(out, "plan place")
    assert all(each.memory is None for each in found.devices)
    assert "says nothing of sizes" in found.notes[0]


def test_a_model_needs_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "place", "bert", "--device", "h100"]) == 2
    assert "name them: --devices N" in capsys.readouterr().err
