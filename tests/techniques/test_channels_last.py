"""`channels-last`: what changes by how much, the conversion of the batch, and the same layout for real."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from foretrace.cost.operators.bench import measure
from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import BFLOAT16, CHANNELS_LAST, Operator
from foretrace.errors import NotApplicableError
from foretrace.graph.select import select
from foretrace.graph.taskgraph import TaskGraph
from foretrace.techniques import ChannelsLast, MixedPrecision
from foretrace.testing import TechniqueConformance, recorded, small_training
from foretrace.testing.workloads import Cpu, Gpu


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def graph() -> TaskGraph:
    training = small_training()
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)),
        *(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)),
    )
    batches = [(torch.randn(16, 3, 32, 32), torch.randint(0, 5, (16,)))]
    training = replace(training, model=model, optimizers=(torch.optim.SGD(model.parameters()),), loader=batches)
    return recorded(training, steps=2)


class TestConformance(TechniqueConformance):
    technique = ChannelsLast()


def test_operators_on_pictures_have_twins(graph: TaskGraph) -> None:
    wanted = ChannelsLast().wants(graph)
    names = {each.name for each in wanted if each.layout == CHANNELS_LAST}
    assert {"aten::mkldnn_convolution", "aten::convolution_backward", "aten::native_batch_norm"} <= names
    assert not any("addmm" in each.name for each in wanted), "linear layers keep their layout"
    found = measure(wanted)
    assert not [key for key in found.failed if "convolution" in key or "prepared_conversion" in key], found.failed


def test_measured_ratios_decide_and_priors_stand_in(graph: TaskGraph) -> None:
    convolution = select(graph, name="aten::mkldnn_convolution")
    seconds = {each.key: 1e-6 if each.layout else 2e-6 for each in ChannelsLast().wants(graph)}
    assert [each.flag for each in ChannelsLast().uncertain(graph)] == ["conv", "others"]
    known = Calibration(seconds=seconds).on(graph)
    flags = {each.flag for each in ChannelsLast().uncertain(known)}
    assert {"measured"} <= flags <= {"measured", "others", "untimed"}
    before = graph.dur[convolution].sum()
    for technique, given, share in ((ChannelsLast(conv=0.7), graph, 0.7), (ChannelsLast(), known, 0.5)):
        predicted = technique.predict(given)
        after = predicted.dur[select(predicted, name="aten::mkldnn_convolution")].sum()
        assert after == pytest.approx(share * before, rel=1e-3)
    assert select(predicted, name="aten::contiguous", phase="forward").sum() >= graph.n_steps


def test_with_16_bit_the_joint_twin_is_looked_up(graph: TaskGraph) -> None:
    mixed = MixedPrecision(gemm=2, conv=2).predict(_calibrated(graph))
    joint = [each for each in ChannelsLast().wants(mixed) if each.name == "aten::mkldnn_convolution" and each.layout]
    assert joint and all(BFLOAT16 in each.types for each in joint)


def _calibrated(graph: TaskGraph) -> TaskGraph:
    """As if everything that mixed precision asks for took a microsecond."""
    return Calibration(seconds={each.key: 1e-6 for each in MixedPrecision().wants(graph)}).on(graph)


def test_twice_is_refused(graph: TaskGraph) -> None:
    with pytest.raises(NotApplicableError, match="not in this layout already"):
        ChannelsLast().predict(ChannelsLast().predict(graph))


def test_without_convolutions_it_is_refused() -> None:
    for graph in (Cpu().graph(), replace(Gpu(layers=0).graph())):
        with pytest.raises(NotApplicableError, match="shows no convolution"):
            ChannelsLast().predict(graph)
    training = small_training()
    training = replace(training, model=nn.Linear(4, 4))
    with pytest.raises(NotApplicableError, match="no weights of four dimensions"):
        ChannelsLast().apply(training)


def test_conversions_between_layouts_go_on_a_device() -> None:
    name = "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>"
    graph = Gpu().graph()
    names = (*graph.names, name)
    relu = select(graph, kind="kernel", name="*relu<float>*")
    column = graph.name.copy()
    column[relu] = len(names) - 1
    converting = replace(graph.with_columns(name=column), names=names)
    predicted = ChannelsLast().predict(converting)
    assert not select(predicted, name="*nchwToNhwc*").any()
    matrix = select(predicted, kind="kernel", name="volta*")
    assert np.allclose(predicted.dur[matrix], 0.95 * graph.dur[matrix])


def test_weights_and_batches_are_in_the_layout() -> None:
    treated = ChannelsLast().apply(small_training())
    seen: list[bool] = []
    model = treated.model
    assert isinstance(model, nn.Sequential)
    model[3].register_forward_hook(
        lambda _, given, made: seen.append(
            all(x.is_contiguous(memory_format=torch.channels_last) for x in (*given, made))
        )
    )
    assert next(iter(treated.batches()))[0].is_contiguous(memory_format=torch.channels_last)
    list(treated.steps(2))
    assert seen == [True, True]


def test_the_conversion_can_be_timed() -> None:
    operator = Operator.of("foretrace.techniques.compute.channels_last:prepared_conversion", [[4, 3, 8, 8]], ["float"])
    assert measure([operator]).seconds[operator.key] > 0
