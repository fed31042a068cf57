"""Masks of real steps, and skipping that changes no gradient."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from foretrace.errors import ForetraceError  # noqa: E402
from foretrace.training.sparsity import exact, samples, taken  # noqa: E402
from foretrace.training.training import Training  # noqa: E402


def training(*layers: nn.Module, batch: int = 4) -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    data = [(torch.rand(batch, 3, 8, 8), torch.zeros(batch))] * 3

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        found: Tensor = (model(batch[0]).square().flatten(1).mean(1) - batch[1]).square().mean()
        return found

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Training(name="small", model=model, optimizers=(optimizer,), loader=data, loss=loss)


def conv(inputs: int, **how: object) -> nn.Conv2d:
    return nn.Conv2d(inputs, 4, 3, padding="same", **how)  # type: ignore[arg-type]


def test_masks_are_those_of_the_operands_and_the_training_stays() -> None:
    job = training(conv(3), nn.ReLU(inplace=True), nn.MaxPool2d(2), conv(4, dilation=2), nn.BatchNorm2d(4), nn.ReLU())
    before = {name: value.clone() for name, value in job.model.state_dict().items()}
    first, second = taken(job, images=2).convs
    assert all(torch.equal(value, before[name]) for name, value in job.model.state_dict().items())
    assert [first.name, second.name] == ["0", "3"]
    assert first.inputs.shape == (2, 3, 8, 8) and first.gradients.shape == (2, 4, 8, 8)
    assert second.padding == (2, 2) and second.weight == (4, 4, 3, 3)
    assert (first.input_gradient, second.input_gradient) == (False, True)
    assert second.maskable and not first.maskable
    image = next(iter(job.loader))[0]
    job.model.train()
    with torch.no_grad():
        pooled = nn.Sequential(*list(job.model.children())[:3])(image)
    assert np.array_equal(second.inputs, (pooled[:2] != 0).numpy())
    # A max pool of 2 × 2 passes one of four gradients on, and its ReLU not all of these; batch norm makes them dense.
    assert first.zeros[1] >= 0.75 and second.zeros[1] < 0.05


@pytest.mark.parametrize(
    ("between", "masked"),
    [
        ([nn.ReLU()], True), ([nn.ReLU6(), nn.AvgPool2d(2)], True), ([nn.ReLU(), nn.AdaptiveAvgPool2d(3)], True),
        ([nn.Threshold(0, 0)], True), ([nn.LeakyReLU()], False), ([nn.ReLU(), nn.BatchNorm2d(4)], False),
        ([nn.Hardtanh()], False), ([nn.Tanh()], False), ([nn.Dropout(0.5)], False), ([], False),
    ],
)  # fmt: skip
def test_outputs_are_skipped_only_behind_relus_and_exactly(between: list[nn.Module], masked: bool) -> None:
    job = training(conv(3), *between, conv(4), nn.ReLU())
    assert taken(job).convs[1].maskable is masked
    assert exact(job)


class Branches(nn.Module):
    """A concatenation of two branches, one with a ReLU or both."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.one, self.other = nn.Sequential(conv(3), nn.ReLU()), nn.Sequential(conv(3), last)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = torch.cat([self.one(images), self.other(images)], 1)
        return found


def test_all_branches_must_be_masked() -> None:
    assert [taken(training(Branches(each), conv(8))).convs[-1].maskable for each in (nn.ReLU(), nn.Sigmoid())] == [
        True,
        False,
    ]


def test_skipping_where_nothing_masks_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    job = training(conv(3), nn.Hardshrink(0.3), conv(4))
    monkeypatch.setattr("foretrace.training.sparsity._by_relus", lambda node: True)
    assert exact(training(conv(3), nn.Dropout(0.5), conv(4)))  # dropped values pass no gradient either
    monkeypatch.setattr("foretrace.training.sparsity._by_relus", lambda node: node is not None)
    assert exact(job)  # nor do those that were shrunk to 0
    assert not exact(training(nn.Conv2d(3, 4, 3, bias=False), Rounded(), conv(4)))


class Rounded(nn.Module):
    """Zeros through which gradients pass: rounding with a straight-through gradient."""

    def forward(self, values: Tensor) -> Tensor:
        rounded: Tensor = values + (values.round() - values).detach()
        return rounded


def test_masks_follow_training() -> None:
    job = training(conv(3), nn.ReLU(), conv(4), nn.ReLU())
    found = list(samples(job, (0, 2, 2)))
    assert [each.step for each in found] == [0, 2]
    assert found[0].loss != found[1].loss


def test_mistakes_are_told() -> None:
    with pytest.raises(ForetraceError, match="small has no convolution"):
        taken(training(nn.Flatten(), nn.Linear(192, 2)))
