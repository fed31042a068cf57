"""What a worker runs: a training with techniques applied to it for real, stepped in blocks that are timed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from foretrace.experiment.arms import next_loss
from foretrace.experiment.measure import RESIDENT_BATCHES
from foretrace.experiment.messages import Buckets, Setup, TimedSteps

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel

    from foretrace.training.training import Training


def training_of(setup: Setup) -> Training:
    """The training alone, nothing applied; the same on every worker.

    Raises ForetraceError for one that does not exist.
    """
    from foretrace.experiment.links import emulate
    from foretrace.zoo.registry import job

    if is_emulated(setup.work):
        return emulate.training(emulate.parse(setup.work), seed=setup.seed)
    training = job(setup.work, setup.size, seed=setup.seed)()
    return training if setup.loads else training.with_batches(RESIDENT_BATCHES)


def is_emulated(work: str) -> bool:
    """Whether a text names an emulation: it begins with a number of layers."""
    return work[:1].isdigit()


class RunningArm:
    """A training under way on one worker."""

    def __init__(self, setup: Setup) -> None:
        from foretrace.techniques.arguments import parse_all

        self.training = training_of(setup)
        for technique in parse_all(setup.techniques):
            self.training = technique.apply(self.training)
        self._steps: Iterator[Tensor] = self.training.steps()
        self._first: tuple[int, ...] = ()

    def block(self, discarded: int, steps: int, *, together: bool) -> TimedSteps:
        """Run steps of which the last `steps` are timed together, all workers beginning them at once if asked to."""
        import torch.distributed as dist

        for _ in range(discarded):
            next_loss(self._steps)
        if together:
            dist.barrier()
        began, began_cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss = next_loss(self._steps)
        wall, cpu = time.perf_counter() - began, time.process_time() - began_cpu
        last = float(loss)
        return TimedSteps(wall_s=wall / steps, cpu_s=cpu / steps, loss=last if math.isfinite(last) else None)

    def buckets(self) -> Buckets:
        """What PyTorch's data parallelism says of its buckets; empty lists where the arm is not made of it."""
        import torch.distributed as dist

        model = self._parallel()
        if model is None:
            return Buckets(first=(), rebuilt=(), world=dist.get_world_size())
        said: dict[str, Any] = model._get_ddp_logging_data()
        return Buckets(
            first=_sizes(said.get("bucket_sizes", "")),
            rebuilt=_sizes(said.get("rebuilt_bucket_sizes", "")),
            world=int(said["world_size"]),
        )

    def _parallel(self) -> DistributedDataParallel | None:
        from torch.nn.parallel import DistributedDataParallel

        found = (each for each in self.training.model.modules() if isinstance(each, DistributedDataParallel))
        return next(found, None)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.replace(",", " ").split())
