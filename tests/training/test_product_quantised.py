"""Layers that look products up: equal to their dense reconstruction, exact with enough prototypes, trained, refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.errors import ForetraceError
from foretrace.training.product_quantised import (
    ProductQuantised,
    Quantiser,
    distances,
    encode,
    learn_prototypes,
    quantise,
)

CONVOLUTIONS: list[dict[str, Any]] = [
    {"kernel_size": 3, "padding": 1}, {"kernel_size": 1}, {"kernel_size": (3, 2), "stride": (2, 1), "dilation": 2},
    {"kernel_size": 3, "padding": "same"}, {"kernel_size": 3, "padding": 2, "padding_mode": "circular", "stride": 2},
]  # fmt: skip


def layer(layer: nn.Conv2d | nn.Linear, x: Tensor, **given: Any) -> ProductQuantised:
    """A layer on prototypes of what it meets, looked up."""
    quantiser = Quantiser(**{"length": 9, "prototypes": 8, **given})
    shaped = ProductQuantised(layer, quantiser, None)
    return ProductQuantised(layer, quantiser, shaped.rows(x)).eval()


@pytest.mark.parametrize("given", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("distance", ["l1", "l2"])
def test_looked_up_convolutions_equal_their_dense_reconstruction(given: dict[str, Any], distance: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 9, 8, dtype=torch.float64)
    dense = nn.Conv2d(5, 7, **given).double()
    module = layer(dense, x, length=4, distance=distance)
    assert dense.bias is not None
    with torch.no_grad():
        out = module(x)
        wanted = module.reconstructed(module.rows(x)) @ dense.weight.flatten(1).t() + dense.bias
        plain = module.rows(x) @ dense.weight.flatten(1).t() + dense.bias
    assert out.shape == dense(x).shape
    torch.testing.assert_close(out.permute(0, 2, 3, 1).reshape(-1, 7), wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(plain, dense(x).permute(0, 2, 3, 1).reshape(-1, 7), rtol=0, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 12), st.integers(1, 12), st.integers(1, 6), st.integers(1, 6), st.integers(0, 99),
    st.sampled_from(["l1", "l2"]), st.booleans(),
)  # fmt: skip
def test_linear_layers_of_any_length_equal_their_dense_reconstruction(
    inputs: int, length: int, prototypes: int, outputs: int, seed: int, distance: str, bias: bool
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(3, 4, inputs, dtype=torch.float64)
    dense = nn.Linear(inputs, outputs, bias=bias).double()
    module = layer(dense, x, length=length, prototypes=prototypes, distance=distance)
    with torch.no_grad():
        rebuilt = module.reconstructed(module.rows(x)).view(3, 4, inputs)
        torch.testing.assert_close(module(x), dense(rebuilt), rtol=0, atol=1e-12)
    assert module.table().shape == (-(-inputs // length), prototypes, outputs)


def test_as_many_prototypes_as_distinct_sub_vectors_give_the_exact_product() -> None:
    torch.manual_seed(1)
    words = torch.randn(5, 6, dtype=torch.float64)
    x = torch.cat([words, words[torch.randint(5, (60,))]])
    dense = nn.Linear(6, 4).double()
    with torch.no_grad():
        exact = layer(dense, x, length=3, prototypes=5)(x) - dense(x)
        coarse = layer(dense, x, length=3, prototypes=2)(x) - dense(x)
    assert exact.abs().max() < 1e-12 < coarse.abs().max()


def test_distances_and_codes_are_those_of_the_definition() -> None:
    rows, prototypes = torch.randn(20, 3, 4), torch.randn(3, 5, 4)
    apart = rows.transpose(0, 1).unsqueeze(2) - prototypes.unsqueeze(1)
    torch.testing.assert_close(distances(rows, prototypes, "l1"), apart.abs().sum(3))
    squares = distances(rows, prototypes, "l2") + rows.square().sum(2).t().unsqueeze(2)
    torch.testing.assert_close(squares, apart.square().sum(3), rtol=1e-4, atol=1e-4)
    assert torch.equal(encode(rows, prototypes, "l2") - torch.tensor([0, 5, 10]), apart.square().sum(3).argmin(2).t())


def test_more_prototypes_lose_less() -> None:
    rows = torch.randn(400, 2, 4, generator=torch.Generator().manual_seed(3))
    lost = []
    for many in (1, 4, 16, 64):
        found = learn_prototypes(rows, Quantiser(length=4, prototypes=many))
        kept = found.flatten(0, 1)[encode(rows, found, "l2")]
        lost.append(float((rows - kept).square().mean()))
    assert lost == sorted(lost, reverse=True) and lost[-1] < 0.5 * lost[0]


@pytest.mark.parametrize("assignment", ["straight", "soft"])
def test_gradients_reach_inputs_weights_and_prototypes(assignment: Any) -> None:
    torch.manual_seed(2)
    x = torch.randn(40, 6, requires_grad=True)
    dense = nn.Linear(6, 3)
    module = layer(dense, x.detach(), length=3, prototypes=4, assignment=assignment).train()
    module(x).square().sum().backward()
    for each in (x, dense.weight, module.prototypes):
        assert each.grad is not None and float(each.grad.abs().sum()) > 0
    if assignment == "straight":  # the identity: as if the reconstruction itself were the input
        rebuilt = module.reconstructed(x).detach().requires_grad_()
        functional.linear(rebuilt, dense.weight.detach(), dense.bias.detach()).square().sum().backward()
        torch.testing.assert_close(x.grad, rebuilt.grad)


def test_the_table_follows_weights_and_narrow_numbers_are_few() -> None:
    torch.manual_seed(4)
    x = torch.randn(30, 6)
    dense = nn.Linear(6, 3, bias=False)
    module = layer(dense, x, length=3, prototypes=4)
    with torch.no_grad():
        before = module(x)
        dense.weight.mul_(2)
        torch.testing.assert_close(module(x), 2 * before)
        narrow = ProductQuantised(dense, Quantiser(length=6, prototypes=4, bits=4), x).eval()(x)
        step = narrow[narrow != 0].abs().min()
        assert (narrow / step - (narrow / step).round()).abs().max() < 1e-3
        assert (narrow / step).abs().max() < 8.01


def net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4),
        nn.Conv2d(4, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2),
    )  # fmt: skip


def test_layers_are_replaced_in_order_but_the_first_and_those_of_groups() -> None:
    model, x = net().eval(), torch.randn(32, 3, 8, 8)
    dense = model(x).detach()
    names = quantise(model, lambda: model(x), Quantiser(length=9, prototypes=16))
    assert names == ["4", "7"] and [type(model[i]) for i in (0, 3, 4)] == [nn.Conv2d, nn.Conv2d, ProductQuantised]
    assert not any(each.training for each in model.modules())
    assert 0 < (model(x) - dense).detach().square().mean() < dense.var()
    with pytest.raises(ForetraceError, match="no layer can be quantised"):
        only = nn.Sequential(nn.Linear(3, 2))
        quantise(only, lambda: only(torch.randn(4, 3)), Quantiser(length=1, prototypes=1))


def test_training_again_recovers_what_was_lost() -> None:
    torch.manual_seed(6)
    x = torch.randn(256, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    wanted = model(x).detach()
    quantise(model, lambda: model(x), Quantiser(length=4, prototypes=8))

    def lost() -> float:
        with torch.no_grad():
            return float((model.eval()(x) - wanted).square().mean())

    begun, optimizer = lost(), torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        (model.train()(x) - wanted).square().mean().backward()
        optimizer.step()
    assert lost() < 0.8 * begun


@pytest.mark.parametrize(("make", "says"), [
    (lambda: learn_prototypes(torch.randn(7, 2, 3), Quantiser(length=3, prototypes=8)), "8 prototypes need as many"),
    (lambda: Quantiser(length=0, prototypes=8), "`length` must be 1 or more"),
    (lambda: Quantiser(length=9, prototypes=0), "`prototypes` must be 1 or more"),
    (lambda: Quantiser(length=9, prototypes=8, bits=1), "`bits` must be 0, or 2 or more"),
    (lambda: Quantiser(length=9, prototypes=1, distance="cosine"), "distance must be l1 or l2"),  # type: ignore[arg-type]
    (lambda: ProductQuantised(nn.Conv2d(4, 4, 3, groups=2), Quantiser(length=9, prototypes=1), None), "2 groups"),
    (lambda: ProductQuantised(nn.ReLU(), Quantiser(length=9, prototypes=1), None), "got ReLU"),  # type: ignore[arg-type]
])  # fmt: skip
def test_refuses_in_one_sentence(make: Any, says: str) -> None:
    with pytest.raises(ForetraceError, match=re.escape(says)) as error:
        make()
    assert "\n" not in str(error.value)
