"""`compiled`: chains become one pass, host work goes, matrix work stays; and `torch.compile` for real."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretrace.errors import NotApplicableError
from foretrace.graph.select import select
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.timeline import simulate
from foretrace.techniques import Compiled, CudaGraphs
from foretrace.techniques.base import Technique
from foretrace.techniques.compute import compiled as module
from foretrace.techniques.whatif import whatif
from foretrace.testing import recorded, small_training
from foretrace.testing.technique import check_valid
from foretrace.testing.workloads import Cpu, Gpu

EXACT = Compiled(rest=0, longest=1, matrix=1, host=0, call_us=0)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def graph() -> TaskGraph:
    return recorded(small_training(), steps=2)


def test_matrix_work_stays_and_host_work_goes() -> None:
    graph = Cpu().graph()
    predicted = EXACT.predict(graph)
    check_valid(predicted)
    products = ("aten::addmm", "aten::mm")
    assert predicted.dur[select(predicted, name=products)].sum() == graph.dur[select(graph, name=products)].sum()
    body = ("forward", "backward")
    assert predicted.dur[select(predicted, kind="python", phase=body)].sum() == 0
    assert graph.dur[select(graph, kind="python", phase=body)].sum() > 0
    for phase in ("data", "optimizer"):
        assert predicted.dur[select(predicted, phase=phase)].sum() == graph.dur[select(graph, phase=phase)].sum()


def test_a_chain_becomes_its_longest_operator(graph: TaskGraph) -> None:
    dur = graph.dur.copy()
    dur[select(graph, name="aten::native_batch_norm")] = 1_000_000  # whatever preemption did to the others
    dur[select(graph, name="aten::clamp_min")] = 10_000
    graph = graph.with_columns(dur=dur)
    predicted = EXACT.predict(graph)
    check_valid(predicted)
    left = [
        select(each, name=("aten::native_batch_norm", "aten::clamp_min"), phase="forward")
        for each in (graph, predicted)
    ]
    assert 0 < left[1].sum() < left[0].sum(), "batch norm and relu are one pass"
    kept = predicted.dur[select(predicted, name="aten::native_batch_norm")]
    assert kept.max() == graph.dur[select(graph, name="aten::native_batch_norm")].max()
    half = Compiled(rest=0.5, longest=1, matrix=1, host=0, call_us=0).predict(graph)
    assert simulate(half).step_time_s > simulate(predicted).step_time_s


def test_numbers_of_dropout_are_drawn_one_by_one(graph: TaskGraph) -> None:
    drawn = select(graph, name="aten::bernoulli_", phase=("forward", "backward"))
    assert drawn.sum() == graph.n_steps
    found = {each: Compiled(random_ns=each).predict(graph) for each in (20.0, 40.0)}
    for ns, each in found.items():
        assert each.dur[select(each, name="aten::bernoulli_")].tolist() == [16 * 32 * ns] * graph.n_steps
    assert "random ns" in {each.name for each in Compiled().uncertain(graph)}
    assert "pools" not in {each.name for each in Compiled().uncertain(graph)}, "there is no such pool"


def test_largest_numbers_of_windows_are_found_more_slowly_on_a_processor(graph: TaskGraph) -> None:
    at = select(graph, name="aten::native_batch_norm", phase="forward")
    names = tuple(each.replace("aten::native_batch_norm", "aten::max_pool2d_with_indices") for each in graph.names)
    pooled = replace(graph, names=names)
    predicted = Compiled(pools=2.0).predict(pooled)
    forward = select(predicted, name="aten::max_pool2d_with_indices")
    assert predicted.dur[forward].sum() == pytest.approx(2 * graph.dur[at].sum(), rel=1e-6)
    assert "pools" in {each.name for each in Compiled().uncertain(pooled)}


def test_convolutions_have_a_factor_of_their_own_on_a_processor(graph: TaskGraph) -> None:
    name = ("aten::mkldnn_convolution", "aten::convolution_backward")
    half = Compiled(conv=0.5, matrix=1.0).predict(graph)
    before = graph.dur[select(graph, name=name)].sum()
    assert half.dur[select(half, name=name)].sum() == pytest.approx(0.5 * before, rel=1e-3)


def test_chains_of_kernels_are_merged_too() -> None:
    graph = Gpu(host_us=100, kernel_us=10, data_us=0).graph()
    predicted = Compiled().predict(graph)
    assert simulate(predicted).step_time_s < simulate(graph).step_time_s
    graphs = Compiled(mode="reduce-overhead").predict(graph)
    assert select(graphs, name="cudaGraphLaunch").sum() == graph.n_steps
    assert simulate(graphs).step_time_s < simulate(predicted).step_time_s


def test_the_range_is_wide(graph: TaskGraph) -> None:
    low, high = (
        simulate(Compiled(**{each.flag: getattr(each, end) for each in Compiled().uncertain(graph)}).predict(graph))
        for end in ("low", "high")
    )
    assert high.step_time_s > 1.1 * low.step_time_s


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    training = small_training()
    with pytest.raises(NotApplicableError, match="no device work"):
        Compiled(mode="reduce-overhead").predict(Cpu().graph())
    with pytest.raises(NotApplicableError, match="runs on a processor"):
        Compiled(mode="reduce-overhead").apply(training)
    with pytest.raises(NotApplicableError, match="step function of its own"):
        Compiled().apply(replace(training, run=lambda training, batch: training.forward(batch)))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NotApplicableError, match=r"C\+\+ compiler"):
        Compiled().apply(training)


def test_the_model_is_compiled_once_and_copies_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def compile_(model: Any, **options: Any) -> Any:
        made.append(options)
        return model

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/c++")
    treated = Compiled().apply(small_training())
    assert treated.applied == ("compiled",)
    list(treated.steps(2))
    assert made == [{"mode": "default"}]
    list(treated.copied().steps(2))
    assert len(made) == 2, "a copied module has lost its compiled call"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own compiler
def test_it_trains_for_real() -> None:
    if module.compiler() is None:
        pytest.skip("no C++ compiler")
    plain, treated = small_training().with_batches(2), Compiled().apply(small_training().with_batches(2))
    torch.manual_seed(1)
    expected = [float(loss) for loss in plain.steps(3)]
    torch.manual_seed(1)
    losses = [float(loss) for loss in treated.steps(3)]
    assert np.isfinite(losses).all() and losses[0] == pytest.approx(expected[0], rel=0.2)


def test_kernels_of_other_libraries_are_called_as_they_are() -> None:
    """Look-ups of fbgemm are no elementwise work of PyTorch that the compiler could merge, and neither is a sort."""
    graph = Gpu().graph()
    kernels = select(graph, kind="kernel", op="aten::cudnn_convolution")
    for op, stay in (("aten::add", False), ("fbgemm::permute_pooled_embs", True), ("aten::_unique2", True)):
        new = {"aten::cudnn_convolution": op, graph.names[graph.name[kernels][0]]: "elementwise_kernel"}
        other = replace(graph, names=tuple(new.get(each, each) for each in graph.names))
        predicted = Compiled().predict(other)
        left = select(predicted, kind="kernel", op=op)
        as_before = left.sum() == kernels.sum() and predicted.dur[left].sum() == graph.dur[kernels].sum()
        assert as_before == stay, op


def test_what_is_compiled_already_gains_nothing_more(graph: TaskGraph) -> None:
    once = Compiled().predict(graph)
    with pytest.raises(NotApplicableError, match="compiled already"):
        Compiled().predict(once)
    names = tuple(name.replace("aten::clamp_min", "triton_poi_fused_relu_0") for name in graph.names)
    with pytest.raises(NotApplicableError, match="compiled already"):
        Compiled().predict(replace(graph, names=names))


@pytest.mark.parametrize("technique", [Compiled(), CudaGraphs()])
def test_long_stretches_of_unknown_work_may_stay(technique: Technique) -> None:
    graph = Gpu(kernel_us=20).graph()
    forward = np.flatnonzero(select(graph, kind="cpu", phase="forward"))
    rows = forward[np.unique(graph.step[forward], return_index=True)[1] + 2]
    dur, op = graph.dur.copy(), graph.op.copy()
    dur[rows], op[rows] = 50_000_000, -1
    whole = whatif(graph.with_columns(dur=dur, op=op), [technique])
    low, high = whole.interval_s
    assert whole.after_s > 0.05  # nothing says that it would go
    assert low < 0.02
    assert high < whole.before_s * 1.05
    assert not any(each.assumption.name == "holes" for each in whatif(graph, [technique]).assumptions)


def test_timed_kernels_say_what_the_step_takes(graph: TaskGraph, tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    answer = {"command": "kernels", "model": "small", "step_s": 0.010, "sum_s": 0.0098, "eager_s": 0.0140,
              "interval_s": [0.0097, 0.0103]}  # fmt: skip
    file.write_text(json.dumps(answer))
    technique = Compiled(kernels=str(file))
    predicted = technique.predict(graph)
    check_valid(predicted)
    work = select(predicted, phase=("forward", "backward", "optimizer"))
    before = graph.dur[select(graph, phase=("forward", "backward", "optimizer"))].sum()
    assert predicted.dur[work].sum() == pytest.approx(0.7 * before, rel=0.01)
    (assumed,) = technique.uncertain(graph)
    assert assumed.low < 0.97 and assumed.high > 1.03 and "2.0 % off" in assumed.why
    for text in ("{}", "no JSON", json.dumps(answer | {"sum_s": -1.0}), json.dumps(answer | {"eager_s": 0.0})):
        other = tmp_path / f"{len(text)}.json"
        other.write_text(text)
        with pytest.raises(NotApplicableError, match="foretrace kernels MODEL --json"):
            Compiled(kernels=str(other)).predict(graph)
