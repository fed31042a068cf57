"""Speeds on any number of GPUs, and beside other jobs on the same GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from foretrace.errors import ForetraceError
from foretrace.fleet.speeds import Shape, Speed, Speeds
from foretrace.fleet.workload import Int64, Workload

ROUNDING = 1e-9  # shares such as 0.1 + 0.2 + 0.7 are whole


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
