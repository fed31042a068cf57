"""Recommendation: DLRM and neural collaborative filtering. Large embedding tables, little arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.training.rows.lookups import CRITEO
from foretrace.training.training import Training
from foretrace.zoo.data import integer, loader


@dataclass(frozen=True, kw_only=True)
class Click:
    """One advertisement shown: 13 numbers, a category of every table, and whether it was clicked."""

    rows: tuple[int, ...]

    def __call__(self, generator: torch.Generator) -> tuple[Tensor, Tensor, float]:
        numbers = torch.rand(13, generator=generator).mul_(20).log1p_()
        skewed = torch.rand(len(self.rows), generator=generator).pow_(4)  # few categories are most of the data
        categories = (skewed * torch.tensor(self.rows)).long()
        return numbers, categories, float(numbers[0] > 2.3)


@dataclass(frozen=True, kw_only=True)
class Rating:
    """A user, an item and whether they met; four of five pairs are drawn at random (negative samples)."""

    users: int
    items: int

    def __call__(self, generator: torch.Generator) -> tuple[int, int, float]:
        user = integer(self.users, generator)
        met = integer(5, generator) == 0
        return user, user % self.items if met else integer(self.items, generator), float(met)


class DLRM(nn.Module):
    """Bottom network for numbers, a table for each category, dot products of all pairs, top network."""

    def __init__(
        self, *, rows: tuple[int, ...], width: int, bottom: tuple[int, ...], top: tuple[int, ...], sparse: bool = False,
        tables: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        if tables:
            self.tables = nn.ModuleList(nn.EmbeddingBag(count, width, mode="sum", sparse=sparse) for count in rows)
        self.bottom = _layers(13, *bottom, width)
        vectors = len(rows) + 1
        self.top = _layers(width + vectors * (vectors - 1) // 2, *top)
        self.output = nn.Linear(top[-1], 1)
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Return log-odds (batch,) of a click."""
        dense = self.bottom(numbers)
        looked = [table(categories[:, i : i + 1]).to(dense.dtype) for i, table in enumerate(self.tables)]
        return self.joined([dense, *looked])

    def joined(self, looked: Sequence[Tensor]) -> Tensor:
        """Return log-odds (batch,) from the bottom network's vectors and those of every table, each (batch, width)."""
        vectors = torch.stack(list(looked), 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        assert isinstance(self.pairs, Tensor)  # a registered buffer
        interactions = products[:, self.pairs[0], self.pairs[1]]
        found: Tensor = self.output(self.top(torch.cat([looked[0], interactions], 1)))
        return found.squeeze(1)


class RowClicks:
    """DLRM's networks over rows that are kept elsewhere, for a `RowTrainer`; what was clicked follows from the seed."""

    def __init__(
        self, *, tables: int, width: int, samples: int, layers: tuple[int, ...] = (32,), seed: int = 0
    ) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.module = DLRM(rows=(1,) * tables, width=width, bottom=layers, top=layers, tables=False)
        self.samples, self.seed = samples, seed

    def loss(self, batch: int, trainer: int, trainers: int, looked: Tensor) -> Tensor:
        """Return binary cross entropy of one trainer's samples, over those of all."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + batch)
        numbers = torch.rand(self.samples, 13, generator=generator)
        first = int(np.linspace(0, self.samples, trainers + 1)[trainer])
        own = numbers[first : first + len(looked)]
        said = self.module.joined([self.module.bottom(own), *looked.unbind(1)])
        happened = (own[:, 0] > 0.8).float()
        return functional.binary_cross_entropy_with_logits(said, happened, reduction="sum") / self.samples


class NeuMF(nn.Module):
    """Matrix factorisation and a multilayer perceptron, each with embeddings of its own, joined in one output."""

    def __init__(self, *, users: int, items: int, factors: int, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.factor_user = nn.Embedding(users, factors)
        self.factor_item = nn.Embedding(items, factors)
        self.user = nn.Embedding(users, layers[0] // 2)
        self.item = nn.Embedding(items, layers[0] // 2)
        self.layers = _layers(*layers)
        self.output = nn.Linear(factors + layers[-1], 1)
        for table in (self.factor_user, self.factor_item, self.user, self.item):
            nn.init.normal_(table.weight, std=0.01)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return log-odds (batch,) that user and item meet."""
        product = self.factor_user(users) * self.factor_item(items)
        deep = self.layers(torch.cat([self.user(users), self.item(items)], 1))
        found: Tensor = self.output(torch.cat([product.to(deep.dtype), deep], 1))
        return found.squeeze(1)


def click_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return binary cross entropy of pairs (inputs, inputs, what happened)."""
    first, second, happened = batch
    return functional.binary_cross_entropy_with_logits(model(first, second).float(), happened.float())


def dlrm(size: str) -> Training:
    if size == "full":  # the authors' setting for Criteo Kaggle: 540 million parameters, sparse gradients
        model = DLRM(rows=CRITEO, width=16, bottom=(512, 256, 64), top=(512, 256), sparse=True)
        batches = loader(Click(rows=CRITEO), batch_size=128)
    else:  # dense gradients, which every optimizer takes
        rows = tuple(min(count, 80_000) for count in CRITEO)
        model = DLRM(rows=rows, width=16, bottom=(256, 64), top=(256, 128), sparse=False)
        batches = loader(Click(rows=rows), batch_size=128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Training(name="dlrm", model=model, optimizers=(optimizer,), loader=batches, loss=click_loss)


def ncf(size: str) -> Training:
    if size == "full":  # MovieLens-20M with the factors and layers of the MLPerf benchmark: 32 million parameters
        users, items, factors, layers, batch_size = 138_493, 26_744, 64, (256, 256, 128, 64), 2048
    else:
        users, items, factors, layers, batch_size = 80_000, 16_000, 16, (64, 64, 32, 16), 1024
    model = NeuMF(users=users, items=items, factors=factors, layers=layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = loader(Rating(users=users, items=items), batch_size=batch_size)
    return Training(name="ncf", model=model, optimizers=(optimizer,), loader=batches, loss=click_loss)


def _layers(*widths: int) -> nn.Sequential:
    """Return linear layers with ReLU after each."""
    made: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        made += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*made)
