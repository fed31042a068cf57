"""A method of gradient compression with its parameters. Needs no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

WARM_UP = (0.25, 0.0625, 0.015625, 0.004)  # shares sent in the four parts of DGC's warm-up (its section 3.3)


@dataclass(frozen=True, kw_only=True)
class CompressionSettings:
    """A method with its parameters."""

    method: str  # fp16, bf16, powersgd, topk, randomk, sign, dgc
    rank: int = 4  # powersgd
    min_rate: float = 2.0  # powersgd: tensors that shrink by no more are sent as they are
    start: int = 2  # powersgd: steps before it sets in
    share: float = 0.01  # topk, randomk, dgc
    momentum: float = 0.9  # dgc
    clip: float = 0.0  # dgc: longest gradient of all workers together; 0 is any
    warm_steps: int = 0  # dgc


def kept(elements: int, share: float) -> int:
    """Return how many of so many elements a share is: at least one, at most all."""
    return min(max(ceil(elements * share), 1), elements)


def share_at(settings: CompressionSettings, step: int) -> float:
    """Return share of the elements that DGC sends in a step: more of them while it warms up."""
    if step >= settings.warm_steps:
        return settings.share
    return max(WARM_UP[len(WARM_UP) * step // settings.warm_steps], settings.share)


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """How activations are compressed between workers that share a model."""

    method: str  # none, autoencoder, topk, randomk, quantise
    share: float = 0.1  # autoencoder: code relative to the hidden size; topk, randomk: elements sent
    bits: int = 8  # quantise
