"""How fast a job runs on any GPUs, beside any others: what the step-by-step engine asks of a speed model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.speeds import Shape, Speed, Speeds
from foretrace.fleet.workload import Int64, Workload

if TYPE_CHECKING:
    from foretrace.fleet.stepping.state import JobState, State

ROUNDING = 1e-9  # shares such as 0.1 + 0.2 + 0.7 are whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ProportionalSpeeds:
    """Placement does not matter, the number of GPUs does: 1 on as many as a job asks for, else in proportion."""

    name: str = "in proportion to GPUs"

    def kinds(self, workload: Workload) -> Int64:
        """(n,) the GPUs that jobs ask for."""
        return workload.gpus

    def speed(self, workload: Workload, job: int, shape: Shape) -> Speed:
        """GPUs held over GPUs asked for. Jobs that share a GPU by parts leave each other theirs."""
        return Speed(shape.gpus / int(workload.gpus[job]))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSpeeds:
    """A model for jobs alone, and what is left of a job's speed beside another one on the same GPU.

    left: by (model of the job, model of its partner) the part of its speed that the job keeps, above 0.
    Any model may have a method `pair` of its own: the engine multiplies by it.
    """

    base: Speeds
    left: Mapping[tuple[str, str], float]

    @property
    def name(self) -> str:
        """The name of the model for jobs alone."""
        return f"{self.base.name} with pairs"

    def kinds(self, workload: Workload) -> Int64:
        """(n,) those of the model for jobs alone."""
        return self.base.kinds(workload)

    def speed(self, workload: Workload, job: int, shape: Shape) -> Speed:
        """As if the job were alone."""
        return self.base.speed(workload, job, replace(shape, sharers=0))

    def pair(self, workload: Workload, job: int, other: int) -> float:
        """Part of its speed that a job keeps beside the other one. Raises ForetraceError for a pair not given."""
        key = str(workload.model[job]), str(workload.model[other])
        if key not in self.left:
            raise ForetraceError(
                f"nothing is known of {key[0]!r} beside {key[1]!r} on one GPU; add the part of its speed that it keeps."
            )
        return self.left[key]


class Rates:
    """Progress of jobs where they lie, asked once of the model for each kind of job and shape."""

    def __init__(self, state: State) -> None:
        self.state, self.speeds = state, state.speeds
        self.known: dict[tuple[int, Shape], Speed] = {}
        self.pair = getattr(state.speeds, "pair", None)

    def shape(self, gpus: list[int], *, sharers: int = 0) -> tuple[Shape, int]:
        """What speed depends on, and the level of the smallest unit around the GPUs (0 the innermost)."""
        state = self.state
        units, even = [], True
        for unit_at in state.unit_at:
            counts: dict[int, int] = {}
            for gpu in gpus:
                counts[unit_at[gpu]] = counts.get(unit_at[gpu], 0) + 1
            units.append(len(counts))
            even = even and len(set(counts.values())) == 1
        kind = state.cluster.types[state.kind_of[gpus[0]]]
        shape = Shape(gpus=len(gpus), units=tuple(units), even=even, gpu_type=kind, sharers=sharers)
        return shape, units.index(1)

    def alone(self, job: JobState, shape: Shape) -> Speed:
        """What the model says of a shape."""
        found = self.known.get((job.kind, shape))
        if found is None:
            found = self.speeds.speed(self.state.workload, job.at, shape)
            if not (np.isfinite(found.progress) and found.progress > 0):
                raise ForetraceError(
                    f"speed model {self.speeds.name!r} says that job {self._name(job.at)} makes no progress on "
                    f"{shape.gpus} GPUs ({shape}); a speed is above 0."
                )
            self.known[job.kind, shape] = found
        return found

    def on(self, job: JobState, gpus: list[int]) -> tuple[float, float, int, float]:
        """Progress and communication on these GPUs beside their other jobs, the level, and what counts as its own.

        A gang is as slow as on the GPU where its partners hold it up most. Where shares on a GPU are above 1, its time
        counts to each in proportion.
        """
        state = self.state
        others = [[each for each in state.owners[gpu] if each != job.at] for gpu in gpus] if state.sharing else []
        crowd = max((len(each) for each in others), default=0)
        shape, level = self.shape(gpus, sharers=crowd)
        speed = self.alone(job, shape)
        own: float = len(gpus)
        if job.share < 1 or crowd:
            loads = (max(1.0, job.share + sum(state.jobs[each].share for each in beside)) for beside in others)
            own = sum(job.share / load for load in loads)
        slowest = min((self._left(job, each) for each in others), default=1.0)
        return speed.progress * slowest, speed.communication, level, own

    def _left(self, job: JobState, others: list[int]) -> float:
        """What the partners on one GPU leave of the job's speed, one after the other."""
        factor = 1.0
        for other in others:
            if self.pair is None:
                if job.share + self.state.jobs[other].share > 1 + ROUNDING:
                    raise ForetraceError(
                        f"policy {self.state.policy.name!r} puts job {self._name(job.at)} on a GPU beside "
                        f"{self._name(other)}, and speed model {self.speeds.name!r} does not know what they do to each "
                        "other; give one with pair(workload, job, other), such as PairSpeeds."
                    )
                continue
            given = float(self.pair(self.state.workload, job.at, other))
            if not 0 < given < float("inf"):
                raise ForetraceError(
                    f"speed model {self.speeds.name!r} leaves job {self._name(job.at)} {given:g} of its speed beside "
                    f"{self._name(other)}; what is left is above 0."
                )
            factor *= given
        return factor

    def _name(self, at: int) -> str:
        return repr(str(self.state.workload.job[at]))
