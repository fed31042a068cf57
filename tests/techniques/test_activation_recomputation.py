"""`activation-recomputation`: the same blocks in a recording and its model, forward work again, the same gradients."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest

from foretrace.errors import NotApplicableError
from foretrace.graph.select import select
from foretrace.graph.taskgraph import Phase, TaskGraph
from foretrace.techniques import ActivationRecomputation, BatchSize
from foretrace.techniques.memory.blocks import Module, choose, modules_of, recorded_modules
from foretrace.testing import TechniqueConformance, small_training
from foretrace.testing.technique import check_valid, recorded
from foretrace.testing.workloads import Cpu
from foretrace.training.training import Training
from tests.graph.small_graphs import total


def blocky() -> Training:
    """A residual network of three blocks with batch norm and dropout."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.drop = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            changed: torch.Tensor = self.drop(torch.relu(self.norm(self.conv(x))))
            return x + changed

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        *(Block() for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    data = TensorDataset(torch.randn(32, 3, 16, 16), torch.randint(0, 5, (32,)))
    return Training(
        name="blocky",
        model=model,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.01),),
        loader=DataLoader(data, batch_size=8),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )


@cache
def graph() -> TaskGraph:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return recorded(blocky())
    finally:
        torch.set_num_threads(threads)


class TestActivationRecomputation(TechniqueConformance):
    technique = ActivationRecomputation()
    make_training = staticmethod(blocky)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("auto", ["layers.0", "layers.1"]),
        ("Layer", ["layers.0", "layers.1"]),
        ("layers.1", ["layers.1"]),
        ("*.attention", ["layers.0.attention", "layers.1.attention"]),
        ("Linear", ["embed", "layers.0.attention.out", "layers.1.attention.out"]),
        ("layers*", ["layers.0", "layers.1"]),
        ("nothing", []),
    ],
)
def test_blocks_are_chosen_by_path_or_class_outermost_first(pattern: str, expected: list[str]) -> None:
    modules = [Module(path="", kind="Model", parameters=0), Module(path="embed", kind="Linear", parameters=10_000)]
    modules += [Module(path="layers", kind="ModuleList", parameters=0)]
    for i in range(2):
        for path, kind, size in (("", "Layer", 0), (".attention", "Attention", 5), (".attention.out", "Linear", 50)):
            modules.append(Module(path=f"layers.{i}{path}", kind=kind, parameters=size))
    assert [each.path for each in choose(modules, pattern)] == expected


@pytest.mark.parametrize("pattern", ["auto", "Block", "2", "BatchNorm2d"])
def test_a_recording_and_its_model_choose_the_same_blocks(pattern: str) -> None:
    chosen = choose(modules_of(blocky().model), pattern)
    assert chosen == choose(recorded_modules(graph().info.recording["modules"]), pattern) and chosen


def test_the_forward_pass_of_the_blocks_runs_again_ahead_of_their_backward() -> None:
    before = graph()
    after = ActivationRecomputation(block_us=0.0, variable_us=0.0).predict(before)
    inside = select(before, phase="forward", layer="*Block_*")
    again = select(after, phase="recompute") & ~select(after, name="checkpoint")
    assert inside.sum() == again.sum() and before.dur[inside].sum() == after.dur[again].sum()
    assert sorted(after.layers[i] for i in after.layer[again]) == sorted(before.layers[i] for i in before.layer[inside])
    assert select(after, name="checkpoint").sum() == 3 * before.n_steps
    one = after.step == 1
    order = [
        (Phase(int(phase)).name, after.layers[layer].split(".")[1])
        for phase, layer in zip(after.phase[one], after.layer[one], strict=True)
        if phase in (Phase.RECOMPUTE, Phase.BACKWARD) and layer >= 0 and "Block_" in after.layers[layer]
    ]
    kept = list(dict.fromkeys(order))
    assert kept == [(phase, f"Block_{i}") for i in (2, 1, 0) for phase in ("RECOMPUTE", "BACKWARD")]
    assert total(after) - total(before) == before.dur[inside].sum()


def test_one_block_alone() -> None:
    after = ActivationRecomputation(blocks="2").predict(graph())
    layers = {graph().layers[i] for i in after.layer[select(after, phase="recompute")]}
    assert layers and all("Block_1" in layer for layer in layers), layers


def test_checkpointing_itself_costs_time_per_block_and_variable() -> None:
    plain = ActivationRecomputation(block_us=0.0, variable_us=0.0).predict(graph())
    costly = ActivationRecomputation(block_us=1000.0, variable_us=0.0).predict(graph())
    assert total(costly) - total(plain) == pytest.approx(3e6 * graph().n_steps)


def test_memory_and_running_statistics_are_noted() -> None:
    notes = " ".join(change.what for change in ActivationRecomputation().predict(graph()).changes)
    assert "MB per step need not be kept" in notes and "running statistics twice" in notes


def test_it_follows_a_change_of_the_batch() -> None:
    larger = BatchSize(by=2.0).predict(graph())
    check_valid(ActivationRecomputation().predict(larger))
    check_valid(BatchSize(by=2.0).predict(ActivationRecomputation().predict(graph())))


def test_refusals() -> None:
    with pytest.raises(NotApplicableError, match="fits blocks=Nothing"):
        ActivationRecomputation(blocks="Nothing").predict(graph())
    with pytest.raises(NotApplicableError, match="repeats no module class"):
        ActivationRecomputation().predict(recorded(small_training()))
    with pytest.raises(NotApplicableError, match="says nothing about the modules"):
        ActivationRecomputation().predict(Cpu().graph())
    with pytest.raises(NotApplicableError, match="recomputed already"):
        ActivationRecomputation().predict(ActivationRecomputation().predict(graph()))
    with pytest.raises(NotApplicableError, match="repeats no module class"):
        ActivationRecomputation().apply(small_training())
    with pytest.raises(NotApplicableError, match="recomputed already"):
        ActivationRecomputation().apply(ActivationRecomputation().apply(blocky()))


def test_apply_keeps_names_copies_and_gradients() -> None:
    import torch

    training = blocky()
    for module in training.model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 0.0  # else the second forward pass counts twice
    treated = ActivationRecomputation().apply(training)
    assert list(treated.model.state_dict()) == list(training.model.state_dict())
    calls = []
    treated.model.get_submodule("1.conv").register_forward_hook(lambda *_: calls.append(1))
    copied = copy.deepcopy(treated.model)
    block: Any = copied.get_submodule("1")
    assert block.forward.args[0].__self__ is block, "a copy recomputes itself, not the original"
    batch = next(iter(training.loader))
    losses = []
    for each in (training, treated):
        torch.manual_seed(1)  # the same dropout
        loss = each.forward(batch)
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and len(calls) == 2
    for one, other in zip(training.model.parameters(), treated.model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad, other.grad)
    assert np.isfinite(losses).all()
