"""What a worker runs: a training with techniques applied to it for real, stepped in blocks that are timed; before that,
one worker alone and recorded, which a prediction for many starts from.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrace.cost.operators import bench
from foretrace.cost.operators.calibration import Calibration
from foretrace.deadline import Deadline
from foretrace.experiment import measure, messages
from foretrace.experiment.arms import next_loss
from foretrace.experiment.cores import queued_s
from foretrace.experiment.job import Job
from foretrace.files import evict
from foretrace.graph import store
from foretrace.graph.builder import build
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.overhead import unprofiled
from foretrace.techniques.arguments import parse, parse_all
from foretrace.techniques.base import Technique
from foretrace.techniques.measuring import calibrated
from foretrace.trace.trace import Trace
from foretrace.training.training import Training

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel


def training_of(setup: messages.Setup) -> Training:
    """Return the training alone, nothing applied; the same on every worker.

    Raises ForetraceError for one that does not exist.
    """
    from foretrace.experiment.links import emulate
    from foretrace.zoo.registry import job

    if is_emulated(setup.work):
        return emulate.training(emulate.parse(setup.work), seed=setup.seed)
    training = job(setup.work, setup.size, seed=setup.seed)()
    return training if setup.loads else training.with_batches(measure.RESIDENT_BATCHES)


def is_emulated(work: str) -> bool:
    """Return whether a text names an emulation: it begins with a number of layers."""
    return work[:1].isdigit()


class RunningArm:
    """A training under way on one worker."""

    def __init__(self, setup: messages.Setup) -> None:
        self.training = training_of(setup)
        for technique in parse_all(setup.techniques):
            self.training = technique.apply(self.training)
        self._loading = [0.0]  # seconds for which the loader waited for a core
        self._steps = _steps(self.training, self._loading) if setup.loads else self.training.steps()
        self._first: tuple[int, ...] = ()

    def block(self, discarded: int, steps: int, *, together: bool) -> messages.TimedSteps:
        """Run steps of which the last `steps` are timed together, all workers beginning them at once if asked to."""
        import torch.distributed as dist

        for _ in range(discarded):
            next_loss(self._steps)
        began_queued = queued_s() - self._loading[0]
        if together:
            dist.barrier()
        began, began_cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss = next_loss(self._steps)
        wall, cpu = time.perf_counter() - began, time.process_time() - began_cpu
        queued = max(queued_s() - self._loading[0] - began_queued, 0.0)  # a thread that ended takes its time with it
        last = float(loss)
        return messages.TimedSteps(
            wall_s=wall / steps, cpu_s=cpu / steps, loss=last if math.isfinite(last) else None, queued_s=queued / steps
        )  # fmt: skip

    def close(self) -> None:
        """End the loader's workers: those of an arm that is not timed would fill their queues beside one that is."""
        self._steps.close()

    def buckets(self) -> messages.Buckets:
        """Return what PyTorch's data parallelism says of its buckets; empty lists where the arm is not made of it."""
        import torch.distributed as dist

        model = self._parallel()
        if model is None:
            return messages.Buckets(first=(), rebuilt=(), world=dist.get_world_size())
        said: dict[str, Any] = model._get_ddp_logging_data()
        return messages.Buckets(
            first=_sizes(said.get("bucket_sizes", "")),
            rebuilt=_sizes(said.get("rebuilt_bucket_sizes", "")),
            world=int(said["world_size"]),
        )

    def _parallel(self) -> DistributedDataParallel | None:
        from torch.nn.parallel import DistributedDataParallel

        found = (each for each in self.training.model.modules() if isinstance(each, DistributedDataParallel))
        return next(found, None)


def _steps(training: Training, loading: list[float]) -> Generator[Tensor]:
    """Yield as `Training.steps` does, and add to `loading` the seconds for which the loader waited for a core."""
    training.model.train()
    before = queued_s("thread-self")
    for batch in training.batches():
        loading[0] += queued_s("thread-self") - before
        yield training.step(batch).detach()
        before = queued_s("thread-self")


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.replace(",", " ").split())


def make(given: messages.Make, worker: messages.Worker) -> None:
    """Make an arm, in a worker."""
    worker.kept[given.name] = RunningArm(given.setup)
    gc.collect()
    gc.freeze()


def run_steps(given: messages.RunSteps, worker: messages.Worker) -> messages.TimedSteps:
    """Run steps of an arm that was made."""
    arm: RunningArm = worker.kept[given.name]
    return arm.block(given.discarded, given.steps, together=given.together)


def buckets_of(name: str, worker: messages.Worker) -> messages.Buckets:
    """Return what PyTorch's data parallelism knows of itself, once an arm has run."""
    arm: RunningArm = worker.kept[name]
    return arm.buckets()


def forget(given: None, worker: messages.Worker) -> None:
    """End all arms of a worker, and what their loaders run."""
    for arm in worker.kept.values():
        arm.close()
    worker.kept.clear()


def try_exchanges(given: messages.TryExchanges, worker: messages.Worker) -> list[tuple[float, float]]:
    """Try what a technique exchanges, with others that answer at once: bytes sent and seconds, by exchange.

    All workers work around an exchange at the same time, as they will: they share memory and caches.
    """
    import torch.distributed as dist

    return parse(given.technique).tried(training_of(given.setup), dist.barrier)


_RECORDINGS = 3
_PUNCTUAL = 0.02  # median over shortest step of an emulated training on a machine that does little else


def record(request: messages.Record) -> messages.Recorded:
    """Record the training of one worker, build its graph, time the operators that techniques ask for, save it.

    Raises ForetraceError where the training does not exist or its graph cannot be built.
    """
    import torch

    torch.set_num_threads(request.threads)
    setup = request.setup
    training = training_of(setup)
    if is_emulated(setup.work):
        trace, attempts = _punctual(training)
    else:
        job = Job(techniques=(), model=setup.work, size=setup.size, seed=setup.seed)
        cold = partial(evict, [Path(each) for each in request.evict])
        trace, attempts = measure.recorded_calmly(training, job, None, lambda what, share: None, first=cold)
    graph = build(trace, None)
    if is_emulated(setup.work):
        graph = replace(graph, info=replace(graph.info, recording={**graph.info.recording, "emulated": setup.work}))
    graph, operators, notes = _calibrated(unprofiled(graph), [parse_all(texts) for texts in request.arms])
    store.save(graph, Path(request.graph))
    again = (f"The worker alone was recorded {attempts} times: others disturbed it.",) if attempts > 1 else ()
    return messages.Recorded(operators=operators, notes=(*again, *notes))


def _punctual(training: Training) -> tuple[Trace, int]:
    """Return the recording of an emulated training whose steps were woken in time, and how many were made."""
    found: list[tuple[float, Trace]] = []
    while not found or (found[-1][0] > _PUNCTUAL and len(found) < _RECORDINGS):
        trace = measure.recording_of(training, None)
        found.append((measure.unrest(trace, measure.PLAIN, "wall_ns"), trace))
    return min(found, key=lambda pair: pair[0])[1], len(found)


def _calibrated(graph: TaskGraph, arms: Sequence[Sequence[Technique]]) -> tuple[TaskGraph, int, tuple[str, ...]]:
    """Return the graph with times of the operators that the techniques of each arm ask for, how many, and what
    to note.
    """
    until = Deadline(measure.CALIBRATION_S)
    graph = replace(Calibration.load_for(graph), seconds={}).on(graph)  # everything is timed again, in this state
    timed, failed = 0, dict[str, str]()

    for techniques in arms:
        found = calibrated(graph, techniques, bench.measure, until)
        graph = found.graph
        timed += len(found.seconds)
        failed |= found.failed
    if not failed:
        return graph, timed, ()
    why = next(iter(failed.values()))
    return graph, timed, (f"{len(failed)} of {len(failed) + timed} operators could not be timed alone ({why}).",)
