"""LSTMs with ordinary and structured dropout: gradients, equality given the same mask, evaluation, expectation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from foretrace.errors import NotApplicableError
from foretrace.training.structured_lstm import (
    Drop,
    DropoutLSTM,
    Kept,
    LSTMLayer,
    StructuredDropoutLSTM,
    keep_elements,
    keep_units,
)

TIME, BATCH, INPUT, HIDDEN = 4, 2, 4, 3
NAMES = ("x", "h0", "c0", "w_ih", "w_hh", "bias")


layer: Callable[..., tuple[torch.Tensor, torch.Tensor]] = LSTMLayer.apply


def as_mask(kept: Kept, time_steps: int) -> torch.Tensor:
    """A selection as a mask to multiply with, [time, 1, units]."""
    mask = torch.zeros(time_steps, 1, round(kept.scale * kept.columns.shape[1]))
    for columns, steps in kept.parts(time_steps):
        mask[steps, :, columns] = kept.scale
    return mask


def arguments(seed: int = 0) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    sizes = [
        (TIME, BATCH, INPUT),
        (BATCH, HIDDEN),
        (BATCH, HIDDEN),
        (4 * HIDDEN, INPUT),
        (4 * HIDDEN, HIDDEN),
        (4 * HIDDEN,),
    ]
    return [torch.randn(size, generator=made, dtype=torch.float64).requires_grad_() for size in sizes]


def drops(kind: str, units: int) -> Drop:
    if kind == "none":
        return None
    if kind == "random":
        return keep_elements((TIME, BATCH, units), 0.5, torch.empty(0, dtype=torch.float64))
    return keep_units(units, TIME, 0.5, int(kind))


@pytest.mark.parametrize("of_x", ["none", "random", "4", "3", "1"])
@pytest.mark.parametrize("of_h", ["none", "random", "4", "3", "1"])
def test_gradients(of_x: str, of_h: str) -> None:
    torch.manual_seed(1)
    given: tuple[Any, ...] = (*arguments(), drops(of_x, INPUT), drops(of_h, HIDDEN))
    assert torch.autograd.gradcheck(layer, given)


@pytest.mark.parametrize("span", [1, 2, 3, 4])
def test_structured_is_the_masked_one(span: int) -> None:
    """Compacted products give what masks of the same units give: outputs and the gradients of everything."""
    torch.manual_seed(span)
    kept = keep_units(INPUT, TIME, 0.5, span), keep_units(HIDDEN, TIME, 0.5, span)
    masks = tuple(as_mask(each, TIME).double() for each in kept)
    results = []
    for dropped in (kept, masks):
        given = arguments()
        out, c = layer(*given, *dropped)
        (out.square().sum() + c.sin().sum()).backward()
        results.append((out, c, *(each.grad for each in given)))
    for name, compact, masked in zip(("out", "c", *NAMES), *results, strict=True):
        torch.testing.assert_close(compact, masked, msg=name)


def test_without_dropout_it_is_nn_lstm() -> None:
    theirs = torch.nn.LSTM(INPUT, HIDDEN, 2, dtype=torch.float64)
    ours = DropoutLSTM(INPUT, HIDDEN, 2, p=0.0, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(TIME, BATCH, INPUT, dtype=torch.float64)
    state = torch.randn(2, 2, BATCH, HIDDEN, dtype=torch.float64)
    results = []
    for module in (theirs, ours):
        given, h0, c0 = (each.clone().requires_grad_() for each in (x, *state))
        out, (h, c) = module(given, (h0, c0))
        (out.square().sum() + h.sum() + c.sin().sum()).backward()
        results.append([out, h, c, given.grad, h0.grad, c0.grad, *(p.grad for p in module.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", [DropoutLSTM, StructuredDropoutLSTM])
def test_evaluation_is_nn_lstm_exactly(kind: type[DropoutLSTM], batch_first: bool) -> None:
    theirs = torch.nn.LSTM(INPUT, HIDDEN, 2, batch_first=batch_first)
    ours = kind(INPUT, HIDDEN, 2, p=0.5, batch_first=batch_first).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(TIME, BATCH, INPUT)
    for a, b in zip(theirs.eval()(x)[1], ours(x)[1], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(theirs(x)[0], ours(x)[0])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [DropoutLSTM, StructuredDropoutLSTM])
def test_layouts_and_states(kind: type[DropoutLSTM], bias: bool) -> None:
    first = kind(INPUT, HIDDEN, 2, bias=bias, batch_first=True)
    x = torch.randn(BATCH, TIME, INPUT)
    torch.manual_seed(3)
    out, (h, c) = first(x)
    second = kind(INPUT, HIDDEN, 2, bias=bias)
    second.load_state_dict(first.state_dict())
    torch.manual_seed(3)
    again, (_, c2) = second(x.transpose(0, 1))
    assert torch.equal(out, again.transpose(0, 1)) and torch.equal(c, c2)
    assert torch.equal(h[-1], out[:, -1])


@pytest.mark.parametrize("p", [0.3, 0.5, 0.65])
def test_masks_keep_the_expectation(p: float) -> None:
    torch.manual_seed(0)
    kept = keep_units(40, 4000, p, 1)
    assert kept.columns.shape == (4000, round((1 - p) * 40))
    torch.testing.assert_close(as_mask(kept, 4000).mean((0, 1)), torch.ones(40), atol=0.12, rtol=0)
    assert as_mask(kept, 4000).mean() == pytest.approx(1.0, abs=1e-5)
    mask = keep_elements((4000, 40), p, torch.empty(0))
    torch.testing.assert_close(mask.mean(0), torch.ones(40), atol=0.12, rtol=0)
    assert mask.unique().tolist() == [0.0, pytest.approx(1 / (1 - p))]


def test_what_is_redrawn() -> None:
    torch.manual_seed(0)
    assert (
        torch.equal(keep_units(64, 6, 0.5, 6).columns[0].sort().values, keep_units(64, 6, 0.5, 6).columns[0]) is False
    )
    per_step = keep_units(64, 6, 0.5, 1).columns
    assert len(per_step) == 6 and len({tuple(row) for row in per_step.tolist()}) == 6
    spans = keep_units(64, 7, 0.5, 3)
    assert [steps for _, steps in spans.parts(7)] == [slice(0, 3), slice(3, 6), slice(6, 7)]


def test_only_the_input() -> None:
    module = StructuredDropoutLSTM(INPUT, HIDDEN, connections="input")
    x = torch.randn(TIME, BATCH, INPUT)
    assert isinstance(module.drop_inputs(x), Kept)
    assert module.drop_recurrent(TIME, x[0, :, :HIDDEN]) is None
    mixed = StructuredDropoutLSTM(INPUT, HIDDEN, structured="input")
    assert isinstance(mixed.drop_inputs(x), Kept)
    assert isinstance(mixed.drop_recurrent(TIME, x[0, :, :HIDDEN]), torch.Tensor)


def test_taking_over_keeps_the_very_parameters() -> None:
    module = DropoutLSTM(INPUT, HIDDEN, 2, batch_first=True)
    made = StructuredDropoutLSTM.taking_over(module, p=0.65, connections="both", structured="both", span=0)
    assert [(n, id(p)) for n, p in made.named_parameters()] == [(n, id(p)) for n, p in module.named_parameters()]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = module.get_parameter("weight_hh_l1").detach().clone()
    made(torch.randn(BATCH, TIME, INPUT))[0].sum().backward()
    optimizer.step()
    assert not torch.equal(made.get_parameter("weight_hh_l1"), before)
    made.eval()
    assert torch.equal(made(torch.ones(1, TIME, INPUT))[0], module.eval()(torch.ones(1, TIME, INPUT))[0])
    assert copy.deepcopy(made).p == 0.65
    assert "p=0.65, connections=both, structured=both, span=0" in repr(made)


def test_autocast_leaves_it_in_full_precision() -> None:
    module = StructuredDropoutLSTM(INPUT, HIDDEN)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = module(torch.randn(TIME, BATCH, INPUT).bfloat16())
    assert out.dtype == torch.float32
    out.sum().backward()


@pytest.mark.parametrize(
    "make",
    [
        lambda: DropoutLSTM(2, 2, p=1.0),
        lambda: DropoutLSTM(2, 2, connections="output"),
        lambda: StructuredDropoutLSTM(2, 2, span=-1),
        lambda: StructuredDropoutLSTM(2, 2, structured="none"),
        lambda: DropoutLSTM(2, 2)(torch.randn(3, 2)),
        lambda: StructuredDropoutLSTM.taking_over(
            torch.nn.LSTM(2, 2, bidirectional=True), p=0.5, connections="both", structured="both", span=0
        ),
    ],
)
def test_what_cannot_be(make: object) -> None:
    assert callable(make)
    with pytest.raises(NotApplicableError, match=r"[.]$"):
        make()
