"""Two more small trainings whose samples are dealt out to workers: the ten digits, and words that follow words."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foretrace.errors import ForetraceError
from foretrace.zoo.data import sentence
from foretrace.zoo.partitioned import PartitionedJob

SIDE, WORDS, CONTEXT = 12, 64, 3
_DIGITS = (
    "01110 10001 10011 10101 11001 10001 01110", "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111", "11110 00001 00001 01110 00001 00001 11110",
    "00010 00110 01010 10010 11111 00010 00010", "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110", "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110", "01110 10001 10001 01111 00001 00010 01100",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Glyphs(PartitionedJob):
    """Images (N, 1, SIDE, SIDE) of digits somewhere in them, under noise; four convolutions with a norm each."""

    norm: str = "group"  # or batch
    noise: float = 0.45

    def start(self) -> nn.Module:
        if self.norm not in ("batch", "group"):
            raise ForetraceError(f"norm must be batch or group, got {self.norm!r}; choose one.")
        layers: list[nn.Module] = []
        for before, after, stride in ((1, 8, 1), (8, 8, 2), (8, 16, 1), (16, 16, 2)):
            layers += [
                nn.Conv2d(before, after, 3, stride, 1, bias=False),
                nn.BatchNorm2d(after) if self.norm == "batch" else nn.GroupNorm(2, after),
                nn.ReLU(),
            ]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))

    def drawn(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        dots = torch.tensor([[[int(dot) for dot in row] for row in each.split()] for each in _DIGITS]).float()
        labels = torch.randint(10, (count,), generator=generator)
        down = torch.randint(SIDE - dots.shape[1] + 1, (count,), generator=generator).tolist()
        right = torch.randint(SIDE - dots.shape[2] + 1, (count,), generator=generator).tolist()
        images = self.noise * torch.randn(count, 1, SIDE, SIDE, generator=generator)
        for image, label, y, x in zip(images, labels.tolist(), down, right, strict=True):
            image[0, y : y + dots.shape[1], x : x + dots.shape[2]] += dots[label]
        return images, labels


@dataclass(frozen=True, kw_only=True)
class Text(PartitionedJob):
    """Words (N, CONTEXT) of sentences in which words mostly follow from the word before, and the next one (N)."""

    def start(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(WORDS, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 64), nn.Tanh(), nn.Linear(64, WORDS)
        )

    def drawn(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        words = sentence(count + CONTEXT, WORDS, generator)
        return words.unfold(0, CONTEXT, 1)[:count], words[CONTEXT:]
