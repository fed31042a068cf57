"""Restructured batch normalisation: the same numbers as the plain one, the pairs it finds, and what is predicted."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import ClassVar

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from torch import Tensor, nn

from foretrace.cost.operators.calibration import Calibration
from foretrace.errors import NotApplicableError
from foretrace.graph.select import select
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.timeline import simulate
from foretrace.techniques.base import Technique
from foretrace.techniques.compute.reconstruct_batchnorm import ReconstructBatchnorm
from foretrace.techniques.selection import Scale
from foretrace.testing import TechniqueConformance, recorded, small_training
from foretrace.training.batchnorm import RestructuredBatchNorm2d, restructure


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@lru_cache
def _graph() -> TaskGraph:
    return recorded(small_training())


class Block(nn.Module):
    """A residual block whose one ReLU module follows a batch norm first and an addition then."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu, self.twice = nn.ReLU(inplace=True), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        z = self.twice(self.relu(y + x))
        made: Tensor = nn.functional.relu(z) + z  # both use it, so its ReLU must stay where it is
        return made


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("rectify", [False, True])
def test_same_result_gradients_and_statistics(rectify: bool, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(6, momentum=0.3)
    with torch.no_grad():
        plain.weight.uniform_(0.5, 2)
        plain.bias.normal_()
    own = nn.BatchNorm2d(6, momentum=0.3)
    own.load_state_dict(plain.state_dict())
    new = RestructuredBatchNorm2d.of(own, rectify=rectify)
    for _ in range(3):
        x = (3 + 2 * torch.randn(8, 6, 5, 7)).contiguous(memory_format=layout)
        first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
        a, b = plain(first), new(second)
        a = a.relu() if rectify else a
        grad = torch.randn_like(a)
        ga = torch.autograd.grad(a, [first, *plain.parameters()], grad)
        gb = torch.autograd.grad(b, [second, *new.parameters()], grad)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        for left, right in zip(ga, gb, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(buffer, dict(new.named_buffers())[name])
    torch.testing.assert_close(
        plain.eval()(x).relu() if rectify else plain.eval()(x), new.eval()(x), rtol=1e-5, atol=1e-5
    )


def test_pairs_are_what_alone_uses_the_result() -> None:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(2, 4, 6, 6)
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = model(x)
    model.load_state_dict(plain)
    found = restructure(model, lambda model, x: model(x).sum(), x)
    assert found == (3, 1), "bn1 and its ReLU; bn2 goes into an addition, the third is used twice"
    kept = model.state_dict()
    assert list(kept) == list(plain) and all(torch.equal(kept[name], plain[name]) for name in plain)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


def test_training_goes_the_same_way() -> None:
    training = small_training().with_batches(2)
    torch.manual_seed(1)
    plain = [float(loss) for loss in training.copied().steps(3)]
    torch.manual_seed(1)
    changed = ReconstructBatchnorm(min_bytes=0).apply(training)
    assert [float(loss) for loss in changed.steps(3)] == pytest.approx(plain, rel=1e-3)
    assert sum(isinstance(each, RestructuredBatchNorm2d) for each in changed.model.modules()) == 2
    assert not any(isinstance(each, RestructuredBatchNorm2d) for each in training.model.modules())


def test_the_prediction_follows_the_measurement_even_where_it_loses() -> None:
    technique, graph = ReconstructBatchnorm(min_bytes=0, call_us=0.0), _graph()
    norms = select(graph, op="aten::native_batch_norm", phase="forward")
    graph = graph.with_columns(dur=np.where(norms, 1_000_000, graph.dur))  # what profiling costs may have eaten it up
    before = simulate(graph).step_time_s
    for gain_s in (2e-5, -3e-3):
        seconds = {each.key: 5e-3 - gain_s * (i % 2) for i, each in enumerate(technique.wants(graph))}
        calibrated = Calibration().extended(seconds).on(graph)
        after = simulate(technique.predict(calibrated)).step_time_s
        assert before - after == pytest.approx(2 * gain_s, rel=0.05)
        assert {each.flag for each in technique.uncertain(calibrated)} == {"measured"}


def test_daydreams_rule_on_a_device() -> None:
    from foretrace.testing.workloads import Gpu

    graph = Gpu().graph()
    names = (
        ("aten::cudnn_convolution", "aten::cudnn_batch_norm"),
        (
            "aten::convolution_backward",
            "aten::cudnn_batch_norm_backward",
        ),
    )
    op, table = graph.op.copy(), (*graph.names, names[0][1], names[1][1])
    for i, (old, _) in enumerate(names):
        op[graph.op == graph.names.index(old)] = len(graph.names) + i
    from dataclasses import replace

    graph = replace(graph.with_columns(op=op), names=table)
    after = ReconstructBatchnorm().predict(graph)
    kernels = graph.on_device & np.isin(op, [len(graph.names) - 2, len(graph.names) - 1])
    assert np.array_equal(after.dur[kernels], graph.dur[kernels] // 2)
    relu = graph.on_device & (op == graph.names.index("aten::relu")) & (graph.phase == 2)
    assert after.gone[relu].all()


def test_refusals() -> None:
    with pytest.raises(NotApplicableError, match="give a smaller min_bytes"):
        ReconstructBatchnorm(min_bytes=1 << 40).predict(_graph())
    with pytest.raises(NotApplicableError, match="the model has no BatchNorm2d"):
        ReconstructBatchnorm(min_bytes=1 << 40).apply(small_training())
    with pytest.raises(NotApplicableError, match="no batch normalisation"):
        ReconstructBatchnorm().predict(_without_norms())


def _without_norms() -> TaskGraph:
    from foretrace.testing.workloads import Cpu

    return Cpu().graph()


class TestReconstruct(TechniqueConformance):
    technique: ClassVar[Technique] = ReconstructBatchnorm(min_bytes=0)


def test_composes_with_scale() -> None:
    half = Scale(phase="forward", by=0.5)
    assert simulate(half.predict(ReconstructBatchnorm(min_bytes=0).predict(_graph()))).step_time_s > 0
