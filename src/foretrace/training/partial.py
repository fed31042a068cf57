"""Partial back-propagation for real: a step whose backward pass stops at a block, and gradients averaged by layer.

Worker i of K back-propagates the first ceil(i L / K) of L groups of blocks, counted from the output; everything before
runs without gradients and saves no activations. Which worker goes how deep changes with every step.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.errors import NotApplicableError
from foretrace.training.batches import Batch
from foretrace.training.training import Training, plain_step

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class BlockSequence:
    """Blocks of a model in the order in which a forward pass calls them."""

    blocks: tuple[str, ...]  # paths of modules
    cost_s: tuple[float, ...]  # forward time of each

    def groups(self, count: int) -> tuple[int, ...]:
        """Return the group of every block, 0 at the output, so that groups cost about the same. count: at most the
        blocks.
        """
        return tuple(grouped(np.array(self.cost_s[::-1]), count)[::-1].tolist())


def grouped(cost: Float64, groups: int) -> Int64:
    """Return the group of every part of a backward pass in its order, so that groups cost about the same; none is
    empty.
    """
    total, count = float(cost.sum()) or 1.0, len(cost)
    middle = (np.cumsum(cost) - cost / 2) / total
    found = np.minimum((groups * middle).astype(np.int64), groups - 1)
    for i in range(count):
        former = int(found[i - 1]) if i else 0
        found[i] = min(max(int(found[i]), former, groups - (count - i)), former + (i > 0))
    return found


def depth(rank: int, step: int, workers: int) -> int:
    """Return how deep a worker goes in a step: 1 to K; every worker goes every way once in K steps."""
    return (rank + step) % workers + 1


def computed(worker_depth: int, groups: int, workers: int) -> int:
    """Return groups that a worker of this depth back-propagates."""
    return ceil(worker_depth * groups / workers)


def contributors(group: int, groups: int, workers: int) -> int:
    """Return how many workers compute the gradients of a group: K at the output."""
    return sum(computed(i, groups, workers) > group for i in range(1, workers + 1))


def find_chain(training: Training, name: str) -> BlockSequence:
    """Return the blocks of a model, found in forward passes of a copy.

    Blocks are the children of the model; lists and sequences of modules, and modules that hold such a list, are taken
    apart. Raises NotApplicableError, in the name of a technique, where a block with parameters is called twice.
    """
    import torch

    model = copy.deepcopy(training.model)
    calls: list[str] = []
    spent: dict[str, float] = {}
    begun: dict[str, float] = {}
    paths = {id(module): path for path, module in model.named_modules()}

    def enter(module: nn.Module, _: Any) -> None:
        calls.append(paths[id(module)])
        begun[calls[-1]] = time.perf_counter()

    def leave(module: nn.Module, *_: Any) -> None:
        path = paths[id(module)]
        spent[path] = time.perf_counter() - begun[path]

    handles = [each.register_forward_pre_hook(enter) for each in model.modules()]
    handles += [each.register_forward_hook(leave) for each in model.modules()]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            batch = next(iter(training.batches()))
            trial = replace(training, model=model)
            trial.forward(batch)
            calls.clear()
            trial.forward(batch)
    finally:
        for handle in handles:
            handle.remove()
    first = {path: i for i, path in reversed(list(enumerate(calls)))}
    found = [path for path in _parts(model, "") if path in first]
    if len(found) == 1 and len(list(model.get_submodule(found[0]).children())) > 1:
        found = [path for path in _parts(model.get_submodule(found[0]), found[0] + ".") if path in first]
    found = sorted(found, key=first.__getitem__)
    for path in found:
        if calls.count(path) > 1 and next(model.get_submodule(path).parameters(), None) is not None:
            raise NotApplicableError(
                f"{name}: the block {path} is called {calls.count(path)} times in a forward pass, so the model is no "
                "chain of blocks."
            )
    found = [path for path in found if calls.count(path) == 1]
    return BlockSequence(blocks=tuple(found), cost_s=tuple(spent[path] for path in found))


def _parts(module: nn.Module, prefix: str) -> Iterator[str]:
    from torch import nn

    for name, child in module.named_children():
        holds = any(isinstance(each, nn.ModuleList) for each in child.children())
        if holds or isinstance(child, (nn.Sequential, nn.ModuleList)):
            yield from _parts(child, f"{prefix}{name}.")
        else:
            yield prefix + name


def owners(model: nn.Module, blocks: Sequence[str]) -> dict[str, int]:
    """Return per parameter the first block that uses it; what belongs to none counts to the first block."""
    place = {f"{path}.": i for i, path in enumerate(blocks)}
    found: dict[int, tuple[str, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        number = next((i for prefix, i in place.items() if name.startswith(prefix)), 0)
        known = found.get(id(parameter))
        if known is None or number < known[1]:
            found[id(parameter)] = (name if known is None else known[0], number)
    return dict(found.values())


class PartialStep:
    """One step of a worker, to be put in the place of the plain one (`Training.run`)."""

    def __init__(self, model: nn.Module, chain: BlockSequence, groups: int, workers: int, rank: int) -> None:
        self.blocks, self.count, self.workers, self.rank = chain.blocks, groups, workers, rank
        self.group_of_block = chain.groups(groups)
        self.group_of = {name: self.group_of_block[i] for name, i in owners(model, chain.blocks).items()}
        self.step = 0

    def __call__(self, training: Training, batch: Batch) -> Tensor:
        """Return forward, partial backward, averages, update; the loss of this worker."""
        mine = computed(depth(self.rank, self.step, self.workers), self.count, self.workers)
        around = (*training.around_forward, lambda: self._truncated(training.model, mine))
        loss = plain_step(replace(training, run=None, optimizers=(), around_forward=around), batch)
        self.average(training.model, mine)
        training.update(*training.optimizers)
        self.step += 1
        return loss

    def _truncated(self, model: nn.Module, mine: int) -> AbstractContextManager[None]:
        """Return a context for a forward pass, without gradients before the first block that is back-propagated."""
        if mine >= self.count:
            return nullcontext()
        first = next(i for i, group in enumerate(self.group_of_block) if group < mine)
        return _grad_from(model.get_submodule(self.blocks[first]))

    def average(self, model: nn.Module, mine: int) -> None:
        """Give every parameter the mean of the gradients of those workers that computed it."""
        import torch
        import torch.distributed as dist

        named = dict(model.named_parameters())
        for group in range(self.count):
            parameters = [
                named[name] for name, of in self.group_of.items() if of == group and named[name].requires_grad
            ]
            if not parameters or self.workers == 1:
                continue
            have = mine > group
            grads = (each.grad if have else None for each in parameters)
            flat = torch.cat([
                (torch.zeros_like(each) if grad is None else grad).reshape(-1)
                for each, grad in zip(parameters, grads, strict=True)
            ])  # fmt: skip
            many = contributors(group, self.count, self.workers)
            if many == 1:  # only the deepest worker has them
                deepest = (self.workers - 1 - self.step) % self.workers
                dist.broadcast(flat, deepest)
            else:
                dist.all_reduce(flat)
                flat.div_(many)
            for each, part in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
                each.grad = part.view_as(each).clone()


@contextmanager
def _grad_from(block: nn.Module) -> Iterator[None]:
    """Turn gradients off until this block is called."""
    import torch

    def enable(*_: Any) -> None:
        torch.set_grad_enabled(True)

    handle = block.register_forward_pre_hook(enable)
    torch.set_grad_enabled(False)
    try:
        yield
    finally:
        torch.set_grad_enabled(True)
        handle.remove()
