"""`Training`: the plain step."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from foretrace.training.training import Training


@pytest.mark.parametrize("clip_norm", [0.0, 1e6])
def test_optimizers_share_the_scale_of_their_backward_pass(clip_norm: float) -> None:
    """The gradient of one overflows: it is left out and the scale halves, but not before the other one has stepped."""
    model = torch.nn.ParameterList([torch.ones(1), torch.ones(1)])
    first, second = model.parameters()
    training = Training(
        name="two", model=model, optimizers=tuple(torch.optim.SGD([each], lr=0.5) for each in (first, second)),
        loader=[torch.ones(1)], loss=lambda model, batch: (1e38 * first * batch + second * batch).sum(),
        scaler=torch.amp.GradScaler("cpu", init_scale=8.0), clip_norm=clip_norm,
    )  # fmt: skip
    training.step(torch.ones(1))
    assert (first.item(), second.item()) == (1.0, 0.5)
    assert training.scaler.get_scale() == 4.0
