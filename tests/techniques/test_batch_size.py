"""`batch-size`: which inputs count samples, what grows and what stays, and the real loader."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretrace import flow
from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import Operator
from foretrace.errors import NotApplicableError
from foretrace.graph.select import select
from foretrace.techniques import BatchSize
from foretrace.techniques.arguments import parse_all
from foretrace.techniques.compute.batching import Resize, parameter_shapes, recorded_size, with_facts
from foretrace.techniques.whatif import whatif
from foretrace.testing import TechniqueConformance, small_training
from foretrace.testing.technique import recorded
from foretrace.testing.workloads import Cpu, Gpu

Dims = list[list[int] | list[list[int]]]


class TestBatchSize(TechniqueConformance):
    technique = BatchSize(by=2.0)


class TestSmallerBatch(TechniqueConformance):
    technique = BatchSize(to=8, recorded=16)


PARAMETERS = frozenset(
    {(64, 3, 3, 3), (64,), (32, 16, 3, 3), (16,), (256, 1024), (1024, 256), (1024,), (64, 64), (2000, 256), (256, 2000)}
)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("aten::mkldnn_convolution", [[16, 3, 32, 32], [64, 3, 3, 3]], [[32, 3, 32, 32], [64, 3, 3, 3]]),
        # as many channels as samples
        ("aten::mkldnn_convolution", [[16, 16, 8, 8], [32, 16, 3, 3]], [[32, 16, 8, 8], [32, 16, 3, 3]]),
        (
            "aten::convolution_backward",
            [[16, 32, 8, 8], [16, 16, 8, 8], [32, 16, 3, 3]],
            [[32, 32, 8, 8], [32, 16, 8, 8], [32, 16, 3, 3]],
        ),
        ("aten::native_batch_norm", [[16, 16, 8, 8], [16], [16], [16], [16]], [[32, 16, 8, 8], [16], [16], [16], [16]]),
        # forward and the gradient of the input: rows; the gradient of the weight: the dimension summed over
        ("aten::addmm", [[1024], [512, 256], [256, 1024]], [[1024], [1024, 256], [256, 1024]]),
        ("aten::mm", [[512, 1024], [1024, 256]], [[1024, 1024], [1024, 256]]),
        ("aten::mm", [[1024, 512], [512, 256]], [[1024, 1024], [1024, 256]]),
        ("aten::bmm", [[64, 128, 64], [64, 64, 128]], [[128, 128, 64], [128, 64, 128]]),
        # sequence first
        ("aten::copy_", [[35, 16, 256], [35, 16, 256]], [[35, 32, 256], [35, 32, 256]]),
        # tables, parameters and what is spread over the samples stay
        ("aten::embedding", [[2000, 256], [16, 35]], [[2000, 256], [32, 35]]),
        ("aten::add", [[16, 128, 256], [128, 256]], [[32, 128, 256], [128, 256]]),
        ("aten::where", [[16, 4, 128, 1], [], [16, 4, 128, 128]], [[32, 4, 128, 1], [], [32, 4, 128, 128]]),
        ("aten::nll_loss_forward", [[512, 2000], [512]], [[1024, 2000], [1024]]),
        ("aten::cat", [[[16, 4], [16, 9]], []], [[[32, 4], [32, 9]], []]),
        ("aten::native_layer_norm", [[16, 7, 16], [], [16], [16]], [[32, 7, 16], [], [16], [16]]),
    ],
)
def test_the_dimension_that_counts_samples_is_found(name: str, before: Dims, after: Dims) -> None:
    types = ["float" if dims else "Scalar" for dims in before]
    twin = Resize(before=16, after=32, fixed=PARAMETERS).twin(Operator.of(name, before, types))
    assert twin is not None and twin.dims == after


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("aten::mul_", [[256, 1024], []]),
        ("aten::add_", [[64], [64], []]),
        ("aten::mm", [[5, 7], [7, 3]]),
        ("aten::add", [[], []]),
        ("aten::relu", [[7, 5]]),
    ],
)
def test_other_calls_stay(name: str, dims: Dims) -> None:
    resize = Resize(before=16, after=32, fixed=PARAMETERS)
    assert resize.twin(Operator.of(name, dims, ["float" if each else "Scalar" for each in dims])) is None


def test_sizes_among_the_arguments_grow_along() -> None:
    operator = Operator.of(
        "aten::slice_backward", [[16, 4], [], []], ["float", "ScalarList", "Scalar"], ["", "[16, 9]", "1"]
    )
    twin = Resize(before=16, after=8).twin(operator)
    assert twin is not None and twin.dims[0] == [8, 4] and twin.concrete == ["", "[8, 9]", "1"]


def test_a_real_recording_tells_its_batch_and_its_parameters() -> None:
    graph = recorded(small_training().with_batches(2))
    assert recorded_size(graph) == graph.info.recording["options"]["samples"] == 16
    untold = with_facts(graph, options={})
    assert not graph.info.recording["loaders"] and recorded_size(untold) == 16, "layers are called with 16 samples"
    assert {(8, 3, 3, 3), (256, 32), (32, 256), (5,)} <= parameter_shapes(graph)
    technique = BatchSize(by=2.0)
    wanted = technique.wants(graph)
    assert len(wanted) == 2 * len(wanted[::2]) and {each.name for each in wanted[::2]} == {
        each.name for each in wanted[1::2]
    }
    assert any(each.name == "aten::mkldnn_convolution" and each.dims[0][0] == 32 for each in wanted[1::2])
    # Timed alone, each twin takes 1.8 times as long: so do their tasks, and nothing else changes.
    seconds = {each.key: 1e-3 * (1.8 if i % 2 else 1.0) for i, each in enumerate(wanted)}
    own = replace(graph, dur=np.where(graph.nbytes >= 0, 1_000_000, graph.dur).astype(np.int64))
    after = technique.predict(Calibration(seconds=seconds).on(own))
    convolutions = select(own, name="aten::mkldnn_convolution") & (graph.nbytes >= 0)
    assert convolutions.any() and after.dur[convolutions] == pytest.approx(1_800_000, rel=0.01)
    still = np.isin(own.phase, (4,)) | (own.kind == 2)
    assert np.array_equal(after.dur[still], own.dur[still])
    assert recorded_size(after) == 32, "the tasks say what they work on now"


@pytest.mark.parametrize(("samples", "words"), [(1, 141), (16, 559), (32, 1)])
def test_rows_of_a_product_are_words_and_no_samples(samples: int, words: int) -> None:
    """A linear layer multiplies [samples, words, width] as [samples x words, width], without a loader that tells."""
    graph, whole, flat = Cpu().graph(), [samples, words, 64], [samples * words, 64]
    calls = {
        "aten::addmm": Operator.of("aten::addmm", [[256], flat, [64, 256]], ["float"] * 3),
        "aten::relu": Operator.of("aten::mul", [whole, whole], ["float"] * 2),
    }
    named = np.array([list(calls).index(graph.names[op]) if graph.names[op] in calls else -1 for op in graph.op])
    told = replace(graph, shapes=tuple(each.text for each in calls.values())).with_columns(shape=named.astype(np.int32))
    assert recorded_size(told) == samples


def test_without_measurements_time_is_affine_in_the_batch() -> None:
    graph = Cpu().graph()
    after = BatchSize(by=3.0, gemm_fixed=0.1, dispatch_us=2.0).predict(graph)
    products = select(graph, name=("aten::mm", "aten::addmm"))
    assert after.dur[products] == pytest.approx(graph.dur[products] * (0.1 + 0.9 * 3), rel=1e-6)
    relu = select(graph, name="aten::relu") & (graph.phase == 2)
    assert after.dur[relu] == pytest.approx(2_000 + 28_000 * 3, rel=0.03)
    loading = select(graph, kind="data")
    assert after.dur[loading] == pytest.approx(3 * graph.dur[loading])
    update = (graph.phase == 4) | (graph.kind == 2)
    assert np.array_equal(after.dur[update], graph.dur[update])


def test_kernels_grow_beyond_their_latency_and_the_host_stays() -> None:
    graph = Gpu().graph()
    after = BatchSize(by=2.0, latency_us=5.0, filling=1.0).predict(graph)
    forward = select(graph, kind="kernel", phase=("forward", "backward"))
    assert after.dur[forward] == pytest.approx(2 * graph.dur[forward] - 5_000)
    same = select(graph, kind=("cpu", "call")) | select(graph, phase="optimizer")
    assert np.array_equal(after.dur[same], graph.dur[same])


def test_more_samples_cost_less_each() -> None:
    answer = whatif(Cpu().graph(), (BatchSize(by=2.0),))
    assert answer.before_s < answer.after_s < 2 * answer.before_s
    low, high = answer.interval_s
    assert low <= answer.after_s <= high


@pytest.mark.parametrize(
    ("technique", "reason"),
    [
        (BatchSize(), "either to= .* or by="),
        (BatchSize(to=4, by=2.0), "either to= .* or by="),
        (BatchSize(to=8), "does not say how many samples"),
        (BatchSize(to=8, recorded=8), "that size already"),
        (BatchSize(by=0.3, recorded=16), "no whole number"),
    ],
)
def test_refusals(technique: BatchSize, reason: str) -> None:
    with pytest.raises(NotApplicableError, match=reason):
        technique.predict(Cpu().graph())


@pytest.mark.parametrize(
    ("sizes", "reason"), [({"to": 0}, "to must be 1 or more"), ({"by": -1.0}, "by must be above 0")]
)
def test_sizes_that_cannot_be_are_refused(sizes: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotApplicableError, match=reason):
        BatchSize(**sizes)


def test_apply_makes_another_loader() -> None:
    training = small_training()
    larger = BatchSize(to=32).apply(training.with_batches(2))
    assert larger.batch_size == 32 and {len(batch[0]) for batch in larger.loader} == {32}
    assert training.batch_size == 16 and BatchSize(by=0.5).apply(training).batch_size == 8
    with pytest.raises(NotApplicableError, match="cannot be rebuilt"):
        BatchSize(to=8).apply(replace(training, loader=_Sized(list(training.loader))))


def test_batches_grow_alike_before_and_after_workers_load_them() -> None:
    """What the workers prepare doubles, and taking a batch over does not."""
    graph = flow.scenario(Path(__file__).parents[1] / "data" / "recommender.json.gz").graph
    chain = ["prefetch-data workers=2", "batch-size by=2"]
    steps = [whatif(graph, parse_all(each)).after_s for each in (chain, chain[::-1])]
    assert steps[0] == pytest.approx(steps[1], rel=0.01)


class _Sized(list):  # type: ignore[type-arg]  # batches in a list that says how many samples each has
    batch_size = 16


def test_a_recurrent_layer_counts_samples_in_its_second_dimension() -> None:
    dims = [[16, 16, 192], [768, 192], [768, 192], [768], [768], [16, 192], [16, 192]]
    layer = Operator.of("aten::mkldnn_rnn_layer", dims, ["float"] * 7)
    twin = Resize(before=16, after=8, fixed=frozenset({(768, 192), (768,)})).twin(layer)
    assert twin is not None
    assert twin.dims == [[16, 8, 192], *dims[1:5], [8, 192], [8, 192]]
