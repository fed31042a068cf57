"""`foretrace operators`: every kind of source, its table, JSON, files and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from foretrace.model.readers.json_form import loads
from foretrace.report.models import OperatorsView
from foretrace.report.units import scaled
from tests.cli.conftest import Cli

MLP = {
    "format": "foretrace operators",
    "version": 1,
    "name": "mlp",
    "calls": [
        {"op": "aten::mm", "dims": [[8, 64], [64, 64]], "layer": f"layers.{i // 2}"}
        if i % 2 == 0
        else {"op": "aten::relu", "dims": [[8, 64]], "layer": f"layers.{i // 2}"}
        for i in range(12)
    ],
}


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    path = tmp_path / "mlp.json"
    path.write_text(json.dumps(MLP))
    return path


def test_table_and_json(cli: Cli, mlp: Path) -> None:
    answer = cli("operators", mlp)
    assert answer.code == 0, answer.err
    assert answer.out.startswith("A step of mlp computes 396 kFLOP and moves 147 kB: gemm has 99.2 % of the FLOPs and ")
    assert "block: 2 operators, 6 times, node 0 on from layers.0" in answer.out
    view = msgspec.convert(cli("operators", mlp, "--json").json, OperatorsView)
    assert view.operators == 12
    assert view.flops == 6 * (2 * 8 * 64 * 64 + 8 * 64)
    assert [each.name for each in view.families] == ["gemm", "elementwise"]
    assert {each.name for each in view.layers} == {f"layers.{i}" for i in range(6)}
    assert view.phases[0].calls == 12
    assert view.batch is None


def test_fused_and_written(cli: Cli, mlp: Path, tmp_path: Path) -> None:
    answer = cli("operators", mlp, "--fuse", "--by", "operator", "--out", tmp_path / "fused.json")
    assert answer.code == 0, answer.err
    assert "6 kernels" in answer.out
    assert answer.out.rstrip().endswith(f"wrote {tmp_path / 'fused.json'}")
    graph = loads((tmp_path / "fused.json").read_bytes())
    assert [node.op for node in graph.nodes] == ["aten::mm"] * 6
    assert cli("operators", tmp_path / "fused.json", "--json").json["flops"] == graph.flops


def test_a_recording(cli: Cli, cnn: Path) -> None:
    view = cli("operators", cnn, "--json", "--step", 13).json
    assert view["source"] == "recording of cpu"
    assert view["batch"] == 2
    assert {each["name"] for each in view["phases"]} >= {"forward", "backward", "optimizer"}
    assert cli("operators", cnn, "--by", "layer", "--top", 3).code == 0


def test_a_model_of_the_zoo(cli: Cli) -> None:
    pytest.importorskip("torch")
    answer = cli("operators", "gan", "--size", "tiny", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["parameters"] > 0
    assert answer.json["blocks"] is not None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no-such.json"], "does not exist"),
        (["mlp.json", "--by", "name"], "a row is a family, operator, phase or layer"),
        (["mlp.json", "--dim", "batch"], "write NAME=N"),
        (["mlp.json", "--dim", "batch=8"], "is no ONNX model"),
        (["mlp.json", "--step", "2"], "has one step only"),
        (["mlp.json", "--rank", "2"], "is of one rank"),
        (["bad.json"], "is JSON, but not a recording"),
        (["empty.json"], "is empty"),
        (["noise"], "is not a recording"),
        (["damaged.gz"], "damaged gzip"),
        (["gan", "--step", "2"], "so --step means nothing"),
    ],
)
def test_mistakes_are_one_sentence(
    cli: Cli, mlp: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(mlp.parent)
    Path("bad.json").write_text('{"a": 1}')
    Path("empty.json").touch()
    Path("noise").write_bytes(b"\xff\xfe\x00 noise")
    Path("damaged.gz").write_bytes(b"\x1f\x8b\x08\x00\x00\x00\x00\x00\xff\xff\xff")
    answer = cli("operators", *arguments)
    assert answer.code == 2
    assert says in answer.err
    assert answer.err.count("\n") == 1


def test_amounts_have_three_digits() -> None:
    assert [scaled(x) for x in (0, 12, 1234, 9.996e5, 1e6, 7.794e11, 2.5e13)] == [
        "0", "12", "1.23 k", "1.00 M", "1.00 M", "779 G", "25.0 T",
    ]  # fmt: skip
