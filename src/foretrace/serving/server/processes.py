"""Workers for an event loop: processes that are started, run and ended without holding up what else it does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from foretrace.errors import ForetraceError
from foretrace.serving.server.models import ModelSource
from foretrace.serving.server.split import ModelInstance
from foretrace.serving.server.worker import START_S, BatchRun, ModelWorker


class ProcessRunner:
    """A `dispatcher.BatchRunner` that is a process."""

    def __init__(self, worker: ModelWorker, limit_s: float) -> None:
        self.facts, self.instance = worker.facts, worker.instance
        self.inputs, self.outputs = worker.inputs, worker.outputs
        self.pid = worker.pid
        self._worker, self._limit_s = worker, limit_s

    async def run(self, samples: int) -> BatchRun:
        """Run samples; a process that takes longer than the limit is killed. Raises EOFError where it dies."""
        self._worker.submit(samples)
        try:
            async with asyncio.timeout(self._limit_s):
                await _readable(self._worker)
        except TimeoutError:
            await asyncio.to_thread(self._worker.end, 0.0)
            raise EOFError from None
        return self._worker.receive()

    def watch(self, died: Callable[[], None] | None) -> None:
        """An idle process has nothing to say, so its pipe becomes readable when it dies."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._worker.fileno())
        if died is not None:
            loop.add_reader(self._worker.fileno(), died)

    def ended(self) -> str:
        """How it died, in words."""
        return self._worker.ended()

    async def end(self) -> None:
        """End the process."""
        await asyncio.to_thread(self._worker.end)


class ProcessStarter:
    """Starts processes with one model, one at a time, which then load at the same time."""

    def __init__(self, source: ModelSource, *, limit_s: float) -> None:
        self.source, self.limit_s = source, limit_s
        self._one = asyncio.Lock()

    async def __call__(self, instance: ModelInstance, cores: Sequence[int]) -> ProcessRunner:
        """A process that has loaded and run the model. Raises ForetraceError with the reason where it cannot."""
        async with self._one:
            worker = await asyncio.to_thread(ModelWorker, self.source, instance, cores)
        try:
            async with asyncio.timeout(START_S):
                await _readable(worker)
            worker.receive_facts()
        except TimeoutError:
            await asyncio.to_thread(worker.end, 0.0)
            raise ForetraceError(f"{self.source.name} was not loaded within {START_S:.0f} s; try again.") from None
        except BaseException:
            await asyncio.to_thread(worker.end, 0.0)
            raise
        return ProcessRunner(worker, self.limit_s)


async def _readable(worker: ModelWorker) -> None:
    """Wait until the process has answered or died."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(worker.fileno(), lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(worker.fileno())
