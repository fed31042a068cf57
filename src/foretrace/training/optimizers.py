"""Optimizers rebuilt with other settings on the same parameters, and one step of an optimizer to be timed alone."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

from foretrace.cost.operators.operator import Operator
from foretrace.errors import NotApplicableError

if TYPE_CHECKING:
    from torch.optim import Optimizer

_WORKING_SET_BYTES = 64 * 2**20  # steps take turns on so much, so that none finds its arrays in a cache
_MOST_SETS = 24


def remade(optimizer: Optimizer, **settings: Any) -> Optimizer:
    """Return an optimizer of the same class on the same parameter groups with other settings; its state starts empty.

    Raises NotApplicableError where its class does not know a setting, or refuses these.
    """
    kind = type(optimizer)
    takes = inspect.signature(kind).parameters
    if unknown := [name for name in settings if name not in takes]:
        raise NotApplicableError(f"{kind.__name__} takes no {' and no '.join(unknown)}.")
    defaults = {key: value for key, value in optimizer.defaults.items() if key in takes} | settings
    groups = [
        {key: value for key, value in group.items() if key == "params" or (key in defaults and key not in settings)}
        for group in optimizer.param_groups
    ]
    try:
        return kind(groups, **defaults)
    except (RuntimeError, ValueError) as error:
        raise NotApplicableError(f"{kind.__name__} refuses {settings}: {error}.") from error


def step_operator(kind: str, sizes: list[list[int]], settings: dict[str, Any]) -> Operator:
    """Return one step of the torch optimizer `kind` over float32 parameters of these sizes, as something to
    be timed.
    """
    concrete = ["", kind, json.dumps(settings, sort_keys=True)]
    return Operator.of(f"{__name__}:prepared_step", [sizes, [], []], ["TensorList", "", ""], concrete)


def prepared_step(operator: Operator) -> Callable[[], object]:
    """Return what a `step_operator` stands for: calls take turns on several copies of the parameters, each with its
    state.
    """
    import torch

    sizes, kind, settings = operator.dims[0], operator.concrete[1], json.loads(operator.concrete[2])
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    nbytes = 16 * sum(map(prod, sizes))  # parameter, gradient and two states
    optimizers = []
    for _ in range(max(1, min(_MOST_SETS, _WORKING_SET_BYTES // max(nbytes, 1)))):
        parameters = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        made = getattr(torch.optim, kind)(parameters, lr=1e-5, **settings)
        made.step()  # allocates the state
        optimizers.append(made)
    turn = 0

    def call() -> None:
        nonlocal turn
        optimizers[turn].step()
        turn = (turn + 1) % len(optimizers)

    return call
