"""One instance of a model: a process on cores of its own that runs batches lying in shared memory.

    worker = ModelWorker(source, ModelInstance(threads=1, batch=8), cores=(0,))   # begins to load
    facts = worker.ready(timeout_s=60)
    worker.inputs["x"][:3] = samples
    worker.submit(3)
    run = worker.receive()              # BatchRun: seconds that the model took, and what is wrong with which sample
    answer = worker.outputs["y"][:3].copy()
    worker.end()

Processes come from a fork server that has PyTorch loaded, so a start costs the model alone; the standard library's
suffices here, as all instances have one environment, and it passes handles of memory. A process belongs to its
cores before it makes a thread, and knows its number of threads before its first operator. Only numbers and sentences
go over the pipe. The end of either process is the end of the pipe for the other one: a worker whose server is gone
leaves, a worker that died is an `EOFError` here. The memory has no name, so nothing is left behind.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from time import perf_counter

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.executor import how_ended
from foretrace.experiment.cores import THREAD_VARIABLES, go_first
from foretrace.serving.server.models import Array, LoadedModel, ModelFacts, ModelSource, import_torch, said
from foretrace.serving.server.split import ModelInstance

START_S = 120.0  # importing PyTorch and loading a model on a busy machine
_END_S = 2.0
_ALIGNED = 64  # bytes
_WARM_UP = 2  # calls with a full batch


@dataclass(frozen=True, kw_only=True)
class BatchRun:
    """A batch that was run: the model's time alone, and why samples, by number, have no answer."""

    seconds: float
    wrong: Mapping[int, str] = field(default_factory=dict)
    error: str = ""  # what the model raised: no sample has an answer then


class ModelWorker:
    """A process with one model. `submit` and `receive` alternate; in an event loop, `run` is both."""

    facts: ModelFacts
    inputs: dict[str, Array]  # (batch, ...) by name; once `ready`
    outputs: dict[str, Array]
    limit_s: float = inf  # for a batch in an event loop

    def __init__(
        self, source: ModelSource, instance: ModelInstance, cores: Sequence[int], *, first: bool = False,
        own: bool = False,
    ) -> None:  # fmt: skip
        """Start the process; it loads the model and runs it on a full batch. `cores` as the scheduler counts them.

        `first` is for measurements: ahead of what else the machine runs, where that is allowed. A process of its `own`
        begins with the settings of a Python that a user starts: PyTorch's threads spin for a while before they sleep.
        """
        context = get_context("forkserver")
        kind = get_context("spawn") if own else context
        self.instance, self.cores = instance, tuple(cores)
        self._pipe, far = kind.Pipe()
        arguments = (far, source, instance, self.cores, first, own)
        with nullcontext() if own else _passive_threads():
            if not own:
                context.set_forkserver_preload([*source.libraries, __name__])
            self._process = kind.Process(target=_run_instance, args=arguments, daemon=True)
            self._process.start()
        self.pid = self._process.pid or 0
        far.close()

    def ready(self, wait_s: float = START_S) -> ModelFacts:
        """Wait until it has loaded; then `inputs` and `outputs` are there.

        Raises ForetraceError with the reason where it cannot, and ends it.
        """
        try:
            if not self._pipe.poll(wait_s):
                raise ForetraceError(f"the model was not loaded within {START_S:.0f} s; is the machine very busy?")
            answer = self._pipe.recv()
            if isinstance(answer, str):
                raise ForetraceError(answer)
            self.facts = answer
            self.inputs, self.outputs = _shared(answer, self.instance.batch, recv_handle(self._pipe))
        except (EOFError, OSError):
            ended = self.ended()
            self.end(0.0)
            raise ForetraceError(f"the process that loads the model {ended}; has it too little memory?") from None
        except BaseException:
            self.end(0.0)
            raise
        return self.facts

    def submit(self, samples: int) -> None:
        """Run the first samples of `inputs`. Raises EOFError where the process is dead."""
        try:
            self._pipe.send(samples)
        except OSError:
            raise EOFError from None

    def receive(self) -> BatchRun:
        """Wait for the batch; its answers lie in `outputs`. Raises EOFError where the process died."""
        try:
            run: BatchRun = self._pipe.recv()
        except OSError:
            raise EOFError from None
        return run

    def ended(self) -> str:
        """Return how the process ended, in words for a sentence; it is waited for."""
        self._process.join(_END_S)
        return how_ended(self._process.exitcode)

    def end(self, patience_s: float = _END_S) -> None:
        """Let it leave once it is idle; by force after `patience_s`."""
        with suppress(OSError):
            self._pipe.send(0)
        self._process.join(patience_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_END_S)
        self._pipe.close()

    # --- in an event loop

    @classmethod
    async def started(
        cls, source: ModelSource, instance: ModelInstance, cores: Sequence[int], limit_s: float, one: asyncio.Lock
    ) -> ModelWorker:
        """Return a process that is ready; with `one`, processes start one at a time and then load at the same time.

        Raises ForetraceError with the reason where it cannot load the model and run it.
        """
        async with one:
            worker = await asyncio.to_thread(cls, source, instance, cores)
        worker.limit_s = limit_s
        try:
            with suppress(TimeoutError):
                await worker._readable(START_S)
        except BaseException:
            await asyncio.to_thread(worker.end, 0.0)
            raise
        worker.ready(0.0)
        return worker

    async def run(self, samples: int) -> BatchRun:
        """Run samples; a process that takes longer than `limit_s` is killed. Raises EOFError where it dies."""
        self.submit(samples)
        try:
            await self._readable(self.limit_s)
        except TimeoutError:
            await asyncio.to_thread(self.end, 0.0)
            raise EOFError from None
        return self.receive()

    def watch(self, died: Callable[[], None] | None) -> None:
        """Watch an idle process, whose pipe becomes readable when it dies as it has nothing to say; None: no more."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pipe.fileno())
        if died is not None:
            loop.add_reader(self._pipe.fileno(), died)

    async def close(self) -> None:
        """See `end`."""
        await asyncio.to_thread(self.end)

    async def _readable(self, limit_s: float) -> None:
        """Wait until the process has answered or died. Raises TimeoutError."""
        ready = asyncio.Event()
        self.watch(ready.set)
        try:
            await asyncio.wait_for(ready.wait(), limit_s)
        finally:
            self.watch(None)


@contextmanager
def _passive_threads() -> Iterator[None]:
    """Change settings that libraries read once, when the fork server loads them: threads that wait shall sleep."""
    wanted = {"OMP_WAIT_POLICY": "passive"} | dict.fromkeys(THREAD_VARIABLES, "1")
    kept = {name: os.environ[name] for name in wanted if name in os.environ}
    os.environ |= wanted
    try:
        yield
    finally:
        for name in wanted:
            os.environ.pop(name)
        os.environ |= kept


def _shared(facts: ModelFacts, batch: int, handle: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return arrays for inputs and outputs of a batch in the memory behind a file descriptor, which is closed."""
    specs = (*facts.inputs, *facts.outputs)
    sizes = (-(-batch * each.nbytes // _ALIGNED) * _ALIGNED for each in specs)
    *starts, total = accumulate(sizes, initial=0)
    try:
        if os.fstat(handle).st_size < total:
            os.ftruncate(handle, total)
        memory = mmap.mmap(handle, total)  # which the arrays keep
    finally:
        os.close(handle)
    arrays = [
        (spec.name, np.ndarray((batch, *spec.sizes), spec.dtype, memory, start))
        for spec, start in zip(specs, starts, strict=True)
    ]
    return dict(arrays[: len(facts.inputs)]), dict(arrays[len(facts.inputs) :])


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("foretrace")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# --- in the process of the worker ----------------------------------------------------------------------------


def _run_instance(
    pipe: Connection, source: ModelSource, instance: ModelInstance, cores: Sequence[int], first: bool, own: bool
) -> None:
    """Load the model, then run batches until 0 is asked for or the server is gone; `inputs` begin as its examples."""
    if first:
        go_first()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's matter, which drains its workers
    os.dup2(2, 1)  # what a model prints is no answer
    with suppress(EOFError, OSError):
        try:
            model = _settled(source, instance, cores, own)
        except ForetraceError as error:
            pipe.send(str(error))
            return
        except (Exception, SystemExit) as error:
            pipe.send(f"{source.name} cannot be served: {said(error)}; see that it runs by itself.")
            return
        handle = _unnamed_file()
        inputs, outputs = _shared(model.facts, instance.batch, os.dup(handle))
        for name, array in model.examples(instance.batch).items():
            inputs[name][:] = array
        pipe.send(model.facts)
        send_handle(pipe, handle, None)  # the peer of the pipe, whichever process that is
        os.close(handle)
        while samples := pipe.recv():
            pipe.send(_batch(model, samples, inputs, outputs))


def _settled(source: ModelSource, instance: ModelInstance, cores: Sequence[int], own: bool) -> LoadedModel:
    """Return the model on these cores with so many threads, warm."""
    if hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, cores)
        except OSError:
            raise ForetraceError(f"a worker must run on cores that this process may use, got {cores}.") from None
    if "torch" in source.libraries:
        if "torch" not in sys.modules and not own:  # in a fork server that began for something else
            os.environ["OMP_WAIT_POLICY"] = "passive"
        torch = import_torch()
        torch.set_num_threads(instance.threads)
        if not own:
            torch.set_num_interop_threads(1)
    model = source.load(threads=instance.threads)
    examples = model.examples(instance.batch)
    for _ in range(_WARM_UP):
        model(examples)
    return model


def _batch(model: LoadedModel, samples: int, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> BatchRun:
    began = perf_counter()
    try:
        found = model({key: each[:samples] for key, each in inputs.items()})
    except (Exception, SystemExit) as error:
        return BatchRun(seconds=perf_counter() - began, error=said(error))
    seconds = perf_counter() - began
    wrong: dict[int, str] = {}
    for key, each in found.items():
        outputs[key][:samples] = each
        bad = np.isnan(each).reshape(samples, -1).any(axis=1)
        wrong |= dict.fromkeys(np.flatnonzero(bad).tolist(), f"output {key} is not a number (NaN)")
    return BatchRun(seconds=seconds, wrong=wrong)
