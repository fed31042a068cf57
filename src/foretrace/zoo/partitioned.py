"""A small training whose generated samples are dealt out to workers: to try out how workers agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from foretrace.arrays import Float32, Int64
from foretrace.training.workers.partition import partition
from foretrace.training.workers.replica import Replica


@dataclass(frozen=True, kw_only=True)
class PartitionedJob:
    """A training: the model's start and each worker's samples are those of the seed. Others override both."""

    workers: int = 4
    partition: str = "iid"
    samples: int = 4_000
    held_out: int = 1_000
    batch: int = 32
    rate: float = 0.1
    noise: float = 2.0
    seed: int = 0

    def start(self) -> nn.Module:
        """Return a model with random weights."""
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def drawn(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return samples and labels: points (count, 64) around ten centres, and which (count)."""
        centres = torch.randn(10, 64, generator=torch.Generator().manual_seed(1))
        labels = torch.randint(10, (count,), generator=generator)
        return centres[labels] + self.noise * torch.randn(count, 64, generator=generator), labels

    def model(self) -> nn.Module:
        """Return the model at its start."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.start()

    def data(self, count: int, part: int) -> tuple[Tensor, Tensor]:
        """Return samples and labels of a part: 0 is trained on, 1 is held out."""
        return self.drawn(count, torch.Generator().manual_seed(2 * self.seed + part))

    def dealt(self) -> list[Int64]:
        """Return numbers of each worker's samples."""
        return partition(self.partition, self.data(self.samples, 0)[1].numpy(), self.workers, seed=self.seed)

    def replicas(self, only: Sequence[int] | None = None) -> list[Replica]:
        """Return every worker's copy, or only some. A worker without samples is a ForetraceError."""
        (samples, labels), dealt, model = self.data(self.samples, 0), self.dealt(), self.model()
        return [
            Replica(
                model, samples[dealt[worker]], labels[dealt[worker]], batch=self.batch, rate=self.rate,
                seed=1_000 * self.seed + worker,
            )
            for worker in (range(self.workers) if only is None else only)
        ]  # fmt: skip

    def judge(self, *, training: bool = False) -> Callable[[Float32, Float32], tuple[float, float]]:
        """Return what gives loss and accuracy of weights with buffers, on held-out or on trained samples."""
        samples, labels = self.data(self.samples, 0) if training else self.data(self.held_out, 1)
        many = min(self.held_out, len(samples))
        replica = Replica(self.model(), samples[:many], labels[:many], batch=1, rate=0.0, seed=0)

        def judged(flat: Float32, buffers: Float32) -> tuple[float, float]:
            state = np.concatenate([flat, buffers if len(buffers) else replica.buffers])
            return replica.judged(state, replica.samples, replica.labels)

        return judged
