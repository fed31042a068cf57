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
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from foretrace.compiled import inner, njit
from foretrace.fleet.live.snapshot import QueuedJob
from foretrace.fleet.policies.slurm_options import SchedulerParameters
from foretrace.fleet.workload import Float64, Int64

FOREVER = 1e12  # seconds; beyond what is played
HORIZON_S = 3e7  # a year: who has not started by then is said not to start
MOST_TESTED = 5000  # jobs that backfill is played for, whatever bf_max_job_test says
GONE_, HELD_, QUEUED_ = 0, 1, 2  # states of a job


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Jobs in the order in which Slurm considers them, and nodes, in numbers; seconds count from the snapshot.

    jobs: (j) records, a task of an array each; left_out: jobs that are not played → why; notes: sentences.
    slots: (n,) GPUs of a node (cores where it has none), 0 where it takes no job; leaf: (n,) its leaf switch.
    running (j,) bool; nodes, each: (j,) nodes and slots on each; may: (j, n) bool, nodes it may use; held: (j, n) slots
    it has; limit: (j,) seconds from its start, as Slurm plans with; began: (j,) ≤ 0 start of a running one; eligible:
    (j,) from when it counts, FOREVER where nobody knows; part: (j,) partition; switches, insists: (j,) leaf switches
    and until when; waits_for: (j,) another job that must end first, −1 none; group, throttle: (j,) tasks of an array
    and how many of them may run at once (0 all). lag_s: from an event to the main scheduler's next look.
    """

    jobs: tuple[QueuedJob, ...]
    left_out: Mapping[str, str]
    notes: tuple[str, ...]
    slots: Int64
    leaf: Int64
    running: npt.NDArray[np.bool_]
    nodes: Int64
    each: Int64
    may: npt.NDArray[np.bool_]
    held: Int64
    limit: Float64
    began: Float64
    eligible: Float64
    part: Int64
    switches: Int64
    insists: Float64
    waits_for: Int64
    group: Int64
    throttle: Int64
    parameters: SchedulerParameters
    backfill: bool
    lag_s: float


def play(queue: Queue, run_s: Float64, phases: Float64, held: list[Int64] | None = None) -> Float64:
    """Return (draws, jobs) starts in seconds from now, FOREVER where a job does not start; those who run have theirs ≤
    0.

    run_s: (draws, jobs) how long each runs in all; phases: (draws,) in [0, 1), where in its interval backfill stands.
    held: filled with the slots, (j, n), that each job had, one array for each draw.
    """
    jobs, nodes = queue.may.shape
    starts = np.full(run_s.shape, FOREVER)
    given = queue.parameters
    interval, depth = max(float(given.bf_interval), 1.0), min(max(given.bf_max_job_test, 1), MOST_TESTED)
    most = jobs + 2 * min(depth, jobs) + 4
    rows, cells = np.empty((3, jobs)), np.empty((most, nodes), np.int64)
    for draw in range(len(run_s)):
        # what the play writes on is its own copy
        columns = [
            each for each in (getattr(queue, each.name) for each in fields(Queue)) if isinstance(each, np.ndarray)
        ]
        args = [np.array(each, order="C") for each in columns]
        if held is not None:
            held.append(args[6])
        _play(
            *args, np.array(run_s[draw], float), interval, given.bf_window * 60.0, depth, queue.backfill, queue.lag_s,
            float(phases[draw]) * interval, np.where(queue.running, HELD_, QUEUED_), starts[draw], rows[0],
            rows[1], queue.slots.copy(), np.zeros(queue.group.max(initial=-1) + 2, np.int64),
            np.zeros(queue.leaf.max(initial=-1) + 1, np.int64), np.empty(nodes, np.int64), np.empty(nodes, np.bool_),
            np.empty(queue.part.max(initial=0) + 1, np.bool_), np.empty(most), cells, np.empty(jobs, np.int64),
        )  # fmt: skip
    return starts


@inner
def _pick(fits, leaf, count, k, switches, chosen):  # type: ignore[no-untyped-def]
    """Choose k nodes of those that fit: in the leaf switch where they just fit, else in the fullest; how many.

    Within a leaf the first ones, whatever else is free on them (`slurm_nodes`).
    """
    for s in range(len(count)):
        count[s] = 0
    for n in range(len(fits)):
        if fits[n]:
            count[leaf[n]] += 1
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
def _start(j, now, nodes, each, run, limit, group, chosen, state, start, end, planned, crowd, free, held):  # type: ignore[no-untyped-def]
    """Give a job the chosen nodes now."""
    state[j], start[j], end[j], planned[j] = HELD_, now, now + run[j], now + limit[j]
    crowd[group[j] + 1] += 1
    for i in range(nodes[j]):
        free[chosen[i]] -= each[j]
        held[j, chosen[i]] = each[j]


@njit()
def _play(  # type: ignore[no-untyped-def]
    slots, leaf, running, nodes, each, may, held, limit, began, eligible, part, switches, insists, waits_for, group,
    throttle, run, interval, window, depth, backfill, lag, phase, state, start, end, planned, free, crowd, count,
    chosen, fits, blocked, times, table, order,
):  # fmt: skip
    n_jobs, n_nodes = len(nodes), len(slots)
    left = 0
    for j in range(n_jobs):
        if running[j]:
            start[j] = began[j]
            end[j] = max(began[j] + run[j], 0.0)
            planned[j] = began[j] + limit[j]
            crowd[group[j] + 1] += 1
            for n in range(n_nodes):
                free[n] -= held[j, n]
        elif eligible[j] < FOREVER:
            left += 1
    for n in range(n_nodes):
        free[n] = max(free[n], np.int64(0))
    most = len(times)
    now, look, fill = 0.0, 0.0, phase  # next looks of the main and of the backfill scheduler
    looked = phase - interval
    while left > 0 and now < HORIZON_S:
        # the next thing that happens
        soon, comes = FOREVER, FOREVER
        for j in range(n_jobs):
            if state[j] == HELD_:
                soon = min(soon, end[j])
            elif state[j] == QUEUED_:
                if eligible[j] > now and waits_for[j] < 0:
                    comes = min(comes, eligible[j])
                if now < insists[j] < FOREVER and switches[j] > 0:
                    comes = min(comes, insists[j])
        then = min(soon, comes, look, fill if backfill else FOREVER)
        if then >= FOREVER:
            break
        now = max(then, now)
        happened = comes <= now
        for j in range(n_jobs):
            if state[j] == HELD_ and end[j] <= now:
                state[j] = GONE_
                happened = True
                crowd[group[j] + 1] -= 1
                for n in range(n_nodes):
                    if held[j, n] > 0:
                        free[n] = min(free[n] + held[j, n], slots[n])
                for i in range(n_jobs):
                    if waits_for[i] == j:
                        waits_for[i] = -1
                        eligible[i] = max(eligible[i], now)
        if happened:
            look = min(look, now + lag)
            if fill >= FOREVER:
                # where nothing had changed it slept for a second at a time (`slurm_clock`)
                due = looked + interval
                fill = due if due >= now else due + np.ceil(now - due)
        main = look <= now
        plan = backfill and fill <= now
        if not (main or plan):
            continue
        if main:
            look = FOREVER
        if plan:
            fill, looked = FOREVER, now
        for p in range(len(blocked)):
            blocked[p] = False
        changed = False
        if main:
            for j in range(n_jobs):
                if state[j] != QUEUED_ or eligible[j] > now or waits_for[j] >= 0 or blocked[part[j]]:
                    continue
                if throttle[j] > 0 and crowd[group[j] + 1] >= throttle[j]:
                    continue
                got = 0
                for n in range(n_nodes):
                    fits[n] = may[j, n] and free[n] >= each[j]
                    got += fits[n]
                if got >= nodes[j]:
                    got = _pick(fits, leaf, count, nodes[j], switches[j] if insists[j] > now else 0, chosen)
                if got < nodes[j]:
                    blocked[part[j]] = True
                    continue
                _start(j, now, nodes, each, run, limit, group, chosen, state, start, end, planned, crowd, free, held)
                left -= 1
        if not plan:
            continue
        # when each node has how many slots free by the limits of those who run
        rows = 0
        for j in range(n_jobs):
            if state[j] == HELD_:
                at_ = rows
                while at_ > 0 and planned[order[at_ - 1]] > planned[j]:
                    order[at_] = order[at_ - 1]
                    at_ -= 1
                order[at_] = j
                rows += 1
        times[0] = now
        for n in range(n_nodes):
            table[0, n] = free[n]
        last = 0
        for i in range(rows):
            j = order[i]
            at = max(planned[j], now + 1.0)
            if at > times[last]:
                last += 1
                times[last] = at
                for n in range(n_nodes):
                    table[last, n] = table[last - 1, n]
            for n in range(n_nodes):
                if held[j, n] > 0:
                    table[last, n] = min(table[last, n] + held[j, n], slots[n])
        tried = 0
        for j in range(n_jobs):
            if state[j] != QUEUED_ or eligible[j] > now or waits_for[j] >= 0:
                continue
            if throttle[j] > 0 and crowd[group[j] + 1] >= throttle[j]:
                continue
            tried += 1
            if tried > depth:
                break
            placed = False
            slice_ = 0
            while slice_ <= last and not placed:
                begin = times[slice_]
                if begin - now > window:
                    break
                got = 0
                for n in range(n_nodes):
                    fits[n] = may[j, n] and table[slice_, n] >= each[j]
                    got += fits[n]
                follow = slice_ + 1
                while got >= nodes[j] and follow <= last and times[follow] < begin + limit[j]:
                    for n in range(n_nodes):
                        if fits[n] and table[follow, n] < each[j]:
                            fits[n] = False
                            got -= 1
                    follow += 1
                if got >= nodes[j]:
                    tight = switches[j] if insists[j] > begin else 0
                    got = _pick(fits, leaf, count, nodes[j], tight, chosen)
                placed = got >= nodes[j]
                if not placed:
                    slice_ += 1
            if not placed:
                continue
            if slice_ == 0:
                _start(j, now, nodes, each, run, limit, group, chosen, state, start, end, planned, crowd, free, held)
                left -= 1
                changed = True
            # a slice ends where it does; whoever starts now holds its slots, whoever is planned its whole nodes
            until = times[slice_] + limit[j]
            cut = slice_ + 1
            while cut <= last and times[cut] < until:
                cut += 1
            if (cut > last or times[cut] > until) and last + 1 < most:
                for i in range(last, cut - 1, -1):
                    times[i + 1] = times[i]
                    for n in range(n_nodes):
                        table[i + 1, n] = table[i, n]
                last += 1
                times[cut] = until
                for n in range(n_nodes):
                    table[cut, n] = table[cut - 1, n]
            for i in range(nodes[j]):
                for row in range(slice_, cut):
                    table[row, chosen[i]] -= each[j] if slice_ == 0 else 1_000_000
        if changed:
            look = min(look, now + lag)
