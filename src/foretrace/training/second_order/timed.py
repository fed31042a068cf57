"""Parts of K-FAC on the layers of a model, each as something to be timed alone on the machine that trains.

PyTorch is imported where they are timed: a prediction only names them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from foretrace.cost.operators.operator import Operator

if TYPE_CHECKING:
    from torch import nn

FACTORS, PACKING, INVERSES, GRADIENTS = "factors", "packing", "inverses", "gradients"
PARTS = (FACTORS, PACKING, INVERSES, GRADIENTS)


def part_operator(
    part: str, reads: Sequence[Sequence[int]], weights: Sequence[Sequence[int]], windows: Sequence[Sequence[str]]
) -> Operator:
    """Return a part of K-FAC on layers with these weights, of one step in which it is due.

    `reads` has the sizes of what each layer reads, [] for one that does not run, and `windows` says whether it has a
    bias ("bias" or "") and, of a convolution, stride, padding and dilation as recorded. Only factors depend on them.
    """
    known = [list(each) if part == FACTORS else [] for each in reads]
    concrete = [part, "", json.dumps([list(each)[: None if part == FACTORS else 1] for each in windows])]
    dims: list[Any] = [known, [list(each) for each in weights], []]
    return Operator.of(f"{__name__}:prepared_part", dims, ["TensorList", "TensorList", ""], concrete)


def prepared_part(operator: Operator) -> Callable[[], object]:
    """Return what a `part_operator` stands for, done by the preconditioner itself."""
    import torch
    from torch import nn

    from foretrace.training.second_order import factors, preconditioner

    part, (reads, weights, *_) = operator.concrete[0], operator.dims
    modules = [_layer(weight, window) for weight, window in zip(weights, json.loads(operator.concrete[2]), strict=True)]
    made = preconditioner.Preconditioner(nn.Sequential(*modules), preconditioner.SecondOrderSettings())
    inputs = [torch.randn(read) if read else None for read in reads]
    with torch.no_grad():
        outputs = [each(read) if read is not None else None for each, read in zip(modules, inputs, strict=True)]
    gradients = [torch.randn_like(each) if each is not None else None for each in outputs]
    for each in modules:
        for parameter in each.parameters():
            parameter.grad = torch.randn_like(parameter)

    def take() -> None:
        for i, (module, read, gradient) in enumerate(zip(modules, inputs, gradients, strict=True)):
            if read is not None and gradient is not None:
                made.new[i, "A"] = [factors.input_factor(module, read, "sample")]
                made.new[i, "G"] = [factors.output_factor(module, gradient, "sample")]
        made.update_factors()

    take()
    made.update_inverses()
    matrices = list(made.factors.values())
    calls: dict[str, Callable[[], object]] = {
        FACTORS: take,
        PACKING: lambda: preconditioner.unpack(preconditioner.pack(matrices), matrices),
        INVERSES: made.update_inverses,
        GRADIENTS: lambda: made.update_gradients(0.1),
    }
    return torch.no_grad()(calls[part])


def _layer(weight: Sequence[int], window: Sequence[str]) -> nn.Module:
    from torch import nn

    bias, *rest = window
    if len(weight) == 2:
        return nn.Linear(weight[1], weight[0], bias=bool(bias))
    stride, padding, dilation = (tuple(json.loads(each)) for each in rest or ("[1]", "[0]", "[1]"))
    return nn.Conv2d(
        weight[1], weight[0], (weight[2], weight[3]), stride=stride * (2 // len(stride)),
        padding=padding * (2 // len(padding)), dilation=dilation * (2 // len(dilation)), bias=bool(bias),
    )  # fmt: skip
