"""`View`: what a policy sees when it decides, and the rules as they are written, to build on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from foretrace.arrays import Mask
from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.moment.rules import Rules
from foretrace.fleet.moment.state import RUNNING, JobState, SteppingState
from foretrace.fleet.policy_rules import Wait
from foretrace.fleet.speeds import Speed, Speeds
from foretrace.fleet.workload import SECOND, Int64, Workload

Memory = TypeVar("Memory")


class View:
    """One moment of a simulation. Jobs are positions in `workload`, GPUs are numbers from 0, units are counted from 0
    at each level of `cluster` (level 0 the innermost). Times in ns are whole; seconds, GPU-seconds and work are floats.
    """

    def __init__(self, state: SteppingState, rules: Rules) -> None:
        self._state, self._rules = state, rules
        self._memory: Any = None

    def memory(self, make: Callable[[View], Memory]) -> Memory:
        """Return what the policy remembers of this simulation; `make` makes it when it is first asked for."""
        if self._memory is None:
            self._memory = make(self)
        found: Memory = self._memory
        return found

    # ---- the whole
    @property
    def now_ns(self) -> int:
        """Time since the workload's zero."""
        return self._state.now

    @property
    def now_s(self) -> float:
        """The same in seconds."""
        return self._state.now / SECOND

    @property
    def workload(self) -> Workload:
        """All jobs, those too that come later; a policy that looks at them sees the future."""
        return self._state.workload

    @property
    def cluster(self) -> ClusterTree:
        """The GPUs and the units around them."""
        return self._state.cluster

    @property
    def speeds(self) -> Speeds:
        """The model of speed; `speed_of` asks it for a job where it would lie."""
        return self._state.speeds

    @property
    def waiting(self) -> Int64:
        """(k,) jobs that wait, in order of submission."""
        return np.array(sorted(self._state.waiting), np.int64)

    @property
    def running(self) -> Int64:
        """(k,) jobs that hold GPUs, in order of submission."""
        return np.array(sorted(self._state.running), np.int64)

    @property
    def blocked(self) -> int | None:
        """The first job of this decision that could not be placed."""
        return None if self._rules.blocked is None else self._rules.blocked.at

    # ---- one job
    def status(self, job: int) -> str:
        """Return one of future, waiting, running and done (also: can never be held)."""
        return self._state.jobs[job].status

    def gpus_of(self, job: int) -> tuple[int, ...]:
        """Return the GPUs it holds; of one preempted in this decision those it can get back for nothing; else none."""
        found = self._state.jobs[job]
        return tuple(sorted(found.gpus)) if found.status == RUNNING or found.reclaims else ()

    def remaining_s(self, job: int) -> float:
        """Return work left, in seconds at speed 1. A policy that uses it knows how long jobs run."""
        found = self._state.jobs[job]
        return (found.remaining - self._progressing_ns(found) * found.rate) / SECOND

    def attained_gpu_s(self, job: int) -> float:
        """Return service had: GPU-seconds held, restarts too."""
        found = self._state.jobs[job]
        return (found.gpu_ns + self._since_ns(found) * found.part) / SECOND

    def held_s(self, job: int) -> float:
        """Return seconds with GPUs."""
        found = self._state.jobs[job]
        return (found.held + self._since_ns(found)) / SECOND

    def last_ns(self, job: int) -> int:
        """Return when it last gained or lost GPUs, or was submitted."""
        return self._state.jobs[job].last

    def starts(self, job: int) -> int:
        """Return times it began to run."""
        return self._state.jobs[job].starts

    def band(self, job: int) -> int:
        """Return band of service, with order_rule "queues"."""
        return self._state.jobs[job].band

    def lease_end_ns(self, job: int) -> int:
        """Return when a running job's lease ends, with preempt_rule "lease"."""
        return self._state.jobs[job].lease_end

    def rate(self, job: int) -> float:
        """Return progress per second of a running job as it lies, in units of `work_s`."""
        return self._state.jobs[job].rate

    def estimate_s(self, job: int) -> float:
        """Run time as stated, the true one where nothing is stated."""
        return self._state.jobs[job].estimate / SECOND

    def speed_of(self, job: int, gpus: Sequence[int]) -> Speed:
        """Return how fast the job would run on these GPUs, nobody else being on them."""
        state = self._state
        return state.speed_alone(job, state.shape([int(each) for each in gpus])[0])

    def may_use(self, job: int, gpu: int) -> bool:
        """Return whether the GPU is of a kind that the job may use, works, and has room for it now."""
        state, found = self._state, self._state.jobs[job]
        return state.allowed[found.demand][state.kind_of[gpu]] and state.has_room(gpu, found)

    def quota_left(self, job: int) -> float:
        """Return GPUs that the job's tenant may still take; inf without a quota."""
        tenant = self._state.jobs[job].tenant
        if str(self.workload.tenant[job]) not in (self.cluster.quotas or {}):
            return float("inf")
        return float(self._state.facts.quota[tenant]) - self._state.used[tenant]

    # ---- GPUs
    @property
    def free_gpus(self) -> int:
        """How many GPUs work and are held by nobody."""
        return self._state.free_gpus

    def free(self, level: int = -1, gpu_type: str | None = None) -> list[int]:
        """Free GPUs of each unit of a level (−1: of the whole cluster, one number), of one kind or of all."""
        return list(self.cluster.counts(level, self._free(gpu_type)).tolist())

    def free_in(self, unit: int, level: int = -1, gpu_type: str | None = None) -> list[int]:
        """Return numbers of the free GPUs of one unit, of one kind or of all."""
        lo, hi = self.cluster.starts[level][unit : unit + 2].tolist()
        return list((lo + np.flatnonzero(self._free(gpu_type)[lo:hi])).tolist())

    def _free(self, gpu_type: str | None) -> Mask:
        """Return (GPUs,) which are free, of one kind or of all."""
        state = self._state
        if gpu_type is None:
            return state.open
        return state.open & np.isin(self.cluster.types, gpu_type)[self.cluster.gpu_type]

    def jobs_on(self, gpu: int) -> tuple[int, ...]:
        """Return jobs that hold a GPU."""
        return tuple(self._state.owners[gpu])

    def together(self, job: int, gpus: int, *, widest: int = -1) -> list[int]:
        """Return so many free GPUs of one kind that the job may use, in the tightest unit that has them, no wider than
        a level of the cluster (−1: the whole); [] where there is none. Of equal ones the unit with the fewest free
        GPUs.
        """
        state = self._state
        kinds = [kind for kind, may in enumerate(state.allowed[state.jobs[job].demand]) if may]
        return self._rules.find(kinds, range(widest % state.levels + 1), gpus)[1]

    # ---- the rules as written
    def ordered(self, waiting: Iterable[int]) -> Int64:
        """Return the waiting jobs as `order_rule` says, first served first."""
        return np.array(self._rules.ordered(int(each) for each in waiting), np.int64)

    def admitted(self, job: int) -> Wait | None:
        """Return none if `admit_rule` lets the job be tried now, else why not."""
        return self._rules.admitted(self._state.jobs[job])

    def placed(self, job: int) -> Sequence[int] | Wait:
        """Return as many GPUs as the job requests where `place_rule` allows, or why it has to wait.

        A job that needs a part of a GPU goes where others are already, on the fullest GPU that has room; if there is
        none, on a free one.
        """
        return self._rules.placed(self._state.jobs[job])

    def outranked(self) -> list[int]:
        """Return running jobs that have to make room as `preempt_rule` says."""
        return self._rules.outranked()

    def _since_ns(self, job: JobState) -> int:
        return self._state.now - job.mark if job.status == RUNNING else 0

    def _progressing_ns(self, job: JobState) -> int:
        return max(self._state.now - max(job.mark, job.ready), 0) if job.status == RUNNING else 0
