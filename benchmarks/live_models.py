"""Small training jobs for live before/after pairs on this machine's CPU.

None of them is of the kinds on which the CPU rules were found (residual network, transformer, LSTM, plain
perceptron): a depthwise-separable network and a recommender (both from `examples/`), a U-Net, a GRU tagger and a
graph network.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train_cnn
import train_recommender

Batch = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to run a job."""

    workers: int = 0
    fused: bool = False
    bf16: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, what it is fed and how far off it is. `dataset` is None where batches lie ready in memory."""

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    dataset: Callable[[], Dataset[Any]] | None = None
    batch_size: int = 1


class DownUp(nn.Module):
    """U-Net (Ronneberger et al. 2015): convolutions down, transposed convolutions up, skips between."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(depth + 1)]
        self.first = self.pair(3, sizes[0])
        self.down = nn.ModuleList(self.pair(a, b) for a, b in pairwise(sizes))
        turned = list(zip(sizes[::-1], sizes[-2::-1], strict=False))
        self.lift = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in turned)
        self.up = nn.ModuleList(self.pair(2 * b, b) for _, b in turned)
        self.head = nn.Conv2d(width, 4, 1)

    @staticmethod
    def pair(inside: int, outside: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inside, outside, 3, 1, 1),
            nn.GroupNorm(8, outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(nn.functional.max_pool2d(x, 2))
        for lift, up, skip in zip(self.lift, self.up, reversed(skips), strict=True):
            x = up(torch.cat([lift(x), skip], dim=1))
        y: Tensor = self.head(x)
        return y


class Tagger(nn.Module):
    """A label per word: embedding, two GRU layers in both directions, linear."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.gru = nn.GRU(width, width, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * width, 17)

    def forward(self, words: Tensor) -> Tensor:
        tags: Tensor = self.head(self.gru(self.embedding(words))[0])
        return tags


class GraphNetwork(nn.Module):
    """Message passing over a fixed graph: gather along edges, a perceptron per edge, add at the nodes."""

    def __init__(self, width: int, layers: int, nodes: int, edges: int) -> None:
        super().__init__()
        self.register_buffer("src", torch.randint(0, nodes, (edges,)))
        self.register_buffer("dst", torch.randint(0, nodes, (edges,)))
        self.inputs = nn.Linear(32, width)
        self.message = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.update = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        src, dst = self.get_buffer("src"), self.get_buffer("dst")
        x = self.inputs(x)
        for message, update, norm in zip(self.message, self.update, self.norm, strict=True):
            sent = nn.functional.silu(message(torch.cat([x[src], x[dst]], dim=1)))
            received = torch.zeros(x.shape, dtype=sent.dtype).index_add(0, dst, sent)
            x = norm(x + nn.functional.silu(update(torch.cat([x.to(received.dtype), received], dim=1))))
        y: Tensor = self.head(x)
        return y


class SlowDisk(Dataset[Batch]):
    """Pictures with a mask that arrive after `seconds` of waiting, as from a slow disk or a network."""

    def __init__(self, seconds: float, size: int) -> None:
        self.seconds, self.size = seconds, size

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Batch:
        time.sleep(self.seconds)
        picture = torch.rand(3, self.size, self.size, generator=torch.Generator().manual_seed(index))
        return picture, (picture[0] * 4).long()


def _classes(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _tags(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def _clicks(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(batch[0], batch[1]).float(), batch[2])


JOBS: dict[str, Job] = {
    "cnn": Job(
        model=lambda: train_cnn.Net(40, 8),
        batch=lambda: (torch.randn(24, 3, 64, 64), torch.randint(0, 8, (24,))),
        loss=_classes,
        dataset=lambda: train_cnn.Pictures(100_000, 64),
        batch_size=24,
    ),
    "recommender": Job(
        model=lambda: train_recommender.Recommender(16, 16, 6000, 32),
        batch=lambda: (torch.randn(256, 16), torch.randint(0, 6000, (256, 16)), torch.rand(256).round()),
        loss=_clicks,
    ),
    "unet": Job(
        model=lambda: DownUp(16, 3),
        batch=lambda: (torch.randn(4, 3, 64, 64), torch.randint(0, 4, (4, 64, 64))),
        loss=_classes,
        dataset=lambda: SlowDisk(0.006, 64),
        batch_size=4,
    ),
    "gru": Job(
        model=lambda: Tagger(8000, 128),
        batch=lambda: (torch.randint(0, 8000, (16, 32)), torch.randint(0, 17, (16, 32))),
        loss=_tags,
    ),
    "gnn": Job(
        model=lambda: GraphNetwork(160, 4, 1500, 6000),
        batch=lambda: (torch.randn(1500, 32), torch.randint(0, 8, (1500,))),
        loss=_classes,
    ),
}


class Training:
    """A job under one arm, with its own model and optimizer; `steps` walks through training steps."""

    def __init__(self, job: Job, arm: Arm) -> None:
        torch.manual_seed(0)
        self.job, self.arm = job, arm
        self.model = job.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=arm.fused, foreach=False)
        self.fixed = job.batch()

    def steps(self, *, loaded: bool) -> Generator[None]:
        """Train for ever, one step per `next`; `loaded` feeds from a fresh data loader instead of memory."""
        for batch in self._batches(loaded):
            self.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.arm.bf16):
                loss = self.job.loss(self.model, batch)
            loss.backward()
            self.optimizer.step()
            yield

    def _batches(self, loaded: bool) -> Generator[Batch]:
        if loaded:
            assert self.job.dataset is not None
            yield from DataLoader(self.job.dataset(), batch_size=self.job.batch_size, num_workers=self.arm.workers)
        while True:
            yield self.fixed
