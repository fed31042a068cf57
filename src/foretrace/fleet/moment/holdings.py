"""Who holds which GPUs, how many are free around them, and how fast a job runs where it lies."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.setup import Engine
from foretrace.fleet.speeds import Shape, Speed
from foretrace.fleet.speeds.shared import ROUNDING

FUTURE, WAITING, RUNNING, DONE = "future", "waiting", "running", "done"


@dataclass(slots=True, eq=False)
class JobState:
    """One job. `gpus` it holds, or has released in this decision where it `reclaims` them unless others take them."""

    at: int  # position in the workload
    wanted: int  # GPUs asked for
    fewest: int
    most: int
    share: float
    submit: int
    work: float
    remaining: float
    estimate: float
    key: float
    restart: int
    demand: int  # class of (GPUs, kinds allowed)
    size: int  # class of GPUs alone
    tenant: int
    kind: int  # class of jobs that are equally fast
    eager: bool
    status: str = FUTURE
    gpus: list[int] = field(default_factory=list)
    level: int = 0  # of the smallest unit around them, 0 the innermost units
    part: float = 0  # devices that count as its own: all of them where it shares none
    rate: float = 0.0
    talking: float = 0.0
    reclaims: bool = False
    band: int = 0
    last: int = 0  # when it last gained or lost GPUs
    lease_end: int = 0
    finish_at: int = 0
    mark: int = 0  # up to here progress is counted
    ready: int = 0  # from here it progresses
    fresh: int = 0  # when this stretch began to progress: what a failure can lose
    pace: list[tuple[int, float]] = field(default_factory=list)  # (since, speed) within this stretch
    stretch: int = 0
    stretch_dead: int = 0
    first: int = -1
    ended: int = -1
    held: int = 0
    dead: int = 0
    talk: float = 0.0
    gpu_ns: float = 0.0
    starts: int = 0
    preempted: int = 0
    failed: int = 0
    cause: int = 0
    cause_since: int = 0
    when: int = -1  # its event in the heap, −1 none


class Holdings:
    """GPUs, and who is on them. Levels are counted from the innermost units outwards; the last is the whole cluster."""

    jobs: list[JobState]

    def __init__(self, given: Engine) -> None:
        workload, cluster, policy, speeds = given.workload, given.cluster, given.policy, given.speeds
        self.workload, self.cluster, self.policy, self.speeds = workload, cluster, policy, speeds
        self.owners: list[list[int]] = [[] for _ in range(cluster.gpus)]
        self.broken = bytearray(cluster.gpus)
        self.sharers = int(policy.options.get("sharers", 1))  # jobs on one GPU even if their shares are above 1
        self.sharing = self.sharers > 1 or bool((workload.share < 1).any())
        self.known: dict[tuple[int, Shape], Speed] = {}  # asked once of the model for each kind of job and shape
        self._ask = given.speed
        self.pair = getattr(speeds, "pair", None)
        self.levels = len(cluster.levels)
        self.unit_at = [cluster.units_of(level).tolist() for level in range(self.levels)]  # of each GPU
        self.kind_of = cluster.gpu_type.tolist()
        self.of_kind = [cluster.gpu_type == kind for kind in range(len(cluster.types))]
        self.open = np.ones(cluster.gpus, bool)  # GPUs that work and that nobody holds
        self.free = [self.kind_of.count(kind) for kind in range(len(cluster.types))]  # how many of each kind
        self.free_gpus = cluster.gpus

    def count(self, gpu: int, by: int) -> None:
        """Count one GPU more or less as free."""
        self.open[gpu] = by > 0
        self.free[self.kind_of[gpu]] += by
        self.free_gpus += by

    def load(self, gpu: int) -> float:
        """Return sum of the shares on a GPU."""
        return sum(self.jobs[each].share for each in self.owners[gpu])

    def has_room(self, gpu: int, job: JobState) -> bool:
        """Return whether the job may be on this GPU beside those that are there."""
        if self.broken[gpu]:
            return False
        owners = self.owners[gpu]
        return not owners or len(owners) < self.sharers or self.load(gpu) + job.share <= 1 + ROUNDING

    # ---- speeds
    def shape(self, gpus: list[int], *, sharers: int = 0) -> tuple[Shape, int]:
        """Return what speed depends on, and the level of the smallest unit around the GPUs (0 the innermost)."""
        units, even = [], True
        for unit_at in self.unit_at:
            counts: dict[int, int] = {}
            for gpu in gpus:
                counts[unit_at[gpu]] = counts.get(unit_at[gpu], 0) + 1
            units.append(len(counts))
            even = even and len(set(counts.values())) == 1
        kind = self.cluster.types[self.kind_of[gpus[0]]]
        shape = Shape(gpus=len(gpus), units=tuple(units), even=even, gpu_type=kind, sharers=sharers)
        return shape, units.index(1)

    def speed_alone(self, job: JobState, shape: Shape) -> Speed:
        """Return what the model says of a shape."""
        if (job.kind, shape) not in self.known:
            self.known[job.kind, shape] = self._ask(job.at, shape)
        return self.known[job.kind, shape]

    def speed_on(self, job: JobState, gpus: list[int]) -> tuple[float, float, int, float]:
        """Return progress and communication on these GPUs beside their other jobs, the level, and its own part.

        A gang is as slow as on the GPU where its partners hold it up most. Where shares on a GPU are above 1, its time
        counts to each in proportion.
        """
        others = [[each for each in self.owners[gpu] if each != job.at] for gpu in gpus] if self.sharing else []
        crowd = max((len(each) for each in others), default=0)
        shape, level = self.shape(gpus, sharers=crowd)
        speed = self.speed_alone(job, shape)
        own: float = len(gpus)
        if job.share < 1 or crowd:
            loads = (max(1.0, job.share + sum(self.jobs[each].share for each in beside)) for beside in others)
            own = sum(job.share / load for load in loads)
        slowest = min((self._left(job, each) for each in others), default=1.0)
        return speed.progress * slowest, speed.communication, level, own

    def _left(self, job: JobState, others: list[int]) -> float:
        """Return what the partners on one GPU leave of the job's speed, one after the other."""
        factor = 1.0
        for other in others:
            if self.pair is None:
                if job.share + self.jobs[other].share > 1 + ROUNDING:
                    raise ForetraceError(
                        f"policy {self.policy.name!r} puts job {self._name(job.at)} on a GPU beside "
                        f"{self._name(other)}, and speed model {self.speeds.name!r} does not know what they do to each "
                        "other; give one with pair(workload, job, other), such as PairSpeeds."
                    )
                continue
            given = float(self.pair(self.workload, job.at, other))
            if not 0 < given < float("inf"):
                raise ForetraceError(
                    f"speed model {self.speeds.name!r} leaves job {self._name(job.at)} {given:g} of its speed beside "
                    f"{self._name(other)}; what is left is above 0."
                )
            factor *= given
        return factor

    def _name(self, at: int) -> str:
        return repr(str(self.workload.job[at]))
