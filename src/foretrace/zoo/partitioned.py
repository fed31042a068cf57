"""Small trainings whose generated samples are dealt out to workers: to try out how workers agree.

`clusters` are points around ten centres; `glyphs` are the ten digits, shifted and under noise; `text` is what follows
three words of sentences in which words mostly follow from the word before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foretrace.arrays import Float32, Int64
from foretrace.errors import ForetraceError
from foretrace.names import question
from foretrace.training.workers.partition import partition
from foretrace.training.workers.replica import Replica
from foretrace.zoo.data import sentence

SIDE, WORDS, CONTEXT = 12, 64, 3
_DIGITS = (
    "01110 10001 10011 10101 11001 10001 01110", "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111", "11110 00001 00001 01110 00001 00001 11110",
    "00010 00110 01010 10010 11111 00010 00010", "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110", "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110", "01110 10001 10001 01111 00001 00010 01100",
)  # fmt: skip


def clusters(count: int, generator: torch.Generator, noise: float) -> tuple[Tensor, Tensor]:
    """Points (count, 64) around ten centres, and which (count)."""
    centres = torch.randn(10, 64, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(10, (count,), generator=generator)
    return centres[labels] + noise * torch.randn(count, 64, generator=generator), labels


def glyphs(count: int, generator: torch.Generator, noise: float) -> tuple[Tensor, Tensor]:
    """Images (count, 1, SIDE, SIDE) of digits somewhere in them, and which (count)."""
    drawn = torch.tensor([[[int(dot) for dot in row] for row in each.split()] for each in _DIGITS]).float()
    labels = torch.randint(10, (count,), generator=generator)
    down = torch.randint(SIDE - drawn.shape[1] + 1, (count,), generator=generator).tolist()
    right = torch.randint(SIDE - drawn.shape[2] + 1, (count,), generator=generator).tolist()
    images = noise * torch.randn(count, 1, SIDE, SIDE, generator=generator)
    for image, label, y, x in zip(images, labels.tolist(), down, right, strict=True):
        image[0, y : y + drawn.shape[1], x : x + drawn.shape[2]] += drawn[label]
    return images, labels


def text(count: int, generator: torch.Generator, noise: float) -> tuple[Tensor, Tensor]:
    """Words (count, CONTEXT) and the one that follows (count)."""
    words = sentence(count + CONTEXT, WORDS, generator)
    return words.unfold(0, CONTEXT, 1)[:count], words[CONTEXT:]


def _convolutions(norm: str) -> nn.Module:
    """Four convolutions, each with a norm: "batch" or "group" (2 groups)."""
    if norm not in ("batch", "group"):
        raise ForetraceError(f"norm must be batch or group, got {norm!r}; choose one.")
    layers: list[nn.Module] = []
    for before, after, stride in ((1, 8, 1), (8, 8, 2), (8, 16, 1), (16, 16, 2)):
        layers += [
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after) if norm == "batch" else nn.GroupNorm(2, after),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))


_KINDS = {"clusters": (clusters, 2.0), "glyphs": (glyphs, 0.45), "text": (text, 0.0)}


@dataclass(frozen=True, kw_only=True)
class PartitionedJob:
    """A training: the model's start and each worker's samples are those of the seed."""

    kind: str = "clusters"
    workers: int = 4
    partition: str = "iid"
    norm: str = "group"  # of glyphs' convolutions
    samples: int = 4_000
    held_out: int = 1_000
    batch: int = 32
    rate: float = 0.1
    noise: float | None = None  # by default the kind's own
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ForetraceError(f"there is no training {self.kind!r}; {question(self.kind, _KINDS)}")

    def model(self) -> nn.Module:
        """The model at its start."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            if self.kind == "clusters":
                return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
            if self.kind == "glyphs":
                return _convolutions(self.norm)
            return nn.Sequential(
                nn.Embedding(WORDS, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 64), nn.Tanh(), nn.Linear(64, WORDS)
            )

    def data(self, count: int, part: int) -> tuple[Tensor, Tensor]:
        """Samples and labels of a part: 0 is trained on, 1 is held out."""
        make, noise = _KINDS[self.kind]
        generator = torch.Generator().manual_seed(2 * self.seed + part)
        return make(count, generator, noise if self.noise is None else self.noise)

    def dealt(self) -> list[Int64]:
        """Numbers of each worker's samples."""
        return partition(self.partition, self.data(self.samples, 0)[1].numpy(), self.workers, seed=self.seed)

    def replicas(self, only: Sequence[int] | None = None) -> list[Replica]:
        """Every worker's copy, or only some. A worker without samples is a ForetraceError."""
        (samples, labels), dealt, model = self.data(self.samples, 0), self.dealt(), self.model()
        return [
            Replica(
                model, samples[dealt[worker]], labels[dealt[worker]], batch=self.batch, rate=self.rate,
                seed=1_000 * self.seed + worker,
            )
            for worker in (range(self.workers) if only is None else only)
        ]  # fmt: skip

    def judge(self, *, training: bool = False) -> Judge:
        """What judges a shared model, on samples that are held out or on some that are trained on."""
        samples, labels = self.data(self.samples, 0) if training else self.data(self.held_out, 1)
        many = min(self.held_out, len(samples))
        return Judge(Replica(self.model(), samples[:many], labels[:many], batch=1, rate=0.0, seed=0))


class Judge:
    """Loss and accuracy of weights with buffers."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica

    def loss(self, flat: Float32, buffers: Float32) -> float:
        """Mean loss."""
        return self._judged(flat, buffers)[0]

    def accuracy(self, flat: Float32, buffers: Float32) -> float:
        """Share of right answers."""
        return self._judged(flat, buffers)[1]

    def _judged(self, flat: Float32, buffers: Float32) -> tuple[float, float]:
        own = self.replica
        state = torch.cat([torch.from_numpy(flat), torch.from_numpy(buffers if len(buffers) else own.buffers)])
        return own.judged(state.numpy(), own.samples, own.labels)
