"""The policies of the Pollux simulator that need no search: Tiresias and Optimus, decided once per round.

Source of the mechanism: petuum/adaptdl, branch osdi21-artifact, simulator (OSDI'21 artifact); fleet-scheduling.md 7.2.
An allocation is a list of node numbers, one entry per GPU, nodes in the order in which they were taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

from foretrace.fleet.pollux.profiles import Application, linear

Allocations = dict[int, list[int]]

PAUSE_S = 30  # a changed allocation makes no progress for so long
_THRESHOLD = 3600 * 16  # GPU seconds after which Tiresias serves a job behind the others
_PACKED = 4  # GPUs per node in Optimus' estimate, whatever the cluster


@dataclass(slots=True, eq=False)
class Job:
    """A job as policies see it. `gpus` and `batch` are what it asks for (`batch` 0: free to choose)."""

    at: int  # position in the workload
    app: Application
    submit_s: float
    gpus: int
    batch: int
    epoch: int = 0
    progress: float = 0.0
    placement: tuple[int, ...] = ()
    atomic: int = 0
    accumulation: int = 0
    pause_s: int = 0  # still to pass before a changed allocation makes progress
    service: int = 0  # GPU seconds held
    starts: int = 0
    end_s: int = -1


class Policy(Protocol):
    """Decides once per round. It may keep state between rounds. `adapts`: jobs change their batch while they run."""

    @property
    def adapts(self) -> bool: ...

    def allocate(self, now: int, jobs: Mapping[int, Job], held: Allocations, nodes: Sequence[int]) -> Allocations:
        """Allocations of the next round.

        now: seconds. jobs: submitted and unfinished, by position, in order of the workload. held: what they hold now.
        nodes: GPUs per node. A job keeps running undisturbed exactly if its allocation is equal to what it holds.
        """
        ...

    def split(self, job: Job) -> tuple[int, int]:
        """(batch per replica and pass, accumulation steps) of a job in its placement."""
        ...

    def observe(self, job: Job, step_s: float, sync_s: float, sqr: float, var: float) -> None:
        """What the job measured of itself while it ran in its present placement."""
        ...


class FixedBatch:
    """Policies whose jobs keep the batch size they ask for."""

    adapts = False

    def split(self, job: Job) -> tuple[int, int]:
        """As `Policy.split`."""
        return job.app.split(job.batch, sum(job.placement))

    def observe(self, job: Job, step_s: float, sync_s: float, sqr: float, var: float) -> None:
        """These policies learn nothing from it."""


def fill(allocations: Allocations, wanted: Mapping[int, int], nodes: Sequence[int]) -> None:
    """Give GPUs to each job of `wanted` in turn: from the node with most free ones, the lowest number among equals."""
    free = list(nodes)
    for taken in allocations.values():
        for node in taken:
            free[node] -= 1
    for at, count in wanted.items():
        got: list[int] = []
        while len(got) < count:
            most = max(free)
            node = free.index(most)
            number = min(most, count - len(got))
            got.extend([node] * number)
            free[node] -= number
        allocations[at] = got


@dataclass(slots=True)
class Tiresias(FixedBatch):
    """Two queues by attained GPU time, first come first served inside each, no promotion; jobs never move.

    A job holds the GPUs it asks for or none. Served: the first queue, then the second, passing over what does not fit.
    """

    queues: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    running: dict[int, bool] = field(default_factory=dict)
    executed: dict[int, int] = field(default_factory=dict)  # seconds
    checked: dict[int, int] = field(default_factory=dict)

    def allocate(self, now: int, jobs: Mapping[int, Job], held: Allocations, nodes: Sequence[int]) -> Allocations:
        """As `Policy.allocate`."""
        first, second = ([at for at in queue if at in jobs] for queue in self.queues)
        self.running = {at: self.running[at] for at in self.running if at in jobs}
        for at, job in jobs.items():
            if at not in self.running:
                self.running[at] = False
                self.executed[at] = 0
                first.append(at)
            elif self.running[at]:
                self.executed[at] += now - self.checked[at]
                if self.executed[at] * job.gpus >= _THRESHOLD and at in first:
                    first.remove(at)
                    second.append(at)
            self.checked[at] = now
        self.queues = first, second
        free = sum(nodes)
        allocations = dict(held)
        wanted: dict[int, int] = {}
        for at in (*first, *second):
            gpus = jobs[at].gpus
            self.running[at] = gpus <= free
            if gpus <= free:
                free -= gpus
                if not held.get(at):
                    wanted[at] = gpus
            else:
                allocations.pop(at, None)
        fill(allocations, wanted, nodes)
        return allocations


@dataclass(slots=True)
class Optimus(FixedBatch):
    """One GPU for each job, then one at a time to the job whose remaining run time shrinks most by it.

    Step times and steps to go are read from the profiles (an oracle, as published). A job is placed anew whenever its
    number of GPUs changes. `alone`: applications that never use more than one GPU.
    """

    alone: frozenset[str] = frozenset({"ncf"})
    steps: dict[tuple[str, int, int], float] = field(default_factory=dict)  # (application, batch, GPUs) -> seconds

    def allocate(self, now: int, jobs: Mapping[int, Job], held: Allocations, nodes: Sequence[int]) -> Allocations:
        """As `Policy.allocate`."""
        free = sum(nodes)
        to_go = {at: self._remaining(job) for at, job in jobs.items()}
        most = {at: self._most(job) for at, job in jobs.items()}
        number: dict[int, int] = {}
        gain: dict[int, float] = {}  # seconds saved by one more GPU
        for at, job in jobs.items():
            number[at] = 1 if free >= 1 else 0
            free -= number[at]
            more = number[at] and most[at] > 1 and free >= 1
            gain[at] = self._saved(job, 1) * to_go[at] if more else 0.0
        while free > 0:
            best = max(gain, key=gain.__getitem__)  # the first among equals
            if gain[best] <= 0:
                break
            number[best] += 1
            free -= 1
            # With none left the gain is not asked for again; more GPUs than there are may not be profiled either.
            more = free > 0 and number[best] < most[best]
            gain[best] = self._saved(jobs[best], number[best]) * to_go[best] if more else 0.0
        allocations = {at: taken for at, taken in held.items() if len(taken) == number[at]}
        order = sorted(jobs, key=number.__getitem__)
        fill(allocations, {at: number[at] for at in order if number[at] and not allocations.get(at)}, nodes)
        return allocations

    def _most(self, job: Job) -> int:
        return 1 if job.app.name in self.alone else job.batch // job.app.min_local

    @staticmethod
    def _remaining(job: Job) -> float:
        last = job.app.epochs - 1
        if last <= job.epoch:
            return 1.0
        return _iterations(job.app, job.batch, last) - _iterations(job.app, job.batch, job.epoch)

    def _saved(self, job: Job, gpus: int) -> float:
        """Seconds per step that one more GPU saves."""
        return self._step_s(job, gpus) - self._step_s(job, gpus + 1)

    def _step_s(self, job: Job, gpus: int) -> float:
        key = job.app.name, job.batch, gpus
        if key not in self.steps:
            placement = (_PACKED,) * (gpus // _PACKED) + ((gpus % _PACKED,) if gpus % _PACKED else ())
            atomic, accumulation = job.app.split(job.batch, gpus, always_accumulate=True)
            step, sync = job.app.step_seconds(placement, atomic)
            self.steps[key] = step + (step - sync) * accumulation
        return self.steps[key]


@cache
def _iterations(app: Application, batch: int, epoch: int) -> float:
    """Steps done after an epoch (from 0), linear between validated batch sizes."""
    low, high = app.neighbours(batch)
    below, above = app.validation[low].iterations[epoch], app.validation[high].iterations[epoch]
    return linear(batch, low, high, below, above)
