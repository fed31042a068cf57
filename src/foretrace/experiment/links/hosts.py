"""What workers take beside their collectives, measured where they will train: computing while a message is under way,
PyTorch's data parallelism around a step, and how far apart they end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import msgspec
import numpy as np

from foretrace.arrays import Float64
from foretrace.cost.operators.bench import no_collection
from foretrace.experiment.messages import Setup, Worker
from foretrace.experiment.statistics import trimmed_mean

Range = tuple[float, float, float]  # value, low and high

_MATRIX = 256  # rows of a product that is computed beside messages: it fits in a core's cache
_BRIEF = 64  # rows of one that is over within a few microseconds
_STREAM = 1 << 19  # elements of a sum beside them that does not
_MESSAGE_S, _MOST_BYTES = 0.06, 4 << 20  # of a message: how long it takes the link, and how large it is at most
_SMALL, _LARGE = 1 << 12, 1 << 20  # elements of a layer
_FEW, _MANY = 10, 80  # layers
_WARM = 3  # first steps
_BLOCK = 5  # steps with a pause, or without one, behind one that does not count
_TRIMMED = 0.2  # of what was seen, at either end: one interruption is not what workers differ by


class TimeHosts(msgspec.Struct, frozen=True, kw_only=True):
    """Time what workers take beside collectives, on a link of this rate."""

    bytes_per_s: float
    turns: int = 16


class StepTogether(msgspec.Struct, frozen=True, kw_only=True):
    """Make so many steps of a training by itself, and as many in which all workers wait for each other."""

    setup: Setup
    steps: int
    pause_s: float  # before the update, beyond the wait for the last worker: as long as messages will take


class SteppedTogether(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the steps of one worker."""

    free_s: tuple[float, ...]
    parts_s: tuple[tuple[float, ...], ...]  # of steps with waits: what was computed before each of them
    waits_s: tuple[float, ...]  # of these steps: in all waits, without pauses


def time_hosts(given: TimeHosts, worker: Worker) -> dict[str, Range]:
    """Return what they take by parameter of techniques, timed in a worker together with all others."""
    with no_collection():
        return _beside(given) | _around(worker, given.turns)


def of_all(workers: Sequence[dict[str, Range]]) -> dict[str, Range]:
    """Return the median of all workers, from the lowest end of any to the highest."""
    names = set[str].intersection(*(set(each) for each in workers))
    ends = {name: [each[name] for each in workers] for name in sorted(names)}
    return {
        name: (median(value), min(low), max(high))
        for name, (value, low, high) in ((name, zip(*each, strict=True)) for name, each in ends.items())
    }


def step_together(given: StepTogether, worker: Worker) -> SteppedTogether:
    """Return time steps, in a worker, while all others make them: blocks of steps that run freely, and of steps that
    wait.

    They wait where data parallelism does: before the update, and before the forward pass of a model with buffers, for
    what the first worker sends and computes on.
    """
    import torch
    import torch.distributed as dist

    from foretrace.experiment.links.arms import training_of

    training, since = training_of(given.setup), 0.0
    buffers, sent = any(True for _ in training.model.buffers()), torch.zeros(1)
    steps = training.steps()
    free: list[float] = []
    parts: list[list[float]] = []
    waits: list[float] = []

    def wait(meet: Callable[[], object], pause_s: float) -> None:
        nonlocal since
        arrived = time.perf_counter()
        parts[-1].append(arrived - since)
        meet()
        waits[-1] += time.perf_counter() - arrived
        time.sleep(pause_s)
        since = time.perf_counter()

    def waiting_step() -> None:
        parts.append([])
        waits.append(0.0)
        if buffers:
            wait(lambda: dist.broadcast(sent, 0), 0.0)
        next(steps)

    with no_collection():
        for _ in range(_WARM):
            next(steps)
        for _ in range(-(-given.steps // _BLOCK)):
            dist.barrier()
            for number in range(-1, _BLOCK):
                since = time.perf_counter()
                next(steps)
                if number >= 0:
                    free.append(time.perf_counter() - since)
            hook = training.optimizers[0].register_step_pre_hook(lambda *_: wait(dist.barrier, given.pause_s))
            waiting_step()
            del parts[-1], waits[-1]  # it has no wait behind it
            for _ in range(_BLOCK):
                waiting_step()
            hook.remove()
    return SteppedTogether(free_s=tuple(free), parts_s=tuple(map(tuple, parts)), waits_s=tuple(waits))


def together(workers: Sequence[SteppedTogether]) -> tuple[float, dict[str, Any]]:
    """Return mean seconds of a step by itself, and what `one_worker` reads of workers that wait: ms, low and high ends.

    What waiting takes where nobody is late, the shortest of all, is the time of the messages themselves.
    """
    free_s = np.array([each.free_s for each in workers]).mean(axis=0)
    waited_s = np.array([each.parts_s for each in workers]).sum(axis=2).mean(axis=0)
    waits_s = np.array([each.waits_s for each in workers])  # workers x steps
    blocks = [np.median(each.reshape(-1, _BLOCK), axis=1) for each in (free_s, waited_s)]
    facts = {
        "workers": len(workers), "steps": len(free_s),
        "late_ms": _trimmed(1e3 * (waits_s.mean(axis=0) - waits_s.min())),
        "resumed_ms": tuple(max(each, 0.0) for each in _trimmed(1e3 * (blocks[1] - blocks[0]))),
    }  # fmt: skip
    return trimmed_mean(free_s, _TRIMMED), facts


def _trimmed(values: Float64) -> Range:
    """Return the trimmed mean, and its 80 % interval from resampling."""
    value, random = trimmed_mean(values, _TRIMMED), np.random.default_rng(0)
    drawn = [trimmed_mean(random.choice(values, len(values)), _TRIMMED) for _ in range(200)]
    low, high = np.quantile(drawn, [0.1, 0.9]).tolist()
    return value, min(low, value), max(high, value)


def _beside(given: TimeHosts) -> dict[str, Range]:
    """Return how much slower computing, within caches and beyond them, and messages are at the same time.

    A message beside computing also waits until its thread gets the processor, however small it is.
    """
    import torch
    import torch.distributed as dist

    a, b, out = (torch.randn(_MATRIX, _MATRIX) for _ in range(3))
    c, d, total = (torch.randn(_STREAM) for _ in range(3))
    works = (lambda: torch.mm(a, b, out=out), lambda: torch.add(c, d, out=total))
    e, f, small = torch.randn(_BRIEF, _BRIEF), torch.randn(_BRIEF, _BRIEF), torch.zeros(_SMALL)
    message = torch.zeros(int(min(given.bytes_per_s * _MESSAGE_S, _MOST_BYTES)) // 4)

    def computed(work: Callable[[], object], over: Callable[[], bool]) -> tuple[float, float]:
        """Return products or sums per second until it is over, and the seconds."""
        began, count = time.perf_counter(), 0
        while not over():
            work()
            count += 1
        took_s = time.perf_counter() - began
        return max(count, 1) / took_s, took_s

    def delay_us() -> float:
        """Return how much later a small message ends beside small products, one of which is over at once."""
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(small)
        alone_s = time.perf_counter() - began
        dist.barrier()
        sent = dist.all_reduce(small, async_op=True)
        return 1e6 * (computed(lambda: torch.mm(e, f), sent.is_completed)[1] - alone_s)

    def begun() -> Any:
        dist.barrier()
        dist.all_reduce(message)  # a link saves up credit while it is idle: none is left in the middle of a step
        return dist.all_reduce(message, async_op=True)

    found: dict[str, list[float]] = {"company": [], "stretch": [], "delay_us": []}
    for turn in range(-1, given.turns):
        sent, began = begun(), time.perf_counter()
        sent.wait()
        alone_s, work = time.perf_counter() - began, works[turn % len(works)]
        end = time.perf_counter() + alone_s
        free, _ = computed(work, lambda end=end: time.perf_counter() > end)  # type: ignore[misc]
        beside, beside_s = computed(work, begun().is_completed)
        if turn >= 0:
            found["company"].append(free / beside)
            found["stretch"].append(beside_s / alone_s)
        found["delay_us"] += [delay_us() for _ in range(_FEW)]
    least = {"delay_us": 0.0}
    quartiles = {
        name: np.maximum(np.quantile(each, [0.5, 0.25, 0.75]), least.get(name, 1.0)).tolist()
        for name, each in found.items()
    }
    return {name: (middle, low, high) for name, (middle, low, high) in quartiles.items()}


def _around(worker: Worker, turns: int) -> dict[str, Range]:
    """Return what data parallelism takes of the host, by a group of this worker alone: per step, per gradient, and
    copying.
    """
    import torch.distributed as dist

    own = [dist.new_group([rank]) for rank in range(worker.workers)][worker.rank]
    added = [_wrapped(*each, own) for each in ((_FEW, _SMALL), (_MANY, _SMALL), (_FEW, _LARGE))]
    few, many, large = (median(each) for each in zip(*([one() for one in added] for _ in range(turns)), strict=True))
    gradient_s = (many - few) / (_MANY - _FEW)
    moved = 4 * 4 * (_LARGE - _SMALL) * _FEW  # into buckets and back, read and written, of float32
    values = {"gradient_us": 1e6 * gradient_s, "step_us": 1e6 * (few - _FEW * gradient_s)}
    values["copy_gb_s"] = moved / max(large - few, 1e-6) / 1e9
    return {name: (value, 0.7 * value, 1.4 * value) for name, value in values.items() if value > 0}


def _wrapped(layers: int, elements: int, group: Any) -> Callable[[], float]:
    """Return what data parallelism adds to a step of so many layers that compute next to nothing, in seconds."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.ParameterList(torch.zeros(elements) for _ in range(layers))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([each[0] * x for each in self.all]).sum()

    def step_s(model: nn.Module) -> float:
        began = time.perf_counter()
        model(one).backward()
        took_s = time.perf_counter() - began
        model.zero_grad()
        return took_s

    one, plain, wrapped = torch.ones(()), Layers(), DistributedDataParallel(Layers(), process_group=group)
    for model in (plain, wrapped, wrapped):
        step_s(model)
    return lambda: step_s(wrapped) - step_s(plain)
