"""A real tensor-parallel pair of a transformer's MLPs, with compressed sums: for `model-parallel-compression`.

Every worker holds a part of the two linear layers of each `nn.TransformerEncoderLayer` and all of the rest, and sees
the same batches. What others computed comes by one all-reduce per layer and direction (Shoeybi et al., Megatron-LM).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist
from torch import nn

from foretrace.errors import NotApplicableError
from foretrace.training.compression.boundaries import ColumnParallelLinear, RowParallelLinear
from foretrace.training.compression.settings import Boundary

if TYPE_CHECKING:
    from foretrace.training.training import Training

PLAIN = Boundary(method="none")


def divided(training: Training, boundary: Boundary, workers: int, *, all_layers: bool, name: str) -> Training:
    """The training with its MLPs divided; sums of the last half of the layers are compressed, or of all.

    Raises NotApplicableError, in the name of a technique, where the model has no such layers or they cannot be divided.
    """
    layers = [each for each in training.model.modules() if isinstance(each, nn.TransformerEncoderLayer)]
    if not layers:
        raise NotApplicableError(
            f"{name}: the model has no nn.TransformerEncoderLayer whose MLP could be divided between workers."
        )
    if any(each.linear1.out_features % workers for each in layers):
        raise NotApplicableError(f"{name}: an MLP cannot be divided evenly between {workers} workers.")
    for each in (*training.model.parameters(), *training.model.buffers()):
        dist.broadcast(each.data, 0)  # what is not divided has to be the same everywhere
    rank = dist.get_rank()
    before = {id(each): each for each in training.model.parameters()}
    for i, layer in enumerate(layers):
        compress = all_layers or i >= len(layers) // 2
        layer.linear2 = RowParallelLinear(layer.linear2, rank, workers, boundary if compress else PLAIN)
        layer.linear1 = ColumnParallelLinear(layer.linear1, rank, workers)
        layer.activation_relu_or_gelu = 0  # no fused path in evaluation, which would take a part for the whole
    now = {id(each): each for each in training.model.parameters()}
    gone, added = before.keys() - now.keys(), [each for key, each in now.items() if key not in before]
    optimizers = tuple(
        _with(optimizer, gone, added if i == 0 else []) for i, optimizer in enumerate(training.optimizers)
    )
    return replace(training, optimizers=optimizers)


def _with(optimizer: torch.optim.Optimizer, gone: set[int], added: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer without some parameters and with others, which join its first group."""
    for group in optimizer.param_groups:
        group["params"] = [each for each in group["params"] if id(each) not in gone]
    optimizer.param_groups[0]["params"] += added
    return optimizer
