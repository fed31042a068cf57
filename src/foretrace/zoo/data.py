"""Synthetic samples of the right shapes, each the same whatever the order, the worker or the batch size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Draw = Callable[[torch.Generator], Any]
_RESERVED = 4  # numbers of words


class Samples(Dataset[Any]):
    """`count` samples, each made by `draw` with a random generator of its own (the seed is torch's, and the index)."""

    def __init__(self, draw: Draw, count: int) -> None:
        self.draw = draw
        self.count = count
        self.seed = torch.initial_seed()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.draw(torch.Generator().manual_seed(self.seed * 1_000_003 + index))


def loader(draw: Draw, *, batch_size: int) -> DataLoader[Any]:
    """Return a DataLoader over synthetic samples, enough for 64 batches an epoch, in their order."""
    return DataLoader(Samples(draw, 64 * batch_size), batch_size=batch_size, drop_last=True)


def integer(high: int, generator: torch.Generator) -> int:
    """Return a whole number below `high`."""
    return int(torch.randint(high, (), generator=generator))


def sentence(length: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Return `length` word numbers (int64) with something to learn: words mostly follow from the word before.

    The first four numbers are left free for padding, begin, end and mask. Frequent words are more likely, as
    in a text.
    """
    words = vocabulary - _RESERVED
    drawn = (torch.rand(length, generator=generator).pow(3) * words).long()
    follows = torch.rand(length, generator=generator) < 0.7
    made = drawn.tolist()
    for i, follow in enumerate(follows.tolist()):
        if follow and i:
            made[i] = (made[i - 1] * 3 + 1) % words
    return torch.tensor(made) + _RESERVED
