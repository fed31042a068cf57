"""Speeds of jobs that share GPUs iteration by iteration, for the policies `jigsaw` and `packing` of the simulator.

Packing with the whole backward pass is `JigsawSpeeds(partial=False)`: what is gained by sharing alone is to be told
apart from what partial backpropagation adds (fleet-lessons.md, section 6).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from foretrace.fleet.speeds import Shape, Speed, Speeds
from foretrace.fleet.workload import Int64, Workload, codes
from reproductions.jigsaw.schedule import Rules, refusal
from reproductions.jigsaw.sharing import FIRST_READY, jigsaw_speeds
from reproductions.jigsaw.tasks import IterationJob

Pair = tuple[str, int]  # model, GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class JigsawSpeeds:
    """Speeds of jobs whose iterations share GPUs, on top of a model `base` of their placement.

    tasks: an iteration of a model on so many GPUs, as many workers as GPUs; it raises ForetraceError for a model that
    it does not know. partial: False keeps the whole backward pass on every worker. Progress 1 is the whole backward
    pass on GPUs of its own. iterations: how many of the slower of two are watched.
    """

    base: Speeds
    tasks: Callable[[str, int], IterationJob]
    partial: bool = True
    rules: Rules = FIRST_READY
    iterations: int = 64
    known: dict[tuple[Pair, ...], tuple[float, ...]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        """For headings."""
        return f"{self.base.name}, iterations {'with partial backpropagation' if self.partial else 'as they are'}"

    def kinds(self, workload: Workload) -> Int64:
        """(n,) jobs alike to `base`, of one model and on as many GPUs, are equally fast."""
        return codes(
            zip(self.base.kinds(workload).tolist(), workload.model.tolist(), workload.gpus.tolist(), strict=True)
        )[0]

    def speed(self, workload: Workload, job: int, shape: Shape) -> Speed:
        """As if the job were alone on its GPUs."""
        placed = self.base.speed(workload, job, replace(shape, sharers=0))
        return Speed(placed.progress * self._relative(_pair(workload, job))[0], placed.communication)

    def pair(self, workload: Workload, job: int, other: int) -> float:
        """Part of that speed that is left beside the other job; 0 where both do not fit, or have unequal gangs."""
        one, two = _pair(workload, job), _pair(workload, other)
        if one[1] != two[1]:
            return 0.0
        first, second = sorted((one, two))  # who comes first matters a little: the same answer for both
        both = self._relative(first, second)
        mine = sum(both) / 2 if first == second else both[0 if one == first else 1]
        return mine / self._relative(one)[0]

    def _relative(self, *pairs: Pair) -> tuple[float, ...]:
        """Iterations per time of these jobs together, as a share of those with the whole pass on GPUs of their own."""
        if pairs not in self.known:
            jobs = [self.tasks(*each) for each in pairs]
            found: tuple[float, ...] = (0.0,) * len(jobs)
            if len(jobs) == 1 or not refusal(jobs, self.rules):
                speeds = jigsaw_speeds(jobs, self.rules, partial=self.partial, iterations=self.iterations)
                found = tuple(speeds.relative.tolist())
            self.known[pairs] = found
        return self.known[pairs]


def _pair(workload: Workload, job: int) -> Pair:
    return str(workload.model[job]), int(workload.gpus[job])
