"""Small networks whose steps are nearly all dispatch: what Python, autograd and an optimizer's loop cost per call.

An operator that is timed alone is called from Python with its arguments ready. In a step, modules and functions of
Python stand before it, autograd notes it down, its backward pass is called by the engine instead of by Python, and an
optimizer picks its tensors from dictionaries. Networks of different kinds, of modules and without any, are timed as a
whole: forward, forward and backward, update. `bench.measure` times them as it times operators (`chains()` names them),
so they count among the operators of a calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from foretrace.cost.operators.operator import Operator
from foretrace.training.training import Training

if TYPE_CHECKING:
    from torch import Tensor, nn

KINDS = ("linear", "attention", "tensors")
PARTS = ("forward", "backward", "update")  # "backward" is timed with the forward pass before it
_DEPTH = 8


def kinds_of(k: int | None) -> tuple[str, ...]:
    """Return the networks that a calibration of k operators measures; all of them for None."""
    return KINDS if k is None or k >= 20 else KINDS[:1]


def chains(kinds: Sequence[str] = KINDS) -> list[Operator]:
    """Return what is to be timed: every part of every network."""
    return [_operator(kind, part) for kind in kinds for part in PARTS]


def _operator(kind: str, part: str) -> Operator:
    return Operator.of(f"foretrace.model.host_chains:{part}", [[]], ["Scalar"], [kind])


def time_key(kind: str, part: str) -> str:
    """Return what a calibration stores the time of a part under."""
    return _operator(kind, part).key


def network(kind: str) -> Training:
    """Return one of the networks with a batch, as a training."""
    import torch
    from torch import nn
    from torch.nn import functional

    torch.manual_seed(0)
    width, batch = 16, 4
    if kind == "linear":
        layers = [each for _ in range(_DEPTH) for each in (nn.Linear(width, width), nn.Tanh())]
        model: nn.Module = nn.Sequential(*layers)
        data = torch.randn(batch, width)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    elif kind == "tensors":
        model, data = _tensors(width), torch.randn(batch, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    else:
        model = nn.Sequential(*[_attention(width) for _ in range(_DEPTH // 2)])
        data = torch.randn(batch, 4, width)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return functional.mse_loss(model(batch), batch)

    return Training(name=f"chain of {kind}", model=model, optimizers=(optimizer,), loader=[data], loss=loss)


def _attention(width: int) -> nn.Module:
    import torch
    from torch import nn

    class ProbeBlock(nn.Module):
        """Pre-norm attention with two heads, written out."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.inner = nn.Linear(width, 3 * width)
            self.outer = nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, n, _ = x.shape
            q, k, v = self.inner(self.norm(x)).view(b, n, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
            scores = ((q @ k.transpose(-1, -2)) * 0.35).softmax(-1)
            found: torch.Tensor = x + self.outer((scores @ v).transpose(1, 2).reshape(b, n, width))
            return found

    return ProbeBlock()


def _tensors(width: int) -> nn.Module:
    import torch
    from torch import nn

    class ProbeLoop(nn.Module):
        """A loop of arithmetic without modules, as simulations and cells of their own are written."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            speed = x * self.scale
            for _ in range(_DEPTH):
                force = 0.5 * x.sin() - 0.1 * speed.square()
                speed = torch.where(speed.abs() < 4, speed + 0.05 * force, 0.9 * speed)
                x = torch.stack([x + 0.05 * speed, speed]).mean(0)
            return x

    return ProbeLoop()


@cache
def _ready(kind: str) -> tuple[Training, Any]:
    import torch

    training = network(kind)
    training.model.train()
    batch = next(iter(training.loader))
    with torch.enable_grad():
        training.step(batch)  # makes the optimizer's state
    return training, batch


def forward(operator: Operator) -> Callable[[], object]:
    """Return the forward pass, its graph noted down and dropped."""
    training, batch = _ready(operator.concrete[0])
    return lambda: _with_gradients(lambda: training.forward(batch))


def backward(operator: Operator) -> Callable[[], object]:
    """Return forward and backward pass; gradients are new each time, as they are after `zero_grad`."""
    training, batch = _ready(operator.concrete[0])
    weights = list(training.model.parameters())

    def run() -> None:
        training.backward(training.forward(batch))
        for weight in weights:
            weight.grad = None

    return lambda: _with_gradients(run)


def update(operator: Operator) -> Callable[[], object]:
    """Return one step of the optimizer; gradients stay."""
    import torch

    training, _ = _ready(operator.concrete[0])
    gradients = [torch.full_like(each, 1e-3) for each in training.model.parameters()]

    def run() -> None:
        for weight, gradient in zip(training.model.parameters(), gradients, strict=True):
            weight.grad = gradient
        training.update(*training.optimizers)

    return run


def _with_gradients(run: Callable[[], object]) -> None:
    import torch

    with torch.enable_grad():
        run()
