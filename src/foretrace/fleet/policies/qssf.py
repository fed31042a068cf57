"""Quasi-shortest-service-first (Hu et al., SC 2021, Helios): by predicted run time × GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.policy import Policy
from foretrace.fleet.workload import SECOND, Float64, Workload


@dataclass(frozen=True, kw_only=True)
class QuasiShortest(Policy):
    """Sorted by predicted GPU-seconds."""

    memory: float = 0.8

    def key(self, workload: Workload) -> Float64:
        """Return (n,) predicted GPU-seconds."""
        return predicted_gpu_seconds(workload, memory=self.memory)


def qssf(*, memory: float = 0.8, block: bool = True) -> Policy:
    """The least predicted GPU time first; running jobs are left alone; with `block` nobody passes the first (as the
    authors ran it). memory: weight of older runs in the moving mean.
    """
    if not 0 <= memory <= 1:
        raise ForetraceError(f"policy 'qssf': memory must be 0 to 1, got {memory:g}; it is the weight of older runs.")
    return QuasiShortest(name="qssf", memory=memory, admit_rule="block" if block else "skip")


def predicted_gpu_seconds(workload: Workload, *, memory: float = 0.8) -> Float64:
    """Return (n,) GPU-seconds of each job as known when it is submitted.

    The moving mean (weight `memory` for what was) of earlier jobs of the same user (or tenant), model and number of
    GPUs that could have ended by then even without waiting; failing that of the same user; failing that of all. The
    very first are taken by their stated run time. The authors' gradient-boosted trees over names of jobs are not here:
    the logs here have none.
    """
    n = len(workload)
    who = [u or t for u, t in zip(workload.user, workload.tenant, strict=True)]
    exact = list(zip(who, workload.model.tolist(), workload.gpus.tolist(), strict=True))
    ends = workload.submit_ns + np.rint(workload.work_s * SECOND).astype(np.int64)
    by_end = np.argsort(ends, kind="stable")
    stated = np.where(np.isnan(workload.estimate_s), 0.0, workload.estimate_s)
    means: dict[object, float] = {}
    predicted = np.zeros(n)
    known = 0
    for job in range(n):
        now = workload.submit_ns[job]
        while known < n and ends[by_end[known]] <= now:
            done = int(by_end[known])
            for key in (exact[done], who[done], None):
                old = means.get(key)
                ran = workload.work_s[done]
                means[key] = ran if old is None else memory * old + (1 - memory) * ran
            known += 1
        found = [means[key] for key in (exact[job], who[job], None) if key in means]
        predicted[job] = found[0] if found else stated[job]
    return predicted * workload.gpus
