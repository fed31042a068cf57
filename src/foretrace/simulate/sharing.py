"""Transfers that are in flight together share a link: what each is by itself, and when each ends if they take longer.

All of a moment get equal shares (processor sharing), which keeps the link busy as long as anything is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.replay import replay

_SETTLED_NS = 1


def alone_ns(start: Float64, end: Float64) -> Float64:
    """Return how long each of n transfers would take alone: its shares of the moments from `start` to `end`, ns."""
    alone, flying = np.zeros(len(start)), set[int]()
    moments = np.concatenate([start, end])
    last = 0.0
    for at in np.argsort(moments, kind="stable").tolist():
        now = float(moments[at])
        if flying:
            alone[list(flying)] += (now - last) / len(flying)
        last = now
        if at < len(start):
            flying.add(at)
        else:
            flying.discard(at - len(start))
    return alone


def shared_ends(start: Float64, alone: Float64) -> Float64:
    """Return when each of n transfers ends, ns, that begins at `start` and would take `alone` by itself."""
    left, end = alone.astype(np.float64), start.astype(np.float64)
    waiting, flying, now = np.argsort(start, kind="stable").tolist()[::-1], list[int](), 0.0
    while waiting or flying:
        now = now if flying else float(start[waiting[-1]])
        while waiting and start[waiting[-1]] <= now:
            flying.append(waiting.pop())
        # Each has so much of the link until the first one is over, exactly, or another one begins.
        each = float(left[flying].min())
        now, before = now + each * len(flying), now
        if waiting and start[waiting[-1]] < now:
            now = float(start[waiting[-1]])
            each = (now - before) / len(flying)
        left[flying] -= each
        end[flying] = now
        flying = [at for at in flying if left[at] > 1e-3]
    return end


def durations_alone(graph: TaskGraph, links: Sequence[Int64]) -> Float64:
    """Return durations of all tasks (n, ns) as they would be if no two transfers of a link were in flight together.

    `links` are rows of the tasks that share one each.
    """
    begin, over = replay(graph)
    dur = graph.dur.astype(np.float64)
    for rows in links:
        dur[rows] = alone_ns(begin[rows].astype(np.float64), over[rows].astype(np.float64))
    return dur


def durations_together(graph: TaskGraph, links: Sequence[Int64], alone: Float64) -> Int64:
    """Return durations of all tasks (n, ns) that would take `alone` by themselves, where links are shared.

    Starts are those of the replay with these durations, so that what waits for a transfer moves with its end. Nothing
    depends on what comes later, so every round settles at least the next transfer of each link.
    """
    plain = np.rint(alone).astype(np.int64)
    before = dur = plain
    for _ in range(sum(map(len, links)) + 1):
        begin, _ = replay(graph.with_columns(dur=dur))
        new = plain.copy()
        for rows in links:
            start = begin[rows].astype(np.float64)
            took = np.rint(shared_ends(start, alone[rows]) - start).astype(np.int64)
            new[rows] = np.where(took > plain[rows] + 1, took, plain[rows])
        if np.abs(new - dur).max(initial=0) <= _SETTLED_NS:
            return new
        before, dur = dur, new
    return np.maximum(before, dur)  # of ends that rounding moves to and fro, the later ones
