"""Communication hooks of DistributedDataParallel: PyTorch's own for 16 bit and PowerSGD, ours for the other methods.

    register(ddp, Settings(method="topk", share=0.01))

A hook takes a bucket of gradients and returns a future of their average. What it does before it returns (encoding)
holds up the backward pass; what comes back from the others is decoded in a callback, on a thread of the back end.

Methods with a memory keep what they did not send and add it to the next gradient (error feedback: Stich et al.,
NeurIPS 2018; Karimireddy et al., ICML 2019). DistributedDataParallel rebuilds its buckets after the first step: a
memory of another size is then forgotten.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import sqrt
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from foretrace.training.compression.codecs import pack_signs, random_k, scattered, top_k, unpack_signs
from foretrace.training.compression.settings import CompressionSettings, kept, share_at


class GradBucket(Protocol):
    """What a hook needs of `torch.distributed.GradBucket`."""

    def buffer(self) -> Tensor: ...
    def gradients(self) -> list[Tensor]: ...
    def index(self) -> int: ...
    def is_last(self) -> bool: ...


# Python subclasses answer calls in their own way, which torch's annotations do not foresee.
_ProcessGroup: Any = dist.ProcessGroup
_c10d: Any = torch._C._distributed_c10d

Hook = Callable[[Any, Any], Future[Tensor]]


@dataclass(kw_only=True)
class HookState:
    """What a method of ours keeps between steps."""

    settings: CompressionSettings
    group: Any = None  # None is the default process group
    step: int = 0
    errors: dict[int, Tensor] = field(default_factory=dict)  # by bucket: what was not sent yet
    velocity: dict[int, Tensor] = field(default_factory=dict)  # by bucket: momentum of DGC

    @property
    def members(self) -> Any:
        """The process group."""
        return self.group if self.group is not None else dist.group.WORLD

    def of(self, table: dict[int, Tensor], bucket: GradBucket) -> Tensor:
        """Return the entry of a bucket, zeros where there is none of its size."""
        buffer = bucket.buffer()
        found = table.get(bucket.index())
        if found is None or found.shape != buffer.shape:
            found = table[bucket.index()] = torch.zeros_like(buffer)
        return found

    def next(self, bucket: GradBucket) -> None:
        """Count a step at its last bucket."""
        self.step += bucket.is_last()


def register(parallel: DistributedDataParallel, settings: CompressionSettings) -> None:
    """Let gradients of this module be exchanged by a method; once per module.

    PyTorch's bfloat16 hook is registered under another name: it is taken with NCCL only, and gloo can do it, too.
    """
    group = parallel.process_group
    state, hook = make_hook(settings, group)
    if settings.method == "powersgd" and dist.get_backend(group) == "gloo":
        hook = InTurn(hook, group)
    parallel.register_comm_hook(state, _Unnamed(hook))


class Registered:
    """Registers a hook on a module when the forward pass is entered for the first time: a context around it.

    Copies of a DistributedDataParallel have a reducer without hooks. A copy of this object registers its own.
    """

    def __init__(self, parallel: DistributedDataParallel, settings: CompressionSettings) -> None:
        self.parallel, self.settings, self.done = parallel, settings, False

    def __call__(self) -> AbstractContextManager[None]:
        """Enter a forward pass."""
        if not self.done:
            register(self.parallel, self.settings)
            self.done = True
        return nullcontext()

    def __deepcopy__(self, memo: dict[int, Any]) -> Registered:
        return Registered(copy.deepcopy(self.parallel, memo), self.settings)


def make_hook(settings: CompressionSettings, group: Any = None) -> tuple[Any, Hook]:
    """Return state and hook of a method."""
    if settings.method == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            group,
            matrix_approximation_rank=settings.rank,
            start_powerSGD_iter=settings.start,
            min_compression_rate=settings.min_rate,
        )
        return state, powerSGD_hook.powerSGD_hook
    plain = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    if settings.method in plain:
        return group, plain[settings.method]
    ours = {"topk": top_k_hook, "randomk": random_k_hook, "sign": sign_hook, "dgc": dgc_hook}
    if settings.method not in ours:
        raise ValueError(f"no method {settings.method}")
    return HookState(settings=settings, group=group), ours[settings.method]


def top_k_hook(memory: HookState, bucket: GradBucket) -> Future[Tensor]:
    """Return the largest elements of gradient and memory together; two all-gathers, values and indices."""
    flat = memory.of(memory.errors, bucket).add_(bucket.buffer())
    values, indices = top_k(flat, kept(flat.numel(), memory.settings.share))
    flat[indices] = 0
    memory.next(bucket)
    return _gathered(values, indices, flat.numel(), memory.members)


def random_k_hook(memory: HookState, bucket: GradBucket) -> Future[Tensor]:
    """Return the same random elements on every worker, of gradient and memory together; one all-reduce."""
    flat, members = memory.of(memory.errors, bucket).add_(bucket.buffer()), memory.members
    count = kept(flat.numel(), memory.settings.share)
    values, indices = random_k(flat, count, step=memory.step, bucket=bucket.index())
    flat[indices] = 0
    memory.next(bucket)

    def decode(future: Future[list[Tensor]]) -> Tensor:
        return scattered(future.value()[0].div_(members.size()), indices, flat.numel())

    sent: Future[Tensor] = dist.all_reduce(values, group=members, async_op=True).get_future().then(decode)
    return sent


def sign_hook(memory: HookState, bucket: GradBucket) -> Future[Tensor]:
    """Return signs, decided by majority (Bernstein et al., ICLR 2019), times the mean magnitude so that learning rates
    hold.

    One all-gather of a bit per element and the magnitude.
    """
    buffer, members = bucket.buffer(), memory.members
    magnitude = buffer.abs().mean().view(1).to(torch.float32)
    mine = torch.cat([pack_signs(buffer), magnitude.view(torch.uint8)])
    everyones = [torch.empty_like(mine) for _ in range(members.size())]
    memory.next(bucket)

    def decode(_: Future[Any]) -> Tensor:
        votes = torch.zeros(buffer.numel(), dtype=torch.int16, device=buffer.device)
        for each in everyones:
            votes += unpack_signs(each[:-4], buffer.numel())
        sizes = torch.cat([each[-4:].clone().view(torch.float32) for each in everyones])
        return votes.sign_().to(buffer.dtype).mul_(sizes.mean().to(buffer.dtype))

    sent: Future[Tensor] = dist.all_gather(everyones, mine, group=members, async_op=True).get_future().then(decode)
    return sent


def dgc_hook(memory: HookState, bucket: GradBucket) -> Future[Tensor]:
    """Return deep Gradient Compression (Lin et al., ICLR 2018): momentum and its sum on every worker, the largest are
    sent.

    The optimizer must have no momentum of its own. Gradients are clipped by bucket to clip / sqrt(workers).
    """
    settings, members, gradient = memory.settings, memory.members, bucket.buffer()
    if settings.clip:
        longest = settings.clip / sqrt(members.size())
        gradient.mul_((longest / (gradient.norm() + 1e-12)).clamp_(max=1.0))
    velocity = memory.of(memory.velocity, bucket).mul_(settings.momentum).add_(gradient)
    flat = memory.of(memory.errors, bucket).add_(velocity)
    values, indices = top_k(flat, kept(flat.numel(), share_at(settings, memory.step)))
    flat[indices], velocity[indices] = 0, 0
    memory.next(bucket)
    return _gathered(values, indices, flat.numel(), members)


def _gathered(values: Tensor, indices: Tensor, elements: int, members: Any) -> Future[Tensor]:
    """Return the average of everyone's few elements, as [elements]."""
    workers = members.size()
    all_values = [torch.empty_like(values) for _ in range(workers)]
    all_indices = [torch.empty_like(indices) for _ in range(workers)]
    both = [
        dist.all_gather(everyones, mine, group=members, async_op=True).get_future()
        for everyones, mine in ((all_values, values), (all_indices, indices))
    ]

    def decode(_: Future[Any]) -> Tensor:
        return scattered(torch.cat(all_values).div_(workers), torch.cat(all_indices), elements)

    return torch.futures.collect_all(both).then(decode)


class _Unnamed:
    """A hook without annotations and name, which DistributedDataParallel would look at."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.__qualname__ = self.__name__ = "compression"

    def __call__(self, state, bucket):  # type: ignore[no-untyped-def]  # on purpose
        return self.hook(state, bucket)


class InTurn:
    """Runs a hook that sends several messages one after the other, on one thread, bucket by bucket.

    PyTorch's PowerSGD hook sends from callbacks. Gloo runs callbacks on the two threads that also exchange messages:
    with two buckets in flight both wait for messages that no thread is left for, and workers may send in different
    orders. Here the thread of this object calls the hook, and each of its messages is waited for where it is sent.
    """

    def __init__(self, hook: Hook, group: Any) -> None:
        self.hook, self.group = hook, _Waiting(group)
        self._work: SimpleQueue[tuple[Any, Any, Future[Tensor]]] = SimpleQueue()
        threading.Thread(target=self._run, name="compression", daemon=True).start()

    def __call__(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        """Work as the hook does, with a future that this object's thread completes."""
        state.process_group = self.group
        future: Future[Tensor] = Future()
        self._work.put((state, bucket, future))
        return future

    def _run(self) -> None:
        while True:
            state, bucket, future = self._work.get()
            try:
                future.set_result(self.hook(state, bucket).wait())
            except Exception as error:  # DistributedDataParallel raises it where it waits for the bucket
                future.set_exception(error)  # type: ignore[arg-type]  # as its documentation says


class _Waiting(_ProcessGroup):  # type: ignore[misc]  # of type Any
    """A process group whose all-reduce returns once it is done."""

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        """Reduce as the group's own function does."""
        asked = (tensors,) if options is None else (tensors, options)
        self.group.allreduce(*asked).wait()
        return work(tensors)

    def getBackendName(self) -> str:  # torch's name
        return "waiting"


def work(result: Any, *, done: bool = True) -> Any:
    """Return work that is finished, with its result; or one that never will be."""
    future: Future[Any] = Future()
    if done:
        future.set_result(result)
    return _c10d._create_work_from_future(future)
