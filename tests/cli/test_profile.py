"""`foretrace profile`: recordings, scripts and models of the zoo."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretrace.report.jsonout import loads, schema
from foretrace.report.profile import ProfileView
from tests.cli.conftest import Cli
from tests.report.test_jsonout import check

SCRIPT = """
import torch
from foretrace.training.training import Training


def training():
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
    data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randint(0, 8, (64,)))
    return Training(
        name="mlp",
        model=model,
        optimizers=(torch.optim.AdamW(model.parameters()),),
        loader=torch.utils.data.DataLoader(data, batch_size=16),
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )
"""


@pytest.fixture
def torch_threads() -> Iterator[None]:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def view(text: str) -> ProfileView:
    rules = schema("profile")
    assert not check(json.loads(text), rules, rules["$defs"])
    found = loads(text, "profile")
    assert isinstance(found, ProfileView)
    return found


def test_a_cpu_recording_whose_peak_nobody_knows(cli: Cli, cnn: Path) -> None:
    answer = cli("profile", cnn)
    assert answer.code == 0, answer.err
    assert "whose peak is not known" in answer.out
    assert "--peak-gflops" in answer.out and "samples/s" in answer.out
    found = view(cli("profile", cnn, "--json").out)
    assert found.peaks is None and found.total.of_peak_flops is None
    assert found.classes[0].name == "convolutions" and found.cpu is not None
    given = view(cli("profile", cnn, "--json", "--peak-gflops", "100", "--peak-gb-s", "20", "--batch", "8").out)
    assert given.total.of_peak_flops == pytest.approx(given.total.flops_per_s / 100e9)
    assert given.total.of_peak_bandwidth == pytest.approx(given.total.bytes_per_s / 20e9)
    assert given.samples_per_s == pytest.approx(8 / given.step_time_s.median)
    assert sum(each.share for each in given.classes) == pytest.approx(1)


@pytest.mark.usefixtures("torch_threads")
def test_a_script_is_recorded_measured_and_kept(cli: Cli, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    answer = cli("profile", script, "--steps", "3", "--out", tmp_path / "run")
    assert answer.code == 0, answer.err
    assert "memory at the peak (cpu)" in answer.out and "(measured)" in answer.out
    assert f"next: foretrace show {tmp_path / 'run'}" in answer.out
    again = view(cli("profile", tmp_path / "run", "--json").out)
    assert again.steps == 3 and again.samples_per_step == 16
    assert again.peaks is not None and again.peaks.source == "measured"
    # Forward: two products; backward: both weight gradients and one input gradient.
    assert sum(each.flops for each in again.classes if each.name == "matrix products") == (
        2 * 16 * (64 * 128 + 128 * 8) * 2 + 2 * 16 * 128 * 8
    )
    assert again.memory is not None
    weights = 4 * (64 * 128 + 128 + 128 * 8 + 8)
    assert again.memory.at_peak_bytes["weights"] == weights
    assert again.memory.at_peak_bytes["optimizer state"] == 2 * weights + 4 * 4  # and a step count per tensor
    refused = cli("profile", script, "--out", tmp_path / "run")
    assert refused.code == 2 and "not an empty folder" in refused.err


@pytest.mark.usefixtures("torch_threads")
def test_a_model_of_the_zoo(cli: Cli) -> None:
    answer = cli("profile", "lstm-lm", "--steps", "2", "--json")
    assert answer.code == 0, answer.err
    found = view(answer.out)
    assert found.source == "lstm-lm (tiny)" and found.next == "foretrace profile lstm-lm --out run"
    assert {"recurrent layers", "matrix products"} <= {each.name for each in found.classes[:3]}
    assert found.memory is not None and found.memory.at_peak_bytes["activations"] > 0


def test_what_cannot_be_profiled_is_said_in_one_line(cli: Cli, tmp_path: Path) -> None:
    for what, why in (
        ("no-such-model", "the zoo has no model"),
        (str(tmp_path / "gone.json.gz"), "does not exist"),
        (str(tmp_path / "gone.py"), "does not exist"),
    ):
        answer = cli("profile", what)
        assert answer.code == 2 and why in answer.err and answer.err.count("\n") == 1, answer.err


FILES = [
    "hta/amd_trace_mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "hta/critical_path_cuda_event_sync_multi_stream_event_sync_trace.json.gz",
    "hta/trace_diff_control.json.gz",
    "param/dlrm_kineto_8rank/worker5_step_12.1694128201549.pt.trace.json.gz",
    "param/resnet_kineto.json.gz",
    "tracelens/h100_Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    "tracelens/mi300_resnet_act_checkpoint.json.gz",
    "tracelens/inference_vllm_decode_full_graph_execution.json.gz",
    "triosim/h100_vgg13_kineto.json.gz",
]


@pytest.mark.parametrize("file", FILES)
def test_real_recordings_answer_with_rates_below_their_peaks(cli: Cli, shared_data: Path, file: str) -> None:
    answer = cli("profile", shared_data / "traces" / file, "--json")
    assert answer.code == 0, answer.err
    found = view(answer.out)
    assert 0 <= found.busy_share <= 1
    if found.total.of_peak_flops is not None:
        assert found.total.of_peak_flops < 1
    if found.total.of_peak_bandwidth is not None:
        assert found.total.of_peak_bandwidth < 1.2  # caches
    assert cli("profile", shared_data / "traces" / file).code == 0
