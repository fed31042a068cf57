"""Jobs as an iteration-level scheduler sees them: one task per worker and depth of its backward pass, and a barrier.

Structured partial backpropagation (SPB, arXiv 2111.10672): layers are cut into K groups of equal backward time, worker
i of K runs the whole forward pass and back-propagates the first i groups from the output, and who goes how deep
changes with every iteration. So the tasks of an iteration are unequal, and a barrier (the exchange of gradients) ends
it. Times come from a forward and a backward time, or from a recorded training step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from foretrace.errors import ForetraceError
from foretrace.fleet.workload import SECOND

if TYPE_CHECKING:
    from foretrace.graph.taskgraph import TaskGraph
    from foretrace.techniques.distributed.gradients import Gradient

FOR_EVER = 1 << 60  # iterations of a job that is watched for a while only


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationJob:
    """A data-parallel job of K workers. Times are whole nanoseconds, depths count from 1 to K.

    task_ns: (K,) one worker's forward pass and its share of the backward pass, by depth, not falling.
    communication_ns: the exchange behind the barrier, once per iteration; no GPU is busy with it.
    full_ns, full_communication_ns: the same with the whole backward pass on every worker.
    fixed_bytes: weights, gradients and optimizer state on each GPU as long as the job is resident there.
    activation_bytes: (K,) what a task needs on top of that by depth; full_activation_bytes with the whole pass.
    """

    name: str
    task_ns: tuple[int, ...]
    communication_ns: int
    full_ns: int
    full_communication_ns: int
    iterations: int = FOR_EVER
    fixed_bytes: int = 0
    activation_bytes: tuple[int, ...] = ()
    full_activation_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.task_ns:
            raise ForetraceError(f"job {self.name!r} has no worker; give it one or more.")
        if min(self.task_ns) <= 0 or self.full_ns <= 0:
            raise ForetraceError(f"job {self.name!r} has a task without a duration; give times above zero.")
        if min(self.communication_ns, self.full_communication_ns) < 0:
            raise ForetraceError(f"job {self.name!r} has a negative communication time; give zero or more.")
        if self.iterations < 1:
            raise ForetraceError(f"job {self.name!r} has {self.iterations} iterations; give one or more.")
        if self.activation_bytes and len(self.activation_bytes) != self.workers:
            raise ForetraceError(
                f"job {self.name!r} has {self.workers} depths and {len(self.activation_bytes)} sizes of activations; "
                "give one for each depth."
            )
        if min((self.fixed_bytes, self.full_activation_bytes, *self.activation_bytes)) < 0:
            raise ForetraceError(f"job {self.name!r} needs a negative amount of memory; give zero or more.")

    @classmethod
    def of(
        cls,
        *,
        name: str,
        workers: int,
        forward_s: float,
        backward_s: float,
        communication_s: float = 0.0,
        traffic: float | None = None,
        iterations: int = FOR_EVER,
        fixed_bytes: int = 0,
        activation_bytes: int = 0,
    ) -> IterationJob:
        """A job whose layers are cut into K groups with equal backward time and equal activations.

        traffic: share of the full exchange's time that the exchange by layer takes. None is the mean number of
        contributors per layer, (K + 1) / 2K, what each layer's computed gradients alone amount to. 1.0 is an all-reduce
        in which those who did not compute a layer take part with zeros, because they need the average, too.
        """
        if workers < 1:
            raise ForetraceError(f"job {name!r} has {workers} workers; give one or more.")
        left = (workers + 1) / (2 * workers) if traffic is None else traffic
        deepest = range(1, workers + 1)
        return cls(
            name=name,
            task_ns=tuple(_ns(forward_s + backward_s * i / workers) for i in deepest),
            communication_ns=_ns(communication_s * left),
            full_ns=_ns(forward_s + backward_s),
            full_communication_ns=_ns(communication_s),
            iterations=iterations,
            fixed_bytes=fixed_bytes,
            activation_bytes=tuple(round(activation_bytes * i / workers) for i in deepest),
            full_activation_bytes=activation_bytes,
        )

    @property
    def workers(self) -> int:
        """Tasks per iteration."""
        return len(self.task_ns)

    @property
    def alone_ns(self) -> int:
        """An iteration on GPUs of its own: the deepest worker and the exchange."""
        return max(self.task_ns) + self.communication_ns

    @property
    def mean_task_ns(self) -> float:
        """What the mean worker of an iteration computes."""
        return sum(self.task_ns) / self.workers

    def whole(self) -> IterationJob:
        """The same job with the whole backward pass on every worker."""
        return replace(
            self,
            task_ns=(self.full_ns,) * self.workers,
            communication_ns=self.full_communication_ns,
            activation_bytes=(self.full_activation_bytes,) * self.workers,
        )

    def activations(self, depth: int) -> int:
        """Bytes of a task's activations; depth counts from 1."""
        return self.activation_bytes[depth - 1] if self.activation_bytes else 0


def compute_bound(jobs: Sequence[IterationJob]) -> float:
    """How many times more iterations GPUs that are busy all the time can do with partial than with full backward.

    For one kind of job this is (F + B) / (F + B (K + 1) / 2K): 1.2 for K = 2 and backward twice as long as forward.
    """
    full = sum(each.full_ns * each.workers * each.iterations for each in jobs)
    return full / sum(sum(each.task_ns) * each.iterations for each in jobs)


def lower_bound_ns(
    jobs: Sequence[IterationJob], gpus: int, placement: Sequence[Sequence[int]] | None = None, *, rotates: bool = True
) -> int:
    """No schedule ends sooner: all work on all GPUs, every chain of iterations, and what is bound to one GPU.

    placement: the GPU of every worker of every job, where workers stay on theirs. rotates: a worker goes to every depth
    once in K iterations; else worker w stays at depth w + 1.
    """
    work = sum(sum(each.task_ns) * each.iterations for each in jobs)
    found = max(-(-work // gpus), *(each.alone_ns * each.iterations for each in jobs))
    per_gpu = [0] * gpus
    for job, where in zip(jobs, placement or (), strict=placement is not None):
        turns, rest = divmod(job.iterations, job.workers)
        least = turns * sum(job.task_ns) + sum(sorted(job.task_ns)[:rest])
        for worker, gpu in enumerate(where):
            per_gpu[gpu] += least if rotates else job.task_ns[worker] * job.iterations
    return max(found, *per_gpu)


def recorded_job(graph: TaskGraph, *, workers: int, network: str, name: str) -> IterationJob:
    """A recorded training step as a job of K workers: tasks by depth, exchanges and memory from the recording.

    The worker of depth i is the recorded step replayed without what autograd does behind the last gradient of its
    groups (`techniques.partial_backprop` cuts the groups). Exchanges are what `data-parallel` and `partial-backprop`
    with `barrier=max` add to the replayed step over `network`, hidden parts left out. Raises NotApplicableError where
    the recording does not show its gradients.
    """
    from foretrace.graph.edit import scale
    from foretrace.simulate.timeline import simulate
    from foretrace.techniques.compute.updates import find_update
    from foretrace.techniques.distributed.data_parallel import DataParallel
    from foretrace.techniques.distributed.gradients import find_gradients
    from foretrace.techniques.distributed.partial_backprop import PartialBackprop, backward_costs
    from foretrace.techniques.memory.saved import find_saved
    from foretrace.training.partial import grouped

    partial = PartialBackprop(workers=workers, network=network)
    whole = DataParallel(workers=workers, network=network)
    both = [simulate(each.predict(graph)).step_time_s for each in (whole, partial)]
    gradients = find_gradients(graph)
    group = grouped(backward_costs(graph, gradients), workers)
    full = simulate(graph).step_time_s
    saved = [each for each in find_saved(graph).tensors if each.use >= 0 and graph.step[each.row] >= 0]
    tasks, activations = [], []
    for depth in range(1, workers + 1):
        behind = _behind(graph, [gradients[i] for i in np.flatnonzero(group < depth).tolist()])
        if depth == workers:
            behind[:] = False  # the deepest goes on to the very end
        tasks.append(simulate(scale(graph, behind, 0.0)).step_time_s)
        activations.append(round(sum(each.nbytes for each in saved if not behind[each.use]) / graph.n_steps))
    update = find_update(graph)
    states = (update.accesses - 3) // 2 if update else 0  # of the optimizer, each as large as the weights
    return IterationJob(
        name=name,
        task_ns=tuple(_ns(each) for each in tasks),
        communication_ns=max(_ns(both[1] - full), 0),
        full_ns=_ns(full),
        full_communication_ns=max(_ns(both[0] - full), 0),
        fixed_bytes=(2 + states) * sum(each.nbytes for each in gradients),
        activation_bytes=tuple(activations),
        full_activation_bytes=activations[-1],
    )


def _behind(graph: TaskGraph, kept: Sequence[Gradient]) -> npt.NDArray[np.bool_]:
    """(tasks,) tasks of the backward passes behind the last of these gradients, on the lanes that compute them."""
    from foretrace.graph.taskgraph import Phase

    mask = np.zeros(len(graph), dtype=bool)
    backward = (graph.phase == Phase.BACKWARD) & ~graph.gone
    for step in range(graph.n_steps):
        for ends in ([each.ready[step] for each in kept], [each.device[step] for each in kept]):
            last = max(ends)
            if last >= 0:
                rows = (graph.lane == graph.lane[last]) & (graph.step == step) & backward
                mask |= rows & (np.arange(len(graph)) > last)
    return mask


def _ns(seconds: float) -> int:
    return round(seconds * SECOND)
