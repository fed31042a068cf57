"""Modules whose activations are computed again in the backward pass, and what that costs beside the computing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from foretrace.cost.operators.operator import Operator

if TYPE_CHECKING:
    from torch import nn

HOME = __name__
SMALL, LARGE = 2, 34  # operators of the two blocks that are timed alone


def recomputed(module: nn.Module) -> None:
    """Let the module save its inputs alone and run its forward pass once more when backward needs it, in place.

    Its parameters keep their names, and the module can still be copied: what is replaced is the method, not the module.
    """
    from torch.utils.checkpoint import checkpoint

    module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def is_recomputed(module: nn.Module) -> bool:
    """Return whether `recomputed` was called on this module."""
    from torch.utils.checkpoint import checkpoint

    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is checkpoint


def checkpoint_operator(count: int, *, kept: bool) -> Operator:
    """Return forward and backward of a block of `count` small operators, whose results are `kept`, or computed again.

    Either way the forward pass runs twice, so that their difference is what checkpointing itself takes.
    """
    return Operator.of(f"{HOME}:prepared_block", [[count], []], ["float", ""], ["", "kept" if kept else "recomputed"])


def prepared_block(operator: Operator) -> Callable[[], object]:
    """Return what a `checkpoint_operator` stands for."""
    import torch
    from torch.utils.checkpoint import checkpoint

    count, kept = operator.dims[0][0], operator.concrete[1] == "kept"
    start = torch.zeros(4, requires_grad=True)

    def block(value: torch.Tensor) -> torch.Tensor:
        for _ in range(count):
            value = value.sin()
        return value

    def call() -> None:
        with torch.enable_grad():
            if kept:
                block(start)
                result = block(start)
            else:
                result = checkpoint(block, start, use_reentrant=False)
            torch.autograd.grad(result.sum(), start)

    return call
