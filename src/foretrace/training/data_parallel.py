"""Several processes that train together: a share of the batches each, and what PyTorch puts around the model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from foretrace.errors import NotApplicableError
from foretrace.training.batches import Batch, Batches, Resident, rebuilt
from foretrace.training.training import Training, plain_step


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Every W-th batch of a loader that is no map-style DataLoader: worker r takes batches r, r + W, r + 2 W, ..."""

    source: Batches
    rank: int
    workers: int

    def __iter__(self) -> Iterator[Batch]:
        return islice(iter(self.source), self.rank, None, self.workers)

    @property
    def batch_size(self) -> int | None:
        """Samples per batch, where the loader says."""
        return getattr(self.source, "batch_size", None)


class Replicated(DistributedDataParallel):
    """As its base, and plain values of the model, which losses read, can be read from it.

    Calling a part of the model past `forward` would leave gradients unsynchronised, silently; so that is refused.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(super().__getattr__("module"), name)
        if callable(value):
            raise NotApplicableError(
                f"data-parallel: the loss calls model.{name}, past DistributedDataParallel; call the model itself."
            )
        return value


def need_group(name: str, workers: int) -> None:
    """Raise NotApplicableError, in the name of a technique, where so many processes have no process group."""
    if not distributed.is_available() or not distributed.is_initialized():
        raise NotApplicableError(
            f"{name}: there is no process group; start {workers} processes (torchrun) that call init_process_group, "
            "or use `foretrace rig verify`."
        )
    if distributed.get_world_size() != workers:
        raise NotApplicableError(f"{name}: {distributed.get_world_size()} processes run, and workers={workers}.")


def shared_loader(loader: Batches, rank: int, workers: int) -> Batches:
    """Return the batches of one worker: a map-style dataset is dealt out by DistributedSampler, all else batch by
    batch.

    A shuffled dataset is dealt out in one order for all epochs (seed 0, the same for all workers).
    """
    from torch.utils.data.distributed import DistributedSampler

    if isinstance(loader, Resident):
        return Resident.taken_from(shared_loader(loader.source, rank, workers), len(loader))
    plain = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if plain and type(loader.sampler) in (RandomSampler, SequentialSampler):  # type: ignore[attr-defined]
        dataset, shuffled = loader.dataset, isinstance(loader.sampler, RandomSampler)  # type: ignore[attr-defined]
        sampler: Any = DistributedSampler(dataset, workers, rank, shuffle=shuffled, drop_last=loader.drop_last)  # type: ignore[attr-defined]
        return rebuilt(loader, sampler=sampler, shuffle=None)
    return Shared(source=loader, rank=rank, workers=workers)


def sharing(training: Training, name: str) -> Training:
    """Return the training on this process's share of the batches. Raises NotApplicableError where a step is not the
    plain one.

    Every worker keeps the batch size of the training: all together take a batch that is so many times as large.
    """
    plain(training, name)
    loader = shared_loader(training.loader, distributed.get_rank(), distributed.get_world_size())
    return replace(training, loader=loader)


def plain(training: Training, name: str) -> None:
    """Raise NotApplicableError where a training has a step of its own, which calls parts of its model by themselves."""
    if training.run is not None and training.run is not synchronised_step:
        raise NotApplicableError(
            f"{name}: the training has a step of its own (run=), which calls parts of the model past the wrapper."
        )


def same_start(model: torch.nn.Module) -> None:
    """Give all workers the parameters and buffers of the first one."""
    for each in (*model.parameters(), *model.buffers()):
        distributed.broadcast(each.data, 0)


def in_replicas(training: Training, name: str, **options: Any) -> Training:
    """Return the training with its model in DistributedDataParallel; only the last micro-batch of a step
    communicates.
    """
    if not any(each.requires_grad for each in training.model.parameters()):
        raise NotApplicableError(f"{name}: the model has no parameter that is trained.")
    wrapped = Replicated(training.model, **options)
    return replace(training, model=wrapped, run=synchronised_step)


def replicas(training: Training, name: str) -> Any:
    """Return the DistributedDataParallel of a training. Raises NotApplicableError where there is none."""
    if not isinstance(training.model, DistributedDataParallel):
        raise NotApplicableError(f"{name}: apply data-parallel first; it changes what that one exchanges.")
    return training.model


def synchronised_step(training: Training, batch: Batch) -> Tensor:
    """Return the plain step, in which gradients of all micro-batches but the last stay on this worker (`no_sync`)."""
    left = iter(range(training.micro_batches - 1, -1, -1))

    def loss(model: Any, piece: Batch) -> Tensor:
        model.require_backward_grad_sync = next(left) == 0
        return training.loss(model, piece)

    return plain_step(replace(training, run=None, loss=loss), batch)


def unwrapped(training: Training, name: str) -> Training:
    """Return the training with the model itself in the place of its DistributedDataParallel, and the plain step."""
    return replace(training, model=replicas(training, name).module, run=None)


def averaged_every(optimizer: Any, every: int, group: Any = None) -> Any:
    """Return the optimizer, which also averages its parameters over all workers of a group every so many steps.

    None is the default group.
    """
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    averager = PeriodicModelAverager(period=every, warmup_steps=0, process_group=group)
    return PostLocalSGDOptimizer(optimizer, averager)


def sharded(training: Training, paths: list[str], name: str, *, reshard: bool) -> Training:
    """Return the training with these modules, and then the model, sharded by FSDP; optimizers get the shards.

    Raises NotApplicableError where an optimizer has a state already.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, world = training.model, distributed.get_world_size()
    if any(optimizer.state for optimizer in training.optimizers):
        raise NotApplicableError(f"{name}: the optimizer has a state already; shard the model before it is trained.")
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    mesh = init_device_mesh(torch.device(training.device).type, (world,))
    for path in paths:
        fully_shard(model.get_submodule(path), mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    shards = dict(model.named_parameters())
    for optimizer in training.optimizers:
        for group in optimizer.param_groups:
            group["params"] = [shards[names[id(each)]] for each in group["params"]]
    return training


def sums_by_levels(wrapped: Any, inside: int) -> None:
    """Let DistributedDataParallel average in two levels: groups of `inside` neighbouring ranks, then across them.

    Every bucket is reduce-scattered inside, all-reduced across and all-gathered inside by one thread, so that all
    ranks do the same in the same order.
    """
    world, rank = distributed.get_world_size(), distributed.get_rank()
    near = [distributed.new_group(list(range(i, i + inside))) for i in range(0, world, inside)][rank // inside]
    far = [distributed.new_group(list(range(i, world, inside))) for i in range(inside)][rank % inside]
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="two levels")

    def average(buffer: Tensor) -> Tensor:
        count = buffer.numel()
        padded = torch.nn.functional.pad(buffer, (0, -count % inside)).div_(world)
        share = padded.new_empty(padded.numel() // inside)
        distributed.reduce_scatter_tensor(share, padded, group=near)
        distributed.all_reduce(share, group=far)
        distributed.all_gather_into_tensor(padded, share, group=near)
        return padded[:count]

    def hook(bucket: Any) -> torch.futures.Future[Tensor]:
        result: torch.futures.Future[Tensor] = torch.futures.Future()

        def work(buffer: Tensor) -> None:
            try:
                result.set_result(average(buffer))
            except Exception as error:  # the reducer raises it where it waits
                result.set_exception(error)  # type: ignore[arg-type]  # declared for the result's type

        thread.submit(work, bucket.buffer())
        return result

    wrapped.register_comm_hook(None, lambda _, bucket: hook(bucket))  # it refuses annotations as text
