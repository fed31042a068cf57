"""`measure`: operators timed one by one on this machine, with the threads and the allocator of this process.

The time of a call is that of the whole operator as PyTorch's dispatcher runs it, without gradients. What a call takes
in a training step depends on where its data lies, so it is timed twice: *far*, taking turns on so many sets of inputs
that none is left in a cache, and *near*, on one set again and again. The recorded time of the operator then tells where
between the two it stood (`Calibration.times_s`). Calls that belong together (an operator and its changed twin follow
each other) are timed in turns, so that a disturbance meets both. With one thread CPU time counts, which preemption by
other processes does not touch. The time kept is a low percentile of many repetitions; a step that sums hundreds of
calls takes each one's mean instead (`TYPICAL`).
"""

from __future__ import annotations

import gc
import importlib
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from typing import Any

import numpy as np

from foretrace.cost.operators.arguments import BoundCall, UnknownCallError, prepare
from foretrace.cost.operators.operator import Operator
from foretrace.deadline import Deadline
from foretrace.hardware.processor import instruction_sets, named
from foretrace.shipped import entry_points

Prepared = Callable[[], object]
Progress = Callable[[float], None]

_WORKING_SET_BYTES = 64 << 20  # of one operator timed far; more than the caches that a core shares with others
_MAX_SETS = 64
_TURN_S = 0.02  # what one turn over all sets may take: where computing bounds a call, it hardly matters where data lies
_NEAR_BYTES = 32 << 10  # smaller calls find their data near in any case
TARGET_S = 0.008  # of timed repetitions per operator and place of its data
_LEAST_TARGET_S = 0.002
_SAMPLE_S = 50e-6  # shorter calls are timed several at once
_MIN_SAMPLES, _MAX_SAMPLES = 4, 60
_PERCENTILE = 0.2
TYPICAL = None  # in place of a percentile: their mean, since the middle of a sum is the sum of means, not of middles
_ODD_TIMES = 2.0  # the middle: longer repetitions count as this, since something else ran amid them
_GROUP = 4
NO_TIME = "no time was left"  # why a call was not timed
# How oneDNN, and PyTorch for it, say that a processor cannot do what was asked for.
_LACKS = re.compile(
    r"could not create a (?:primitive descriptor|primitive) for (?:the |an? )?(.+?) primitive"
    r"|(\w+): (?:bf16|fp16) path needs the cpu support"
)


@dataclass(frozen=True, kw_only=True)
class OperatorTimings:
    """Seconds per call and why the others could not be timed, by `Operator.key`; times with near data by `near_key`."""

    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def measure(
    operators: Iterable[Operator],
    *,
    budget_s: float | None = None,
    progress: Progress | None = None,
    device: str = "cpu",
    target_s: float = TARGET_S,
    trust: Collection[str] = (),
    percentile: float | None = _PERCENTILE,
) -> OperatorTimings:
    """Time every operator once, in the order given; pairs to be compared should follow each other.

    Args:
        operators: calls; equal ones are timed once.
        budget_s: wall time; those that would not end within it are left out, each with that reason. None: no limit.
        progress: told the share done, 0 to 1.
        device: where the tensors live. On "cuda" calls are timed between synchronisations.
        target_s: time to spend on the repetitions of one operator in one place; less where the budget needs it.
        trust: packages whose functions an operator named "package.module:function" may call to be prepared, beside
            foretrace's own and those that installed techniques. A recording or a graph can name any function.
        percentile: of its repetitions that is kept, 0 to 1, or `TYPICAL`.

    Returns:
        The times, and the reasons of the calls without one.

    """
    import torch

    distinct = list(dict.fromkeys(operators))
    found = OperatorTimings()
    until, done = Deadline(float("inf") if budget_s is None else budget_s), 0
    if budget_s is not None:  # preparing and warming up takes about as long as the repetitions
        target_s = min(max(0.2 * budget_s / max(len(distinct), 1), _LEAST_TARGET_S), target_s)
    settle_allocator()
    with torch.no_grad():
        for group in _groups(distinct):
            if until.allows("group"):
                with until.part("group"):
                    _measure_group(group, found, device, target_s, trust, percentile)
            else:
                found.failed.update(dict.fromkeys((each.key for each in group), NO_TIME))
            done += len(group)
            if progress is not None:
                progress(done / len(distinct))
    return found


def settle_allocator() -> None:
    """Make glibc keep what it freed, as it does in a process that has trained for a while.

    Its thresholds follow the largest block freed so far (up to 32 MiB; not where the environment sets them). In a young
    process every large result would be mapped and faulted in again, a cost of the process, not of the operator.
    """
    import torch

    block = torch.empty((32 << 20) - (64 << 10), dtype=torch.uint8)
    del block


def _groups(operators: list[Operator]) -> Iterator[list[Operator]]:
    """Yield neighbours that are timed in turns: calls of the same operator, or at least two."""
    group: list[Operator] = []
    for each in operators:
        if len(group) >= _GROUP or (len(group) >= 2 and each.name != group[-1].name):
            yield group
            group = []
        group.append(each)
    if group:
        yield group


def _measure_group(
    group: list[Operator], found: OperatorTimings, device: str, target_s: float, trust: Collection[str],
    percentile: float | None,
) -> None:  # fmt: skip
    far: dict[str, _Runner] = {}
    near: dict[str, _Runner] = {}
    clock = clock_of(device)
    for each in group:
        try:
            calls = _input_sets(_maker(each, device, trust), clock)
            far[each.key] = _Runner(calls, clock, target_s)
            if len(calls) > 1:
                near[each.near_key] = _Runner(calls[:1], clock, target_s)
        except Exception as error:  # an operator may raise anything on inputs that do not suit it
            found.failed[each.key] = _reason(error)
    with no_collection():
        for runners in (far, near):
            waiting = list(runners.values())
            while waiting:
                for runner in waiting:
                    runner.sample()
                waiting = [runner for runner in waiting if not runner.finished]
    found.seconds.update({key: runner.time_s(percentile) for key, runner in (far | near).items()})


@contextmanager
def no_collection() -> Iterator[None]:
    """Turn the garbage collector off: it would run amid what is timed, and through all that is made."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class _Runner:
    """One operator with its sets of inputs, and the times of its repetitions."""

    def __init__(self, calls: list[Prepared], clock: Callable[[], float], target_s: float) -> None:
        self.target_s = target_s
        self.clock = clock
        self.calls = calls
        self.kept: list[object] = [None] * len(calls)
        self.next = 0
        self.samples: list[float] = []
        self.spent_s = 0.0
        for _ in range(len(calls)):
            self._run(1)
        once = self._run(1)
        self.repeat = max(1, min(ceil(_SAMPLE_S / max(once, 1e-7)), 200))
        self._run(self.repeat)

    def sample(self) -> None:
        """Time the call once, or several times if it is short."""
        taken = self._run(self.repeat)
        self.samples.append(taken / self.repeat)
        self.spent_s += taken

    @property
    def finished(self) -> bool:
        count = len(self.samples)
        return count >= _MAX_SAMPLES or (count >= _MIN_SAMPLES and self.spent_s >= self.target_s)

    def time_s(self, percentile: float | None) -> float:
        if percentile is None:
            return max(float(np.minimum(self.samples, _ODD_TIMES * np.median(self.samples)).mean()), 1e-9)
        return max(float(np.quantile(self.samples, percentile)), 1e-9)

    def _run(self, repeat: int) -> float:
        calls, kept, at, count = self.calls, self.kept, self.next, len(self.calls)
        begin = self.clock()
        for _ in range(repeat):
            kept[at] = calls[at]()
            at = at + 1 if at + 1 < count else 0
        end = self.clock()
        self.next = at
        return end - begin


def _input_sets(make: Callable[[], Prepared], clock: Callable[[], float]) -> list[Prepared]:
    """Return the call with as many sets of inputs as no cache holds, or as can be walked through in _TURN_S."""
    first = make()
    if not isinstance(first, BoundCall):
        return [first]
    nbytes = first.nbytes + _made_bytes(first, first())
    if nbytes < _NEAR_BYTES:
        return [first]
    begin = clock()
    first()
    once = max(clock() - begin, 1e-6)
    sets = min(ceil(_WORKING_SET_BYTES / nbytes), _MAX_SETS, max(ceil(_TURN_S / once), 2))
    return [first, *(first.cloned() for _ in range(sets - 1))]


def _made_bytes(call: BoundCall, made: Any) -> int:
    """Return bytes of new results: a set keeps its own, so that they are not written to the same memory again."""
    given = {each.data_ptr() for each in (*call.args, *call.kwargs.values()) if hasattr(each, "data_ptr")}
    new = [
        each
        for each in (made if isinstance(made, list | tuple) else [made])
        if hasattr(each, "data_ptr") and not each.is_sparse and each.data_ptr() not in given
    ]
    return sum(each.numel() * each.element_size() for each in new)


def _maker(operator: Operator, device: str, trust: Collection[str]) -> Callable[[], Prepared]:
    """Return how to prepare a call: by name of the operator, or "package.module:function"."""
    module, colon, function = operator.name.partition(":")
    if not colon or function.startswith(":"):
        return lambda: prepare(operator, device)
    package = module.partition(".")[0]
    if package not in {"foretrace", *trust, *_extending()}:
        raise UnknownCallError(
            f"it would call {operator.name}, which is not foretrace's own; `trust={package}` lets it"
        )
    factory: Callable[[Operator], Prepared] = getattr(importlib.import_module(module), function)
    return lambda: factory(operator)


@cache
def _extending() -> frozenset[str]:
    """Return packages that were installed as extensions with techniques of their own."""
    return frozenset(each.module.partition(".")[0] for each in entry_points(group="foretrace.techniques"))


def clock_of(device: str = "cpu") -> Callable[[], float]:
    """Return seconds: CPU time of this thread where it does all the work, else wall time."""
    import torch

    if device.startswith("cuda"):
        return _device_clock
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _device_clock() -> float:
    """Return wall time at which everything launched so far has run."""
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def _reason(error: Exception) -> str:
    if isinstance(error, RuntimeError) and (lacking := lacks(error)):
        return lacking
    text = str(error).strip().splitlines()
    if isinstance(error, UnknownCallError):
        return text[0] if text else type(error).__name__
    return f"{type(error).__name__}: {text[0][:200] if text else ''}"


def lacks(error: RuntimeError) -> str:
    """Return what oneDNN says that it has not for this processor, as one sentence; empty where it says
    something else.
    """
    if not (found := _LACKS.search(str(error))):
        return ""
    what = next(each for each in found.groups() if each)
    return f"oneDNN has no {what} here for the type asked for ({named(instruction_sets())})"
