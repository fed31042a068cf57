"""Kronecker factors of layers: A from what a layer reads, G from the gradients of what it writes.

Martens and Grosse, K-FAC (ICML 2015), section 3; Grosse and Martens, KFC (ICML 2016), section 3: of a convolution, A
sums over positions and G averages over them. Gradients are those of one sample, so a batch of any size gives factors
of the same size. `mean` scales them as kfac-pytorch does, which takes gradients of the mean loss and divides both
by the number of positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.errors import NotApplicableError
from foretrace.training.second_order.grid import FactoredLayer, factored, skips, unsupported


def find_layers(model: nn.Module, skip: str = "") -> list[tuple[FactoredLayer, Any]]:
    """Return linear layers and convolutions that are trained, in the order of the model, without those that `skip`
    names.

    Raises NotApplicableError for a convolution that has no two factors.
    """
    found = []
    for name, module in model.named_modules():
        if type(module) not in (nn.Linear, nn.Conv2d) or not module.weight.requires_grad or skips(skip, name):
            continue
        if isinstance(module, nn.Conv2d):
            why = f"{module.groups} groups" if module.groups > 1 else ""
            why = why or (f"{module.padding_mode} padding" if module.padding_mode != "zeros" else "")
            if why or isinstance(module.padding, str):
                raise NotApplicableError(unsupported(name, why or f"padding={module.padding}"))
        found.append((factored(name, tuple(module.weight.shape), bias=module.bias is not None), module))
    return found


def input_factor(module: Any, read: Tensor, scaling: str) -> Tensor:
    """Return a of what a layer reads, (..., inputs) or (N, C, H, W): a symmetric matrix with `inputs` of the layer as
    side.
    """
    read = read.detach().float()
    positions = 1
    if type(module) is nn.Conv2d:
        patches = functional.unfold(
            read, module.kernel_size, dilation=module.dilation, padding=module.padding, stride=module.stride  # type: ignore[arg-type]
        )  # fmt: skip
        positions = patches.shape[-1]
        read = patches.transpose(1, 2)
    rows = read.reshape(-1, read.shape[-1])
    if module.bias is not None:
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
    found: Tensor = rows.T @ rows
    return found.mul_(positions / len(rows) if scaling == "sample" else 1 / len(rows) / positions**2)


def output_factor(module: Any, gradient: Tensor, scaling: str) -> Tensor:
    """Return G of the gradients of what a layer writes, (..., outputs) or (N, outputs, H, W), by the mean loss of a
    batch.
    """
    gradient = gradient.detach().float()
    positions = 1
    if isinstance(module, nn.Conv2d):
        positions = gradient.shape[2] * gradient.shape[3]
        gradient = gradient.flatten(2).transpose(1, 2)
    rows = gradient.reshape(-1, gradient.shape[-1])
    samples = len(rows) / positions
    found: Tensor = rows.T @ rows
    return found.mul_(samples / positions if scaling == "sample" else 1 / len(rows) / positions**2)


def gradient_of(module: Any) -> Tensor:
    """Return the gradient of weight and bias of a layer as one matrix, `outputs` x `inputs`."""
    gradient: Tensor = module.weight.grad.flatten(1)
    return gradient if module.bias is None else torch.cat([gradient, module.bias.grad[:, None]], dim=1)


def put_gradient(module: Any, matrix: Tensor, scale: float) -> None:
    """Set the gradient of weight and bias from a matrix as `gradient_of` gives it, times `scale`."""
    weight = module.weight.grad
    columns = weight[0].numel()
    torch.mul(matrix[:, :columns].view(weight.shape), scale, out=weight)
    if module.bias is not None:
        torch.mul(matrix[:, -1], scale, out=module.bias.grad)
