"""Questions about one job in one cluster: why it waits, what holds the GPUs, and what would let it start sooner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.metrics import known, spread
from foretrace.fleet.policies import make
from foretrace.fleet.reasons import minutes
from foretrace.fleet.result import Cause, Decision, FleetResult, Segments
from foretrace.fleet.scene import Scene
from foretrace.fleet.speeds import ROUNDING
from foretrace.fleet.workload import SECOND, Int64, nanoseconds

MOST_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What is free at a level: GPUs with room for the job, the most in one unit, and units that could hold it."""

    level: str
    units: int
    free: int
    most: int
    fits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A job that holds GPUs at that moment."""

    job: str
    gpus: int
    until_s: float  # from that moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change that was tried, and what becomes of this job and of all."""

    change: str
    queue_s: float | None  # None: it does not finish
    mean_jct_s: float | None
    helps: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """The answer: where a job stood at one moment, and why.

    queue_s: waiting in all, None where it never ended; causes_s: seconds by reason; room: per level, at that moment, of
    kinds the job may use; holders: who held most; decisions about it, in order. best: what helps most of what answers
    the reason of the waiting, else of all, None where nothing helps; asked: parameters of `foretrace fleet whatif` that
    ask for it, else for the first that helps and that it knows.
    """

    job: str
    gpus: int
    tenant: str
    at_s: float
    status: str  # waiting, running, done, not submitted, never
    reason: str
    queue_s: float | None
    start_s: float | None
    end_s: float | None
    causes_s: dict[str, float]
    room: tuple[Room, ...]
    holders: tuple[Holder, ...]
    decisions: tuple[Decision, ...]
    remedies: tuple[Remedy, ...]
    best: Remedy | None
    asked: Mapping[str, str]


def why(
    scene: Scene,
    job: str,
    *,
    at_s: float | None = None,
    progress: Callable[[float], None] | None = None,
) -> Why:
    """Play the workload, and with changes, and look at one job at `at_s`, by default where its longest wait begins.

    Raises ForetraceError where there is no such job.
    """
    at = scene.workload.position(job)
    if at_s is not None and not (np.isfinite(at_s) and at_s >= 0):
        raise ForetraceError(f"`at={at_s:g}` is no time; give seconds after the first submission, from 0 up.")
    changes = list(_changes(scene))
    whole = scene.play(explain=job, record="devices")
    moment = int(nanoseconds(at_s)) if at_s is not None else _telling_moment(whole, at)
    remedies: list[Remedy] = []
    answering: list[Remedy] = []
    asked: dict[str, Mapping[str, str]] = {}
    for i, (name, changed, answers, words) in enumerate(changes):
        if progress is not None:
            progress((i + 1) / (len(changes) + 1))
        remedies.append(_tried(name, changed, whole, at))
        if remedies[-1].helps:
            asked[name] = words
            if int(whole.waited_ns[at].argmax()) in answers and whole.waited_ns[at].any():
                answering.append(remedies[-1])
    helping = answering or [each for each in remedies if each.helps]
    # Of equals the first one: what can be changed stands before what has to be bought.
    best = min(helping, key=lambda each: each.queue_s or 0.0, default=None)
    segments = whole.segments
    assert segments is not None
    return Why(
        job=job,
        gpus=int(scene.workload.gpus[at]),
        tenant=str(scene.workload.tenant[at]),
        at_s=moment / SECOND,
        status=_status(whole, at, moment),
        reason=_reason(whole, at, moment),
        queue_s=known(whole.queue_s[at]),
        start_s=int(whole.start_ns[at]) / SECOND if whole.start_ns[at] >= 0 else None,
        end_s=int(whole.end_ns[at]) / SECOND if whole.end_ns[at] >= 0 else None,
        causes_s={
            Cause(cause).name.lower(): waited / SECOND
            for cause, waited in enumerate(whole.waited_ns[at].tolist())
            if waited > 0
        },
        room=_room(scene, segments, at, moment),
        holders=_holders(whole, segments, moment),
        decisions=whole.decisions,
        remedies=tuple(remedies),
        best=best,
        asked=next(filter(None, [asked[best.change], *asked.values()]), {}) if best else {},
    )


def _changes(scene: Scene) -> Iterator[tuple[str, Scene, tuple[Cause, ...], Mapping[str, str]]]:
    """Yield what may help: its name, the scene so changed, the causes of waiting that it answers, and `Why.asked`.

    Letting others pass, another policy, a wider placement, no quotas, and last what has to be bought.
    """
    tree, policy = scene.cluster, scene.policy
    fifo = policy.name == "fifo"
    queued = (Cause.BEHIND, Cause.UNDECIDED)
    apart = (Cause.SCATTERED, Cause.TIMER)
    if policy.compiled:
        if policy.admit_rule == "block":
            then = replace(scene, policy=replace(policy, admit_rule="skip"))
            yield "others may pass", then, queued, {"policy": "fifo-skip"} if fifo else {}
        if policy.preempt_rule == "keep":
            then = replace(scene, policy=make("las"))
            yield "policy las (leases of 1 h)", then, (*queued, Cause.RESERVED), {"policy": "las"}
        if policy.place_rule != "greedy" and len(tree.levels) > 1:
            then = replace(scene, policy=replace(policy, place_rule="greedy"))
            yield "jobs may spread at once", then, apart, {"policy": "fifo consolidate=no"} if fifo else {}
    if tree.quotas:
        yield "no quotas", replace(scene, cluster=replace(tree, quotas=None)), (Cause.QUOTA,), {}
    if len(tree.levels) > 1:
        then = replace(scene, cluster=tree.bigger(1))
        yield f"one more {tree.levels[-2]}", then, (Cause.FULL, Cause.TYPE, Cause.OUTRANKED, *apart), {"add_rack": "1"}


def _tried(name: str, changed: Scene, now: FleetResult, at: int) -> Remedy:
    then = changed.play()
    queue, before = known(then.queue_s[at]), known(now.queue_s[at])
    return Remedy(
        change=name,
        queue_s=queue,
        mean_jct_s=known(spread(then.jct_s).mean),
        helps=queue is not None and (before is None or queue < before - 1e-9),
    )


def _telling_moment(result: FleetResult, at: int) -> int:
    """Return when the job's longest stretch of waiting had begun: its submission, or when it lost its GPUs."""
    segments = result.segments
    assert segments is not None
    mine = np.flatnonzero(segments.job == at)
    begins = np.concatenate([[result.workload.submit_ns[at]], segments.end_ns[mine]])
    ends = np.concatenate([segments.start_ns[mine], [begins[-1]]])
    return int(begins[int(np.argmax(ends - begins))])


def _status(result: FleetResult, at: int, moment: int) -> str:
    if result.never[at]:
        return "never"
    if moment < result.workload.submit_ns[at]:
        return "not submitted"
    if 0 <= result.end_ns[at] <= moment:
        return "done"
    segments = result.segments
    assert segments is not None
    mine = (segments.job == at) & (segments.start_ns <= moment) & (segments.end_ns > moment)
    return "running" if mine.any() else "waiting"


def _reason(result: FleetResult, at: int, moment: int) -> str:
    """Return the last decision about the job up to the moment."""
    if result.never[at]:
        return "no unit of the cluster, or its tenant's quota, can ever hold so many GPUs of the kinds it may use"
    past = [each for each in result.decisions if nanoseconds(each.time_s) <= moment]
    if not past:
        return "it was not submitted yet" if moment < result.workload.submit_ns[at] else "nothing was decided about it"
    last = past[-1]
    ago = moment - int(nanoseconds(last.time_s))
    return last.why + (f" (decided {minutes(ago)} earlier)" if ago > 0 and last.what == "wait" else "")


def _open(segments: Segments, moment: int) -> Int64:
    return np.flatnonzero((segments.start_ns <= moment) & (segments.end_ns > moment)).astype(np.int64)


def _room(scene: Scene, segments: Segments, at: int, moment: int) -> tuple[Room, ...]:
    tree = scene.cluster
    if len(segments) and not len(segments.devices):
        return ()
    load = np.zeros(tree.gpus)  # sum of the shares on each
    for segment in _open(segments, moment):
        load[segments.devices_of(int(segment))] += scene.workload.share[segments.job[segment]]
    room = load + scene.workload.share[at] <= 1 + ROUNDING
    usable = np.array(tree.usable(str(scene.workload.gpu_type[at])))[tree.gpu_type]
    found = []
    for level, name in enumerate(tree.levels):
        free = tree.counts(level, room & usable)
        fits = int((free >= scene.workload.gpus[at]).sum())
        found.append(Room(level=name, units=len(free), free=int(free.sum()), most=int(free.max()), fits=fits))
    return tuple(found)


def _holders(result: FleetResult, segments: Segments, moment: int) -> tuple[Holder, ...]:
    rows = _open(segments, moment)
    largest = rows[np.argsort(-segments.gpus[rows], kind="stable")][:MOST_SHOWN]
    return tuple(
        Holder(
            job=str(result.workload.job[segments.job[each]]),
            gpus=int(segments.gpus[each]),
            until_s=float(segments.end_ns[each] - moment) / SECOND,
        )
        for each in largest
    )
