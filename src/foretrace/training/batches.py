"""Batches: what a loader yields, batches that lie ready in memory, and how either is changed.

A batch is a tensor, or tuples, lists and dicts of tensors and plain values. The first dimension of every tensor counts
the samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretrace.errors import ForetraceError, NotApplicableError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

Batch = Any
Batches = Iterable[Batch]

_SETTINGS = (
    "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "generator",
    "persistent_workers",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Batches that lie ready in memory and are given again and again."""

    made: tuple[Batch, ...]
    batch_size: int
    source: Batches  # where they came from, for other batch sizes

    @classmethod
    def taken_from(cls, loader: Batches, count: int) -> Resident:
        """Return the first `count` batches of a loader (all, if it has fewer). Raises ForetraceError if it has none."""
        source = loader.source if isinstance(loader, Resident) else loader
        made = []
        for batch in source:
            made.append(batch)
            if len(made) == count:
                break
        if not made:
            raise ForetraceError("the loader gives no batch; give it at least one batch of samples.")
        return cls(made=tuple(made), batch_size=size(made[0]), source=source)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.made)

    def __len__(self) -> int:
        return len(self.made)


def resized(loader: Batches, batch_size: int) -> Batches:
    """Return the same samples in batches of another size. Raises NotApplicableError where a loader cannot be
    rebuilt.
    """
    if isinstance(loader, Resident):
        return Resident.taken_from(resized(loader.source, batch_size), len(loader))
    return rebuilt(loader, batch_size=batch_size)


def rebuilt(loader: Batches, **changes: Any) -> DataLoader[Any]:
    """Return a DataLoader like this one with other settings (`batch_size`, `num_workers`, `pin_memory`, ...).

    Raises NotApplicableError where it is no DataLoader, or one with a batch sampler of its own.
    """
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

    if isinstance(loader, Resident):
        return rebuilt(loader.source, **changes)
    if not isinstance(loader, DataLoader):
        raise NotApplicableError(
            f"the batches come from a {type(loader).__name__}, which cannot be rebuilt with other settings; "
            "give the training a torch DataLoader."
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise NotApplicableError("the DataLoader has a batch sampler of its own; give it a batch_size instead.")
    settings = {name: getattr(loader, name) for name in _SETTINGS} | {
        "shuffle": isinstance(loader.sampler, RandomSampler)
    }
    if not isinstance(loader.sampler, (RandomSampler, SequentialSampler)):
        settings |= {"sampler": loader.sampler, "shuffle": None}  # an order of its own
    settings |= changes
    if settings["num_workers"]:
        settings.setdefault("prefetch_factor", loader.prefetch_factor or 2)
    else:
        settings["persistent_workers"] = False
        settings.pop("prefetch_factor", None)
    return DataLoader(loader.dataset, **settings)


def size(batch: Batch) -> int:
    """Return samples of a batch: the first dimension of its first tensor; 0 if it has none."""
    for tensor in _tensors(batch):
        if tensor.ndim:
            return int(tensor.shape[0])
    return 0


def move(batch: Batch, device: str, *, non_blocking: bool = False) -> Batch:
    """Return the batch with every tensor on `device`."""
    return mapped(batch, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def mapped(batch: Batch, change: Any) -> Batch:
    """Return the batch with `change(tensor)` in the place of every tensor."""
    import torch

    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return type(batch)({key: mapped(value, change) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*(mapped(value, change) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(mapped(value, change) for value in batch)
    return batch


def parts(batch: Batch, count: int) -> list[Batch]:
    """Return the batch cut into `count` parts of equal size along the first dimension of every tensor.

    Raises NotApplicableError where its samples cannot be shared out equally.
    """
    samples = size(batch)
    if samples == 0 or samples % count:
        raise NotApplicableError(f"a batch of {samples} samples cannot be cut into {count} equal parts.")
    each = samples // count

    def cut(tensor: Any, index: int) -> Any:
        if tensor.ndim == 0:
            return tensor
        if tensor.shape[0] != samples:
            raise NotApplicableError(
                f"a tensor of the batch has {tensor.shape[0]} rows and the batch {samples} samples; "
                "only batches whose tensors all begin with the batch dimension can be cut."
            )
        return tensor[index * each : (index + 1) * each]

    return [mapped(batch, lambda tensor, i=i: cut(tensor, i)) for i in range(count)]


def _tensors(batch: Batch) -> Iterator[Any]:
    import torch

    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from _tensors(value)
