"""`gradient-accumulation`: forward and backward again, one update, the same gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from foretrace.errors import NotApplicableError
from foretrace.graph.select import select
from foretrace.graph.taskgraph import Phase, TaskGraph
from foretrace.simulate.timeline import simulate
from foretrace.techniques import BatchSize, GradientAccumulation
from foretrace.techniques.compute.batching import micro_batches, recorded_size
from foretrace.testing import TechniqueConformance, small_training
from foretrace.testing.technique import recorded
from foretrace.testing.workloads import Cpu, Gpu, optimizer_facts
from foretrace.training.training import Training


class TestGradientAccumulation(TechniqueConformance):
    technique = GradientAccumulation(steps=2)


CPU = Cpu(recording=optimizer_facts(10, 1_000_000)).graph()
GPU = Gpu(recording=optimizer_facts(6, 60_000, "SGD", momentum=0.9)).graph()

_BARE = Cpu().graph()
UNKNOWN = _BARE.with_columns(nbytes=np.full_like(_BARE.nbytes, -1))


def count(graph: TaskGraph, **what: Any) -> int:
    return int(select(graph, **what).sum())


@pytest.mark.parametrize("graph", [CPU, GPU], ids=["cpu", "gpu"])
def test_forward_and_backward_run_several_times_and_the_update_once(graph: TaskGraph) -> None:
    after = GradientAccumulation(steps=3).predict(graph)
    work = "operator" if graph is CPU else "kernel"
    added = 0 if graph is CPU else 1  # the kernel that adds gradients
    assert count(after, kind=work, phase="forward") == 3 * count(graph, kind=work, phase="forward")
    backward = select(after, kind=work, phase="backward", name="*")
    backward &= ~select(after, name=("aten::add_", "add gradients"))
    assert backward.sum() == 3 * count(graph, kind=work, phase="backward")
    assert count(after, phase="optimizer") == count(graph, phase="optimizer")
    assert count(after, kind="data") == count(graph, kind="data")
    assert count(after, kind="copy") == count(graph, kind="copy"), "the batch is copied as a whole"
    assert count(after, name="add gradients") == added * graph.n_steps


def test_what_does_not_depend_on_samples_is_paid_several_times() -> None:
    # Everything fixed: forward and backward take k times as long. Nothing fixed: as long as before.
    body = float(CPU.dur[np.isin(CPU.phase, (Phase.FORWARD, Phase.BACKWARD))].sum()) / CPU.n_steps / 1e9
    before = simulate(CPU).step_time_s
    no_extra: dict[str, Any] = {"bandwidth_gb_s": 1e9, "loop_us": 0.0}
    fixed = GradientAccumulation(steps=2, gemm_fixed=1.0, other_fixed=1.0, **no_extra).predict(CPU)
    assert simulate(fixed).step_time_s == pytest.approx(before + body, rel=1e-3)
    free = GradientAccumulation(steps=2, gemm_fixed=0.0, other_fixed=0.0, dispatch_us=0.0, **no_extra).predict(CPU)
    python = float(CPU.dur[(CPU.kind == 2) & np.isin(CPU.phase, (2, 3))].sum()) / CPU.n_steps / 1e9
    wrappers = float(CPU.dur[select(CPU, name="aten::linear")].sum()) / CPU.n_steps / 1e9
    assert simulate(free).step_time_s == pytest.approx(before + python + wrappers, rel=1e-3)


def test_adding_gradients_takes_their_bytes_over_the_bandwidth() -> None:
    slow, fast = (GradientAccumulation(steps=3, bandwidth_gb_s=rate).predict(CPU) for rate in (1.0, 1e6))
    more = simulate(slow).step_time_s - simulate(fast).step_time_s
    assert more == pytest.approx(2 * 3 * 4 * 1_000_000 / 1e9, rel=1e-3)  # twice: two read, one written


def test_a_host_bound_run_launches_everything_again() -> None:
    graph = Gpu(kernel_us=5, small_us=5, data_us=0, recording=optimizer_facts(6, 60_000, "SGD")).graph()
    ratio = simulate(GradientAccumulation(steps=2).predict(graph)).step_time_s / simulate(graph).step_time_s
    assert 1.4 < ratio < 2.0


def test_memory_is_noted() -> None:
    graph = recorded(small_training())
    notes = [change.what for change in GradientAccumulation(steps=2).predict(graph).changes]
    assert any("MB saved for the backward pass shrink" in note for note in notes)


@pytest.mark.parametrize(
    ("graph", "technique", "reason"),
    [
        (CPU, GradientAccumulation(steps=3, recorded=16), "cannot be cut into 3 equal parts"),
        (UNKNOWN, GradientAccumulation(steps=2), "how large the gradients are"),
    ],
)
def test_refusals(graph: TaskGraph, technique: GradientAccumulation, reason: str) -> None:
    with pytest.raises(NotApplicableError, match=reason):
        technique.predict(graph)


def test_one_micro_batch_is_refused() -> None:
    with pytest.raises(NotApplicableError, match="steps must be 2 or more, got 1"):
        GradientAccumulation(steps=1)


def test_apply_gives_the_gradients_of_the_whole_batch() -> None:
    import torch

    training = small_training().with_batches(1)
    for module in training.model.modules():
        if isinstance(module, (torch.nn.BatchNorm2d, torch.nn.Dropout)):
            module.eval()
    training.model.train = lambda mode=True: training.model  # type: ignore[method-assign]  # both stay as they are
    cut = GradientAccumulation(steps=4).apply(training)
    assert cut.micro_batches == 4
    (batch,) = training.loader

    def gradients(given: Training) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        optimizer = given.optimizers[0]
        optimizer.register_step_pre_hook(
            lambda *_: kept.extend(p.grad.clone() for p in given.model.parameters() if p.grad is not None)
        )
        given.step(batch)
        return kept

    whole, parts = gradients(training), gradients(cut)
    assert len(whole) == len(parts) > 0
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_apply_refuses_what_cannot_be_cut() -> None:
    training = small_training()
    with pytest.raises(NotApplicableError, match="cannot be cut into 3 equal parts"):
        GradientAccumulation(steps=3).apply(training)
    own = replace(training, run=lambda training, batch: training.forward(batch))
    with pytest.raises(NotApplicableError, match="step of its own"):
        GradientAccumulation(steps=2).apply(own)


def test_a_batch_cut_once_can_be_cut_again_or_change_its_size() -> None:
    graph = recorded(small_training().with_batches(1))
    cut = GradientAccumulation(steps=2).predict(graph)
    assert recorded_size(cut) == 16 and micro_batches(cut) == 2
    assert micro_batches(GradientAccumulation(steps=2).predict(cut)) == 4
    assert recorded_size(BatchSize(to=32).predict(cut)) == 32
    with pytest.raises(NotApplicableError, match="cannot be cut into its 2 equal parts"):
        BatchSize(to=9).predict(cut)
