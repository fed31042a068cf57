"""`foretrace compression advise`: the answer for people and scripts, and mistakes in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretrace.cli.app import run
from foretrace.flow import Scenario
from foretrace.plan.compression_advice import CANNOT_TELL, DOES_NOT, PAYS, advise, verdict
from foretrace.report.jsonout import schema
from foretrace.techniques.distributed.data_parallel import DataParallel
from foretrace.techniques.distributed.gradient_compression import GradientCompression
from tests.report.test_jsonout import check
from tests.techniques.backward import Backward

FP16 = GradientCompression(method="fp16")
SIGN = GradientCompression(method="sign")


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved graph of three layers of 400 kB, written out by hand: a step of 10 ms."""
    path = tmp_path_factory.mktemp("graph") / "small.graph"
    return Scenario(graph=Backward(elements=(100_000, 100_000, 100_000)).graph()).save(path)


def test_json_and_text_agree(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "compression",
        "advise",
        str(graph),
        "--network",
        "0.02gbit/10us",
        "--workers",
        "4",
        "--method",
        "fp16",
    ]
    arguments += ["--method", "powersgd rank=1", "--no-measure"]
    assert run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rule = schema("compression advise")
    assert check(found, rule, rule["$defs"]) == []
    assert found["command"] == "compression advise" and found["verdict"] == PAYS
    assert [each["name"].split("method=")[1] for each in found["methods"]] == ["fp16", "powersgd rank=1"]
    for each in found["methods"]:
        assert each["interval_s"][0] <= each["step_s"] <= each["interval_s"][1]
        assert each["gain_interval_s"][0] <= each["gain_s"] <= each["gain_interval_s"][1]
        assert each["gain_s"] == pytest.approx(found["step_s"] - each["step_s"])
        assert not each["measured"]
    assert found["alone_s"] < found["free_s"] < found["step_s"]
    assert run(arguments) == 0
    text = capsys.readouterr().out
    assert " ".join(text.split()).startswith(found["headline"]) and "Compression pays" in text
    assert "stated priors" in text and found["next"] in text


def test_a_fast_link_needs_no_compression(graph: Path) -> None:
    from foretrace.flow import load

    there = load(graph).graph
    fast = advise(there, DataParallel(workers=4, network="400gbit", waiting_ms=0.0), [FP16, SIGN])
    assert fast.required == 1.0 and not fast.paying
    assert {each.verdict for each in fast.methods} <= {DOES_NOT, CANNOT_TELL}
    slow = advise(there, DataParallel(workers=4, network="0.01gbit", waiting_ms=0.0), [FP16, SIGN])
    assert slow.required is not None and slow.required > 10
    low, high = slow.required_interval
    assert low is not None and high is not None and low <= slow.required <= high
    assert slow.paying[0].name == str(SIGN)
    late = advise(there, DataParallel(workers=4, network="10gbit/20ms"), [FP16])
    assert late.required is None


def test_it_pays_below_the_bandwidth_that_is_named(graph: Path) -> None:
    from foretrace.flow import load
    from foretrace.techniques.whatif import whatif

    there = load(graph).graph
    found = advise(there, DataParallel(workers=4, network="1gbit/10us", waiting_ms=0.0), [SIGN]).methods[0]
    border = found.pays_below_gbit_s
    assert border is not None
    for rate, pays in ((border / 2, True), (border * 2, False)):
        parallel = DataParallel(workers=4, network=f"{rate:.9f}gbit/10us", waiting_ms=0.0)
        steps = [each.after_s for each in whatif(there, [parallel, SIGN]).stages]
        assert (steps[1] < 0.99 * steps[0]) is pays


@pytest.mark.parametrize(
    ("gain", "interval", "expected"),
    [
        (0.2, (0.1, 0.3), PAYS),
        (0.2, (-0.1, 0.3), CANNOT_TELL),
        (-0.2, (-0.3, -0.1), DOES_NOT),
        (0.001, (0.0005, 0.002), DOES_NOT),
    ],
)
def test_verdicts(gain: float, interval: tuple[float, float], expected: str) -> None:
    assert verdict(gain, interval, 1.0) == expected


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--network", "fast", "--workers", "4"], "fast"),
        (["--network", "-1gbit", "--workers", "4"], "-1gbit"),
        (["--network", "0gbit", "--workers", "4"], "0gbit"),
        (["--network", "1gbit", "--workers", "1"], "--workers"),
        (["--network", "1gbit", "--workers", "4", "--method", "zip"], "zip"),
        (
            ["--network", "1gbit", "--workers", "4", "--method", "topk share=7"],
            "share must be above 0",
        ),
        (["--network", "1gbit", "--workers", "4", "--tolerance", "nan"], "--tolerance nan"),
        (["--network", "1gbit", "--workers", "4", "--seconds", "inf"], "--seconds inf"),
        (["--network", "1gbit", "--workers", "4", "--bucket-mb", "-1"], "bucket_mb=-1"),
        (["--network", "1gbit", "--workers", "4", "--gradient-mb", "nan"], "--gradient-mb nan"),
        (["--network", "1gbit", "--workers", "4", "--backend", "mpi"], "--backend mpi"),
    ],
)
def test_mistakes_are_one_sentence(
    graph: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compression", "advise", str(graph), "--no-measure", *words]) == 2
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said and said.count("\n") == 1


def test_a_model_that_never_ran(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    words = ["compression", "advise", "resnet50", "--size", "tiny", "--device", "v100", "--batch", "2"]
    words += ["--network", "1gbit", "--workers", "4", "--method", "fp16", "--method", "topk"]
    assert run([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["coding"] for each in found["methods"]] == ["memory traffic"] * 2
    assert not any(each["measured"] for each in found["methods"])
    for each in found["methods"]:
        assert each["gain_interval_s"][0] < each["gain_s"] < each["gain_interval_s"][1]
    assert found["next"] == "foretrace estimate resnet50 --device=v100 --batch=2 --size=tiny"
    assert "passes over its memory" in " ".join(found["notes"])


def test_what_is_asked_of_models_and_of_recordings(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = ["--network", "1gbit", "--workers", "4"]
    assert run(["compression", "advise", "resnet50", *link]) == 2
    assert "--device" in capsys.readouterr().err
    assert run(["compression", "advise", "resnet50", "--device", "v100", "--rank", "0", *link]) == 2
    assert "--rank" in capsys.readouterr().err
    assert run(["compression", "advise", str(graph), "--batch", "4", *link]) == 2
    assert "--batch" in capsys.readouterr().err


def test_missing_and_empty_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.json"
    empty.write_bytes(b"")
    for path in (empty, tmp_path / "none.json"):
        assert run(["compression", "advise", str(path), "--network", "1gbit", "--workers", "2"]) == 2
        assert "Traceback" not in capsys.readouterr().err
