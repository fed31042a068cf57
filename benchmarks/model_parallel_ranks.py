"""What benchmarks/model_parallel.py asks of workers: to share a model, by tensors or as a pipeline, and be recorded."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from torch import Tensor, distributed, nn

from foretrace.cost.operators import bench
from foretrace.experiment.links.arms import RunningArm
from foretrace.experiment.messages import Worker
from foretrace.graph import store
from foretrace.techniques.arguments import parse
from foretrace.techniques.distributed.model_parallel_compression import PIPELINE, ModelParallelCompression
from foretrace.techniques.measuring import calibrated
from foretrace.training.batches import Resident
from foretrace.training.compression.boundaries import Receiver, Sender
from foretrace.training.recording import record_training
from foretrace.training.training import Training


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A model of encoder layers and its batch."""

    layers: int
    hidden: int
    samples: int
    words: int


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """An arm: a model that two workers share, with a technique's boundary between them."""

    name: str
    shape: Shape
    technique: str
    folder: str = ""  # for a file per rank, where it is to be recorded
    steps: int = 0


class Time(msgspec.Struct, frozen=True, kw_only=True):
    """Time what techniques want on a graph; the first worker saves it with the times."""

    graph: str
    techniques: tuple[str, ...]


class First(nn.Module):
    """The first stage: what it computes is sent, and the gradient that comes back starts its backward pass."""

    def __init__(self, layers: nn.Sequential, sender: Sender) -> None:
        super().__init__()
        self.layers, self.sender = layers, sender

    def forward(self, x: Tensor) -> Tensor:
        end: Tensor = self.sender(self.layers(x))
        return end


class Last(nn.Module):
    """The last stage: it receives what it computes on."""

    def __init__(self, layers: nn.Sequential, receiver: Receiver) -> None:
        super().__init__()
        self.layers, self.receiver = layers, receiver

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(self.receiver(x.shape))
        return out.square().mean()


class Whole(nn.Module):
    """All layers, of which workers have parts."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out.square().mean()


def shared(share: Share, rank: int) -> Training:
    """Return what a worker trains."""
    shape, technique = share.shape, parse(share.technique)
    assert isinstance(technique, ModelParallelCompression)
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(shape.hidden, 4, 4 * shape.hidden, dropout=0.0, batch_first=True)
        for _ in range(shape.layers)
    ]
    half = shape.layers // 2
    model: nn.Module = Whole(nn.Sequential(*layers))
    if technique.where == PIPELINE and rank == 0:
        model = First(nn.Sequential(*layers[:half]), Sender(technique.boundary, shape.hidden, 1))
    elif technique.where == PIPELINE:
        model = Last(nn.Sequential(*layers[half:]), Receiver(technique.boundary, shape.hidden, 0))
    training = Training(
        name=share.name,
        model=model,
        optimizers=(torch.optim.SGD(model.parameters(), lr=1e-3),),
        loader=Resident.taken_from([torch.randn(shape.samples, shape.words, shape.hidden)] * 2, 1),
        loss=lambda model, batch: model(batch),
    )
    return training if technique.where == PIPELINE else technique.apply(training)


class SharedArm(RunningArm):
    """A shared training under way on one worker."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self._steps = training.steps()


def record_share(given: Share, worker: Worker) -> str:
    """Record a shared training; the file."""
    training = shared(given, worker.rank)
    return str(
        record_training(
            training, given.folder, facts={"clock": "wall"}, wait=3, active=given.steps, skip_first=1, rehearse=False
        )
    )


def make_share(given: Share, worker: Worker) -> None:
    """Make an arm."""
    worker.kept[given.name] = SharedArm(shared(given, worker.rank))


def time_codings(given: Time, worker: Worker) -> int:
    """Time coding in all workers at once, as it will be done; how many operators were timed."""
    graph = store.load(Path(given.graph))
    distributed.barrier()
    count = 0
    for text in given.techniques:
        found = calibrated(graph, [parse(text)], bench.measure)
        graph, count = found.graph, count + len(found.seconds)
    if worker.rank == 0:
        store.save(graph, Path(given.graph))
    return count
