"""Sparse exchanges over gloo that stop and continue from what was saved."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from foretrace.errors import ForetraceError
from foretrace.training.workers.committing import Committing
from foretrace.training.workers.policies import parse
from tests.gloo_workers import together

CASES = [("gaia threshold=0.05", 2), ("dgc share=0.2", 1)]


def made(text: str, every: int) -> tuple[nn.Module, Committing]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return net, Committing(torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9), parse(text), every)


def steps(net: nn.Module, optimizer: Committing, rank: int, numbers: range) -> None:
    for number in numbers:
        random = torch.Generator().manual_seed(2 * number + rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(
            net(torch.randn(16, 6, generator=random)), torch.randint(3, (16,), generator=random)
        ).backward()
        optimizer.step()


def continued(rank: int) -> list[Any]:
    """Weights after seven steps at a stretch, and with a stop after the third; what waited there."""
    found = []
    for text, every in CASES:
        net, optimizer = made(text, every)
        steps(net, optimizer, rank, range(3))
        file = io.BytesIO()
        torch.save((net.state_dict(), optimizer.state_dict()), file)
        waited = float(optimizer.pending.abs().sum())
        steps(net, optimizer, rank, range(3, 7))
        other, loaded = made(text, every)
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        other.load_state_dict(weights)
        loaded.load_state_dict(state)
        loaded.param_groups[0]["lr"] = 0.3  # the list that the loaded optimizer reads
        assert loaded.inner.param_groups is loaded.param_groups
        steps(other, loaded, rank, range(3, 7))
        found.append(
            (list(net.parameters()), list(other.parameters()), waited, optimizer.sent_bytes, loaded.sent_bytes)
        )
    return found


def test_what_is_saved_continues_to_the_bit() -> None:
    for answer in together(continued, 2):
        for whole, parts, waited, sent, sent_again in answer:
            assert waited > 0 and sent == sent_again > 0
            assert all(torch.equal(*pair) for pair in zip(whole, parts, strict=True))


def test_the_state_of_another_optimizer_is_one_sentence() -> None:
    net, optimizer = made(*CASES[0])
    with pytest.raises(ForetraceError, match="must be one that this worker saved"):
        optimizer.load_state_dict(torch.optim.SGD(net.parameters(), lr=0.1).state_dict())
