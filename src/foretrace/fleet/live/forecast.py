"""The queue played on from a snapshot: Slurm's main and backfill scheduler on nodes, compiled, once per draw.

What is played is what slurm.conf(5) says of SchedulerType=sched/backfill. The main scheduler goes down the queue at
each event and stops in a partition at the first job that does not fit. Every `bf_interval` the backfill scheduler gives
each job, in order, the earliest start at which its nodes are free for its whole time limit, by the limits of those who
run, and starts those whose turn is now; what it keeps for a job are whole nodes. Jobs end when they do, not at their
limits. `fleet.engine` plays workloads from their beginning and counts GPUs; here the state in the middle is given.
"""

# The compiler takes plain loops and nested conditions as they are.
# mypy: disable-error-code="call-arg,no-untyped-call,no-any-return,misc,untyped-decorator"

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.compiled import inner, njit
from foretrace.fleet.live.records import QueuedJob
from foretrace.fleet.policies.slurm_options import SchedulerParameters
from foretrace.fleet.workload import Float64, Int64

FOREVER = 1e12  # seconds; beyond what is played
HORIZON_S = 3e7  # a year: who has not started by then is said not to start
MOST_TESTED = 5000  # jobs that backfill is played for, whatever bf_max_job_test says
GONE_, HELD_, QUEUED_ = 0, 1, 2  # states of a job
ROW = np.dtype(
    [(name, np.int64) for name in ("state", "nodes", "each", "part", "switches", "waits_for", "group", "throttle")]
    + [(name, np.float64) for name in ("limit", "eligible", "insists", "start", "run", "end", "planned")]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Jobs in the order in which Slurm considers them, and nodes, in numbers; seconds count from the snapshot.

    jobs: (j) records, a task of an array each, with limits; left_out: jobs that are not played → why; notes: sentences.
    slots: (n,) GPUs of a node (cores where it has none), 0 where it takes no job; leaf: (n,) its leaf switch.
    may: (j, n) bool, nodes a job may use; held: (j, n) slots it has. rows: (j,) of `ROW`: nodes and slots on each;
    partition; leaf switches it insists on, and until when; another job that must end first, −1 none; its array, −1
    none, and how many tasks of it may run at once (0 all); time limit, from its start; eligible from when it counts,
    FOREVER where nobody knows; start ≤ 0 of a running one. lag_s: from an event to the main scheduler's next look.
    """

    jobs: tuple[QueuedJob, ...]
    left_out: Mapping[str, str]
    notes: tuple[str, ...]
    slots: Int64
    leaf: Int64
    may: npt.NDArray[np.bool_]
    held: Int64
    rows: npt.NDArray[Any]
    parameters: SchedulerParameters
    backfill: bool
    lag_s: float


def play(queue: Queue, run_s: Float64, phases: Float64, held: list[Int64] | None = None) -> Float64:
    """Return (draws, jobs) starts in seconds from now: FOREVER for none, ≤ 0 of those who run.

    run_s: (draws, jobs) how long each runs in all; phases: (draws,) in [0, 1), where in its interval backfill stands.
    held: filled with the slots, (j, n), that each job had, one array for each draw.
    """
    starts = np.full(run_s.shape, FOREVER)
    given = queue.parameters
    interval, depth = max(float(given.bf_interval), 1.0), min(max(given.bf_max_job_test, 1), MOST_TESTED)
    for draw in range(len(run_s) if len(queue.jobs) else 0):
        rows, holding = queue.rows.copy(), queue.held.copy()
        rows["run"] = run_s[draw]
        _play(
            rows, queue.may, holding, queue.slots, queue.leaf, interval, given.bf_window * 60.0, depth, queue.backfill,
            queue.lag_s, float(phases[draw]) * interval,
        )  # fmt: skip
        starts[draw] = rows["start"]
        if held is not None:
            held.append(holding)
    return starts


@inner
def _fit(nodes, room, each, fits):  # type: ignore[no-untyped-def]
    """Mark those of these nodes that have room for so many slots; how many."""
    got = 0
    for n in range(len(fits)):
        fits[n] = nodes[n] and room[n] >= each
        got += fits[n]
    return got


@inner
def _pick(fits, leaf, count, k, switches, chosen):  # type: ignore[no-untyped-def]
    """Choose k nodes of those that fit: in the leaf switch where they just fit, else in the fullest; how many.

    Within a leaf the first ones, whatever else is free on them (`slurm_nodes`).
    """
    count[:] = 0
    for n in range(len(fits)):
        count[leaf[n]] += fits[n]
    taken, used = 0, 0
    while taken < k:
        want = k - taken
        best = -1
        for s in range(len(count)):
            if count[s] == 0:
                continue
            if best < 0:
                best = s
            elif count[s] >= want:
                if count[best] < want or count[s] < count[best]:
                    best = s
            elif count[best] < want and count[s] > count[best]:
                best = s
        used += 1
        if best < 0 or 0 < switches < used:
            return 0
        for n in range(len(fits)):
            if fits[n] and leaf[n] == best and taken < k:
                chosen[taken] = n
                taken += 1
        count[best] = 0
    return taken


@inner
def _earliest(job, nodes, times, table, last, latest, leaf, count, fits, chosen):  # type: ignore[no-untyped-def]
    """Find the first slice of time in which a job fits for its whole limit, and choose its nodes; −1 where none is."""
    for at in range(last + 1):
        if times[at] > latest:
            break
        got = _fit(nodes, table[at], job.each, fits)
        follow = at + 1
        while got >= job.nodes and follow <= last and times[follow] < times[at] + job.limit:
            got = _fit(fits, table[follow], job.each, fits)
            follow += 1
        if got >= job.nodes:
            got = _pick(fits, leaf, count, job.nodes, job.switches if job.insists > times[at] else 0, chosen)
        if got >= job.nodes:
            return at
    return -1


@inner
def _ready(job, now, crowd):  # type: ignore[no-untyped-def]
    """Return whether a job may be looked at."""
    waits = job.state == QUEUED_ and job.eligible <= now and job.waits_for < 0
    return waits and not 0 < job.throttle <= crowd[job.group + 1]


@inner
def _start(job, now, held, free, crowd, chosen):  # type: ignore[no-untyped-def]
    """Give a job the chosen nodes now."""
    job.state, job.start, job.end, job.planned = HELD_, now, now + job.run, now + job.limit
    crowd[job.group + 1] += 1
    for i in range(job.nodes):
        free[chosen[i]] -= job.each
        held[chosen[i]] = job.each


@inner
def _release(held, room, slots):  # type: ignore[no-untyped-def]
    """Add what a job holds to the room of its nodes."""
    for n in range(len(room)):
        if held[n] > 0:
            room[n] = min(room[n] + held[n], slots[n])


@njit()
def _play(jobs, may, held, slots, leaf, interval, window, depth, backfill, lag, phase):  # type: ignore[no-untyped-def]
    n_jobs, n_nodes = may.shape
    free, fits, chosen = slots.copy(), np.empty(n_nodes, np.bool_), np.empty(n_nodes, np.int64)
    count = np.empty(leaf.max() + 1, np.int64)
    crowd = np.zeros(n_jobs + 1, np.int64)  # tasks of an array that run; [0]: jobs of none
    blocked = np.empty(n_jobs, np.bool_)  # partitions
    most = n_jobs + 2 * min(depth, n_jobs) + 4
    times, table = np.empty(most), np.empty((most, n_nodes), np.int64)
    left = 0
    for j in range(n_jobs):
        job = jobs[j]
        job.planned = FOREVER
        if job.state == HELD_:
            job.end = max(job.start + job.run, 0.0)
            job.planned = job.start + job.limit
            crowd[job.group + 1] += 1
            free -= held[j]
        elif job.eligible < FOREVER:
            left += 1
    free = np.maximum(free, 0)
    now, look, fill = 0.0, 0.0, phase  # next looks of the main and of the backfill scheduler
    looked = phase - interval
    while left > 0 and now < HORIZON_S:
        # the next thing that happens
        soon, comes = FOREVER, FOREVER
        for job in jobs:
            if job.state == HELD_:
                soon = min(soon, job.end)
            elif job.state == QUEUED_:
                if job.eligible > now and job.waits_for < 0:
                    comes = min(comes, job.eligible)
                if job.insists > now and job.switches > 0:
                    comes = min(comes, job.insists)
        then = min(soon, comes, look, fill if backfill else FOREVER)
        if then >= FOREVER:
            break
        now = max(then, now)
        happened = comes <= now
        for j in range(n_jobs):
            job = jobs[j]
            if job.state == HELD_ and job.end <= now:
                happened = True
                job.state, job.planned = GONE_, FOREVER
                crowd[job.group + 1] -= 1
                _release(held[j], free, slots)
                for i in range(n_jobs):
                    if jobs[i].waits_for == j:
                        jobs[i].waits_for = -1
                        jobs[i].eligible = max(jobs[i].eligible, now)
        if happened:
            look = min(look, now + lag)
            if fill >= FOREVER:
                # where nothing had changed it slept for a second at a time (`SlurmClock`)
                due = looked + interval
                fill = due if due >= now else due + np.ceil(now - due)
        times[0] = now
        if look <= now:
            look = FOREVER
            blocked[:] = False
            for j in range(n_jobs):
                job = jobs[j]
                if blocked[job.part] or not _ready(job, now, crowd):
                    continue
                if _earliest(job, may[j], times, free.reshape(1, n_nodes), 0, now, leaf, count, fits, chosen) < 0:
                    blocked[job.part] = True
                    continue
                _start(job, now, held[j], free, crowd, chosen)
                left -= 1
        if not backfill or fill > now:
            continue
        fill, looked = FOREVER, now
        # when each node has how many slots free by the limits of those who run
        table[0], last = free, 0
        for j in np.argsort(jobs["planned"].copy(), kind="mergesort"):
            if jobs[j].state != HELD_:
                break
            at = max(jobs[j].planned, now + 1.0)
            if at > times[last]:
                last += 1
                times[last], table[last] = at, table[last - 1]
            _release(held[j], table[last], slots)
        tried = 0
        for j in range(n_jobs):
            job = jobs[j]
            if not _ready(job, now, crowd):
                continue
            tried += 1
            if tried > depth:
                break
            slice_ = _earliest(job, may[j], times, table, last, now + window, leaf, count, fits, chosen)
            if slice_ < 0:
                continue
            # a slice ends where it does; whoever starts now holds its slots, whoever is planned its whole nodes
            until = times[slice_] + job.limit
            cut = slice_ + 1
            while cut <= last and times[cut] < until:
                cut += 1
            if (cut > last or times[cut] > until) and last + 1 < most:
                for i in range(last, cut - 1, -1):
                    times[i + 1], table[i + 1] = times[i], table[i]
                last += 1
                times[cut], table[cut] = until, table[cut - 1]
            for i in range(job.nodes):
                table[slice_:cut, chosen[i]] -= job.each if slice_ == 0 else 1_000_000
            if slice_ == 0:
                _start(job, now, held[j], free, crowd, chosen)
                left -= 1
                look = min(look, now + lag)
