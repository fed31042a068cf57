"""List scheduling of training iterations: several jobs on the same GPUs, workers of unequal depth, barriers.

A task is one worker's part of one iteration (`tasks`). A GPU runs one task at a time and never stops in the
middle of one; a barrier and an exchange end the iteration of a job, during which its GPUs run tasks of other jobs. The
method is JigSaw's (arXiv 2111.10672), built from its abstract, as no code was released. Exchanges of different jobs do
not slow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.workload import Int64
from reproductions.jigsaw.tasks import FOR_EVER, IterationJob

ORDERS = ("longest-first", "first-ready")
ROTATIONS = ("same", "opposed", "none")
ACTIVATIONS = ("kept", "returned")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How tasks are put on GPUs.

    order: the longest of the tasks that a GPU may run now, or the one that became ready first (then by job).
    rotation: worker w of iteration t goes to depth (w + t) mod K + 1 in every job ("same"); "opposed" lets every other
    job of a GPU go the other way round, so that a deep task meets a shallow one; "none" keeps depths.
    bound: a worker stays on its GPU. Otherwise a task runs on any GPU that holds a copy of the job, which is possible
    since all copies are equal between iterations.
    slots: jobs on one GPU at most. switch_ns: a GPU spends it before a task of another job than its last one.
    memory_bytes: of one GPU, None for no limit. activations: "kept" by each resident job, as large as the deepest task
    it may run there (a process keeps its allocator's pool), or "returned" after each task, so that only the running one
    counts.
    """

    order: str = "longest-first"
    rotation: str = "opposed"
    bound: bool = True
    slots: int = 2
    switch_ns: int = 0
    memory_bytes: int | None = None
    activations: str = "kept"

    def __post_init__(self) -> None:
        for value, known, what in (
            (self.order, ORDERS, "order"),
            (self.rotation, ROTATIONS, "rotation"),
            (self.activations, ACTIVATIONS, "activations"),
        ):
            if value not in known:
                raise ForetraceError(f"{what}={value} does not exist; choose {', '.join(known)}.")
        if self.slots < 1 or self.switch_ns < 0:
            raise ForetraceError("slots must be 1 or more and a switch must cost zero or more.")


LONGEST_FIRST = Rules()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IterationSchedule:
    """When every task ran; columns are (tasks,) int64 in the order in which tasks began.

    job, iteration, worker: from 0; depth: from 1; gpu; start_ns, end_ns: without the switch, switch_ns before start_ns.
    barriers_ns: per job the end of every iteration, exchange included. placement: per job its GPUs, () where it never
    began. begun_ns, finished_ns: (jobs,) −1 where not. peak_bytes: (gpus,) most memory needed at once. waits: per job
    why it could not begin at once, "" where it could.
    """

    jobs: tuple[IterationJob, ...]
    gpus: int
    job: Int64
    iteration: Int64
    worker: Int64
    depth: Int64
    gpu: Int64
    start_ns: Int64
    end_ns: Int64
    switch_ns: Int64
    barriers_ns: tuple[Int64, ...]
    placement: tuple[tuple[int, ...], ...]
    begun_ns: Int64
    finished_ns: Int64
    peak_bytes: Int64
    waits: tuple[str, ...]

    @property
    def makespan_ns(self) -> int:
        """End of the last iteration."""
        return max(int(each[-1]) for each in self.barriers_ns if len(each))

    @property
    def switches(self) -> int:
        """Tasks before which a GPU turned to another job."""
        return int(np.count_nonzero(self.switch_ns))

    @property
    def efficiency(self) -> float:
        """Finished iterations per GPU time, each worth what its workers compute with the whole backward pass.

        1 is a cluster that runs whole iterations all the time; partial ones may go beyond.
        """
        done = sum(
            len(ends) * each.full_ns * each.workers for ends, each in zip(self.barriers_ns, self.jobs, strict=True)
        )
        return done / (self.makespan_ns * self.gpus)

    def throughput(self, begin_ns: int, until_ns: int) -> float:
        """The same between two times, each job counted from its first to its last barrier between them."""
        rates = [rate(ends, begin_ns, until_ns) for ends in self.barriers_ns]
        return sum(rate * each.full_ns * each.workers for rate, each in zip(rates, self.jobs, strict=True)) / self.gpus

    @property
    def utilisation(self) -> float:
        """Share of all GPU time that tasks ran."""
        return float((self.end_ns - self.start_ns).sum()) / (self.makespan_ns * self.gpus)


def need_bytes(jobs: Sequence[IterationJob], activations: str) -> int:
    """Memory of one GPU on which these jobs are resident, each at its deepest."""
    deepest = [max(each.activation_bytes, default=0) for each in jobs]
    return sum(each.fixed_bytes for each in jobs) + (sum(deepest) if activations == "kept" else max(deepest, default=0))


def refusal(jobs: Sequence[IterationJob], rules: Rules) -> str:
    """Why these jobs cannot be resident on one GPU together; "" where they can."""
    names = " and ".join(repr(each.name) for each in jobs)
    if len(jobs) > rules.slots:
        return f"{names} would be {len(jobs)} jobs on a GPU of {rules.slots} slots"
    if rules.memory_bytes is None:
        return ""
    need = need_bytes(jobs, rules.activations)
    if need <= rules.memory_bytes:
        return ""
    return f"{names} need {need / 1e9:.4g} GB on a GPU of {rules.memory_bytes / 1e9:.4g} GB"


def schedule(
    jobs: Sequence[IterationJob],
    gpus: int,
    rules: Rules = LONGEST_FIRST,
    *,
    placement: Sequence[Sequence[int]] | None = None,
    until_ns: int | None = None,
) -> IterationSchedule:
    """Run these jobs to their end, or up to `until_ns` (tasks under way then are not counted as iterations).

    With `placement`, the GPUs of every job's workers, all begin at once. Without it, a job gets the GPUs with the least
    work on them, in the order of `jobs`, as soon as enough have a slot and memory for it; later jobs may pass one that
    waits. Same input, same output. Raises ForetraceError where a job or a placement can never fit, with the reason.
    """
    if not jobs:
        raise ForetraceError("there is no job to schedule; give one or more.")
    if until_ns is None and any(each.iterations == FOR_EVER for each in jobs):
        raise ForetraceError("a job without a number of iterations never ends; give it one, or a time to stop at.")
    run = _Run(tuple(jobs), gpus, rules)
    if placement is None:
        for each in jobs:
            if each.workers > gpus:
                raise ForetraceError(
                    f"job {each.name!r} has {each.workers} workers and the cluster {gpus} GPUs; give it fewer workers "
                    "or more GPUs."
                )
            if why := refusal([each], rules):
                raise ForetraceError(f"{why}; it can never begin: give it a smaller batch or a larger GPU.")
        run.waiting = list(range(len(jobs)))
        run.admit(0)
    else:
        _check(jobs, gpus, rules, placement)
        for i, where in enumerate(placement):
            run.begin(i, tuple(where), 0)
    run.play(until_ns)
    return run.result()


def _check(jobs: Sequence[IterationJob], gpus: int, rules: Rules, placement: Sequence[Sequence[int]]) -> None:
    if len(placement) != len(jobs):
        raise ForetraceError(f"there are {len(jobs)} jobs and {len(placement)} placements; give one for each.")
    resident: list[list[IterationJob]] = [[] for _ in range(gpus)]
    for job, where in zip(jobs, placement, strict=True):
        if len(set(where)) != len(where) or len(where) != job.workers or not all(0 <= gpu < gpus for gpu in where):
            raise ForetraceError(
                f"job {job.name!r} needs {job.workers} different GPUs of 0 to {gpus - 1}, and is placed on "
                f"{', '.join(map(str, where)) or 'none'}."
            )
        for gpu in where:
            resident[gpu].append(job)
    for gpu, there in enumerate(resident):
        if there and (why := refusal(there, rules)):
            raise ForetraceError(f"{why} (GPU {gpu}); place them apart, or give more memory or slots.")


class _Run:
    """The state of the event loop. Events: a task ends, then an exchange ends; ties by their order of creation."""

    def __init__(self, jobs: tuple[IterationJob, ...], gpus: int, rules: Rules) -> None:
        self.jobs, self.gpus, self.rules = jobs, gpus, rules
        n = len(jobs)
        self.events: list[tuple[int, int, int, int]] = []  # time, number, job, GPU (−1: an exchange)
        self.number = 0
        self.waiting: list[int] = []
        self.waits = [""] * n
        self.placement: list[tuple[int, ...]] = [()] * n
        self.begun, self.finished = [-1] * n, [-1] * n
        self.iteration, self.left = [0] * n, [0] * n
        self.reverse = [False] * n
        self.barriers: list[list[int]] = [[] for _ in jobs]
        self.resident: list[list[int]] = [[] for _ in range(gpus)]
        self.load = [0] * gpus
        self.free, self.last = [True] * gpus, [-1] * gpus
        self.queues: dict[tuple[int, ...], list[tuple[tuple[int, ...], int, int, int]]] = {}
        self.serves: list[list[list[tuple[tuple[int, ...], int, int, int]]]] = [[] for _ in range(gpus)]
        self.touched: set[int] = set()
        self.tasks: list[tuple[int, int, int, int, int, int, int, int]] = []
        self.pool: list[dict[int, int]] = [{} for _ in range(gpus)]  # job -> bytes of activations, by GPU
        self.peak = [0] * gpus

    def admit(self, now: int) -> None:
        """Let those begin that fit, in their order."""
        still = []
        for i in self.waiting:
            job = self.jobs[i]
            reasons = [refusal([self.jobs[k] for k in there] + [job], self.rules) for there in self.resident]
            fit = [gpu for gpu in range(self.gpus) if not reasons[gpu]]
            if len(fit) >= job.workers:
                self.begin(i, self._choose(fit, job.workers), now)
            else:
                self.waits[i] = self.waits[i] or next(why for why in reasons if why)
                still.append(i)
        self.waiting = still

    def _choose(self, fit: list[int], count: int) -> tuple[int, ...]:
        """The least loaded GPUs, and of equally good ones a block 0 … K − 1, K … 2K − 1, ..., so that jobs of equal
        size share all of their GPUs or none.
        """
        scattered = sorted(sorted(fit, key=lambda gpu: (self.load[gpu], gpu))[:count])
        ok, highest = set(fit), max(self.load[gpu] for gpu in scattered)
        for start in range(0, self.gpus - count + 1, count):
            block = range(start, start + count)
            if ok.issuperset(block) and max(self.load[gpu] for gpu in block) <= highest:
                return tuple(block)
        return tuple(scattered)

    def begin(self, i: int, where: tuple[int, ...], now: int) -> None:
        """Job i is resident on these GPUs from now on."""
        job = self.jobs[i]
        self.placement[i], self.begun[i] = where, now
        self.reverse[i] = self.rules.rotation == "opposed" and len(self.resident[where[0]]) % 2 == 1
        share = round(1e6 * job.mean_task_ns / job.alone_ns)
        for gpu in where:
            self.resident[gpu].append(i)
            self.load[gpu] += share
            self.pool[gpu][i] = 0
            self._note_memory(gpu)
        for key in [(gpu,) for gpu in where] if self.rules.bound else [tuple(sorted(where))]:
            if key not in self.queues:
                self.queues[key] = []
                for gpu in key:
                    self.serves[gpu].append(self.queues[key])
        self.ready(i, now)

    def ready(self, i: int, now: int) -> None:
        """The tasks of the next iteration of job i can run."""
        job, turn = self.jobs[i], self.iteration[i]
        count, where = job.workers, self.placement[i]
        self.left[i] = count
        moved = 0 if self.rules.rotation == "none" else turn
        for worker in range(count):
            place = (worker + moved) % count
            if self.reverse[i]:
                place = count - 1 - place
            dur = job.task_ns[place]
            key = (-dur, now, i, worker) if self.rules.order == "longest-first" else (now, i, -dur, worker)
            home = (where[worker],) if self.rules.bound else tuple(sorted(where))
            heappush(self.queues[home], (key, i, worker, place))
            self.touched.update(home)

    def dispatch(self, now: int) -> None:
        """Give tasks to GPUs that are free, the first of the order first; a GPU that need not switch is preferred."""
        idle = sorted(gpu for gpu in self.touched if self.free[gpu])
        self.touched.clear()
        while idle:
            best = None
            for gpu in idle:
                for queue in self.serves[gpu]:
                    if queue:
                        head = queue[0]
                        rank = (head[0], self.last[gpu] not in (head[1], -1), gpu)
                        if best is None or rank < best[0]:
                            best = (rank, queue)
            if best is None:
                return
            gpu = best[0][2]
            _, i, worker, place = heappop(best[1])
            idle.remove(gpu)
            self._start(gpu, i, worker, place, now)

    def _start(self, gpu: int, i: int, worker: int, place: int, now: int) -> None:
        job = self.jobs[i]
        switch = self.rules.switch_ns if self.last[gpu] not in (i, -1) else 0
        start = now + switch
        end = start + job.task_ns[place]
        self.free[gpu], self.last[gpu] = False, i
        self.tasks.append((i, self.iteration[i], worker, place + 1, gpu, start, end, switch))
        kept = self.pool[gpu][i] if self.rules.activations == "kept" else 0
        self.pool[gpu][i] = max(kept, job.activations(place + 1))
        self._note_memory(gpu)
        self._event(end, i, gpu)

    def _note_memory(self, gpu: int) -> None:
        fixed = sum(self.jobs[i].fixed_bytes for i in self.resident[gpu])
        self.peak[gpu] = max(self.peak[gpu], fixed + sum(self.pool[gpu].values()))

    def _event(self, time: int, i: int, gpu: int) -> None:
        self.number += 1
        heappush(self.events, (time, self.number, i, gpu))

    def play(self, until_ns: int | None) -> None:
        """Work through all events up to this time."""
        self.dispatch(0)
        while self.events:
            now = self.events[0][0]
            if until_ns is not None and now > until_ns:
                return
            while self.events and self.events[0][0] == now:
                _, _, i, gpu = heappop(self.events)
                if gpu < 0:
                    self._iteration_over(i, now)
                    continue
                self.free[gpu] = True
                self.touched.add(gpu)
                if self.rules.activations == "returned":
                    self.pool[gpu][i] = 0
                self.left[i] -= 1
                if not self.left[i]:
                    self._event(now + self.jobs[i].communication_ns, i, -1)
            self.dispatch(now)

    def _iteration_over(self, i: int, now: int) -> None:
        job = self.jobs[i]
        self.barriers[i].append(now)
        self.iteration[i] += 1
        if self.iteration[i] < job.iterations:
            self.ready(i, now)
            return
        self.finished[i] = now
        share = round(1e6 * job.mean_task_ns / job.alone_ns)
        for gpu in self.placement[i]:
            self.resident[gpu].remove(i)
            self.load[gpu] -= share
            del self.pool[gpu][i]
        if self.waiting:
            self.admit(now)

    def result(self) -> IterationSchedule:
        """What happened, as columns."""
        columns = np.array(self.tasks, np.int64).reshape(-1, 8).T
        names = ("job", "iteration", "worker", "depth", "gpu", "start_ns", "end_ns", "switch_ns")
        return IterationSchedule(
            jobs=self.jobs,
            gpus=self.gpus,
            **dict(zip(names, columns, strict=True)),
            barriers_ns=tuple(np.array(each, np.int64) for each in self.barriers),
            placement=tuple(self.placement),
            begun_ns=np.array(self.begun, np.int64),
            finished_ns=np.array(self.finished, np.int64),
            peak_bytes=np.array(self.peak, np.int64),
            waits=tuple(self.waits),
        )


def rate(ends: Int64, begin: int, until: int) -> float:
    """Iterations per nanosecond between two times, from the first to the last end between them."""
    inside = ends[ends > begin]
    if len(inside) < 2:
        return len(inside) / (until - begin)
    return (len(inside) - 1) / float(inside[-1] - inside[0])
