"""Decisions in words: what the compiled engine wrote down as numbers, as a person would say it."""

from __future__ import annotations

from typing import Any

from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.result import Cause, Decision
from foretrace.fleet.workload import SECOND, Workload

WHAT = ("start", "wait", "preempt", "migrate", "finish", "fail")


def decisions_of(log: Any, workload: Workload, cluster: ClusterTree) -> tuple[Decision, ...]:
    """Return everything that was decided about the watched jobs, in order; `log` is the compiled engine's (`EVENT`)."""
    from foretrace.fleet.engine import memory as engine

    made = []
    for now, job, what, a, b, last in log.tolist():
        gpus = int(workload.gpus[job])
        if what == engine.L_WAIT:
            cause = Cause(a // 1_000_000)
            why = waiting(cause, gpus, cluster, widest=a % 1_000_000, value=b, now=now, last=last)
        elif what == engine.L_START:
            why = started(gpus, cluster, level=a, gpu=b)
        elif what == engine.L_PREEMPT:
            why = preempted(a)
        elif what == engine.L_MIGRATE:
            why = f"a {cluster.levels[a]} became free that holds all its {gpus} GPUs, and it ends sooner there"
        elif what == engine.L_FAIL:
            why = f"a machine under it broke; {minutes(a)} of work since its last checkpoint are lost"
        else:
            why = "all its work is done"
        made.append(Decision(time_s=now / SECOND, job=str(workload.job[job]), what=WHAT[what], why=why))
    return tuple(made)


def waiting(
    cause: int, gpus: int, cluster: ClusterTree, *, widest: int = 0, value: int = 0, now: int = 0, last: int = 0
) -> str:
    """Return why a job waits. `value`: GPUs that are free, or for a timer the time (ns) when it runs out."""
    ask = f"{gpus:,} GPU{'s' if gpus > 1 else ''}"
    unit = cluster.levels[widest]
    if cause == Cause.FULL:
        return f"it requests {ask}, {value:,} are free"
    if cause == Cause.SCATTERED:
        return f"waiting for a {unit} with {gpus:,} free: {value:,} are free, but no {unit} has them together"
    if cause == Cause.TIMER:
        wider = cluster.levels[min(widest + 1, len(cluster.levels) - 1)]
        ran, whole = (now - last) / SECOND / 60, (value - last) / SECOND / 60
        return f"waiting for a {unit} with {gpus:,} free: timer {ran:.3g} of {whole:.3g} min, then a {wider} will do"
    return {
        Cause.UNDECIDED: "the policy has not come to it yet",
        Cause.BEHIND: "a job before it does not fit, and nobody may pass",
        Cause.QUOTA: f"with {ask} more its tenant would hold more than its quota",
        Cause.TYPE: f"enough GPUs are free, but not {gpus:,} of one kind that it may use",
        Cause.RESERVED: "it would delay the first in line, for which GPUs are reserved",
        Cause.OUTRANKED: "others have a better claim to its GPUs",
        Cause.ROUND: "the policy decides again at the next round",
    }[Cause(cause)]


def started(gpus: int, cluster: ClusterTree, *, level: int, gpu: int) -> str:
    """Return where a job starts. `level` as the engine counts (0: the innermost units)."""
    unit = cluster.unit_name(level, cluster.unit_of(level, gpu))
    if level == len(cluster.levels) - 1 and len(cluster.levels) > 1:
        return f"{gpus:,} GPUs are free across the cluster, and it may spread"
    together = "" if gpus == 1 else " together"
    return f"{unit} has {gpus:,} GPU{'s' if gpus > 1 else ''} free{together}"


def preempted(gpus: int) -> str:
    """Return why a job lost its GPUs."""
    return f"its turn ended and others were served first; it gave back {gpus:,} GPU{'s' if gpus > 1 else ''}"


def minutes(ns: float) -> str:
    """Return a duration in the unit that reads best."""
    seconds = ns / SECOND
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
