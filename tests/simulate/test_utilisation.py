"""Rates against peaks: known answers, and FLOPs of real models against PyTorch's own counter."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretrace import flow
from foretrace.graph.builder import build
from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.graph.work import conv_output, is_product, operator_work
from foretrace.hardware.probe import Peaks
from foretrace.report import profile as report
from foretrace.report.profile import ProfileView
from foretrace.simulate.timeline import simulate
from foretrace.simulate.utilisation import Limits, cpu_use, known_work, samples_per_step, utilisation
from foretrace.techniques.compute.rates import peaks_of
from foretrace.trace.read import read
from tests.kineto_files import Recording


def shapes(dims: list[Any], kind: str = "float", concrete: list[str] | None = None) -> str:
    return json.dumps([dims, [kind if d else "" for d in dims], concrete or [""] * len(dims)])


# --- work of single operators ----------------------------------------------------------------------------------------

X, W = [2, 8, 16, 16], [16, 8, 3, 3]
OUT = [2, 16, 8, 8]  # stride 2, padding 1
CONV = 2.0 * 2 * 16 * 8 * 8 * 8 * 9


@pytest.mark.parametrize(
    ("name", "dims", "concrete"),
    [
        ("aten::conv2d", [X, W, [], [], [], [], []], ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "1"]),
        ("aten::mkldnn_convolution", [X, W, [], [], [], [], []], ["", "", "", "[1, 1]", "[2, 2]", "[1, 1]", "1"]),
        ("aten::cudnn_convolution", [X, W, [], [], [], []], ["", "", "[1, 1]", "[2, 2]", "[1, 1]", "1"]),
        ("aten::_slow_conv2d_forward", [X, W, [], [], [], []], ["", "", "[3, 3]", "", "[2, 2]", "[1, 1]"]),
    ],
)
def test_stride_and_padding_are_found_where_each_operator_has_them(
    name: str, dims: list[Any], concrete: list[str]
) -> None:
    assert operator_work(name, shapes(dims, concrete=concrete))[1] == CONV


def test_backward_of_a_convolution_counts_the_gradients_that_are_asked_for() -> None:
    def work(mask: str) -> float:
        concrete = ["", "", "", "[16]", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", mask]
        return operator_work("aten::convolution_backward", shapes([OUT, X, W, *[[]] * 8], concrete=concrete))[1]

    assert work("[True, True, True]") == 2 * CONV
    assert work("[False, True, True]") == CONV
    assert work("[False, False, True]") == 0


def test_old_recordings_tell_strides_by_their_backward_calls() -> None:
    text = shapes([X, W, [], [], []])
    assert operator_work("aten::cudnn_convolution", text)[1] == 0.0  # unknown, not guessed
    told = conv_output("aten::cudnn_convolution_backward", shapes([X, OUT, W]))
    assert told == (tuple(X), tuple(W), tuple(OUT))
    outputs = {told[:2]: told[2]}
    assert operator_work("aten::cudnn_convolution", text, outputs)[1] == CONV
    assert operator_work("aten::cudnn_convolution_backward_input", shapes([[], OUT, W]))[1] == CONV
    assert operator_work("aten::cudnn_convolution_backward_weight", shapes([[], OUT, X]), outputs)[1] == CONV


def test_recurrent_layers_multiply_every_weight_once_per_step() -> None:
    weights = [[128, 16], [128, 32], [128], [128]]
    one = 2.0 * 7 * 5 * (128 * 16 + 128 * 32)
    layer = shapes([[7, 5, 16], *weights, [5, 32], [5, 32]])
    assert operator_work("aten::mkldnn_rnn_layer", layer)[1] == one
    assert operator_work("aten::mkldnn_rnn_layer_backward", layer)[1] == 2 * one
    cudnn = json.dumps([[[7, 5, 16], weights, [], [1, 5, 32]], ["float", "TensorList", "", "float"], ["", "", "4", ""]])
    assert operator_work("aten::_cudnn_rnn", cudnn)[1] == one
    assert operator_work("aten::_cudnn_rnn_backward", cudnn)[1] == 2 * one


def test_attention_counts_scores_and_values_and_both_again_in_the_backward_pass() -> None:
    q, k = [2, 4, 9, 8], [2, 4, 11, 8]
    forward = 4.0 * 2 * 4 * 9 * 11 * 8
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert operator_work(name, shapes([q, k, k]))[1] == forward
    assert operator_work(name + "_backward", shapes([q, q, k, k, q, [2, 4, 9]]))[1] == 2.5 * forward
    rows = [2, 9, 4, 8], [2, 11, 4, 8]  # heads behind the sequence
    assert operator_work("aten::_flash_attention_forward", shapes([rows[0], rows[1], rows[1]]))[1] == forward


def test_lookups_touch_rows_not_tables_and_views_touch_nothing() -> None:
    text = json.dumps([[[1000, 16], [5]], ["float", "long int"], ["", ""]])
    assert operator_work("aten::embedding", text) == (5 * 8 + 2 * 5 * 16 * 4, 0.0)
    assert operator_work("aten::transpose", shapes([[64, 64], [], []])) == (0, 0.0)
    assert operator_work("fbgemm::lookup", text) == (-1, 0.0)  # another library's: unknown


# --- FLOPs of real models against torch.utils.flop_counter -----------------------------------------------------------


@pytest.fixture
def one_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def recorded(step: Callable[[], None], folder: Path) -> TaskGraph:
    import torch

    with torch.profiler.profile(record_shapes=True) as profiler:
        step()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    return build(read(folder / "trace.json"))


def products(graph: TaskGraph) -> dict[str, float]:
    """FLOPs by operator, matrix work only."""
    found: dict[str, float] = {}
    for row in np.flatnonzero(graph.flops > 0).tolist():
        name = graph.names[graph.op[row]]
        if is_product(name):
            found[name] = found.get(name, 0.0) + float(graph.flops[row])
    return found


def models() -> dict[str, Callable[[], tuple[Any, Any]]]:
    import torch
    from torch import nn

    def cnn() -> tuple[Any, Any]:
        body = [nn.Conv2d(3, 16, 7, 2, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        body += [nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(*body, nn.Linear(32, 10)), torch.randn(4, 3, 64, 64)

    def transposed() -> tuple[Any, Any]:
        parts = nn.Conv2d(4, 8, 3, 2, 1), nn.ConvTranspose2d(8, 4, 4, 2, 1), nn.ConvTranspose2d(4, 6, 2, 2)
        return nn.Sequential(*parts), torch.randn(2, 4, 16, 16)

    def other_ranks() -> tuple[Any, Any]:
        parts = nn.Conv1d(4, 8, 3, 2, 1), nn.Unflatten(2, (2, 2, -1)), nn.Conv3d(8, 4, (1, 2, 3), 1, (0, 1, 1))
        return nn.Sequential(*parts), torch.randn(2, 4, 32)

    def dilated() -> tuple[Any, Any]:
        parts = nn.Conv2d(4, 8, 3, padding="same", dilation=2), nn.Conv2d(8, 8, 3, 1, 1)
        return nn.Sequential(*parts), torch.randn(2, 4, 16, 16)

    def transformer() -> tuple[Any, Any]:  # with dropout, attention consists of products
        return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True), torch.randn(2, 16, 32)

    def gru() -> tuple[Any, Any]:
        return nn.GRU(16, 32), torch.randn(7, 5, 16)

    return {
        each.__name__: each for each in (cnn, transposed, other_ranks, dilated, transformer, gru)
    }  # fmt: skip


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["cnn", "transposed", "other_ranks", "dilated", "transformer", "gru"])
def test_flops_of_a_training_step_are_those_of_the_flop_counter(name: str, tmp_path: Path) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, batch = models()[name]()

    def step() -> None:
        model.zero_grad()
        out = model(batch)
        (out[0] if isinstance(out, tuple) else out).sum().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    assert sum(products(recorded(step, tmp_path)).values()) == counter.get_total_flops()


@pytest.mark.usefixtures("one_thread")
def test_grouped_convolutions_cost_a_group_where_the_flop_counter_counts_all_channels(tmp_path: Path) -> None:
    """PyTorch's counter ignores groups in the gradient of the weight; forward and input gradient agree."""
    import torch
    from torch import nn
    from torch.utils.flop_counter import FlopCounterMode

    model, batch = nn.Conv2d(16, 16, 3, 1, 1, groups=4), torch.randn(2, 16, 16, 16, requires_grad=True)

    def step() -> None:
        model(batch).sum().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    forward = 2.0 * 2 * 16 * 16 * 16 * 4 * 9
    assert sum(products(recorded(step, tmp_path)).values()) == 3 * forward
    assert counter.get_total_flops() == 2 * forward + 4 * forward


# --- rates -----------------------------------------------------------------------------------------------------------

MM: dict[str, Any] = {
    "Input Dims": [[100, 100], [100, 100]],
    "Input type": ["float", "float"],
    "Concrete Inputs": ["", ""],
}


def two_steps(device: str = "Tesla V100-SXM2-16GB") -> TaskGraph:
    """Two steps of 1 ms: one product of 2 MFLOP and 120 kB that runs 100 us, and a copy of 1 MiB of 100 us."""
    recording = Recording(device=device)
    for step in range(2):
        at = 1000.0 * step
        recording.note(f"ProfilerStep#{step}", at, 1000)
        recording.op("aten::mm", at + 10, 80, **MM)
        recording.launch("volta_sgemm_128x64_nn", at + 20, 10, at + 100, 100)
        recording.copy("Memcpy DtoH (Device -> Pinned)", at + 300, 10, at + 400, 100)
        recording.call("cudaDeviceSynchronize", at + 500, 450)
    return build(recording.trace())


def test_known_rates_of_a_small_gpu_recording() -> None:
    timeline = simulate(two_steps())
    graph = timeline.graph
    label = np.select([graph.kind == TaskKind.KERNEL, graph.kind == TaskKind.COPY], [0, 1], default=-1)
    limits = Limits(flops_per_s=np.full(len(graph), 1e11), bytes_per_s=1e10)
    found = utilisation(timeline, limits, classes=label, class_names=("product", "copy"))
    assert found.busy_s == pytest.approx(200e-6)
    assert found.busy_share == pytest.approx(0.2)
    product = next(each for each in found.classes if each.name == "product")
    assert product.flops == 2e6 and product.bytes == 120_000
    assert product.time_s == pytest.approx(100e-6)
    assert product.of_peak_flops == pytest.approx(0.2)  # 20 of 100 GFLOP/s
    assert product.of_peak_bandwidth == pytest.approx(0.12)
    assert product.of_roofline == pytest.approx(0.2)
    assert product.intensity == pytest.approx(2e6 / 120_000)
    assert found.compute_bound_share == 1.0  # 16.7 FLOP/B is above the ridge of 10
    assert found.step_flops_per_s == pytest.approx(2e9)
    assert known_work(graph)[label >= 0].all()


def view_of(graph: TaskGraph, **limits: float) -> ProfileView:
    return report.profile(simulate(graph), peaks=peaks_of(graph, **limits), memory=None, path="x.json")


def test_peaks_come_from_the_catalog_by_the_recorded_name() -> None:
    view = view_of(two_steps())
    assert view.peaks is not None and view.peaks.source == "catalog" and view.peaks.fp32_flops_per_s == 15.7e12
    assert view.total.of_peak_flops == pytest.approx(2e6 / 200e-6 / 15.7e12)
    assert view.peaks.ridge == pytest.approx(15.7e12 / 900e9)


def test_an_unknown_device_has_no_peak_unless_it_is_given() -> None:
    view = view_of(two_steps("Some Accelerator"))
    assert view.peaks is None and view.total.of_peak_flops is None and view.compute_bound_share is None
    assert any("--peak-gflops" in note for note in view.notes)
    given = view_of(two_steps("Some Accelerator"), gflops=100.0, gb_s=10.0)
    assert given.peaks is not None and given.peaks.source == "given"
    assert given.total.of_peak_flops == pytest.approx(0.1)


def test_facts_of_the_recorder_give_samples_and_cpu_time() -> None:
    steps = [{"phase": "before", "wall_ns": 100, "cpu_ns": 150}, {"phase": "active", "wall_ns": 100, "cpu_ns": 900}]
    use = cpu_use({"steps": steps, "machine": {"affinity": [0, 1, 2, 3], "cores": 8}})
    assert use is not None and (use.share, use.cores, use.steps) == (0.375, 4, 1)
    assert cpu_use({}) is None
    loader = {"batch_size": 16, "read_by_step_thread": True}
    assert samples_per_step({"loaders": [loader], "steps": [{"batches": 2}, {"batches": 2}]}) == 32
    assert samples_per_step({"options": {"samples": 7}, "loaders": [loader]}) == 7
    assert samples_per_step({"loaders": [loader, loader]}) is None


def test_cpu_precisions_have_peaks_of_their_own() -> None:
    """A bfloat16 product is held against the bfloat16 peak, everything else against the float32 one."""
    recording = Recording()
    for step in range(2):
        at = 1000.0 * step
        recording.note(f"ProfilerStep#{step}", at, 1000)
        recording.op("aten::mm", at + 10, 100, **{**MM, "Input type": ["c10::BFloat16", "c10::BFloat16"]})
        recording.op("aten::mm", at + 200, 100, **MM)
    graph = build(recording.trace())
    peaks = Peaks(name="cpu", source="measured", fp32=1e11, bf16=2e11, bytes_per_s=1e10, threads=1)
    view = report.profile(simulate(graph), peaks=peaks, memory=None)
    assert view.total.of_peak_flops == pytest.approx((2e6 / 2e11 + 2e6 / 1e11) / 200e-6)


# --- real recordings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "busy"), [("0", 0.56), ("4", 0.72)])
def test_resnet50_on_a_v100(shared_data: Path, workers: str, busy: float) -> None:
    (path,) = (shared_data / "traces/kineto").glob(f"resnet50_num_workers_{workers}.*")
    view = view_of(flow.read(path).graph().graph)
    assert view.busy_share == pytest.approx(busy, abs=0.02)
    # 4.09 G multiply-adds per image of 224 x 224, three times forward but for the first layer's input gradient.
    assert view.total.flops == pytest.approx(3 * 2 * 4.09e9 * 32, rel=0.05)
    assert view.total.of_peak_flops is not None and 0.4 < view.total.of_peak_flops < 1
    assert view.total.of_peak_bandwidth is not None and view.total.of_peak_bandwidth < 1
    assert view.classes[0].name == "convolutions"
    assert all(each.of_roofline is None or each.of_roofline < 1 for each in view.classes)
    assert "is busy" in view.headline
