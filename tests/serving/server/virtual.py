"""An event loop whose clock jumps, and instances that take virtual time and die: the dispatcher's schedule is real."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.serving.server.models import Array, ModelFacts, TensorSpec
from foretrace.serving.server.split import ModelInstance
from foretrace.serving.server.worker import BatchRun, ModelWorker

Result = TypeVar("Result")
FACTS = ModelFacts(
    name="square", kind="module", inputs=(TensorSpec("x", "int64", ()),), outputs=(TensorSpec("y", "int64", ()),),
    fixed_batch=None, weight_bytes=8, fingerprint=1,
)  # fmt: skip
POISON, WRONG, DEADLY = -1, -2, -3  # samples that the model raises at, answers with NaN, dies of


class _Jumping(selectors.SelectSelector):
    """Where nothing is ready, the time of the next timer comes at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing will ever happen: a coroutine waits for nothing"
        self.now += max(timeout, 0.0)
        return super().select(0)


def play(main: Coroutine[Any, Any, Result]) -> Result:
    """Run to the end in virtual time; an exception that nobody takes is raised."""
    selector = _Jumping()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    lost: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: lost.append(context))
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        found = runner.run(main)
    assert not lost, lost
    return found


class VirtualRunner(ModelWorker):
    """Squares numbers, `seconds` per batch, in no process. Dies when told, and of DEADLY."""

    facts, pid = FACTS, 0

    def __init__(self, instance: ModelInstance, cores: Sequence[int], seconds: float) -> None:
        self.instance, self.cores, self.seconds = instance, tuple(cores), seconds
        self.inputs: dict[str, Array] = {"x": np.zeros(instance.batch, np.int64)}
        self.outputs: dict[str, Array] = {"y": np.zeros(instance.batch, np.int64)}
        self.dead, self.over, self.batches = asyncio.Event(), False, list[list[int]]()
        self._running = False
        self._died: Callable[[], None] | None = None

    def kill(self) -> None:
        self.dead.set()
        if self._died is not None:
            self._died()

    async def run(self, samples: int) -> BatchRun:
        assert not self._running and not self.over and 1 <= samples <= self.instance.batch
        taken = self.inputs["x"][:samples].copy()
        self.batches.append(taken.tolist())
        if DEADLY in taken:
            self.dead.set()
        self._running = True
        try:
            async with asyncio.timeout(self.seconds):
                await self.dead.wait()
            raise EOFError
        except TimeoutError:
            pass
        finally:
            self._running = False
        if POISON in taken:
            return BatchRun(seconds=self.seconds, error="ValueError: poison")
        self.outputs["y"][:samples] = taken**2
        wrong = {int(i): "output y is not a number (NaN)" for i in np.flatnonzero(taken == WRONG)}
        return BatchRun(seconds=self.seconds, wrong=wrong)

    def watch(self, died: Callable[[], None] | None) -> None:
        self._died = died
        if died is not None and self.dead.is_set():
            died()

    def ended(self) -> str:
        return "was ended by SIGKILL"

    async def close(self) -> None:
        assert not self._running, "ended while it runs"
        self.over = True
        await asyncio.sleep(0.1)


class Machine:
    """Starts virtual instances, and keeps all of them; `failing` makes the next starts fail."""

    def __init__(self, seconds: float = 0.01, start_s: float = 1.0) -> None:
        self.seconds, self.start_s, self.failing = seconds, start_s, 0
        self.all: list[VirtualRunner] = []

    async def __call__(self, instance: ModelInstance, cores: Sequence[int]) -> VirtualRunner:
        assert len(cores) == instance.threads
        await asyncio.sleep(self.start_s)
        if self.failing:
            self.failing -= 1
            raise ForetraceError("the model is gone.")
        self.all.append(VirtualRunner(instance, cores, self.seconds))
        return self.all[-1]

    @property
    def living(self) -> list[VirtualRunner]:
        return [each for each in self.all if not each.over and not each.dead.is_set()]
