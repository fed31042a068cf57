"""The genetic search behind Pollux: which GPUs of which nodes go to which job.

Source of the mechanism: petuum/adaptdl, branch osdi21-artifact, simulator (Pollux, OSDI'21), which searches with
NSGA-II (Deb et al. 2002). The search is random; equal seeds give equal answers.

A state gives GPUs by (job, node). Two aims: the power mean with exponent -1 of the jobs' speed-ups against a fair
share, and how much of an ideal speed-up the cluster's GPUs yield. The state with the best first aim is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.fleet.workload import Float64, Int64

_CROSS, _RESET, _THIN, _DROP = 0.9, 0.1, 0.1, 0.1  # chances: mate, job back to what it holds, job thinned, node dropped
_ATTEMPTS = 5  # to find states that are new, per generation

State = npt.NDArray[np.int16]  # GPUs by (..., job, node)


@dataclass(frozen=True, slots=True, eq=False)
class Aim:
    """What a search is for: J jobs on N nodes.

    base: (J, N) GPUs held now. nodes: (N,) GPUs per node. most: (J,) replicas at most. speedup: (J, N + 1, total + 1)
    by nodes and replicas, scaled so that a fair share of one node counts 1. kept: (J,) factor on what changes.
    """

    base: State
    nodes: State
    most: Int64
    speedup: Float64
    kept: Float64

    def judge(self, states: State) -> Float64:
        """Return (k, 2) values of (k, J, N) states, smaller is better."""
        used, replicas = _total(states > 0, 2), _total(states, 2)
        speed = self.speedup[np.arange(len(self.base)), used, replicas]
        share = len(self.nodes) / self.nodes.sum()
        changed = (states != self.base).any(axis=2)
        scaled = speed * share * np.where(changed, self.kept, 1.0)
        mean = len(self.base) / (1 / (scaled + 1e-3)).sum(axis=1)
        # GPU-weighted mean of speed-up per replica, over the GPUs of the nodes in use.
        there = ((_total(states, 1) > 0) * self.nodes).sum(axis=1)
        useful = np.where(replicas > 0, speed, 0.0).sum(axis=1) / np.maximum(there, 1)
        return np.column_stack([-mean, -useful])

    def mutate(self, states: State, random: np.random.Generator) -> State:
        """Return changed copies: jobs put back to what they hold, nodes taken away, more given where GPUs are free."""
        k, j, n = states.shape
        reset = random.random((k, j, 1), np.float32) < _RESET
        states = np.where(reset, self.base, states)
        thin = random.random((k, j), np.float32) < _THIN
        rows = states[thin]
        rows[random.random(rows.shape, np.float32) < _DROP] = 0
        states[thin] = rows
        free = (_total(states, 1) < self.nodes).astype(np.float32)  # (k, n) 1 on nodes with a free GPU
        on = states > 0
        some = free / np.float32(j)  # chance of a job to be given more there, and more for one that is there already
        more = free / np.maximum(_total(on, 1), 1)
        chance = np.where(on, (some + more - some * more)[:, None], some[:, None])
        at = np.nonzero(random.random((k, j, n), np.float32) < chance)
        states[at] = random.integers(states[at], self.nodes[at[2]] + 1)
        return states

    def repair(self, states: State, random: np.random.Generator) -> State:
        """Enforce, in place, one job on several nodes per node, replicas per job, GPUs per node; first jobs first."""
        on = states > 0
        spread = (_total(on, 2) > 1)[:, :, None] & on
        # As published, this also takes the node from jobs behind the second spread one that use no other.
        states[spread.cumsum(axis=1, dtype=np.int16) > 1] = 0
        over = _total(states, 2) > self.most
        if over.any():
            rows, most = states[over], self.most[np.nonzero(over)[1]]
            mixed = np.argsort(random.random(rows.shape, np.float32), axis=1)
            kept = np.minimum(np.take_along_axis(rows, mixed, 1).cumsum(axis=1), most[:, None])
            np.put_along_axis(rows, mixed, np.diff(kept, axis=1, prepend=0).astype(np.int16), 1)
            states[over] = rows
        full = (_total(states, 1) > self.nodes).any(axis=1)
        if full.any():
            within = np.minimum(states[full].cumsum(axis=1, dtype=np.int16), self.nodes)
            within[:, 1:] -= within[:, :-1].copy()
            states[full] = within
        return states


def _total(values: npt.NDArray[Any], axis: int) -> State:
    """Return sum in 16 bits, enough for GPUs of a cluster and several times as fast."""
    total: State = np.add.reduce(values, axis=axis, dtype=np.int16)
    return total


def search(aim: Aim, start: State, population: int, generations: int, random: np.random.Generator) -> State:
    """Return the states of the first front after NSGA-II from `start`: (k, J, N)."""
    states = aim.repair(start.copy(), random)
    states = states[_new(states, set())]
    values = aim.judge(states)
    front, crowd = _fronts(values)
    for _ in range(generations - 1):
        seen = {state.tobytes() for state in states}
        found: list[State] = []
        missing = population
        for _ in range(_ATTEMPTS):
            born = aim.repair(aim.mutate(_mate(states, values, crowd, missing + missing // 4, random), random), random)
            born = born[_new(born, seen)[:missing]]
            found.append(born)
            missing -= len(born)
            if not missing or not len(born):
                break
        born = np.concatenate(found)
        states, values = np.concatenate([states, born]), np.concatenate([values, aim.judge(born)])
        front, crowd = _fronts(values)
        best = np.lexsort((random.random(len(states)), -crowd, front))[:population]
        states, values, front, crowd = states[best], values[best], front[best], crowd[best]
    first: State = states[front == 0]
    return first


def _new(states: State, seen: set[bytes]) -> Int64:
    """Return positions of states that were not seen before, each once; adds them to `seen`."""
    fresh = []
    for at, state in enumerate(states):
        key = state.tobytes()
        if key not in seen:
            seen.add(key)
            fresh.append(at)
    return np.array(fresh, np.int64)


def _mate(states: State, values: Float64, crowd: Float64, wanted: int, random: np.random.Generator) -> State:
    """Return pairs won by binary tournaments (dominance, then crowding) exchange their first jobs."""
    pairs = -(-wanted // 2)
    needed = 4 * pairs
    drawn = np.concatenate([random.permutation(len(states)) for _ in range(-(-needed // len(states)))])[:needed]
    a, b = drawn.reshape(2, -1)
    first = (values[a] <= values[b]).all(axis=1) & (values[a] < values[b]).any(axis=1)
    second = (values[b] <= values[a]).all(axis=1) & (values[b] < values[a]).any(axis=1)
    even = np.where(crowd[a] == crowd[b], random.random(len(a)) < 0.5, crowd[a] > crowd[b])
    mother, father = np.where(first | (~second & even), a, b).reshape(2, -1)
    jobs = states.shape[1]
    point = np.where(random.random(pairs) < _CROSS, random.integers(0, jobs, pairs), 0)
    swap = (np.arange(jobs) < point[:, None])[:, :, None]
    one, other = states[mother], states[father]
    return np.concatenate([np.where(swap, other, one), np.where(swap, one, other)])


def _fronts(values: Float64) -> tuple[Int64, Float64]:
    """Return (front, crowding) of (k, 2) values; front 0 is dominated by none.

    Crowding is the width of the gap around a point inside its front, infinite at the ends, 0 for repetitions.
    """
    order = np.lexsort((values[:, 1], values[:, 0]))
    tails: list[float] = []  # least second value per front so far; ascending
    fronts: list[int] = []
    last: tuple[float, float] | None = None
    for pair in values[order].tolist():
        if pair != last:
            at = bisect_right(tails, pair[1])  # the first front with no value that is as small
            if at == len(tails):
                tails.append(pair[1])
            else:
                tails[at] = pair[1]
        fronts.append(at)
        last = pair
    front = np.empty(len(values), np.int64)
    front[order] = fronts
    by = np.lexsort((values[:, 1], values[:, 0], front))
    sorted_front, sorted_values = front[by], values[by]
    fresh = np.ones(len(by), bool)
    fresh[1:] = (sorted_front[1:] != sorted_front[:-1]) | (sorted_values[1:] != sorted_values[:-1]).any(axis=1)
    distinct, which = sorted_values[fresh], sorted_front[fresh]
    edge = np.flatnonzero(which[1:] != which[:-1])
    starts, ends = np.append(0, edge + 1), np.append(edge, len(which) - 1)
    width = np.abs(distinct[ends] - distinct[starts])[which]
    gap = np.zeros_like(distinct)
    gap[1:-1] = np.abs(distinct[2:] - distinct[:-2])
    wide = (gap / np.where(width > 0, width, 1)).mean(axis=1)
    wide[starts] = wide[ends] = np.inf
    crowd = np.zeros(len(values))
    crowd[by[fresh]] = wide
    return front, crowd
