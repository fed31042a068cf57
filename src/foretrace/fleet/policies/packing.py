"""Gandiva's packing (Xiao et al., OSDI 2018): two jobs on the same GPUs where both together get more done; and JigSaw
(arXiv 2111.10672) in a cluster: two jobs with partial backpropagation fill each other's gaps on their GPUs.

What two jobs do to each other comes from the model of speed, by its method `pair`; `TablePairs` has it from Gavel's
measured pairs, `JigsawSpeeds` in reproductions/jigsaw plays their iterations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.policy import PlaceRule, Policy, Wait
from foretrace.fleet.speeds import Shape, Speed
from foretrace.fleet.speeds.throughputs import ThroughputTable
from foretrace.fleet.workload import Workload

if TYPE_CHECKING:
    from foretrace.fleet.stepping import View


@dataclass(frozen=True, kw_only=True)
class Packing(Policy):
    """A job that finds no free GPUs goes onto those of a running one, with which the sum of what both keep of their
    speeds is largest and above `threshold`; it moves out when GPUs are free that nobody waits for.
    """

    threshold: float = 1.0
    resizes = False

    def validate(self) -> None:
        """See `Policy.validate`."""
        if not (np.isfinite(self.threshold) and self.threshold >= 0):
            raise ForetraceError(
                f"policy {self.name!r}: threshold is what two jobs get done together, 1 as one alone, not "
                f"{self.threshold:g}; give threshold=1.1 or so."
            )
        Policy.validate(self)

    def place(self, view: View, job: int) -> list[int] | Wait:
        """Free GPUs, or those of a partner."""
        mine = view.gpus_of(job)
        if mine and any(view.jobs_on(gpu) for gpu in mine):  # it makes room below, to move out
            return view.together(job, len(mine), widest=view.cluster.around(mine)) or list(mine)
        found = view.placed(job)
        if not isinstance(found, Wait):
            return list(found)
        beside = self._partner(view, job)
        return found if beside is None else list(view.gpus_of(beside))

    def preempt(self, view: View) -> list[int]:
        """Return one of two that share, if there are free GPUs for it and nobody waits; the one that gains most."""
        if len(view.waiting) or not view.free_gpus:
            return []
        best: tuple[float, int] | None = None
        for job in view.running.tolist():
            gpus = view.gpus_of(job)
            others = {other for gpu in gpus for other in view.jobs_on(gpu)} - {job}
            if not others or _share(view, job) < 1:
                continue
            if not view.together(job, len(gpus), widest=view.cluster.around(gpus)):
                continue
            left = min(what_is_left(view, job, other) for other in others)
            if left < 1 and (best is None or left < best[0]):
                best = left, job
        return [] if best is None else [best[1]]

    def _partner(self, view: View, job: int) -> int | None:
        """Return the running job of as many whole GPUs, alone on them, beside which most is done."""
        work, best, found = view.workload, self.threshold, None
        count = int(work.gpus[job])
        if _share(view, job) < 1 or view.quota_left(job) < count:
            return None
        for other in view.running.tolist():
            gpus = view.gpus_of(other)
            if len(gpus) != count or _share(view, other) < 1 or not all(view.may_use(job, gpu) for gpu in gpus):
                continue
            if any(len(view.jobs_on(gpu)) > 1 for gpu in gpus):
                continue
            mine, its = what_is_left(view, job, other), what_is_left(view, other, job)
            if mine > 0 and its > 0 and mine + its > best:
                best, found = mine + its, other
        return found


def _share(view: View, job: int) -> float:
    return float(view.workload.share[job])


def what_is_left(view: View, job: int, other: int) -> float:
    """Return the part of its speed that a job keeps beside another one; 0 where the two cannot be together.

    Raises ForetraceError where the model of speed knows nothing of pairs.
    """
    speeds = view.speeds
    pair = getattr(speeds, "pair", None)
    if pair is None:
        raise ForetraceError(
            f"packing needs to know what jobs on one GPU do to each other, and the speed model {speeds.name!r} does "
            "not; give `speeds=` 'throughputs=FILE pairs=yes', or in Python one with pair(workload, job, other), such "
            "as TablePairs."
        )
    return float(pair(view.workload, job, other))


@dataclass(frozen=True, eq=False)
class TablePairs(ThroughputTable):
    """Gavel's measured speeds with its measured pairs, on the reference kind of GPU.

    What is left of a job's speed is taken from both jobs together in one machine, also where they lie apart.
    """

    def speed(self, workload: Workload, job: int, shape: Shape) -> Speed:
        """Return the speed as if the job were alone; raises ForetraceError on a kind of GPU that the pairs lack."""
        if shape.gpu_type not in ("", self.reference):
            raise ForetraceError(
                f"the pairs of {self.name} are those on {self.reference}, and the cluster has {shape.gpu_type}; play "
                f"them on a cluster of {self.reference} only, or name another kind as the reference."
            )
        return super().speed(workload, job, replace(shape, sharers=0))

    def pair(self, workload: Workload, job: int, other: int) -> float:
        """Return the part of its speed that a job keeps beside the other; 0 where they do not fit or are unmeasured."""
        one, two = ((str(workload.model[at]), int(workload.gpus[at])) for at in (job, other))
        alone = self.rate(self.reference, *one)
        return self.pair_rates(self.reference, one, two)[0] / alone if one[1] == two[1] and alone > 0 else 0.0


def _pack(name: str, threshold: float, consolidate: bool) -> Packing:
    place: PlaceRule = "strict" if consolidate else "greedy"
    return Packing(name=name, threshold=threshold, place_rule=place, options={"sharers": 2})


def packing(*, threshold: float = 1.0, consolidate: bool = True) -> Policy:
    """In order of submission; where no GPU is free, beside the running job with which both together keep most of their
    speeds, if that is more than `threshold` (1: as much as one alone). One of two moves out when GPUs are free.

    It needs a model of speed that knows pairs. consolidate: wait for the tightest unit that can hold the job.
    """
    return _pack("packing", threshold, consolidate)


def jigsaw(*, threshold: float = 1.0, consolidate: bool = True) -> Policy:
    """In order of submission; where no GPU is free, two jobs of equally many workers interleave their iterations if
    together they do more than `threshold` times what one does alone. It needs a model of speed that knows pairs, such
    as `JigsawSpeeds`. consolidate: wait for the tightest unit that can hold the job.
    """
    return _pack("jigsaw", threshold, consolidate)
