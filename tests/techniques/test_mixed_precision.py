"""`mixed-precision`: which work gets faster, by how much at most, and what is added."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from foretrace.cost.operators.bench import measure
from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import BFLOAT16, Operator
from foretrace.errors import NotApplicableError
from foretrace.graph.builder import build
from foretrace.graph.select import select
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.timeline import simulate
from foretrace.techniques import MixedPrecision
from foretrace.techniques.compute.autocast import CPU_LOWER, CPU_SINGLE
from foretrace.techniques.compute.casting import overhead_operators
from foretrace.techniques.compute.classes import TaskPrecision, WorkClass, kernel_class, operator_class
from foretrace.techniques.compute.reduced import reduce
from foretrace.techniques.whatif import whatif
from foretrace.testing import TechniqueConformance, recorded, small_training
from foretrace.testing.workloads import Cpu, Gpu, optimizer_facts, processor_facts
from foretrace.training.training import Training
from tests.kineto_files import Recording

pytestmark = pytest.mark.processor

HALF = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_64x3_tn_align2>"
TF32 = "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16"
RELU = "*relu<float>*"
A100 = "NVIDIA A100-SXM4-40GB"


@pytest.mark.parametrize(
    ("name", "op", "work", "precision"),
    [
        ("volta_sgemm_128x64_nn", "aten::mm", WorkClass.GEMM, TaskPrecision.SINGLE),
        ("volta_sgemm_64x64_nt", "aten::convolution_backward", WorkClass.CONV, TaskPrecision.SINGLE),
        ("volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn", "aten::addmm", WorkClass.GEMM, TaskPrecision.HALF),
        ("ampere_fp16_s16816gemm_fp16_128x64", "aten::mm", WorkClass.GEMM, TaskPrecision.HALF),
        (
            "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x128_16x4_nt>",
            "aten::mm",
            WorkClass.GEMM,
            TaskPrecision.TF32,
        ),
        (HALF, "aten::addmm", WorkClass.GEMM, TaskPrecision.HALF),
        (TF32, "aten::cudnn_convolution", WorkClass.CONV, TaskPrecision.TF32),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "aten::mm", WorkClass.GEMM, TaskPrecision.HALF),
        ("nvjet_tst_64x64_64x16_2x1_2cta_v_bz_bias_TNT", "aten::addmm", WorkClass.GEMM, TaskPrecision.HALF),
        ("nvjet_hsh_128x256_64x4", "aten::addmm", WorkClass.GEMM, TaskPrecision.HALF),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_MT128x256x32", "aten::mm", WorkClass.GEMM, TaskPrecision.HALF),
        ("Cijk_Ailk_Bjlk_SB_Bias_AS_SAV_MT64x16x16", "aten::mm", WorkClass.GEMM, TaskPrecision.SINGLE),
        ("Cijk_Alik_Bljk_DB_MT32x32x8", "aten::mm", WorkClass.GEMM, TaskPrecision.OTHER),
        (
            "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32",
            "aten::miopen_convolution",
            WorkClass.CONV,
            TaskPrecision.HALF,
        ),
        (
            "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>",
            "",
            WorkClass.CONV,
            TaskPrecision.SINGLE,
        ),
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>",
            "",
            WorkClass.ATTENTION,
            TaskPrecision.HALF,
        ),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80", "", WorkClass.ATTENTION, TaskPrecision.SINGLE),
        (
            "void cudnn::ops::nchwToNhwcKernel<float, float>",
            "aten::cudnn_convolution",
            WorkClass.MEMORY,
            TaskPrecision.SINGLE,
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, FillFunctor<int>>",
            "",
            WorkClass.MEMORY,
            TaskPrecision.OTHER,
        ),
        ("void fbgemm_gpu::permute_2D_data_kernel<float>", "fbgemm::permute", WorkClass.MEMORY, TaskPrecision.SINGLE),
        ("void at::native::batch_norm_backward_kernel<c10::BFloat16>", "", WorkClass.MEMORY, TaskPrecision.HALF),
    ],
)
def test_kernels_are_classified_by_name(name: str, op: str, work: WorkClass, precision: TaskPrecision) -> None:
    assert kernel_class(name, op) == (work, precision)


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("aten::addmm", WorkClass.GEMM),
        ("aten::mkldnn_convolution", WorkClass.CONV),
        ("aten::convolution_backward", WorkClass.CONV),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", WorkClass.ATTENTION),
        ("aten::conv2d", WorkClass.OTHER),  # hands on
        ("aten::native_batch_norm", WorkClass.MEMORY),
        ("AddmmBackward0", WorkClass.OTHER),
    ],
)
def test_operators_are_classified_by_name(name: str, work: WorkClass) -> None:
    assert operator_class(name)[0] == work


def kernel_ms(graph: TaskGraph, *name: str) -> float:
    return float(graph.dur[select(graph, name=name, kind="kernel")].mean()) / 1e6


def test_matrix_work_gets_faster_and_the_optimizer_stays() -> None:
    graph = Gpu(nbytes=-1).graph()
    predicted = MixedPrecision(conv=4, elementwise=0.5).predict(graph)
    assert kernel_ms(predicted, "volta*") == pytest.approx(0.05)
    assert kernel_ms(predicted, RELU) == pytest.approx(0.01)
    assert kernel_ms(predicted, Gpu.update) == kernel_ms(graph, Gpu.update)


def test_no_kernel_beats_its_bytes_or_the_shortest_kernel() -> None:
    bound = Gpu(nbytes=100_000_000).graph()  # half of it at 900 GB/s takes 56 us and more
    predicted = MixedPrecision(conv=100, elementwise=0.01).predict(bound)
    assert kernel_ms(predicted, "volta*") == pytest.approx(0.0654, rel=0.01)
    assert kernel_ms(predicted, RELU) == pytest.approx(0.002)


def test_gains_come_from_the_catalog_with_a_range() -> None:
    assumed = {each.flag: each for each in MixedPrecision().uncertain(Gpu().graph())}
    peak = 125 / 15.7
    assert 1 < assumed["conv"].low < assumed["conv"].value < assumed["conv"].high < peak
    assert "gemm" not in assumed and "attention" not in assumed, "there are none"


def test_unknown_devices_need_a_number() -> None:
    graph = Gpu(device="Wonder GPU").graph()
    with pytest.raises(NotApplicableError, match=r"'Wonder GPU'.* e\.g\. conv=3"):
        MixedPrecision().predict(graph)
    assert kernel_ms(MixedPrecision(conv=2).predict(graph), "volta*") == pytest.approx(0.1)


def test_tf32_kernels_gain_less() -> None:
    single, tf32 = (Gpu(device=A100, kernel=kernel, nbytes=-1).graph() for kernel in ("ampere_scudnn", TF32))
    times = [kernel_ms(MixedPrecision().predict(graph), "*scudnn*", "*xmma*") for graph in (single, tf32)]
    assert 0.2 / times[0] > 3 and 1.2 < 0.2 / times[1] < 2


@pytest.mark.parametrize("kernel", [HALF, "ampere_fp16_s16816cudnn_fp16_128x128"])
def test_half_precision_is_left_alone(kernel: str) -> None:
    with pytest.raises(NotApplicableError, match="100 % of the matrix work runs in 16 bit already"):
        MixedPrecision().predict(Gpu(kernel=kernel).graph())


def test_casts_cost_kernels_and_host_time() -> None:
    graph = Gpu(device=A100, recording=optimizer_facts(6, 6_000_000, "SGD")).graph()
    predicted = MixedPrecision(casts=2, cast_us=10).predict(graph)
    casts = select(predicted, name="cast to 16 bit")
    assert casts.sum() == 2 * 6 * graph.n_steps
    host = select(predicted, name="aten::_to_copy", kind="cpu")
    assert predicted.dur[host].tolist() == [20_000] * int(host.sum())
    assert predicted.dur[casts].mean() == pytest.approx(6 * 6e6 / 6 / (0.75 * 1555), rel=0.4)


def test_float16_brings_a_gradient_scaler_that_waits() -> None:
    graph = Gpu(device=A100, recording=optimizer_facts(6, 6_000_000, "SGD")).graph()
    scaled, plain = (MixedPrecision(dtype=dtype).predict(graph) for dtype in ("float16", "bfloat16"))
    assert select(scaled, name="unscale gradients").sum() == graph.n_steps
    assert select(scaled, kind="return").sum() == select(plain, kind="return").sum() + graph.n_steps
    assert simulate(scaled).step_time_s > simulate(plain).step_time_s
    volta = MixedPrecision().predict(Gpu(recording=graph.info.recording).graph())
    assert select(volta, name="unscale gradients").any(), "a V100 has no bfloat16 units"


def test_on_a_processor_small_products_lose() -> None:
    large, small = (Cpu(gemm_us=us, relu_us=1, data_us=0, tensors=1, elements=10).graph() for us in (400, 5))
    for graph, faster in ((large, True), (small, False)):
        predicted = MixedPrecision().predict(graph)
        assert (simulate(predicted).step_time_s < simulate(graph).step_time_s) == faster
        assert not select(predicted, kind="kernel").any()


def products(*sets: str) -> TaskGraph:
    """A perceptron on a processor with these instruction sets, of which nothing was timed."""
    return Cpu(gemm_us=400, relu_us=1, data_us=0, tensors=1, elements=10, recording=processor_facts(*sets)).graph()


def test_no_price_is_carried_to_another_kind_of_processor() -> None:
    avx2 = whatif(products("avx", "avx2"), [MixedPrecision()])
    assert avx2.interval_s[0] > 2 * avx2.before_s, "16-bit products are a loss there, at either end"
    assert any("no units for it" in each.assumption.why for each in avx2.assumptions)
    wide = whatif(products("avx2", "avx512"), [MixedPrecision()])
    assert wide.before_s < wide.interval_s[0] < wide.after_s < avx2.after_s
    own = whatif(products("avx2", "avx512", "avx512_bf16", "amx_bf16"), [MixedPrecision()])
    assert own.after_s < own.before_s
    half = whatif(products("avx2", "avx512", "avx512_bf16", "amx_bf16"), [MixedPrecision(dtype="float16")])
    assert half.after_s > avx2.before_s, "units for bfloat16 do nothing for float16"


@pytest.mark.parametrize("sets", [None, ["neon", "neon_bf16"]])
def test_an_unknown_processor_needs_a_number(sets: list[str] | None) -> None:
    graph = products()
    info = replace(graph.info, recording={"machine": {"instruction_sets": sets}} if sets else {})
    graph = replace(graph, info=info)
    with pytest.raises(NotApplicableError, match=r"calibrate run .* e\.g\. gemm=3"):
        MixedPrecision().predict(graph)
    answer = whatif(graph, [MixedPrecision(gemm=3)])
    assert answer.after_s < answer.before_s


def test_a_layer_that_onednn_lacks_is_refused() -> None:
    def lstm(*sets: str) -> TaskGraph:
        r = Recording(device="")
        for step in range(2):
            r.note(f"ProfilerStep#{step}", 1000 * step, 1000)
            r.op("aten::mkldnn_rnn_layer", 1000 * step + 100, 800)
        r.extra["foretrace"] = {"format": 1, **processor_facts(*sets)}
        return build(r.trace())

    assert whatif(lstm("avx2", "avx512", "avx512_bf16", "amx_bf16"), [MixedPrecision()]).after_s > 0
    for technique, sets in ((MixedPrecision(), ("avx2",)), (MixedPrecision(dtype="float16"), ("avx2", "avx512_fp16"))):
        with pytest.raises(NotApplicableError, match=r"has no LSTM in .*, so the changed step would stop"):
            technique.predict(lstm(*sets))


def test_a_processor_that_casts_already_is_refused() -> None:
    with pytest.raises(NotApplicableError, match="as under autocast already"):
        MixedPrecision().predict(Cpu(casts=2).graph())


def test_a_cpu_model_of_convolutions_alone_is_predicted() -> None:
    r = Recording(device="")
    for step in range(2):
        r.note(f"ProfilerStep#{step}", 1000 * step, 1000)
        r.op("aten::mkldnn_convolution", 1000 * step + 100, 800)
    r.extra["foretrace"] = {"format": 1, **processor_facts("avx2", "avx512", "avx512_bf16", "amx_bf16")}
    graph = build(r.trace())
    answer = whatif(graph, [MixedPrecision()])
    assert answer.after_s < answer.before_s


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class TestConformance(TechniqueConformance):
    technique = MixedPrecision()


X, SQUARE, PICTURE = torch.rand(4, 4), torch.rand(1, 4, 4), torch.rand(1, 2, 6, 6)
LOWER: dict[str, Any] = {
    "linear": lambda: functional.linear(X, X),
    "matmul": lambda: torch.matmul(X, X),
    "mm": lambda: torch.mm(X, X),
    "bmm": lambda: torch.bmm(SQUARE, SQUARE),
    "addmm": lambda: torch.addmm(X, X, X),
    "baddbmm": lambda: torch.baddbmm(SQUARE, SQUARE, SQUARE),
    "conv2d": lambda: functional.conv2d(PICTURE, torch.rand(3, 2, 3, 3)),
    "conv_transpose2d": lambda: functional.conv_transpose2d(PICTURE, torch.rand(2, 3, 3, 3)),
    "scaled_dot_product_attention": lambda: functional.scaled_dot_product_attention(SQUARE, SQUARE, SQUARE),
}
SINGLE: dict[str, Any] = {
    "mse_loss": lambda x: functional.mse_loss(x, x),
    "cross_entropy_loss": lambda x: functional.cross_entropy(x, torch.zeros(4, dtype=torch.long)),
    "nll_loss": lambda x: functional.nll_loss(x, torch.zeros(4, dtype=torch.long)),
    "smooth_l1_loss": lambda x: functional.smooth_l1_loss(x, x),
    "prod": lambda x: x.prod(),
}
FOLLOWING: dict[str, Any] = {"relu": torch.relu, "softmax": lambda x: x.softmax(-1), "sum": lambda x: x.sum()}


def test_the_lists_are_those_of_pytorch() -> None:
    half = X.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert {name for name, call in LOWER.items() if call().dtype == torch.bfloat16} == set(LOWER) <= CPU_LOWER
        assert {name for name, call in SINGLE.items() if call(half).dtype == torch.float32} == set(SINGLE) <= CPU_SINGLE
        for name, call in FOLLOWING.items():
            assert call(half).dtype == torch.bfloat16 and call(X).dtype == torch.float32
            assert name not in CPU_LOWER | CPU_SINGLE


class Residual(nn.Module):
    """Attention and a perceptron around a residual stream, from an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.out = nn.Embedding(50, 32), nn.LayerNorm(32), nn.Linear(32, 50)
        self.qkv, self.up, self.down = nn.Linear(32, 96), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.table(words)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return self.out(self.norm(x))  # type: ignore[no-any-return]


class Blocks(nn.Module):
    """Two residual convolution blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)) for _ in range(2))
        self.out = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = functional.relu(block(x) + x)
        return self.out(x.mean((2, 3)))  # type: ignore[no-any-return]


def residual() -> Training:
    torch.manual_seed(0)
    words = torch.randint(0, 50, (4, 12))
    return made(
        Residual(), words, lambda model, batch: functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
    )


def blocks() -> Training:
    torch.manual_seed(0)
    return made(
        Blocks(), torch.randn(4, 3, 12, 12), lambda model, batch: functional.mse_loss(model(batch), torch.ones(4, 5))
    )


def made(model: nn.Module, batch: torch.Tensor, loss: Any) -> Training:
    return Training(
        name="small", model=model, optimizers=(torch.optim.SGD(model.parameters()),), loader=[batch], loss=loss
    )


@pytest.mark.parametrize("make", [residual, blocks, small_training])
def test_inferred_types_are_those_of_a_run_under_autocast(make: Any) -> None:
    graph = recorded(make(), steps=2)
    truth = recorded(MixedPrecision().apply(make()), steps=2)
    inferred, seen = calls(graph, reduce(graph, BFLOAT16).types), calls(truth, {})
    assert any(BFLOAT16 in types for counted in seen.values() for types in counted)
    compared = [key for key in inferred if key in seen]
    assert len(compared) > 10
    wrong = {key: (inferred[key], seen[key]) for key in compared if set(inferred[key]) - set(seen[key])}
    assert len(wrong) <= max(1, 0.05 * len(compared)), wrong  # a mean of 16-bit numbers adds up in float32 inside


def calls(graph: TaskGraph, types: dict[int, Operator]) -> dict[tuple[Any, ...], Counter[tuple[str, ...]]]:
    """Types that operators of forward and backward ran on, by phase, name and sizes."""
    found: dict[tuple[Any, ...], Counter[tuple[str, ...]]] = {}
    rows = select(graph, phase=("forward", "backward"), name="aten::*") & (graph.shape >= 0) & (graph.flops > 0)
    for row in np.flatnonzero(rows).tolist():
        each = types.get(row) or Operator(graph.names[graph.op[row]], graph.shapes[graph.shape[row]])
        kinds = tuple(kind if kind in ("float", BFLOAT16) else "" for kind in each.types)
        if each.name in CASTS_AND_WRAPPERS or not any(kinds):
            continue
        found.setdefault((int(graph.phase[row]), each.name, str(each.dims)), Counter())[kinds] += 1
    return found


CASTS_AND_WRAPPERS = {
    "aten::fill_",
    "aten::zero_",
    "aten::to",
    "aten::_to_copy",
    "aten::copy_",
    "aten::linear",
    "aten::conv2d",
}  # twice under autocast, or without arithmetic


def steady(graph: TaskGraph) -> TaskGraph:
    """The graph with times that no other program on the machine decides: operators that compute take 100 us."""
    return graph.with_columns(dur=np.where(graph.flops > 0, 100_000, 1_000).astype(np.int64))


def test_measured_operators_decide() -> None:
    graph = steady(recorded(blocks(), steps=2))
    wanted = MixedPrecision().wants(graph)
    seconds = {each.key: 1e-5 if BFLOAT16 in each.types else 3e-5 for each in wanted}
    known = Calibration(seconds=seconds).on(graph)
    assert "measured" in {each.flag for each in MixedPrecision().uncertain(known)}
    convolution = "aten::mkldnn_convolution"
    predicted = MixedPrecision().predict(known)
    before, after = (each.dur[select(each, name=convolution)].sum() for each in (graph, predicted))
    assert after == pytest.approx(before / 3, rel=0.01)
    assert select(predicted, name="aten::_to_copy").sum() > select(graph, name="aten::_to_copy").sum()
    assert any(BFLOAT16 in each for each in predicted.shapes)


def test_what_was_not_timed_widens_the_range_by_its_share() -> None:
    graph = steady(recorded(blocks(), steps=2))
    wanted = MixedPrecision().wants(graph)
    seconds = {each.key: 1e-5 if BFLOAT16 in each.types else 3e-5 for each in wanted}
    spread = []
    for left_out in ((), ("aten::convolution_backward",), ("aten::convolution_backward", "aten::mkldnn_convolution")):
        mine = [each for each in wanted if each.name in left_out]
        keys = {each.key for each in mine if not any(dims[1:2] == [3] for dims in each.dims)}  # the first layer stays
        known = Calibration(seconds={key: s for key, s in seconds.items() if key not in keys}).on(graph)
        answer = whatif(known, [MixedPrecision()])
        weighed = [each for each in answer.assumptions if each.assumption.flag == "untimed"]
        spread.append(sum(each.faster_s + each.slower_s for each in weighed) / answer.after_s)
        assert all("was not timed itself" in each.assumption.why for each in weighed)
    assert spread[0] < 1e-4 < spread[1] and spread[2] == pytest.approx(2 * spread[1], rel=0.2), spread


def test_overheads_can_be_timed() -> None:
    wanted = overhead_operators(BFLOAT16)
    found = measure(wanted)
    assert set(found.seconds) == {each.key for each in wanted} and not found.failed


def test_autocast_for_real() -> None:
    seen: list[torch.dtype] = []
    treated = MixedPrecision().apply(blocks())
    treated.model.out.register_forward_hook(lambda _, given, made: seen.append(made.dtype))  # type: ignore[union-attr]
    losses = [float(loss) for loss in treated.steps(2)]
    assert seen == [torch.bfloat16] * 2 and np.isfinite(losses).all()
    assert all(each.dtype == torch.float32 for each in treated.model.parameters())
    assert replace(treated).scaler is None, "bfloat16 has the range of float32"
