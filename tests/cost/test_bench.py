"""Operators are called again from what a recording says of them, and timed; those that cannot are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from foretrace.cost.operators import bench
from foretrace.cost.operators.arguments import BoundCall, UnknownCallError, parse, prepare
from foretrace.cost.operators.bench import lacks, measure
from foretrace.cost.operators.grid import chosen
from foretrace.cost.operators.operator import BFLOAT16, CHANNELS_LAST, Operator, call
from foretrace.hardware.processor import instruction_sets, trains_lstm

pytestmark = pytest.mark.filterwarnings("ignore:.*profiler.*")


def recorded(step: Callable[[], object], folder: Path) -> list[Operator]:
    """Every operator that a real profile of `step` holds."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        step()
    file = folder / "profile.json"
    profile.export_chrome_trace(str(file))
    events = [e for e in json.loads(file.read_text())["traceEvents"] if "Input Dims" in e.get("args", {})]
    found = [
        Operator.of(e["name"], e["args"]["Input Dims"], e["args"]["Input type"], e["args"].get("Concrete Inputs"))
        for e in events
    ]
    return [each for each in dict.fromkeys(found) if each.name.startswith("aten::")]


def vision() -> Callable[[], object]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.GELU(), nn.Upsample(scale_factor=2.0), nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(8, 5),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def language() -> Callable[[], object]:
    embedding, head = nn.Embedding(50, 16), nn.Linear(16, 50)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    parameters = [*embedding.parameters(), *layer.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    x = torch.randint(0, 50, (2, 8))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(layer(embedding(x))).flatten(0, 1), x.flatten()).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step


def speech() -> Callable[[], object]:
    lstm, head = nn.LSTM(8, 8, 2), nn.Linear(8, 6)
    x, targets = torch.randn(10, 3, 8), torch.randint(1, 6, (3, 4))
    lengths = torch.full((3,), 10), torch.full((3,), 4)

    def step() -> None:
        log_probs = head(lstm(x)[0]).log_softmax(-1)
        nn.functional.ctc_loss(log_probs, targets, *lengths).backward()

    return step


def gathering() -> Callable[[], object]:
    table, index = torch.randn(12, 6, requires_grad=True), torch.randint(0, 12, (4,))
    bag = nn.EmbeddingBag(20, 6, mode="sum")

    def step() -> None:
        rows = table.index_select(0, index) + table[index] + table.gather(0, index[:, None].expand(4, 6))
        added = torch.zeros(12, 6).index_add(0, index, rows)
        scattered = torch.zeros(12, 6).scatter_add(0, index[:, None].expand(4, 6), rows)
        bags = bag(torch.arange(8), torch.tensor([0, 3]))
        (torch.cat([added, scattered]).sum() + torch.einsum("ij,kj->ik", rows, rows).mean() + bags.sum()).backward()

    return step


@pytest.mark.parametrize("make", [vision, language, speech, gathering])
def test_all_operators_of_a_real_step_can_be_timed(make: Callable[[], Callable[[], object]], tmp_path: Path) -> None:
    operators = recorded(make(), tmp_path)
    found = measure(operators, target_s=0.0)
    assert len(operators) > 15
    unsaid = {each.key for each in operators if each.name == "aten::einsum"}  # its equation is no recorded argument
    assert set(found.failed) == unsaid
    far = {key for key in found.seconds if not key.startswith("near ")}
    assert far == {each.key for each in operators} - unsaid
    assert set(found.seconds) - far <= {each.near_key for each in operators}
    assert all(0 < value < 1.0 for value in found.seconds.values())


@pytest.mark.parametrize("make", [vision, language, speech])
def test_the_tensors_of_a_call_have_the_recorded_sizes_and_types(
    make: Callable[[], Callable[[], object]], tmp_path: Path
) -> None:
    for operator in recorded(make(), tmp_path):
        call = prepare(operator)
        mine = [list(each.shape) for each in (*call.args, *call.kwargs.values()) if isinstance(each, torch.Tensor)]
        theirs = [
            d
            for d, t in zip(operator.dims, operator.types, strict=True)
            if t not in ("", "Scalar", "ScalarList", "TensorList")
        ]
        if "ctc_loss" not in operator.name and "rnn_layer_backward" not in operator.name:
            assert mine == theirs, operator


def test_twins_in_bfloat16_and_channels_last() -> None:
    points = {each.family: each for each in chosen().grid if each.base.dims[0]}
    convolution = points["convolution"].both
    assert convolution is not None
    x, weight = prepare(convolution).args[:2]
    assert x.dtype == weight.dtype == torch.bfloat16
    assert x.is_contiguous(memory_format=torch.channels_last)
    cat = points["cat"].bfloat16
    assert cat is not None
    assert {each.dtype for each in prepare(cat).args[0]} == {torch.bfloat16}


def test_a_dtype_argument_follows_the_twin_but_not_that_of_a_cast() -> None:
    softmax = Operator.of(
        "aten::_softmax_backward_data",
        [[4, 8], [4, 8], [], []],
        ["float", "float", "Scalar", "Scalar"],
        ["", "", "-1", "6"],
    )
    half = softmax.with_types([BFLOAT16, BFLOAT16, "Scalar", "Scalar"])
    assert prepare(softmax).args[3] == 6
    assert prepare(half).args[3] == 15
    result = prepare(half)()
    assert isinstance(result, torch.Tensor)
    assert result.dtype == torch.bfloat16
    cast = Operator.of(
        "aten::_to_copy", [[4], [], [], [], [], [], []], [BFLOAT16, "Scalar", "", "", "", "Scalar", ""],
        ["", "6", "", "", "", "False", ""],
    )  # fmt: skip
    copied = prepare(cast)()
    assert isinstance(copied, torch.Tensor)
    assert copied.dtype == torch.float32


def test_repeated_updates_in_place_neither_vanish_nor_overflow() -> None:
    decay = Operator.of("aten::mul_", [[64], []], ["float", "double"], ["", ""])
    scaled = Operator.of("aten::_foreach_mul_", [[[64], [8]], []], ["TensorList", "Scalar"], ["", "0.9"])
    for operator in (decay, scaled):
        call = prepare(operator)
        for _ in range(5000):
            call()
        tensors = call.args[0] if isinstance(call.args[0], list) else [call.args[0]]
        assert all((each == 1.0).all() for each in tensors)


def test_what_cannot_be_called_is_named_with_the_reason() -> None:
    bad = {
        "an autograd node": Operator.of("MmBackward0", [[4, 4]], ["float"]),
        "an unknown operator": Operator.of("aten::no_such_thing", [[4, 4]], ["float"]),
        "sizes that do not fit": Operator.of("aten::mm", [[4, 4], [5, 5]], ["float", "float"]),
        "a value that is missing": Operator.of("aten::_softmax", [[4, 4], [], []], ["float", "Scalar", "Scalar"]),
        "a module that is missing": Operator.of("foretrace.no_such:thing", [[4]], ["float"]),
    }
    good = Operator.of("aten::mm", [[4, 4], [4, 4]], ["float", "float"])
    found = measure([*bad.values(), good])
    assert set(found.seconds) == {good.key}
    assert set(found.failed) == {each.key for each in bad.values()}
    assert "alone" in found.failed[bad["an autograd node"].key]
    assert "argument dim" in found.failed[bad["a value that is missing"].key]
    assert "RuntimeError" in found.failed[bad["sizes that do not fit"].key]


def test_a_prepared_call_of_ones_own_is_timed() -> None:
    operator = Operator.of(f"{__name__}:doubling", [[32]], ["float"])
    found = measure([operator, operator], trust=["tests"])
    assert list(found.seconds) == [operator.key]


def test_a_function_of_somebody_else_is_not_called() -> None:
    called: list[Operator] = []
    sys.modules["somebody_else"] = module = ModuleType("somebody_else")
    module.call = called.append  # type: ignore[attr-defined]
    operators = [
        Operator.of(name, [[1]], ["float"]) for name in ("somebody_else:call", "os:_exit", f"{__name__}:doubling")
    ]
    try:
        found = measure(operators)
    finally:
        del sys.modules["somebody_else"]
    assert not called and not found.seconds
    assert set(found.failed) == {each.key for each in operators}
    assert "`trust=somebody_else` lets it" in found.failed[operators[0].key]


def doubling(operator: Operator) -> Callable[[], object]:
    x = torch.ones(operator.dims[0])
    return lambda: x + x


def test_a_budget_leaves_the_rest_out_and_says_so() -> None:
    operators = [Operator.of("aten::relu", [[n]], ["float"]) for n in range(1, 400)]
    shares: list[float] = []
    found = measure(operators, budget_s=0.05, progress=shares.append)
    assert found.seconds
    assert "no time was left" in next(iter(found.failed.values()))
    assert len(found.seconds) + len(found.failed) == len(operators)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_the_share_of_repetitions_below_the_time_kept_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(np.cumsum(np.tile([0.0, 1e-3, 0.0, 2e-3, 0.0, 3e-3, 0.0, 4e-3, 0.0, 5e-3], 400)))
    monkeypatch.setattr(bench, "clock_of", lambda device: lambda: next(clock))
    small = call("t", [8, 8])
    low, middle = (measure([small], target_s=0.05, percentile=each).seconds[small.key] for each in (0.2, 0.5))
    assert 0.0 < low < middle


def test_of_typical_repetitions_the_mean_counts_and_long_ones_as_twice_the_middle() -> None:
    runner = object.__new__(bench._Runner)
    runner.samples = [1.0, 1.0, 1.0, 1.5, 90.0]
    assert runner.time_s(bench.TYPICAL) == pytest.approx(6.5 / 5)
    assert runner.time_s(0.2) == 1.0


def test_a_larger_product_takes_longer() -> None:
    small, large = (Operator.of("aten::mm", [[n, 256], [256, 256]], ["float", "float"]) for n in (32, 1024))
    seconds = measure([small, large]).seconds
    assert seconds[large.key] > 4 * seconds[small.key]


@pytest.mark.processor
@pytest.mark.parametrize("family", sorted({each.family for each in chosen().grid}))
def test_the_grid_can_be_called(family: str) -> None:
    point = next(each for each in chosen().grid if each.family == family)
    lstm = trains_lstm(instruction_sets(), "bfloat16")
    with torch.no_grad():
        for operator in point.operators:
            if "rnn" in operator.name and BFLOAT16 in operator.types and lstm is False:
                assert measure([operator]).failed[operator.key].startswith("oneDNN has no LSTM")
            else:
                prepare(operator)()


def test_a_convolution_that_onednn_lacks_is_the_one_that_pytorch_runs() -> None:
    arguments = ([[2, 4, 8, 8], [8, 4, 3, 3], [8], [], [], [], []], [*["float"] * 3, *["ScalarList"] * 3, "Scalar"])
    concrete = ["", "", "", "[1, 1]", "[2, 2]", "[1, 1]", "1"]
    single = Operator.of("aten::mkldnn_convolution", *arguments, concrete)
    twin = single.with_types([BFLOAT16 if each == "float" else each for each in single.types])
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    code = (
        "from foretrace.cost.operators.arguments import prepare\n"
        "from foretrace.cost.operators.operator import Operator\n"
        "import torch\n"
        f"for text in ({single.text!r}, {twin.text!r}):\n"
        "    call = prepare(Operator('aten::mkldnn_convolution', text))\n"
        "    print(*call().shape, call().dtype)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    first, second = (line.split() for line in ran.stdout.splitlines())
    assert first == ["2", "8", "4", "4", "torch.float32"] and second == [*first[:4], "torch.bfloat16"]


def test_what_onednn_says_of_a_processor_is_a_sentence() -> None:
    said = "could not create a primitive descriptor for the LSTM forward propagation primitive. Run workload with ..."
    assert lacks(RuntimeError(said)).startswith("oneDNN has no LSTM forward propagation here")
    path = "mkldnn_convolution: bf16 path needs the cpu support avx_ne_convert or avx512bw, avx512vl and avx512dq"
    assert lacks(RuntimeError(path)).startswith("oneDNN has no mkldnn_convolution here")
    assert not lacks(RuntimeError("mat1 and mat2 must have the same dtype"))


@given(
    name=st.sampled_from(["aten::mm", "aten::add", "aten::cat"]),
    arguments=st.lists(
        st.tuples(
            st.lists(st.integers(0, 1 << 40), max_size=5)
            | st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3),
            st.sampled_from(["float", BFLOAT16, "long int", "TensorList", "Scalar", ""]),
            st.sampled_from(["", "True", "[1, 2]", "1e-05", "inf"]),
        ),
        max_size=6,
    ),
    layout=st.sampled_from(["", CHANNELS_LAST]),
)
def test_an_operator_survives_its_text(name: str, arguments: list[tuple[list[int], str, str]], layout: str) -> None:
    dims, types, concrete = [a for a, _, _ in arguments], [b for _, b, _ in arguments], [c for _, _, c in arguments]
    operator = Operator.of(name, dims, types, concrete, layout)
    again = Operator(name, operator.text)
    assert (again.dims, again.types, again.concrete, again.layout) == (dims, types, concrete, layout)
    assert again.key == operator.key
    assert again.with_types(types).with_dims(dims).with_layout(layout) == operator


@given(st.one_of(st.booleans(), st.integers(-(10**9), 10**9), st.lists(st.integers(-9, 9)), st.floats(allow_nan=False)))
def test_values_are_read_as_they_are_written(value: object) -> None:
    assert parse(str(value)) == value


def test_calls_know_their_bytes() -> None:
    call = prepare(Operator.of("aten::cat", [[[4, 8], [4, 8]], []], ["TensorList", "Scalar"], ["", "0"]))
    assert isinstance(call, BoundCall)
    assert call.nbytes == 2 * 4 * 8 * 4
    with pytest.raises(UnknownCallError, match="no operator"):
        prepare(Operator.of("gloo:all_reduce", [[4]], ["float"]))


def test_a_layer_whose_state_does_not_fit_is_never_run() -> None:
    dims = [[8, 16, 4], [16, 4], [16, 4], [16], [16], [8, 4], [8, 4], *[[]] * 9]
    types = ["float"] * 7 + ["Scalar", "ScalarList", *["Scalar"] * 7]
    concrete = ["", "", "", "", "", "", "", "False", "[]", "2", "4", "1", "True", "False", "False", "True"]
    wrong = Operator.of("aten::mkldnn_rnn_layer", dims, types, concrete)
    assert "do not fit together" in measure([wrong], target_s=0.0).failed[wrong.key]


def test_large_results_of_small_inputs_are_timed_far_and_near() -> None:
    """Each set of inputs keeps its results, so that they do not lie where the last ones did."""
    each = Operator.of(
        "aten::embedding_dense_backward", [[4, 16], [4], [], [], []],
        ["float", "long int", "Scalar", "Scalar", "Scalar"], ["", "", "50000", "-1", "False"],
    )  # fmt: skip
    found = measure([each], target_s=0.0005)
    assert not found.failed
    assert set(found.seconds) == {each.key, each.near_key}
