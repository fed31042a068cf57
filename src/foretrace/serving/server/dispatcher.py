"""Who runs which samples: one queue, one coroutine per instance, and a change of the split that loses nothing.

A request is cut into parts. A part is in exactly one place: in the queue, or in the hands of the one coroutine that was
given it and will hand in answers, an error, or the part itself, back to the front of the queue. So a request has three
states (waiting, running, done, which is its future), and an instance has three (starting, idle, running).

- *Giving is reserving*: parts leave the queue and become a coroutine's own within one function that never waits.
- *Draining is returning*: an instance of a retired generation gets no more parts; once its coroutine has handed in the
  last, it returns. A generation is drained when all its coroutines have returned.
- *Active–passive*: the instances of a new split load and warm up beside the old ones; then, within one function, the
  new generation takes the place of the old one, which drains.
- A process that dies gives its parts back, to be run once more and each alone, so that the request that kills
  processes takes no other one with it; the same where a model raises.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat
from math import ceil
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.serving.server.metrics import ServerMetrics
from foretrace.serving.server.models import Array, ModelFacts
from foretrace.serving.server.protocol import RequestError
from foretrace.serving.server.split import CoreSplit, ModelInstance
from foretrace.serving.server.worker import BatchRun

_TRIES = 2
_BACKOFF_S = (0.0, 0.5, 2.0, 8.0, 30.0)  # before a process is started again that died, or could not start


class BatchRunner(Protocol):
    """A process with a model, as the dispatcher sees it."""

    facts: ModelFacts
    instance: ModelInstance  # its threads, and the most samples that it runs at once
    pid: int
    inputs: dict[str, Array]  # where samples go, (batch, ...) by name
    outputs: dict[str, Array]  # where answers come

    async def run(self, samples: int) -> BatchRun:
        """Run the first samples of `inputs`. Raises EOFError where the process dies."""

    def watch(self, died: Callable[[], None] | None) -> None:
        """Call `died` if the process dies while it is idle; None: no more."""

    def ended(self) -> str:
        """Return how it died, in words."""

    async def close(self) -> None:
        """End the process."""


Result = TypeVar("Result")
Start = Callable[[ModelInstance, Sequence[int]], Awaitable[BatchRunner]]


class Inference:
    """One request while it is served: `done` is set once every sample has its answer in `outputs`."""

    def __init__(self, inputs: Mapping[str, Array], facts: ModelFacts, samples: int) -> None:
        self.inputs, self.samples, self.unanswered = inputs, samples, samples
        self.outputs = {each.name: np.empty((samples, *each.sizes), each.dtype) for each in facts.outputs}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, status: int, reason: str, retry_s: int | None = None) -> None:
        """End without an answer, unless it has ended."""
        if not self.done.done():
            self.done.set_exception(RequestError(status, reason, retry_s))


class Part(NamedTuple):
    """Samples of a request. One that was tried before is run alone."""

    inference: Inference
    start: int
    stop: int
    tries: int = 0

    @property
    def samples(self) -> int:
        """How many there are."""
        return self.stop - self.start


@dataclass(eq=False)
class Generation:
    """The instances of one split."""

    split: CoreSplit
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    alive: set[BatchRunner] = field(default_factory=set)
    retired: asyncio.Event = field(default_factory=asyncio.Event)
    problem: str = ""  # why an instance could not be started again


class Dispatcher:
    """Samples in, answers out. Every method belongs to one event loop."""

    def __init__(self, start: Start, cores: Sequence[int], *, queue: int = 1024) -> None:
        self.start, self.cores, self.limit = start, tuple(cores), queue
        self.facts: ModelFacts | None = None  # of the model that all instances have
        self.active: Generation | None = None
        self.waiting = self.running = 0  # samples
        self.metrics = ServerMetrics(waiting=lambda: self.waiting, running=lambda: self.running,
                                     instances=lambda: len(self.active.alive) if self.active else 0)  # fmt: skip
        self._parts: deque[Part] = deque()
        self._idle: dict[asyncio.Future[list[Part]], tuple[Generation, int]] = {}
        self._changing, self._closed = asyncio.Lock(), asyncio.Event()
        self._matching = False
        self._sample_s = 0.0  # of one instance, the average of late

    # --- requests

    @property
    def ready(self) -> bool:
        """Whether a request would be run now."""
        return self.active is not None and bool(self.active.alive) and not self._closed.is_set()

    @property
    def changing(self) -> bool:
        """Whether another split is being started, or an old one drained."""
        return self._changing.locked()

    async def infer(self, inputs: Mapping[str, Array], deadline_s: float) -> dict[str, Array]:
        """Return answers to samples, by name of the output. Raises RequestError.

        Whoever cancels this gives up the samples: those that wait leave the queue.
        """
        samples = len(next(iter(inputs.values())))
        facts = self._admit(samples)
        inference = Inference(inputs, facts, samples)
        self._put(Part(inference, 0, samples))
        try:
            async with asyncio.timeout(deadline_s):
                await inference.done
        except TimeoutError:
            self._forget(inference)
            raise RequestError(504, f"no answer within {deadline_s:g} s, the deadline of the request.") from None
        except BaseException:
            self._forget(inference)
            raise
        return inference.outputs

    def _admit(self, samples: int) -> ModelFacts:
        if samples > self.limit:
            raise RequestError(413, f"a request must have at most {self.limit} samples, got {samples}; send several.")
        if self._closed.is_set() or self.facts is None or self.active is None:
            raise RequestError(503, "the server is shutting down, or not there yet.", 5)
        if self.active.problem and not self.active.alive:
            raise RequestError(503, f"no instance runs, and none can be started: {self.active.problem}", 5)
        if self.waiting + samples > self.limit:
            wait_s = self.waiting * self._sample_s / len(self.active.split)
            raise RequestError(
                429, f"{self.waiting} samples wait already, of {self.limit} that may.", max(ceil(wait_s), 1)
            )
        return self.facts

    def _put(self, part: Part, *, first: bool = False) -> None:
        (self._parts.appendleft if first else self._parts.append)(part)
        self.waiting += part.samples
        self._match_soon()

    def _forget(self, inference: Inference) -> None:
        """Take what waits of a request that is done out of the queue."""
        self._parts = deque(each for each in self._parts if each.inference is not inference)
        self.waiting = sum(each.samples for each in self._parts)

    # --- giving

    def _match_soon(self) -> None:
        """Match once for all that happens in this turn of the event loop: requests that come together run together."""
        if not self._matching:
            self._matching = True
            asyncio.get_running_loop().call_soon(self._match)

    def _match(self) -> None:
        """Give waiting parts to idle instances, to each its share by batch size."""
        self._matching = False
        idle = [each for each in self._idle if not each.done()]
        room = sum(self._idle[each][1] for each in idle)
        for future in idle:
            if not self._parts:
                return
            _, batch = self._idle.pop(future)
            share = min(ceil(self.waiting * batch / room), batch)
            room -= batch
            future.set_result(self._next_parts(share, batch))

    def _next_parts(self, share: int, batch: int) -> list[Part]:
        """Return the first parts in the queue with so many samples in all; a part that was tried before comes alone."""
        given: list[Part] = []
        while self._parts and share > 0:
            part = self._parts[0]
            if part.tries and given:
                break
            self._parts.popleft()
            size = min(part.samples, batch if part.tries else share)
            if size < part.samples:
                self._parts.appendleft(part._replace(start=part.start + size))
            given.append(part._replace(stop=part.start + size))
            self.waiting -= size
            self.running += size
            share = 0 if part.tries else share - size
        return given

    async def _take(self, generation: Generation, runner: BatchRunner) -> list[Part]:
        """Wait for parts; none where the generation is retired. Raises EOFError where the process dies meanwhile."""
        future: asyncio.Future[list[Part]] = asyncio.get_running_loop().create_future()
        if generation.retired.is_set():
            return []
        self._idle[future] = (generation, runner.instance.batch)
        runner.watch(lambda: None if future.done() else future.set_exception(EOFError()))
        self._match_soon()
        try:
            return await future
        finally:
            runner.watch(None)
            self._idle.pop(future, None)

    # --- running

    async def _run(self, runner: BatchRunner, parts: Sequence[Part]) -> None:
        """Run parts and hand in what became of them. Raises EOFError where the process dies."""
        places, samples = list[slice](), 0
        for part in parts:
            places.append(slice(samples, samples + part.samples))
            for name, array in part.inference.inputs.items():
                runner.inputs[name][places[-1]] = array[part.start : part.stop]
            samples += part.samples
        try:
            run = await runner.run(samples)
        except EOFError:
            self.metrics.deaths.inc()
            for part in reversed(parts):
                self._again(part, 503, f"the process that ran it {runner.ended()}, twice.")
            raise
        self.metrics.batch.observe(samples)
        self.metrics.batch_s.observe(run.seconds)
        self._sample_s += 0.1 * (run.seconds / samples - self._sample_s)
        for part, place in zip(parts, places, strict=True):
            wrong = next((why for number, why in run.wrong.items() if place.start <= number < place.stop), "")
            if run.error and len(parts) > 1:
                self._again(part, 422, run.error)
            elif run.error or wrong:
                part.inference.fail(422, f"the model cannot answer this: {run.error or wrong}.")
            elif not part.inference.done.done():
                for name, array in runner.outputs.items():
                    part.inference.outputs[name][part.start : part.stop] = array[place]
                part.inference.unanswered -= part.samples
                if not part.inference.unanswered:
                    part.inference.done.set_result(None)

    def _again(self, part: Part, status: int, reason: str) -> None:
        """Put a part back to the front, or end its request where it had its chance."""
        if part.tries + 1 >= _TRIES:
            part.inference.fail(status, reason, 1 if status == 503 else None)
        elif not part.inference.done.done():
            self.metrics.retries.inc()
            self._put(part._replace(tries=part.tries + 1), first=True)

    async def _serve(self, generation: Generation, first: BatchRunner, cores: Sequence[int]) -> None:
        """Serve as one instance: start a process, and another one whenever it dies, until the generation is retired."""
        runner: BatchRunner | None = first
        while runner is not None:
            generation.alive.add(runner)
            parts = list[Part]()
            try:
                while parts := await self._take(generation, runner):
                    try:
                        await self._run(runner, parts)
                    finally:
                        self.running -= sum(each.samples for each in parts)
            except EOFError:
                pass
            except Exception:  # a bug of ours costs these requests and the process, not the instance
                logging.getLogger(__name__).exception("a batch was lost")
                for part in parts:
                    part.inference.fail(500, "a bug of the server, which its log tells more of.")
            finally:
                generation.alive.discard(runner)
                await runner.close()
            if generation.retired.is_set():
                return
            runner = await _unless(generation.retired, self._replaced(generation, first.instance, cores))

    async def _replaced(self, generation: Generation, instance: ModelInstance, cores: Sequence[int]) -> BatchRunner:
        """Start a process until one runs, waiting longer each time."""
        for wait_s in chain(_BACKOFF_S, repeat(_BACKOFF_S[-1])):
            await asyncio.sleep(wait_s)
            try:
                runner = await self._start_one(instance, cores)
                break
            except ForetraceError as error:
                generation.problem = str(error)
        generation.problem = ""
        return runner

    # --- splits

    async def reconfigure(self, split: CoreSplit) -> None:
        """Serve with another split, from the moment on at which all its instances are warm.

        Returns when the last old instance has ended. Raises ForetraceError where the split needs more cores than there
        are, or an instance cannot start; nothing has changed then.
        """
        if split.threads > len(self.cores):
            raise ForetraceError(f"`split={split.text}` must use at most the {len(self.cores)} cores that there are.")
        async with self._changing:
            runners = await _unless(self._closed, self._start_all(split))
            if runners is None:
                return
            old, new = self.active, Generation(split=split, alive={each for each, _ in runners})
            new.tasks = [asyncio.create_task(self._serve(new, *each)) for each in runners]
            self.active = new
            if old is not None:
                self.metrics.reconfigurations.inc()
                await self._retire(old)

    async def close(self, patience_s: float) -> None:
        """Take no more requests, answer those that are here within `patience_s`, and end all processes."""
        self._closed.set()
        end = asyncio.get_running_loop().time() + patience_s
        while (self.waiting or self.running) and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.01)
        async with self._changing:
            if self.active is not None:
                await self._retire(self.active)
        for part in self._parts:
            part.inference.fail(503, "the server was shut down.", 5)

    async def _retire(self, generation: Generation) -> None:
        generation.retired.set()
        for future, (owner, _) in self._idle.items():
            if owner is generation and not future.done():
                future.set_result([])
        await asyncio.gather(*generation.tasks)

    async def _start_all(self, split: CoreSplit) -> list[tuple[BatchRunner, Sequence[int]]]:
        """Return an instance after the other on consecutive cores, all at once; all or none."""
        ends = list(accumulate(each.threads for each in split.instances))
        cores = [self.cores[end - each.threads : end] for each, end in zip(split.instances, ends, strict=True)]
        starting = [asyncio.create_task(self._start_one(*each)) for each in zip(split.instances, cores, strict=True)]
        try:
            return list(zip(await asyncio.gather(*starting), cores, strict=True))
        except BaseException:
            for task in starting:
                task.cancel()
            for found in await asyncio.gather(*starting, return_exceptions=True):
                if not isinstance(found, BaseException):
                    await found.close()
            raise

    async def _start_one(self, instance: ModelInstance, cores: Sequence[int]) -> BatchRunner:
        """Return a process with the model that the others have. Raises ForetraceError."""
        runner = await self.start(instance, cores)
        self.facts = self.facts or runner.facts
        if runner.facts != self.facts:
            await runner.close()
            raise ForetraceError(
                f"{runner.facts.name} must be the same model whenever it is loaded, and has changed; seed it, "
                "or start the server again."
            )
        return runner


async def _unless(event: asyncio.Event, work: Awaitable[Result]) -> Result | None:
    """Return what `work` returns; it is cancelled, and None, where the event comes first."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in (working, waiting):
            each.cancel()
        await asyncio.wait({working})
    return None if working.cancelled() else working.result()
