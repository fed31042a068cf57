"""What workers take beside their collectives, measured where they will train: computing while a message is under way,
PyTorch's data parallelism around a step, how far apart they end, and a step behind a wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from foretrace.cost.operators.bench import no_collection
from foretrace.experiment.messages import Setup, Worker
from foretrace.experiment.statistics import trimmed_mean

if TYPE_CHECKING:
    from torch import nn

Range = tuple[float, float, float]  # value, low and high

_MATRIX = 256  # rows of the product that is computed beside messages: it fits in a core's cache
_MESSAGE_S = 0.06  # of the link, of one message
_MOST_BYTES = 4 << 20
_SMALL, _LARGE = 1 << 12, 1 << 20  # elements of a layer
_FEW, _MANY = 10, 80  # layers
_PAUSE_S = 0.1  # before an update: as long as messages last
_WARM = 3  # first steps


class TimeHosts(msgspec.Struct, frozen=True, kw_only=True):
    """Time what workers take beside collectives, on a link of this rate."""

    bytes_per_s: float
    turns: int = 16


class HostTimes(msgspec.Struct, frozen=True, kw_only=True):
    """By parameter of techniques: value, low and high."""

    found: dict[str, Range]


class StepTogether(msgspec.Struct, frozen=True, kw_only=True):
    """Make so many steps of a training by itself at the same time as the others, every second one behind a wait."""

    setup: Setup
    steps: int


class SteppedTogether(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of steps, and of steps whose update came behind a wait, without the wait."""

    plain_s: tuple[float, ...]
    waited_s: tuple[float, ...]


def time_hosts(given: TimeHosts, worker: Worker) -> HostTimes:
    """Time them, in a worker, together with all others."""
    with no_collection():
        return HostTimes(found=_beside(given) | _around(worker, given.turns))


def of_all(workers: Sequence[HostTimes]) -> dict[str, Range]:
    """The median of all workers, from the lowest end of any to the highest."""
    each = [found.found for found in workers]
    return {
        name: (median(e[name][0] for e in each), min(e[name][1] for e in each), max(e[name][2] for e in each))
        for name in each[0]
        if all(name in e for e in each)
    }


def step_together(given: StepTogether, worker: Worker) -> SteppedTogether:
    """Make steps, in a worker, that begin at the same time in all of them."""
    import torch.distributed as dist

    from foretrace.experiment.links.arms import training_of

    training = training_of(given.setup)
    steps, waits, waited_s = training.steps(), False, 0.0

    def wait(*_: object) -> None:
        nonlocal waited_s
        if waits and not waited_s:
            began = time.perf_counter()
            time.sleep(_PAUSE_S)
            waited_s = time.perf_counter() - began

    for optimizer in training.optimizers:
        optimizer.register_step_pre_hook(wait)
    for _ in range(_WARM):
        next(steps)
    found: tuple[list[float], list[float]] = [], []
    with no_collection():
        for _ in range(given.steps):
            # The update behind a wait and the passes behind it belong together: two steps of either sort.
            for waits in (False, True):
                waited_s = 0.0
                next(steps)
                dist.barrier()
                waited_s, began = 0.0, time.perf_counter()
                next(steps)
                found[waits].append(time.perf_counter() - began - waited_s)
    return SteppedTogether(plain_s=tuple(found[0]), waited_s=tuple(found[1]))


def together(workers: Sequence[SteppedTogether]) -> dict[str, Any]:
    """What these steps say of several workers, as `one_worker` reads it: milliseconds with low and high ends."""
    plain, waited = (1e3 * np.array([getattr(each, of) for each in workers]) for of in ("plain_s", "waited_s"))
    late = plain.max(axis=0) - plain.mean(axis=0)
    cold = (waited - plain).mean(axis=0)
    ends = [_mean(late), _mean(cold)]
    return {
        "workers": len(workers), "steps": plain.shape[1], "step_ms": trimmed_mean(plain.mean(axis=0), 0.2),
        "late_ms": ends[0], "cold_ms": tuple(max(each, 0.0) for each in ends[1]),
    }  # fmt: skip


def _mean(values: Any) -> Range:
    """The trimmed mean of a few differences, and the 80 % range of what others would have given."""
    random = np.random.default_rng(0)
    drawn = [trimmed_mean(random.choice(values, len(values)), 0.2) for _ in range(200)]
    value, (low, high) = trimmed_mean(values, 0.2), np.quantile(drawn, [0.1, 0.9]).tolist()
    return value, min(low, value), max(high, value)


def _beside(given: TimeHosts) -> dict[str, Range]:
    """How much slower computing and messages are while both go on."""
    import torch
    import torch.distributed as dist

    a = torch.randn(_MATRIX, _MATRIX)
    b, out = torch.randn(_MATRIX, _MATRIX), torch.empty(_MATRIX, _MATRIX)
    message = torch.zeros(int(min(given.bytes_per_s * _MESSAGE_S, _MOST_BYTES)) // 4)

    def rate(over: Callable[[], bool]) -> tuple[float, float]:
        """Products per second until it is over, and the seconds."""
        began, count = time.perf_counter(), 0
        while not over():
            torch.mm(a, b, out=out)
            count += 1
        took_s = time.perf_counter() - began
        return max(count, 1) / took_s, took_s

    def alone() -> float:
        dist.barrier()
        dist.all_reduce(message)  # a link saves up credit while it is idle: none is left in the middle of a step
        began = time.perf_counter()
        dist.all_reduce(message)
        return time.perf_counter() - began

    company, stretch = [], []
    for turn in range(-1, given.turns):
        message_s = alone()
        end = time.perf_counter() + message_s
        free, _ = rate(lambda end=end: time.perf_counter() > end)  # type: ignore[misc]
        dist.barrier()
        dist.all_reduce(message)
        work: Any = dist.all_reduce(message, async_op=True)
        beside, beside_s = rate(work.is_completed)
        work.wait()
        if turn >= 0:
            company.append(free / beside)
            stretch.append(beside_s / message_s)
    return {"company": _around_median(company), "stretch": _around_median(stretch)}


def _around_median(values: Sequence[float], least: float = 1.0) -> Range:
    """Median and quartiles of ratios, none below `least`."""
    low, middle, high = (max(each, least) for each in np.quantile(values, [0.25, 0.5, 0.75]).tolist())
    return middle, low, high


def _around(worker: Worker, turns: int) -> dict[str, Range]:
    """What data parallelism takes of the host, by a group of this worker alone: per step, per gradient, and copying."""
    import torch.distributed as dist

    groups = [dist.new_group([rank]) for rank in range(worker.workers)]
    own, few, many, large = groups[worker.rank], list[float](), list[float](), list[float]()
    with _wrapped(_FEW, _SMALL, own) as a, _wrapped(_MANY, _SMALL, own) as b, _wrapped(_FEW, _LARGE, own) as c:
        for _ in range(turns):
            for run, found in ((a, few), (b, many), (c, large)):
                found.append(run())
    gradient_s = (median(many) - median(few)) / (_MANY - _FEW)
    step_s = median(few) - _FEW * gradient_s
    moved = 4 * 4 * (_LARGE - _SMALL) * _FEW  # into buckets and back, read and written, of float32
    copied_s = max(median(large) - median(few), 1e-6)
    values = {"gradient_us": 1e6 * gradient_s, "step_us": 1e6 * step_s, "copy_gb_s": moved / copied_s / 1e9}
    return {name: (value, 0.7 * value, 1.4 * value) for name, value in values.items() if value > 0}


@contextmanager
def _wrapped(layers: int, elements: int, group: Any) -> Iterator[Callable[[], float]]:
    """What data parallelism adds to a step of so many layers that compute next to nothing."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.ParameterList(torch.zeros(elements) for _ in range(layers))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([each[0] * x for each in self.all]).sum()

    def step(model: nn.Module) -> float:
        began = time.perf_counter()
        model(one).backward()
        took_s = time.perf_counter() - began
        for each in model.parameters():
            each.grad = None
        return took_s

    one, plain = torch.ones(()), Layers()
    wrapped = DistributedDataParallel(Layers(), process_group=group)
    for model in (plain, wrapped, wrapped):
        step(model)
    yield lambda: step(wrapped) - step(plain)
