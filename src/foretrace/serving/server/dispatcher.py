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
from itertools import islice
from math import ceil
from statistics import mode
from typing import NamedTuple, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from foretrace.errors import ForetraceError
from foretrace.serving.server.models import Array, ModelFacts
from foretrace.serving.server.protocol import RequestError
from foretrace.serving.server.split import CoreSplit, ModelInstance
from foretrace.serving.server.worker import ModelWorker

SAMPLE_S = 0.005  # between readings of the queue
_KEPT, _CANDIDATES = 0.9, 10  # of the average of readings, at every one; readings whose mode counts
_RESTART_S = 5.0  # before another try to start a process that could not start

Result = TypeVar("Result")
Start = Callable[[ModelInstance, Sequence[int]], Awaitable[ModelWorker]]


class Inference:
    """One request while it is served: `done` is set once every sample has its answer in `outputs`."""

    def __init__(self, inputs: Mapping[str, Array], facts: ModelFacts, samples: int) -> None:
        self.inputs, self.unanswered = inputs, samples
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
    again: bool = False

    @property
    def samples(self) -> int:
        """How many there are."""
        return self.stop - self.start


@dataclass(eq=False)
class Generation:
    """The instances of one split."""

    split: CoreSplit
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    alive: set[ModelWorker] = field(default_factory=set)
    idle: dict[asyncio.Future[list[Part]], int] = field(default_factory=dict)  # who waits for parts, and its batch
    retired: asyncio.Event = field(default_factory=asyncio.Event)
    problem: str = ""  # why an instance could not be started again


class ServerMetrics:
    """What a server counts, for Prometheus; what it holds now is read from its dispatcher."""

    def __init__(self, of: Dispatcher) -> None:
        self.registry = kept = CollectorRegistry()
        self.requests = Counter("foretrace_requests", "Requests by status.", ["status"], registry=kept)
        self.request_s = Histogram("foretrace_request_seconds", "Time to answer a request.", registry=kept)
        self.batch = Histogram("foretrace_batch_samples", "Samples that an instance ran at once.", registry=kept,
                               buckets=[float(1 << i) for i in range(11)])  # fmt: skip
        self.batch_s = Histogram("foretrace_batch_seconds", "Time of the model for these.", registry=kept)
        self.deaths = Counter("foretrace_worker_deaths", "Processes that died at work.", registry=kept)
        self.retries = Counter("foretrace_retries", "Parts of requests that were run again.", registry=kept)
        self.reconfigurations = Counter("foretrace_reconfigurations", "Changes of the split.", registry=kept)
        samples = Gauge("foretrace_samples", "Samples in the server.", ["state"], registry=kept)
        samples.labels("waiting").set_function(lambda: of.waiting)
        samples.labels("running").set_function(lambda: of.running)
        instances = Gauge("foretrace_instances", "Processes that run the model.", registry=kept)
        instances.set_function(lambda: len(of.active.alive))


@dataclass
class BatchEstimator:
    """The batch size that arrivals call for, as Packrat estimates it (arXiv 2311.18174, section 4, and its code).

    Samples the queue every SAMPLE_S: x = 0.9 x + 0.1 q; the candidate is the largest power of two up to x, rounded. The
    queue holds what waits and what runs: without the second, a batch that is taken would look like a load that went
    away.
    """

    average: float = 0.0
    candidates: deque[int] = field(default_factory=lambda: deque(maxlen=_CANDIDATES))

    def sample(self, queued: int) -> None:
        """Take one reading of the queue, in samples."""
        self.average = _KEPT * self.average + (1 - _KEPT) * queued
        self.candidates.append(1 << max(round(self.average).bit_length() - 1, 0))

    @property
    def batch(self) -> int:
        """The mode of the last candidates, the oldest of several; 1 before the first reading."""
        return mode(self.candidates or [1])


class Dispatcher:
    """Samples in, answers out. Every method belongs to one event loop."""

    def __init__(self, start: Start, cores: Sequence[int], *, queue: int = 1024) -> None:
        self.start, self.cores, self.limit = start, tuple(cores), queue
        self.facts: ModelFacts | None = None  # of the model that all instances have
        self.active = Generation(CoreSplit.fat(1, 1))  # without instances, until the first split is there
        self.waiting = self.running = 0  # samples
        self.metrics = ServerMetrics(self)
        self._parts: deque[Part] = deque()
        self._changing, self._closed = asyncio.Lock(), asyncio.Event()
        self._matching = False
        self._sample_s = 0.0  # of one instance, the average of late

    # --- requests

    @property
    def ready(self) -> bool:
        """Whether a request would be run now."""
        return bool(self.active.alive) and not self._closed.is_set()

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
            raise RequestError(504, f"no answer within {deadline_s:g} s, the deadline of the request.") from None
        finally:
            if inference.unanswered:  # take what waits of it out of the queue
                self._parts = deque(each for each in self._parts if each.inference is not inference)
                self.waiting = sum(each.samples for each in self._parts)
        return inference.outputs

    def _admit(self, samples: int) -> ModelFacts:
        if samples > self.limit:
            raise RequestError(413, f"a request must have at most {self.limit} samples, got {samples}; send several.")
        if self._closed.is_set() or self.facts is None:
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

    # --- giving

    def _match_soon(self) -> None:
        """Match once for all that happens in this turn of the event loop: requests that come together run together."""
        if not self._matching:
            self._matching = True
            asyncio.get_running_loop().call_soon(self._match)

    def _match(self) -> None:
        """Give waiting parts to idle instances, to each its share by batch size."""
        self._matching = False
        idle = {future: batch for future, batch in self.active.idle.items() if not future.done()}
        room = sum(idle.values())
        for future, batch in idle.items():
            if not self._parts:
                return
            share = min(ceil(self.waiting * batch / room), batch)
            room -= batch
            future.set_result(self._next_parts(share, batch))

    def _next_parts(self, share: int, batch: int) -> list[Part]:
        """Return the first parts in the queue with so many samples in all; a part that was tried before comes alone."""
        given: list[Part] = []
        while self._parts and share > 0:
            part = self._parts[0]
            if part.again and given:
                break
            self._parts.popleft()
            size = min(part.samples, batch if part.again else share)
            if size < part.samples:
                self._parts.appendleft(part._replace(start=part.start + size))
            given.append(part._replace(stop=part.start + size))
            self.waiting -= size
            self.running += size
            share = 0 if part.again else share - size
        return given

    async def _take(self, generation: Generation, runner: ModelWorker) -> list[Part]:
        """Wait for parts; none where the generation is retired. Raises EOFError where the process dies meanwhile."""
        if generation.retired.is_set():
            return []
        future: asyncio.Future[list[Part]] = asyncio.get_running_loop().create_future()
        generation.idle[future] = runner.instance.batch
        runner.watch(lambda: None if future.done() else future.set_exception(EOFError()))
        self._match_soon()
        try:
            return await future
        finally:
            runner.watch(None)
            del generation.idle[future]

    # --- running

    async def _run(self, runner: ModelWorker, parts: Sequence[Part]) -> None:
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
        if part.again:
            part.inference.fail(status, reason, 1 if status == 503 else None)
        elif not part.inference.done.done():
            self.metrics.retries.inc()
            self._put(part._replace(again=True), first=True)

    async def _serve(self, generation: Generation, first: ModelWorker) -> None:
        """Serve as one instance: start a process, and another one whenever it dies, until the generation is retired."""
        runner: ModelWorker | None = first
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
            runner = await _unless(generation.retired, self._replaced(generation, first))

    async def _replaced(self, generation: Generation, dead: ModelWorker) -> ModelWorker:
        """Start a process in place of another one, again and again until it runs."""
        while True:
            try:
                runner = await self._start_one(dead.instance, dead.cores)
            except ForetraceError as error:
                generation.problem = str(error)
                await asyncio.sleep(_RESTART_S)
            else:
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
            old, new = self.active, Generation(split=split, alive={*runners})
            new.tasks = [asyncio.create_task(self._serve(new, each)) for each in runners]
            self.active = new
            self.metrics.reconfigurations.inc(bool(old.tasks))
            await self._retire(old)

    async def follow_load(self, splits: Mapping[int, CoreSplit], every_s: float) -> None:
        """Estimate the batch size, and every so many seconds change to the split that is best for it; without end.

        `splits` by batch size; the next larger one stands for a size that is missing. A split that cannot start is
        reported in the log and tried again.
        """
        estimator = BatchEstimator()
        while True:
            for _ in range(max(round(every_s / SAMPLE_S), 1)):
                estimator.sample(self.waiting + self.running)
                await asyncio.sleep(SAMPLE_S)
            best = splits[min((each for each in splits if each >= estimator.batch), default=max(splits))]
            if best != self.active.split and not self.changing:
                try:
                    await self.reconfigure(best)
                except ForetraceError as error:
                    logging.getLogger(__name__).warning("the split stays: %s", error)

    async def close(self, patience_s: float) -> None:
        """Take no more requests, answer those that are here within `patience_s`, and end all processes."""
        self._closed.set()
        end = asyncio.get_running_loop().time() + patience_s
        while (self.waiting or self.running) and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.01)
        async with self._changing:
            await self._retire(self.active)
        for part in self._parts:
            part.inference.fail(503, "the server was shut down.", 5)

    async def _retire(self, generation: Generation) -> None:
        generation.retired.set()
        for future in generation.idle:
            if not future.done():
                future.set_result([])
        await asyncio.shield(asyncio.gather(*generation.tasks))  # they end, even if nobody waits any more

    async def _start_all(self, split: CoreSplit) -> list[ModelWorker]:
        """Return an instance after the other on consecutive cores, all at once; all or none."""
        free = iter(self.cores)
        starting = [
            asyncio.create_task(self._start_one(each, tuple(islice(free, each.threads)))) for each in split.instances
        ]
        try:
            return await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            for found in await asyncio.gather(*starting, return_exceptions=True):
                if not isinstance(found, BaseException):
                    await found.close()
            raise

    async def _start_one(self, instance: ModelInstance, cores: Sequence[int]) -> ModelWorker:
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
