"""JigSaw: what sharing GPUs iteration by iteration gains, with and without partial backpropagation.

Time-sharing alone gains, too, so `four_arms` keeps both effects apart: whole or partial backward pass, each on GPUs of
its own or shared. `jigsaw_speeds` tells how fast jobs run beside each other, as a table for a cluster simulator. The
schedules are those of `schedule`, the method JigSaw's (arXiv 2111.10672).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.workload import Float64
from reproductions.jigsaw.schedule import IterationSchedule, Rules, rate, refusal, schedule
from reproductions.jigsaw.tasks import FOR_EVER, IterationJob, compute_bound

FIRST_READY = Rules(order="first-ready")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arms:
    """Efficiencies (`IterationSchedule.throughput`) of the same jobs under the four combinations."""

    own: float  # whole backward pass, GPUs of its own
    packed: float  # whole backward pass, GPUs shared
    partial: float  # partial backward pass, GPUs of its own
    jigsaw: float  # partial backward pass, GPUs shared
    bound: float  # `compute_bound` of the jobs − 1
    slowest: float  # of the last arm: least relative speed of a job that found room, 0 for one that is starved

    @property
    def time_sharing(self) -> float:
        """What sharing gains without partial backpropagation, as a share of the first arm."""
        return self.packed / self.own - 1

    @property
    def partial_alone(self) -> float:
        """What partial backpropagation gains without sharing."""
        return self.partial / self.own - 1

    @property
    def together(self) -> float:
        """What both gain: (1 + time_sharing) (1 + partial_share) − 1."""
        return self.jigsaw / self.own - 1

    @property
    def partial_share(self) -> float:
        """What partial backpropagation adds to sharing."""
        return self.jigsaw / self.packed - 1


def four_arms(jobs: Sequence[IterationJob], gpus: int, rules: Rules, *, iterations: int = 64) -> Arms:
    """The same jobs with and without sharing, with and without partial backpropagation, as they run for ever.

    iterations: how many of the slowest job fit into the time that is watched, after an eighth that is not; it is longer
    by as much as workers outnumber GPUs. Jobs that find no room in an arm wait outside it and do not count there.
    """
    endless = [replace(each, iterations=FOR_EVER) for each in jobs]
    whole = [each.whole() for each in endless]
    crowd = max(sum(each.workers for each in jobs) / gpus, 1.0)
    slowest = max(max(each.alone_ns for each in many) for many in (endless, whole)) + rules.switch_ns
    until = round(iterations * crowd * slowest)

    def played(many: Sequence[IterationJob], slots: int) -> IterationSchedule:
        return schedule(many, gpus, replace(rules, slots=slots), until_ns=until)

    warm = until // 8
    jigsaw = played(endless, rules.slots)
    relative = [
        rate(ends, warm, until) * (job.full_ns + job.full_communication_ns)
        for ends, job, where in zip(jigsaw.barriers_ns, jobs, jigsaw.placement, strict=True)
        if where
    ]
    return Arms(
        own=played(whole, 1).throughput(warm, until),
        packed=played(whole, rules.slots).throughput(warm, until),
        partial=played(endless, 1).throughput(warm, until),
        jigsaw=jigsaw.throughput(warm, until),
        bound=compute_bound(endless) - 1,
        slowest=min(relative),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedSpeeds:
    """How fast jobs run on the same GPUs, iteration by iteration.

    relative: (n,) iterations per time as a share of those on GPUs of its own with the whole backward pass.
    gain: iterations that the GPUs do more than if the jobs took turns on them, holding them alone: Σ relative − 1 where
    all have equally many workers.
    """

    names: tuple[str, ...]
    relative: Float64
    gain: float


def jigsaw_speeds(
    jobs: Sequence[IterationJob],
    rules: Rules = FIRST_READY,
    *,
    partial: bool = True,
    iterations: int = 64,
) -> SharedSpeeds:
    """Speeds of jobs that share GPUs 0, 1, ... for good, the first workers of each on the first GPU.

    Longest-first may starve a job of short tasks beside one that communicates nothing, so that first-ready is the
    default here. partial: False shares with the whole backward pass. iterations: how many of the slowest job are
    watched, after an eighth that is not. Raises ForetraceError where the jobs do not fit on one GPU.
    """
    if why := refusal(jobs, rules):
        raise ForetraceError(f"{why}; they cannot share it.")
    endless = [replace(each if partial else each.whole(), iterations=FOR_EVER) for each in jobs]
    slowest = max(each.alone_ns for each in endless) + rules.switch_ns
    until = iterations * len(jobs) * slowest * 8 // 7
    gpus = max(each.workers for each in jobs)
    found = schedule(endless, gpus, rules, placement=[range(each.workers) for each in endless], until_ns=until)
    alone = np.array([each.full_ns + each.full_communication_ns for each in jobs], np.float64)
    relative = alone * [rate(ends, until // 8, until) for ends in found.barriers_ns]
    gain = float((relative * [each.workers for each in jobs]).sum() / gpus - 1)
    return SharedSpeeds(names=tuple(each.name for each in jobs), relative=relative, gain=gain)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairTable:
    """Relative speeds of pairs of jobs that share their GPUs.

    relative: (n, n), row i column j the speed of i beside j, nan where both do not fit; alone: (n,) without a sharer.
    refused: why a pair is not there, by names.
    """

    names: tuple[str, ...]
    alone: Float64
    relative: Float64
    refused: Mapping[tuple[str, str], str]


def pair_speeds(
    kinds: Sequence[IterationJob],
    rules: Rules = FIRST_READY,
    *,
    partial: bool = True,
    iterations: int = 64,
) -> PairTable:
    """`jigsaw_speeds` of every pair of kinds of jobs, for a cluster simulator that lets two jobs share GPUs."""
    n = len(kinds)
    relative, refused = np.full((n, n), np.nan), dict[tuple[str, str], str]()
    for i in range(n):
        for j in range(i, n):
            both = (kinds[i], kinds[j])
            if why := refusal(both, rules):
                refused[kinds[i].name, kinds[j].name] = why
                continue
            one, other = jigsaw_speeds(both, rules, partial=partial, iterations=iterations).relative
            relative[i, j], relative[j, i] = one, other
            if i == j:
                relative[i, i] = (one + other) / 2
    alone = np.array([jigsaw_speeds([each], rules, partial=partial, iterations=8).relative[0] for each in kinds])
    return PairTable(names=tuple(each.name for each in kinds), alone=alone, relative=relative, refused=refused)
