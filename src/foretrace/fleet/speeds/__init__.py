"""How fast a job runs where it was placed: the protocol, models by numbers of GPUs and by pairs, and what models ask of
the shape of a placement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from foretrace.errors import ForetraceError
from foretrace.fleet.workload import Int64, Workload

ROUNDING = 1e-9  # shares such as 0.1 + 0.2 + 0.7 are whole


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a placement decides speed: placements with equal shapes are equally fast for the same job.

    units: how many units of each level the GPUs lie in, innermost level first, the whole cluster last (always 1):
    8 GPUs on two nodes of one rack of a (rack, node) cluster are (2, 1, 1). even: every used unit of a level holds
    equally many of the GPUs. gpu_type: the kind of all of them ("" where the cluster names none). sharers: the
    largest number of other jobs on one of the GPUs.
    """

    gpus: int
    units: tuple[int, ...]
    even: bool = True
    gpu_type: str = ""
    sharers: int = 0

    @property
    def level(self) -> int:
        """Level of the smallest unit that holds all: 0 one GPU, 1 the innermost units (nodes), ..."""
        if self.gpus == 1:
            return 0
        return 1 + next(i for i, count in enumerate(self.units) if count == 1)


@dataclass(frozen=True, slots=True)
class Speed:
    """Progress per second of a job in units of its `work_s` (1: as fast as the workload says), and the part of the
    running time that is communication not hidden behind compute (0 where the model does not know).
    """

    progress: float
    communication: float = 0.0


class Speeds(Protocol):
    """A model of speed by placement. It must be a function of (kind of job, shape): the engine asks once for each."""

    @property
    def name(self) -> str:
        """What the model is called in answers."""
        ...

    def kinds(self, workload: Workload) -> Int64:
        """Return (n,) small whole numbers: jobs with the same kind are equally fast in the same shape."""
        ...

    def speed(self, workload: Workload, job: int, shape: Shape) -> Speed:
        """Return the speed of the job at this position in `workload`, in a placement of this shape.

        Raises ForetraceError where the model does not know the job or the shape; it never guesses in silence.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProportionalSpeeds:
    """Placement does not matter, the number of GPUs does: 1 on as many as a job requests, else in proportion."""

    name: str = "in proportion to GPUs"

    def kinds(self, workload: Workload) -> Int64:
        """Return (n,) the GPUs that jobs ask for."""
        return workload.gpus

    def speed(self, workload: Workload, job: int, shape: Shape) -> Speed:
        """Return GPUs held over GPUs asked for. Jobs that share a GPU by parts leave each other theirs."""
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
        """Return (n,) those of the model for jobs alone."""
        return self.base.kinds(workload)

    def speed(self, workload: Workload, job: int, shape: Shape) -> Speed:
        """Return the speed as if the job were alone."""
        return self.base.speed(workload, job, replace(shape, sharers=0))

    def pair(self, workload: Workload, job: int, other: int) -> float:
        """Return the part of its speed that a job keeps beside the other. Raises ForetraceError for an unknown pair."""
        key = str(workload.model[job]), str(workload.model[other])
        if key not in self.left:
            raise ForetraceError(
                f"nothing is known of {key[0]!r} beside {key[1]!r} on one GPU; add the part of its speed that it keeps."
            )
        return self.left[key]


def dimensions(shape: Shape) -> tuple[tuple[int, int], ...]:
    """Return (level, size) of each dimension of an all-reduce over these GPUs, innermost first; sizes from 2.

    GPUs that lie evenly make one dimension per level: GPUs per node, nodes per rack, ... Uneven ones make a flat ring
    of all of them at the widest level that they use (shared reference of ArtISt-sim; its hierarchy differs there).
    """
    if shape.gpus == 1:
        return ()
    inside = (shape.gpus, *shape.units[:-1])
    whole = all(below % units == 0 for below, units in zip(inside, shape.units, strict=True))
    if not shape.even or not whole:
        return ((shape.level - 1, shape.gpus),)
    sizes = [below // units for below, units in zip(inside, shape.units, strict=True)]
    return tuple((level, size) for level, size in enumerate(sizes) if size > 1)


def alone(speeds: str, shape: Shape) -> None:
    """Raise ForetraceError where other jobs are on the same GPUs, for models that know nothing of sharing."""
    if shape.sharers:
        raise ForetraceError(
            f"the speed model {speeds!r} does not know how jobs slow each other down on one GPU; give every job whole "
            "GPUs, or use a table of pairs."
        )
