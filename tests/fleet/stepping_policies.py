"""Policies and speed models that tests of the step-by-step engine share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.fleet.policy import Policy, Wait
from foretrace.fleet.result import Cause
from foretrace.fleet.speeds import PairSpeeds, ProportionalSpeeds, Shape, Speed
from foretrace.fleet.stepping import View
from foretrace.fleet.workload import Int64, Workload


@dataclass(frozen=True, kw_only=True)
class Resizes(Policy):
    """Elastic jobs take what there is between their least and most GPUs, and grow when GPUs are left over."""

    def preempt(self, view: View) -> list[int]:
        if len(view.waiting) or not view.free_gpus:
            return []
        most = view.workload.max_gpus
        small = [job for job in view.running.tolist() if len(view.gpus_of(job)) < most[job]]
        return [job for job in small[:1] if self._room(view, job) > len(view.gpus_of(job))]

    def place(self, view: View, job: int) -> list[int] | Wait:
        work = view.workload
        if work.share[job] < 1:
            found = view.placed(job)
            return found if isinstance(found, Wait) else list(found)
        for count in range(int(work.max_gpus[job]), int(work.min_gpus[job]) - 1, -1):
            gpus = list(view.gpus_of(job)) if len(view.gpus_of(job)) == count else view.together(job, count)
            if gpus and count <= view.quota_left(job):
                return gpus
        return Wait(Cause.FULL)

    def _room(self, view: View, job: int) -> float:
        held = view.gpus_of(job)
        kind = view.cluster.types[int(view.cluster.gpu_type[held[0]])]
        room = view.free(gpu_type=kind)[0] + len(held)
        return min(room, len(held) + view.quota_left(job), int(view.workload.max_gpus[job]))


@dataclass(frozen=True, kw_only=True)
class Packs(Policy):
    """Jobs of one whole GPU go beside another such job where no GPU is free."""

    def place(self, view: View, job: int) -> list[int] | Wait:
        found = view.placed(job)
        work = view.workload
        if not isinstance(found, Wait) or work.gpus[job] > 1 or work.share[job] < 1 or view.quota_left(job) < 1:
            return found if isinstance(found, Wait) else list(found)
        for gpu in range(view.cluster.gpus):
            beside = view.jobs_on(gpu)
            if len(beside) == 1 and work.gpus[beside[0]] == 1 and work.share[beside[0]] == 1 and view.may_use(job, gpu):
                return [gpu]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A tenth slower for every further unit at each level, a fifth slower on GPUs of kind b."""

    name: str = "spread"

    def kinds(self, workload: Workload) -> Int64:
        return np.asarray(workload.gpus % 3, np.int64)

    def speed(self, workload: Workload, job: int, shape: Shape) -> Speed:
        progress = 1.0
        for units in shape.units:
            progress /= 1 + 0.1 * (units - 1)
        progress *= (0.8 if shape.gpu_type == "b" else 1.0) * (1.0 if shape.even else 0.93)
        return Speed(progress, 0.1 * (1 - progress))


def keeps_most() -> PairSpeeds:
    """Jobs on one GPU keep 0.6 of their speed beside their like and 0.8 beside others."""
    models = ("m0", "m1")
    left = {(a, b): 0.6 if a == b else 0.8 for a in models for b in models}
    return PairSpeeds(base=ProportionalSpeeds(), left=left)
