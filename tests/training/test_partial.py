"""Partial back-propagation on real processes: averages over exactly the workers that computed a gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from foretrace.errors import NotApplicableError
from foretrace.techniques.distributed.partial_backprop import PartialBackprop
from foretrace.training.batches import Resident
from foretrace.training.partial import BlockSequence, PartialStep, computed, contributors, depth, find_chain, owners
from foretrace.training.training import Training
from tests.gloo_workers import together

BLOCKS = 8
STEP = 1  # of the rotation


def deep_training(seed: int = 0, blocks: int = BLOCKS) -> Training:
    """A perceptron of equal blocks that learns tanh of a projection; 16 batches of 16 samples."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(blocks - 1)]
    model = Stack([*layers, nn.Linear(16, 4)])
    torch.manual_seed(100)
    inputs, target = torch.randn(16, 16, 16), torch.randn(16, 4)
    batches = tuple((each, torch.tanh(each @ target)) for each in inputs)
    return Training(
        name="deep",
        model=model,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),),
        loader=Resident(made=batches, batch_size=16, source=batches),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    )


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def losses_and_weights(rank: int, workers: int, steps: int) -> tuple[list[float], torch.Tensor]:
    """A training with SPB on one of several processes."""
    trained = PartialBackprop(workers=workers, network="1gbit").apply(deep_training())
    losses = [float(each) for each in trained.steps(steps)]
    return losses, torch.cat([each.detach().reshape(-1) for each in trained.model.parameters()])


def averages(rank: int, workers: int, step: int) -> list[dict[str, torch.Tensor | None]]:
    """Gradients of this worker's batch, all of them, and what the step made of them."""
    training = deep_training()
    chain = BlockSequence(blocks=tuple(f"blocks.{i}" for i in range(BLOCKS)), cost_s=(1.0,) * BLOCKS)
    batch = list(training.loader)[rank]
    training.loss(training.model, batch).backward()
    whole = {name: each.grad.clone() for name, each in training.model.named_parameters() if each.grad is not None}
    training.model.zero_grad()
    found: dict[str, torch.Tensor | None] = {}
    partial = PartialStep(training.model, chain, workers, workers, rank)
    partial.step = step

    class Keep(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            found.update({name: each.grad.clone() for name, each in training.model.named_parameters()})  # type: ignore[union-attr]

    optimizer = Keep(training.model.parameters(), lr=0.0)
    partial(Training(**{**training.__dict__, "optimizers": (optimizer,)}), batch)
    return [dict(whole), found]


def both(rank: int, workers: int) -> tuple[Any, Any]:
    """The two of them in one process: starting it takes longer than they do."""
    return averages(rank, workers, STEP), losses_and_weights(rank, workers, 60)


@pytest.mark.parametrize("workers", [2, 4])
def test_real_workers(workers: int) -> None:
    """A gradient is the mean over exactly those that computed it, the loss falls, and workers stay equal."""
    answers = together(both, workers, workers)
    per_group = BLOCKS // workers
    for block in range(BLOCKS):
        group = (BLOCKS - 1 - block) // per_group
        those = [rank for rank in range(workers) if computed(depth(rank, STEP, workers), workers, workers) > group]
        assert len(those) == contributors(group, workers, workers) == workers - group
        for name in answers[0][0][0]:
            if name.startswith(f"blocks.{block}."):
                mean = sum(answers[rank][0][0][name] for rank in those) / len(those)
                for (_, averaged), _ in answers:
                    torch.testing.assert_close(averaged[name], mean)
    for _, (losses, weights) in answers:
        assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
        assert torch.equal(weights, answers[0][1][1])


def test_one_worker_is_the_plain_training() -> None:
    plain, partial = deep_training(), PartialBackprop(workers=1).apply(deep_training())
    assert [float(each) for each in plain.steps(5)] == [float(each) for each in partial.steps(5)]


def test_what_is_not_back_propagated_saves_nothing() -> None:
    training = deep_training()
    chain = BlockSequence(blocks=tuple(f"blocks.{i}" for i in range(BLOCKS)), cost_s=(1.0,) * BLOCKS)
    step = PartialStep(training.model, chain, 4, 4, 0)
    batch = next(iter(training.loader))
    sizes = []
    for mine in (1, 2, 3, 4):
        kept: list[int] = []

        def pack(each: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept.append(each.numel())
            return each

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each), step._truncated(training.model, mine):
            training.loss(training.model, batch)
        assert torch.is_grad_enabled()
        sizes.append(sum(kept))
    assert sizes == sorted(set(sizes))


def test_every_worker_goes_every_way_once() -> None:
    for rank in range(5):
        assert sorted(depth(rank, step, 5) for step in range(5)) == [1, 2, 3, 4, 5]
    assert [sorted(depth(rank, step, 5) for rank in range(5)) for step in range(7)] == [[1, 2, 3, 4, 5]] * 7


def test_groups_cost_about_the_same_and_none_is_empty() -> None:
    assert BlockSequence(blocks=tuple("abcdef"), cost_s=(1,) * 6).groups(3) == (2, 2, 1, 1, 0, 0)
    assert BlockSequence(blocks=tuple("abcd"), cost_s=(1, 1, 1, 97)).groups(4) == (3, 2, 1, 0)
    assert BlockSequence(blocks=tuple("abcd"), cost_s=(97, 1, 1, 1)).groups(2) == (1, 0, 0, 0)


def test_blocks_of_models_are_found() -> None:
    parts = [f"blocks.{i}.{part}" for i in range(BLOCKS - 1) for part in (0, 1)]
    assert find_chain(deep_training(), "t").blocks == (*parts, f"blocks.{BLOCKS - 1}")
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 1))
    batches = ((torch.randn(2, 2, 2), torch.randn(2, 1)),)
    training = Training(
        name="t",
        model=model,
        optimizers=(),
        loader=Resident(made=batches, batch_size=2, source=batches),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    )
    assert find_chain(training, "t").blocks == ("0", "1", "2.0", "2.1", "3")


def test_a_tied_parameter_belongs_to_its_first_use() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    assert owners(model, ("0", "1", "2")) == {"0.weight": 0, "0.bias": 0, "1.weight": 1, "1.bias": 1}


def test_a_model_without_a_chain_is_refused() -> None:
    with pytest.raises(NotApplicableError, match=r"partial-backprop: the model is no chain of blocks .*[.]$"):
        PartialBackprop(workers=1, groups=4).apply(deep_training(blocks=2))
