"""`fused-optimizer`: bytes over bandwidth and a little host time, in place of the recorded update."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from foretrace.errors import NotApplicableError
from foretrace.graph.select import select
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.timeline import simulate
from foretrace.techniques import FusedOptimizer
from foretrace.techniques.compute.updates import find_update, step_tasks
from foretrace.testing.workloads import Cpu, Gpu, optimizer_facts


def time_ms(graph: TaskGraph, name: str) -> float:
    """Time per step of tasks of this name."""
    return float(graph.dur[select(graph, name=name)].sum()) / 1e6 / graph.n_steps


def test_on_a_processor_an_update_is_bytes_over_bandwidth_and_time_per_tensor() -> None:
    graph = Cpu(recording=optimizer_facts(10, 1_000_000)).graph()
    predicted = FusedOptimizer(bandwidth_gb_s=10, tensor_us=3, fixed_us=20).predict(graph)
    assert time_ms(predicted, "aten::_fused_adamw_") == pytest.approx(7 * 4 * 1e6 / 10 / 1e6)
    host = select(predicted, name="Optimizer.step#AdamW.step")
    assert predicted.dur[host].sum() / graph.n_steps == 20_000 + 10 * 3000
    assert not select(predicted, op="aten::addcdiv_").any()
    assert time_ms(predicted, "Optimizer.zero_grad#AdamW.zero_grad") == pytest.approx(0.02), "zero_grad stays"


def test_the_bandwidth_is_that_of_the_recorded_operators() -> None:
    assumed = {each.flag: each for each in FusedOptimizer().uncertain(Cpu().graph())}
    assert assumed["bandwidth_gb_s"].value == pytest.approx(20, rel=0.01)
    assert "kernel_share" not in assumed
    small = Cpu(elements=1000).graph()
    assumed = {each.flag: each for each in FusedOptimizer().uncertain(small)}
    assert assumed["bandwidth_gb_s"].high > 5 * assumed["bandwidth_gb_s"].low, "nothing recorded: a wide range"


def test_without_metadata_parameters_are_counted_from_operators() -> None:
    update = find_update(Cpu(tensors=10, elements=1_000_000).graph())
    assert update is not None
    assert (update.optimizer, update.tensors, update.accesses) == ("AdamW", 10, 7)
    assert update.nbytes == pytest.approx(4e6)
    update = find_update(Gpu(layers=6).graph())
    assert update is not None
    assert (update.optimizer, update.tensors, update.accesses) == ("SGD", 6, 5)


def test_on_a_device_few_kernels_with_launches_take_the_place() -> None:
    recording = optimizer_facts(100, 25_000_000, "SGD", momentum=0.9)
    graph = Gpu(recording=recording).graph()
    predicted = FusedOptimizer(bandwidth_gb_s=500).predict(graph)
    fused = select(predicted, name="fused_sgd")
    assert fused.sum() / graph.n_steps == 3  # 100 tensors, 48 pointers each
    assert time_ms(predicted, "fused_sgd") == pytest.approx(5 * 4 * 25e6 / 500 / 1e6, rel=1e-3)
    assert not (step_tasks(predicted) & select(predicted, op="aten::mul_")).any()
    assert predicted.changes[0].what == ("removed 48 stretches of host work, 48 calls and 48 kernels")
    assert simulate(predicted).step_time_s < simulate(graph).step_time_s


def test_without_any_size_the_removed_kernels_tell() -> None:
    graph = Gpu(device="Some GPU").graph()
    graph = graph.with_columns(nbytes=np.full(len(graph), -1))
    removed = graph.dur[step_tasks(graph) & graph.on_device].sum()
    predicted = FusedOptimizer(kernel_share=0.5).predict(graph)
    assert predicted.dur[select(predicted, name="fused_sgd")].sum() == pytest.approx(removed / 2)
    flags = {each.flag for each in FusedOptimizer().uncertain(graph)}
    assert "kernel_share" in flags and "bandwidth_gb_s" not in flags


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (Cpu(optimizer="RMSprop"), "no fused RMSprop here; it has Adam, AdamW, SGD, Adagrad"),
        (Gpu(optimizer="Adagrad"), "no fused Adagrad here; it has Adam, AdamW, SGD"),
        (Cpu(recording=optimizer_facts(3, 1000, fused=True)), "is fused already"),
        (Gpu(update="void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float> >"), "fused already"),
        (Gpu(layers=0), "no optimizer step"),
    ],
)
def test_what_cannot_be_fused_is_refused(graph: Any, said: str) -> None:
    with pytest.raises(NotApplicableError, match=said):
        FusedOptimizer().predict(graph.graph())


def test_parameters_must_be_known_on_a_processor() -> None:
    graph = Cpu().graph()
    with pytest.raises(NotApplicableError, match="record with shapes"):
        FusedOptimizer().predict(graph.with_columns(nbytes=np.full(len(graph), -1)))
