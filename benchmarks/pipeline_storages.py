"""`Storages`: what activations of micro-batches in flight take, by the storages that autograd keeps.

The process's resident memory is no measure of it: it has the allocator's reserves and PyTorch's code in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from foretrace.training.pipeline.job import PipelineJob
from foretrace.training.pipeline.launch import train_here
from foretrace.training.pipeline.runtime import StageWorker, Trained
from foretrace.training.pipeline.schedule import Action, PipelineSchedule

Key = tuple[int, int]


class Storages:
    """Bytes that are held now and were held at most. Hooks take autograd's version checks away: for measuring alone."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._weights = {each.untyped_storage().data_ptr() for each in parameters}
        self._held: dict[Key, dict[int, int]] = {}
        self.peak = 0

    def hold(self, key: Key, tensor: Tensor) -> None:
        """Count a tensor for a stage's micro-batch until it is released; parameters are counted elsewhere."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._held.setdefault(key, {})[storage.data_ptr()] = storage.nbytes()
            self.peak = max(
                self.peak, sum({at: size for each in self._held.values() for at, size in each.items()}.values())
            )

    @contextmanager
    def counting(self, key: Key) -> Iterator[None]:
        """Count what a forward pass has autograd keep."""

        def pack(tensor: Tensor) -> Tensor:
            self.hold(key, tensor)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def release(self, key: Key) -> None:
        """Release a stage's micro-batch whose backward pass is over."""
        self._held.pop(key, None)


@dataclass(frozen=True, kw_only=True)
class Measured(Trained):
    """With the most bytes that activations took at a time."""

    peak_bytes: int


class MeasuredWorker(StageWorker):
    """A process that counts what its activations take."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.storages = Storages(each for stage in self.stages.values() for some in stage.parameters for each in some)

    def run(self) -> Trained:
        return Measured(**vars(super().run()), peak_bytes=self.storages.peak)

    def _run(self, s: int, i: int, x: Tensor) -> Tensor:
        with self.storages.counting((s, i)):
            out = super()._run(s, i, x)
        self.storages.hold((s, i), x)
        return out

    def _backward(self, action: Action) -> float:
        begin = super()._backward(action)
        self.storages.release((action.stage, action.number))
        return begin

    def _weight_half(self, action: Action) -> float:
        begin = super()._weight_half(action)
        self.storages.release((action.stage, action.number))
        return begin


def measured(job: PipelineJob, schedule: PipelineSchedule) -> tuple[Measured, ...]:
    """Train, and count."""
    return cast("tuple[Measured, ...]", train_here(job, schedule, timeout_s=60, worker=MeasuredWorker))
