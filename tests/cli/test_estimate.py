"""`foretrace estimate`: a model, no trace, a device that is not here; mistakes are one line."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from foretrace.hardware import probe
from foretrace.report.jsonout import schema
from tests.cli.conftest import Cli
from tests.report.test_jsonout import check

SCRIPT = """
import torch
from torch import nn
import foretrace
from foretrace.training.batches import Resident

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    def forward(self, x):
        {body}

def training():
    net = Net()
    rows = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randn(64, 64))
    loader = torch.utils.data.DataLoader(rows, batch_size=16)
    def loss(model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x), y)
    return foretrace.Training(name="net", model=net, optimizers=(torch.optim.Adam(net.parameters()),),
                              loader=loader, loss=loss)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(SCRIPT.replace("{body}", "return self.layers(x)"))
    return path


def test_the_answer_as_json(cli: Cli, script: Path, tmp_path: Path) -> None:
    graph = tmp_path / "step.graph"
    answer = cli("estimate", script, "--device", "h100", "--batch", "32", "--out", graph, "--json")
    assert answer.code == 0, answer.err
    found = answer.json
    rules = schema("estimate")
    assert not check(found, rules, rules["$defs"])
    low, high = found["interval_s"]
    assert 0 < low < found["step_time_s"] < high
    assert sum(found["memory_bytes"].values()) == found["peak_memory_bytes"]
    weights = 64 * 256 + 256 + 256 * 64 + 64
    assert found["parameters"] == weights
    assert found["memory_bytes"]["weights"] >= 4 * weights
    assert found["memory_bytes"]["optimizer"] >= 8 * weights
    assert sum(found["cost_sources"].values()) == pytest.approx(1)
    # Two products forward; backward two for the second layer and one for the first, whose input wants no gradient.
    gemm = next(each for each in found["families"] if each["family"] == "gemm")
    assert gemm["flops"] == 5 * 2 * 32 * 64 * 256
    assert found["launch_bound"] and found["batch"] == 32
    # The task graph continues where a recording would.
    for technique in ("cuda-graphs", "data-parallel workers=8 network=1gbit", "mixed-precision"):
        further = cli("whatif", graph, "--do", technique, "--json")
        assert further.code == 0, further.err


def test_the_answer_for_people(cli: Cli, script: Path) -> None:
    answer = cli("estimate", script, "--device", "a100", "--batch", "32", "--top", "2")
    assert answer.code == 0, answer.err
    said = " ".join(answer.out.split())  # lines end where the place ends
    assert said.startswith(f"{script} · training · batch 32 · fp32 · NVIDIA A100 SXM4 80 GB")
    assert "A step of net takes" in said and "fits in 80.0 GB" in said
    assert "the host launches more slowly than the device computes" in said
    assert "more: --top" in said and "of the kernel time by" in said


def test_inference_needs_less(cli: Cli, script: Path) -> None:
    train = cli("estimate", script, "--device", "h100", "--json").json
    infer = cli("estimate", script, "--device", "h100", "--inference", "--json").json
    assert infer["flops"] < train["flops"] / 2
    assert infer["peak_memory_bytes"] < train["peak_memory_bytes"]
    assert not infer["training"] and "optimizer" not in infer["memory_bytes"]


def test_accumulation_and_zero(cli: Cli, script: Path) -> None:
    one = cli("estimate", script, "--device", "h100", "--json").json
    four = cli("estimate", script, "--device", "h100", "--accumulate", "4", "--json").json
    assert four["batch"] == 4 * one["batch"]
    assert 3 * one["flops"] < four["flops"] < 4 * one["flops"]
    assert four["peak_memory_bytes"] < 2 * one["peak_memory_bytes"]
    shared = cli("estimate", script, "--device", "h100", "--zero", "3", "--workers", "8", "--json").json
    assert shared["memory_bytes"]["optimizer"] < one["memory_bytes"]["optimizer"] / 7
    choices = {each["name"]: each for each in shared["recipe"]}
    assert (choices["ZeRO"]["value"], choices["ZeRO"]["default"]) == ("3", False)
    assert (choices["data"]["value"], choices["tensor"]["default"]) == ("8", True)
    assert "Adam, foreach" in choices["optimizer"]["value"] and choices["optimizer"]["default"]
    assert shared["devices"] == 8 and shared["exchange_s"] > 0
    assert shared["samples_per_s"] == pytest.approx(8 * shared["batch"] / shared["step_time_s"])
    forward = one["model_flops"] / 3
    assert forward == 2 * 2 * one["batch"] * 64 * 256  # two products, whatever the backward pass does


def test_devices_in_all(cli: Cli) -> None:
    common = ("estimate", "mpt-125m", "--device", "h100", "--length", "128", "--zero", "1", "--json")
    found = cli(*common, "--gpus", "8", "--tensor", "2").json
    same = cli(*common, "--workers", "4", "--tensor", "2").json
    assert found == same and found["devices"] == 8
    choices = {each["name"]: (each["value"], each["default"]) for each in found["recipe"]}
    assert choices["data"] == ("4", False) and choices["loss"] == ("fused", True)
    assert found["mfu"] < 1 and sum(found["memory_bytes"].values()) == found["peak_memory_bytes"]


def test_this_processor(cli: Cli, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(probe, "cpu_peaks", cache(probe.cpu_peaks))  # seconds of a core, and asked for five times
    probed = cli("estimate", script, "--device", "here", "--threads", "1")
    said = " ".join(probed.out.split())
    assert probed.code == 0 and "fitted to 3 operators" in said and "calibrate device --operators 50 tells more" in said
    answer = cli("estimate", script, "--device", "here", "--threads", "1", "--measure", "2")
    assert answer.code == 2 and "foretrace calibrate device --operators 50" in answer.err
    assert cli("calibrate", "device", "--operators", "8", "--threads", "1", "--seconds", "20").code == 0
    found = cli("estimate", script, "--device", "here", "--threads", "1", "--json").json
    assert 0 < found["step_time_s"] < 1
    assert found["reserved_memory_bytes"] == 0 and not found["launch_bound"]
    (stored,) = (tmp_path / "calibration").glob("*.json")
    before = json.loads(stored.read_text())["seconds"]
    own = cli("estimate", script, "--device", "here", "--threads", "1", "--measure", "2", "--json").json
    timed = {key for key in set(json.loads(stored.read_text())["seconds"]) - set(before) if key.startswith("aten::")}
    assert len(timed) == 2
    # By the thread's own clock, whatever else the machine does; and what was timed is kept for the next question.
    assert 0.2 < own["step_time_s"] / found["step_time_s"] < 5
    # Its range is wider or narrower as the probes of the moment differ from those of then.
    again = cli("estimate", script, "--device", "here", "--threads", "1", "--json").json
    assert again["step_time_s"] == own["step_time_s"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nonsense", "--device", "h100"), "nonsense is no model of the zoo"),
        (("resnet5", "--device", "h100"), "did you mean resnet50"),
        (("bert", "--device", "h1000"), "device 'h1000' is in no catalog; did you mean h100?"),
        (("lama-2-7b", "--device", "h100"), "did you mean llama-2-7b"),
        (("bert", "--device", "h100", "--precision", "amp"), "is fp16 or bf16 with autocast; choose one"),
        (("bert", "--device", "h100", "--precision", "tf32"), "is what convolutions of fp32 run in"),
        (("bert", "--device", "h100", "--attention", "flash"), "--attention is fused, flash-1, separate"),
        (("bert", "--device", "h100", "--reentrant"), "add --recompute"),
        (("bert", "--device", "tpu-v5e"), "no float32 rate of TPU-v5e"),
        (("bert", "--device", "h100", "--gpus", "8", "--workers", "4"), "must be --workers times --tensor"),
        (("resnet50", "--device", "h100", "--loss", "fused"), "--loss cannot be asked for"),
        (("bert", "--device", "h100", "--optimizer", "apex"), "--optimizer is fused, foreach, for-loop"),
        (("bert", "--device", "h100", "--network", "100gbit"), "say how many with --workers"),
        (("bert", "--device", "h100", "--batch", "0"), "--batch"),
        (("bert", "--device", "h100", "--precision", "int3", "--size", "tiny"), "is no precision"),
        (("bert", "--device", "h100", "--zero", "2"), "say how many with --workers"),
        (("bert", "--device", "h100", "--threads", "2"), "--threads is for --device here"),
        (("bert", "--device", "h100", "--measure", "10"), "--measure is for --device here"),
        (("bert", "--device", "h100", "--size", "huge"), "no size 'huge'"),
        (("missing.py", "--device", "h100"), "missing.py does not exist"),
        (("missing.onnx", "--device", "h100"), "missing.onnx does not exist"),
        (("bert", "--device", "h100", "--dim", "batch=2"), "--dim cannot be asked for"),
    ],
)
def test_mistakes(cli: Cli, arguments: tuple[str, ...], says: str) -> None:
    answer = cli("estimate", *arguments)
    assert answer.code == 2 and not answer.out
    assert says in answer.err and len(answer.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return self.layers(x) if x.sum() > 0 else x", "sum"),
        ("return self.layers(x[x[:, 0] > 0])", "index"),
    ],
)
def test_control_flow_that_depends_on_values(cli: Cli, tmp_path: Path, body: str, says: str) -> None:
    path = tmp_path / "dynamic.py"
    path.write_text(SCRIPT.replace("{body}", body))
    answer = cli("estimate", path, "--device", "h100")
    assert answer.code == 2 and len(answer.err.splitlines()) == 1, answer.err
    assert "aten::" in answer.err, answer.err


def test_a_decoder_larger_than_any_device(cli: Cli) -> None:
    found = cli("estimate", "llama-2-70b", "--device", "h100", "--json").json
    assert found["parameters"] == 68_976_648_192
    # 6 FLOPs per parameter and word, the embedding aside, and attention's: 2 products forward, 5 backward.
    words, layers, hidden = 4096, 80, 8192
    products = 6 * (found["parameters"] - 32_000 * hidden) * words
    attention = 7 * 2 * layers * words * words * hidden
    assert found["flops"] == pytest.approx(products + attention, rel=0.02)
    assert found["fits"] == "does not fit" and found["precision"] == "bf16"
    shared = cli(
        "estimate", "llama-2-70b", "--device", "h100", "--zero", "3", "--workers", "64", "--recompute", "--json"
    )
    assert shared.json["peak_memory_bytes"] < found["peak_memory_bytes"] / 8
    # A block's forward pass again, a third of what it costs whole, less its last product.
    assert 1.2 * found["flops"] < shared.json["flops"] < 1.25 * found["flops"]


def test_a_file_of_operators(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    call = {"op": "aten::mm", "dims": [[1024, 1024], [1024, 1024]]}
    path.write_text(json.dumps({"format": "foretrace operators", "version": 1, "name": "two", "calls": [call, call]}))
    answer = cli("estimate", path, "--device", "h100", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["flops"] == 2 * 2 * 1024**3
    assert cli("estimate", path, "--device", "h100", "--zero", "1", "--workers", "4").code == 2


WRONG = {
    "does not parse": ("def training(:\n", "line 1 raises SyntaxError"),
    "raises": ("\nraise ValueError('boom')\n", "line 2 raises ValueError: boom"),
    "ends itself": ("import sys\nsys.exit(3)\n", "ends itself in line 2"),
    "needs arguments": ("def training(size):\n    return size\n", "needs arguments"),
    "lacks a module": ("import no_such_module_\n", "line 1 raises ModuleNotFoundError"),
    "fails in its step": (SCRIPT.replace("{body}", "return self.no_such(x)"), "line 12 raises AttributeError"),
}


@pytest.mark.parametrize("command", [("estimate", "--device", "h100"), ("operators",), ("rewrite", "--no-measure")])
@pytest.mark.parametrize("mistake", WRONG)
def test_a_script_that_is_wrong_is_named_with_its_line(
    cli: Cli, tmp_path: Path, mistake: str, command: tuple[str, ...]
) -> None:
    text, says = WRONG[mistake]
    path = tmp_path / "wrong.py"
    path.write_text(text)
    answer = cli(command[0], path, *command[1:])
    assert answer.code == 2 and answer.out == ""
    assert str(path.name) in answer.err and answer.err.count("\n") == 1
    assert says in answer.err or (command[0] == "rewrite" and "AttributeError" in answer.err)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--do", "prefetch-data"), "changes only how data are loaded"),
        (("--do", "cuda-graphs"), "ask foretrace whatif"),
        (("--batch", "9" * 20), "is beyond any device"),
    ],
)
def test_what_a_model_alone_cannot_tell(cli: Cli, script: Path, arguments: tuple[str, ...], says: str) -> None:
    answer = cli("estimate", script, "--device", "h100", *arguments)
    assert answer.code == 2 and says in answer.err and answer.err.count("\n") == 1


def test_a_technique_in_the_training(cli: Cli) -> None:
    """Autocast around a model with batch norm; sizes of operators are then those of 16-bit products."""
    found = cli("estimate", "resnet50", "--size", "tiny", "--device", "h100", "--do", "mixed-precision", "--json")
    assert found.code == 0, found.err
    assert found.json["techniques"] == ["mixed-precision"]
    plain = cli("estimate", "resnet50", "--size", "tiny", "--device", "h100", "--json").json
    assert found.json["operators"] > plain["operators"]


def test_the_next_command_is_about_the_same_step(cli: Cli, script: Path, tmp_path: Path) -> None:
    found = cli("estimate", script, "--device", "h100", "--batch", "8", "--precision", "bf16", "--json").json
    assert found["next"].endswith("--device h100 --batch 8 --precision bf16 --out step.graph")
    out = tmp_path / "step.graph"
    words = cli("estimate", script, "--device", "h100", "--out", out, "--json").json["next"].split()
    assert words[:3] == ["foretrace", "whatif", str(out)]
    assert cli(*words[1:]).code == 0


def test_a_precision_that_the_device_lacks_is_said(cli: Cli, script: Path) -> None:
    notes = cli("estimate", script, "--device", "v100", "--precision", "bf16", "--json").json["warnings"]
    assert any("has no units for BF16" in each for each in notes)
    notes = cli("estimate", script, "--device", "a100", "--precision", "bf16", "--json").json["warnings"]
    assert not any("has no units" in each for each in notes)


def test_an_operator_that_nothing_is_known_of_is_counted(cli: Cli, script: Path) -> None:
    twist = (
        '\n@torch.library.custom_op("foretrace_test::twist", mutates_args=())\n'
        "def twist(x: torch.Tensor) -> torch.Tensor:\n    return x.flip(0)\n\n"
        "@twist.register_fake\ndef _(x):\n    return torch.empty_like(x)\n\n"
        "twist.register_autograd(lambda ctx, g: twist(g))\n\nclass Net"
    )
    text = SCRIPT.replace("{body}", "return twist(self.layers(x))").replace("\nclass Net", twist)
    script.write_text(text)
    answer = cli("estimate", script, "--device", "h100", "--json")
    assert answer.code == 0, answer.err
    (note,) = [each for each in answer.json["warnings"] if "foretrace_test::twist (2x)" in each]
    assert "% of the kernel time" in note
