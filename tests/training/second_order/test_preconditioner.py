"""K-FAC on real modules, alone and on gloo processes."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from foretrace.errors import ForetraceError, NotApplicableError
from foretrace.training.second_order.factors import find_layers, input_factor, output_factor
from foretrace.training.second_order.preconditioner import (
    Preconditioned,
    Preconditioner,
    SecondOrderSettings,
    decompose,
    pack,
    precondition,
    unpack,
)
from tests.gloo_workers import together


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(4, 6, 3, stride=2, bias=False), nn.ReLU(),
        nn.Flatten(), nn.Linear(54, 16), nn.Tanh(), nn.Linear(16, 5),
    )  # fmt: skip


def data(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    image = torch.randn(count, 1, 8, 8, generator=random)
    return image, (image.flatten(1).sum(1) > 0).long()


def step(net: nn.Module, optimizer: Any, image: Tensor, label: Tensor) -> float:
    optimizer.zero_grad()
    loss = functional.cross_entropy(net(image), label)
    loss.backward()
    if dist.is_initialized():
        for each in net.parameters():
            dist.all_reduce(each.grad)
            each.grad.div_(dist.get_world_size())  # type: ignore[union-attr]
    optimizer.step()
    return loss.item()


def made(net: nn.Module, **options: Any) -> tuple[Preconditioner, Preconditioned]:
    settings = SecondOrderSettings(**{"factors_every": 2, "inverses_every": 4, "clip": 0.01} | options)
    workers, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    found = Preconditioner(net, settings, workers=workers, rank=rank)
    return found, Preconditioned(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), found)


def worker(rank: int, fractions: list[float], workers: int) -> list[Any]:
    """Six steps at every fraction on this worker's part of the data."""
    image, label = data(8 * workers)
    found = []
    for fraction in fractions:
        net = model()
        kfac, optimizer = made(net, fraction=fraction)
        for _ in range(6):
            step(net, optimizer, image[rank::workers], label[rank::workers])
        weights = torch.cat([each.detach().flatten() for each in net.parameters()])
        shares = kfac.shares
        expected = shares.traffic(rank)
        found.append((
            weights, kfac.held_bytes - shares.held_bytes(rank),
            (kfac.sent["factors"] - 3 * expected.factors, kfac.sent["inverses"] - 2 * expected.inverses,
             kfac.sent["gradients"] - 6 * expected.gradients),
        ))  # fmt: skip
    return found


@pytest.mark.parametrize(("workers", "fractions"), [(2, [0.5, 1.0]), (4, [0.25, 0.5, 1.0])])
def test_all_fractions_lead_to_the_same_weights_with_the_bytes_predicted(workers: int, fractions: list[float]) -> None:
    answers = together(worker, workers, fractions, workers)
    first = answers[0][0][0]
    for answer in answers:
        for weights, memory, sent in answer:
            torch.testing.assert_close(weights, first, rtol=1e-4, atol=1e-6)
            assert memory == 0 and sent == (0, 0, 0)
    assert not torch.allclose(first, torch.cat([each.detach().flatten() for each in model().parameters()]))


def test_the_curvature_is_inverted() -> None:
    """Of a gradient V: (G ⊗ A + damping)⁻¹ vec V, by one large solve in float64."""
    random = torch.Generator().manual_seed(3)
    a, g = (each @ each.T for each in (torch.randn(5, 7, generator=random), torch.randn(4, 6, generator=random)))
    gradient = torch.randn(4, 5, generator=random)
    whole = torch.kron(g.double(), a.double()) + 0.3 * torch.eye(20, dtype=torch.float64)
    expected = torch.linalg.solve(whole, gradient.double().flatten()).view(4, 5)
    torch.testing.assert_close(precondition(gradient, *decompose(a, g, 0.3)).double(), expected, rtol=1e-3, atol=1e-4)


def test_factors_of_a_convolution_are_those_of_one_as_large_as_its_image() -> None:
    """A convolution with one position is a linear layer; two equal halves of a batch have the factors of one."""
    conv, linear = nn.Conv2d(2, 3, 4), nn.Linear(32, 3)
    read, gradient = torch.randn(6, 2, 4, 4), torch.randn(6, 3, 1, 1)
    for scaling in ("sample", "mean"):
        torch.testing.assert_close(input_factor(conv, read, scaling), input_factor(linear, read.flatten(1), scaling))
        flat = gradient.flatten(1)
        torch.testing.assert_close(output_factor(conv, gradient, scaling), output_factor(linear, flat, scaling))
    twice = torch.cat([gradient, gradient]) / 2  # of the mean loss of a batch twice as large
    torch.testing.assert_close(output_factor(conv, twice, "sample"), output_factor(conv, gradient, "sample"))


def test_half_of_a_symmetric_matrix_is_enough() -> None:
    matrices = [each + each.T for each in (torch.randn(n, n) for n in (1, 4, 7))]
    packed = pack(matrices)
    assert packed.numel() == 1 + 10 + 28
    into = [torch.zeros_like(each) for each in matrices]
    unpack(packed, into)
    for each, other in zip(into, matrices, strict=True):
        assert torch.equal(each, other)


def test_a_failed_decomposition_keeps_the_old_inverse_and_says_so() -> None:
    net = model()
    kfac, optimizer = made(net, inverses_every=1, factors_every=1)
    step(net, optimizer, *data(8))
    before = [each.clone() for each in kfac.inverses[0]]
    kfac.factors[0, "A"].fill_(float("nan"))
    with pytest.warns(RuntimeWarning, match=r"the factors of 0 cannot be decomposed in step 1 .*keeps the inverse"):
        step(net, optimizer, *data(8))
    assert kfac.failures == 1
    assert all(torch.equal(*pair) for pair in zip(before, kfac.inverses[0], strict=True))
    assert all(bool(torch.isfinite(each).all()) for each in net.parameters())


def test_a_singular_factor_is_no_failure() -> None:
    a, g = torch.zeros(3, 3), torch.ones(2, 2)
    torch.testing.assert_close(precondition(torch.ones(2, 3), *decompose(a, g, 0.5)), torch.full((2, 3), 2.0))


def test_the_clip_bounds_the_update() -> None:
    net, image = model(), data(16)
    lengths = []
    for clip in (1e-6, 0.0):
        own = copy.deepcopy(net)
        kfac, optimizer = made(own, clip=clip, damping=1e-4)
        optimizer.zero_grad()
        functional.cross_entropy(own(image[0]), image[1]).backward()
        grads: list[Any] = [each.grad for each in own.parameters()]
        plain = [each.clone() for each in grads]
        kfac.step(0.05)
        pairs = zip(plain, grads, strict=True)
        lengths.append(0.05**2 * sum((old * each).sum().item() for old, each in pairs))
    assert lengths[0] <= 1.01 * (1e-6 * lengths[1]) ** 0.5 < lengths[1]


def test_a_copy_is_of_its_own() -> None:
    net = model()
    _, optimizer = made(net)
    other, changed = copy.deepcopy((net, optimizer))
    step(other, changed, *data(8))
    assert changed.preconditioner.factors and not optimizer.preconditioner.factors


def continued(rank: int, workers: int) -> list[Any]:
    """Weights after seven steps at a stretch, and with a stop after the third."""
    image, label = data(8 * workers)
    own = image[rank::workers], label[rank::workers]
    net = model()
    _, optimizer = made(net, fraction=1 / workers)
    for _ in range(3):
        step(net, optimizer, *own)
    file = io.BytesIO()
    torch.save((net.state_dict(), optimizer.state_dict()), file)
    for _ in range(4):
        step(net, optimizer, *own)
    other = model()
    _, loaded = made(other, fraction=1 / workers)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other.load_state_dict(weights)
    loaded.load_state_dict(state)
    for _ in range(4):
        step(other, loaded, *own)
    return [(a.detach(), b.detach()) for a, b in zip(net.parameters(), other.parameters(), strict=True)]


def test_what_is_saved_continues_to_the_bit() -> None:
    for pairs in (continued(0, 1), *together(continued, 2, 2)):
        assert all(torch.equal(*pair) for pair in pairs)
    _, optimizer = made(model())
    other, _ = made(model(), skip="0")
    step(model(), optimizer, *data(8))
    for state in ({}, optimizer.preconditioner.state_dict() | {"factors": {(0, "A"): torch.eye(3)}}):
        with pytest.raises(ForetraceError, match="K-FAC's state must be what this worker saved"):
            other.load_state_dict(state)


@pytest.mark.filterwarnings("ignore:the factors of:RuntimeWarning")  # LAPACK may find no vectors of zeros
def test_training_goes_on_with_singular_factors() -> None:
    """A layer that reads zeros has a factor of rank one, beside the one of its bias, and gradients of no length."""
    net = model()
    kfac, optimizer = made(net, inverses_every=1, factors_every=1, decay=0.0)
    weight = next(net.parameters())  # of the first layer
    before = weight.detach().clone()
    losses = [step(net, optimizer, torch.zeros(8, 1, 8, 8), torch.arange(8) % 5) for _ in range(20)]
    assert torch.linalg.matrix_rank(kfac.factors[0, "A"]) == 1 and losses[-1] < losses[0]
    torch.testing.assert_close(weight.detach(), before)


def test_what_has_no_two_factors_is_refused_by_name() -> None:
    grouped = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Linear(3, 2))
    with pytest.raises(NotApplicableError, match=r"the convolution 0 has 2 groups, .* add 0 to what to skip\.$"):
        find_layers(grouped)
    assert [layer.name for layer, _ in find_layers(grouped, "0")] == ["1"]
    with pytest.raises(
        NotApplicableError, match=r"the model has no linear layer and no convolution that is trained\.$"
    ):
        Preconditioner(nn.BatchNorm1d(3), SecondOrderSettings())
