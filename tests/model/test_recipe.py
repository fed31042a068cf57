"""What a trainer's recipe changes in a step: loss, dropout, recomputation, attention, layout and TF32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from foretrace.cost.calls import Family
from foretrace.cost.devices.attention import FIRST
from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import Phase
from foretrace.model.memory.memory import peak
from foretrace.model.operator_graph import OperatorGraph
from foretrace.model.repeat import again
from foretrace.model.target import target

torch = pytest.importorskip("torch")

from foretrace.model.capture.capture import capture  # noqa: E402
from foretrace.model.decoder_config import DecoderConfig  # noqa: E402
from foretrace.model.decoder_modules import decoder, training_of  # noqa: E402
from foretrace.training.checkpoints import recomputed  # noqa: E402
from foretrace.training.training import Training  # noqa: E402
from foretrace.zoo.operators import operators_of  # noqa: E402

BATCH, LAYERS = 2, 4
SMALL = DecoderConfig(name="small", layers=LAYERS, hidden=256, heads=4, kv_heads=4, inner=1024, words=8192, length=128,
              gated=False)  # fmt: skip
ROWS = BATCH * SMALL.length


def captured(found: DecoderConfig = SMALL, attention: str = "") -> OperatorGraph:
    return capture(training_of(found, batch=BATCH), precision="bf16-weights", update="fused", attention=attention)


def test_a_fused_loss_reads_scores_twice_and_writes_them_once() -> None:
    separate, fused = captured(), captured(replace(SMALL, loss="fused"))
    scores = ROWS * SMALL.words * 2
    mine = [node for node in fused.nodes if node.op.startswith("fused::")]
    assert [node.phase for node in mine] == [Phase.FORWARD, Phase.BACKWARD]
    assert sum(node.read_bytes for node in mine) == pytest.approx(2 * scores, rel=0.01)
    assert sum(node.written_bytes for node in mine) == pytest.approx(scores, rel=0.01)
    assert (fused.calls.family == Family.SOFTMAX).sum() == 2
    # The copies in float32 are not there: of scores, of their logarithms, of gradients.
    moved = (separate.calls.nbytes.sum() - fused.calls.nbytes.sum()) / scores
    assert 10 < moved < 20
    assert peak(separate).peak_bytes > peak(fused).peak_bytes + 2 * scores
    assert fused.parameters == separate.parameters and fused.calls.flops.sum() < separate.calls.flops.sum()


def test_dropout_writes_its_masks_and_keeps_them() -> None:
    plain, dropped = (captured(replace(SMALL, dropout=each), attention="separate") for each in (0.0, 0.1))
    drops = [node for node in dropped.nodes if node.op == "aten::native_dropout"]
    assert len(drops) == 3 * LAYERS + 1  # attention's weights, two sums of every layer, the embedding
    weights = BATCH * SMALL.heads * SMALL.length**2
    elements = LAYERS * (weights + 2 * ROWS * SMALL.hidden) + ROWS * SMALL.hidden
    assert sum(node.read_bytes for node in drops) == 2 * elements
    assert sum(node.written_bytes for node in drops) == 3 * elements
    assert peak(dropped).peak_bytes >= peak(plain).peak_bytes + elements


def products(graph: OperatorGraph, *phases: Phase) -> float:
    return sum(node.flops for node, family in zip(graph.nodes, graph.calls.family, strict=True)
               if family in (Family.GEMM, Family.ATTENTION) and (node.phase in phases or not phases))  # fmt: skip


def test_recomputation_ends_where_the_backward_pass_has_what_it_reads() -> None:
    """Held against PyTorch's own checkpoints, captured; reentrant ones run their block to its end."""
    plain = captured()

    def checkpointed() -> Training:
        made = training_of(SMALL, batch=BATCH)()
        for layer in made.model.get_submodule("layers").children():
            recomputed(layer)
        return made

    truth = capture(checkpointed, precision="bf16-weights", update="fused")
    step, _ = again(plain, recompute=1)
    assert products(step) == pytest.approx(products(truth), rel=1e-9)
    whole, _ = again(plain, recompute=1, reentrant=True)
    down = 2 * ROWS * SMALL.inner * SMALL.hidden
    assert products(whole, Phase.RECOMPUTE) - products(step, Phase.RECOMPUTE) == LAYERS * down
    assert len(again(plain, recompute=2)[0]) < len(step) < len(whole)


def seconds(graph: OperatorGraph, device: str) -> float:
    on = target(device)
    return float(on.costs(graph).predict(graph.calls, on.device).seconds.sum())


def test_the_first_flash_attention_takes_longer_and_computes_the_same() -> None:
    second, first = captured(), captured(attention="flash-1")
    assert (second.recipe["attention"], first.recipe["attention"]) == ("fused", "flash-1")
    assert [node.op for node in first.nodes] == [node.op for node in second.nodes]
    rows = second.calls.family == Family.ATTENTION
    on = target("a100")
    before, after = (on.costs(each).predict(each.calls, on.device).seconds for each in (second, first))
    assert after[rows] == pytest.approx(FIRST * before[rows])
    assert np.array_equal(after[~rows], before[~rows])


def test_mpt_moves_rows_around_its_attention() -> None:
    plain, moved = captured(), captured(replace(SMALL, unpads=True))
    more = moved.calls.nbytes.sum() - plain.calls.nbytes.sum()
    # Four matrices each way, read and written, and four times zeros written: nothing else changes.
    assert more == pytest.approx(LAYERS * (8 * 2 + 4) * ROWS * SMALL.hidden * 2, rel=0.05)
    assert products(moved) == products(plain)


def test_named_decoders_have_the_recipe_of_those_who_trained_them() -> None:
    mpt = decoder("mpt-125m", length=128)
    assert (mpt.recipe["loss"], mpt.recipe["dropout"]) == ("fused", "none")
    assert decoder("mpt-125m", length=128, loss="separate").recipe["loss"] == "separate"
    megatron = decoder("megatron-1.2b", length=128)
    assert (megatron.recipe["loss"], megatron.recipe["dropout"]) == ("separate", "0.1")
    forward = decoder("megatron-1.2b", length=128, training=False)
    assert not any("dropout" in node.op for node in forward.nodes)
    with pytest.raises(ForetraceError, match="`loss=` is separate or fused"):
        decoder("mpt-125m", loss="chunked")


@pytest.fixture(scope="module")
def resnet() -> Callable[..., OperatorGraph]:
    from foretrace.techniques.arguments import parse_all

    @cache
    def made(precision: str, *techniques: str) -> OperatorGraph:
        return operators_of("resnet50", batch=64, precision=precision, techniques=parse_all(techniques))

    return made


def test_channels_last_gains_where_tensor_cores_convolve(resnet: Callable[..., OperatorGraph]) -> None:
    """PyTorch's page on memory formats: 8 to 35 % on Volta in mixed precision."""
    first, last = resnet("fp16"), resnet("fp16", "channels-last")
    assert (first.recipe["layout"], last.recipe["layout"]) == ("channels first", "channels last")
    assert 1.08 < seconds(first, "v100") / seconds(last, "v100") < 1.35
    # No tensor cores, no gain: Volta computes float32 convolutions without them.
    assert seconds(resnet("fp32"), "v100") == pytest.approx(seconds(resnet("fp32", "channels-last"), "v100"), rel=0.01)


def test_tf32_convolutions_take_what_was_published(resnet: Callable[..., OperatorGraph]) -> None:
    """NVIDIA, DeepLearningExamples, ResNet-50 v1.5: 938 images/s on A100 in TF32, 356 on V100 in float32."""
    graph = resnet("fp32")
    ampere, volta = seconds(graph, "a100"), seconds(graph, "v100")
    assert volta / ampere == pytest.approx(938 / 356, rel=0.35)
    assert 64 / ampere == pytest.approx(938, rel=0.15)
    # Half the bytes and twice the peak of TF32 gain, less than both together.
    assert 1.3 < ampere / seconds(resnet("fp16"), "a100") < 2.6
