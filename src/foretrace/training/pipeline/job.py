"""`PipelineJob`: the model in layers, where it is cut, and what an update is; the same on every process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from torch.optim import Optimizer

MULTIPLIER = 0x9E3779B97F4A7C15  # Knuth's: spreads seeds of neighbouring layers and micro-batches


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """Dynamic scale of the loss, as torch.amp.GradScaler keeps it, for gradients of 16 bits."""

    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    every: int = 2000  # updates without an overflow after which the scale grows

    def after(self, scale: float, since: int, *, overflow: bool) -> tuple[float, int]:
        """Return the next scale and the updates since its last change, after one more update."""
        if overflow:
            return scale * self.backoff, 0
        return (scale * self.growth, 0) if since + 1 == self.every else (scale, since + 1)


@dataclass(frozen=True, kw_only=True)
class PipelineJob:
    """A training that can be cut between its layers, each a module with one tensor in and one out.

    Functions make everything, so that each process makes its own layers only; to start processes they must be
    importable. Micro-batches are counted over all batches. A batch's loss is the mean over its micro-batches.
    """

    layers: tuple[Callable[[], nn.Module], ...]
    cut: tuple[int, ...]  # layers per stage
    data: Callable[[int], tuple[Tensor, Any]]  # input and target of a micro-batch
    loss: Callable[[Tensor, Any], Tensor]  # mean over the samples of a micro-batch
    optimizer: Callable[[list[nn.Parameter]], Optimizer]
    tied: tuple[tuple[str, ...], ...] = ()  # parameters that are one, as in ("0.weight", "5.weight"): layer, name
    clip_norm: float = 0.0  # longest gradient over all stages, as torch.nn.utils.clip_grad_norm_; 0 is any
    scaling: LossScaling | None = None
    recompute: bool = False  # keep the input of a stage only, and run its forward pass again
    seed: int = 0

    def __post_init__(self) -> None:
        if sum(self.cut) != len(self.layers) or min(self.cut, default=0) < 1:
            raise ForetraceError(
                f"the {len(self.layers)} layers cannot be cut into stages of {list(self.cut)}; give every stage a "
                "layer or more, and use each."
            )
        for group in self.tied:
            stages = [self.stage_of(int(name.split(".")[0])) for name in group]
            if stages != sorted(set(stages)):
                raise ForetraceError(
                    f"the tied parameters {', '.join(group)} must be of different stages in ascending order, got the "
                    f"stages {stages}; within a stage, share the parameter itself."
                )

    def layers_of(self, stage: int) -> range:
        end = list(accumulate(self.cut))[stage]
        return range(end - self.cut[stage], end)

    def stage_of(self, layer: int) -> int:
        return next(stage for stage, end in enumerate(accumulate(self.cut)) if layer < end)

    def built(self, layer: int) -> nn.Module:
        """Return a layer with its first weights, the same whatever the cut; tied ones are those of the first holder."""
        torch.manual_seed(seed_of(self.seed, -1, layer))
        module = self.layers[layer]()
        for group in self.tied:
            for name in group[1:]:
                at, _, path = name.partition(".")
                if int(at) == layer:
                    owner, _, its = group[0].partition(".")
                    with torch.no_grad():
                        module.get_parameter(path).copy_(self.built(int(owner)).get_parameter(its))
        return module

    def run(self, layers: Sequence[nn.Module], first: int, x: Tensor, micro_batch: int) -> Tensor:
        """Return forward pass of neighbouring layers, the first of them number `first`.

        Random numbers of a layer follow from the micro-batch alone, so neither a cut nor running it again changes them.
        """
        for number, layer in enumerate(layers, start=first):
            torch.manual_seed(seed_of(self.seed, micro_batch, number))
            x = layer(x)
        return x


def seed_of(seed: int, micro_batch: int, layer: int) -> int:
    """Return the seed of random numbers of a layer in a micro-batch (−1: of its first weights)."""
    mixed = ((seed * MULTIPLIER + micro_batch + 1) * MULTIPLIER + layer + 1) * MULTIPLIER % 2**64
    return mixed >> 1
