"""Workers for an event loop: processes that are started, run and ended without holding up what else it does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from foretrace.errors import ForetraceError
from foretrace.serving.server.models import ModelSource
from foretrace.serving.server.split import ModelInstance
from foretrace.serving.server.worker import START_S, BatchRun, ModelWorker


class ProcessRunner:
    """A `dispatcher.BatchRunner` that is a process."""

    def __init__(self, worker: ModelWorker, limit_s: float) -> None:
        self.facts, self.instance, self.pid = worker.facts, worker.instance, worker.pid
        self.inputs, self.outputs, self.ended = worker.inputs, worker.outputs, worker.ended
        self._worker, self._limit_s = worker, limit_s

    async def run(self, samples: int) -> BatchRun:
        """Run samples; a process that takes longer than the limit is killed. Raises EOFError where it dies."""
        self._worker.submit(samples)
        try:
            await _readable(self._worker, self._limit_s)
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

    async def end(self) -> None:
        """End the process."""
        await asyncio.to_thread(self._worker.end)


def process_starter(
    source: ModelSource, *, limit_s: float
) -> Callable[[ModelInstance, Sequence[int]], Awaitable[ProcessRunner]]:
    """What starts processes with one model, one at a time, which then load at the same time.

    It raises ForetraceError with the reason where a process cannot load the model and run it.
    """
    one = asyncio.Lock()

    async def start(instance: ModelInstance, cores: Sequence[int]) -> ProcessRunner:
        async with one:
            worker = await asyncio.to_thread(ModelWorker, source, instance, cores)
        try:
            await _readable(worker, START_S)
            worker.receive_facts()
        except BaseException as error:
            await asyncio.to_thread(worker.end, 0.0)
            if isinstance(error, TimeoutError):
                raise ForetraceError(f"{source.name} was not loaded within {START_S:.0f} s; try again.") from None
            raise
        return ProcessRunner(worker, limit_s)

    return start


async def _readable(worker: ModelWorker, limit_s: float) -> None:
    """Wait until the process has answered or died. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(worker.fileno(), ready.set)
    try:
        await asyncio.wait_for(ready.wait(), limit_s)
    finally:
        loop.remove_reader(worker.fileno())
