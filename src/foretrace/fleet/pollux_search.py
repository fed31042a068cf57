"""The policy Pollux: allocations and batch sizes by goodput, found by a genetic search once per round.

Source of the mechanism: petuum/adaptdl, branch osdi21-artifact, simulator (Pollux, OSDI'21), which searches with
NSGA-II (Deb et al. 2002); fleet-scheduling.md 4.2. The search is random; equal seeds give equal answers.

A state gives GPUs by (job, node). Two aims: the power mean with exponent -1 of the jobs' speed-ups against a fair
share, and how much of an ideal speed-up the cluster's GPUs yield. The state with the best first aim is taken. Every job
fits its own step model to what it measured while it ran, and chooses its batch size by it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from reproductions.pollux.policies import PAUSE_S, Allocations, Job

from foretrace.fleet.goodput import BatchLimits, Candidates, Goodput, StepModel, efficiency, fit_step_model
from foretrace.fleet.workload import Float64, Int64

_MOST_REPLICAS = 64  # of one job, as published
_CROSS, _RESET, _THIN, _DROP = 0.9, 0.1, 0.1, 0.1  # chances: mate, job back to what it holds, job thinned, node dropped
# As published: ncf trains with one batch size on one GPU.
_FIXED_BATCH = {"ncf": 32768}
_MOST_OF = {"ncf": 1}

_ATTEMPTS = 5  # to find states that are new, per generation

State = npt.NDArray[np.int16]  # GPUs by (..., job, node)


@dataclass(slots=True)
class _Learned:
    """What a job knows of itself: measured (step, sync) seconds by (nodes, replicas, local batch), and its gradient."""

    measured: dict[tuple[int, int, int], tuple[float, float]] = field(default_factory=dict)
    gradient: tuple[float, float] = (0.0, 0.0)
    model: StepModel | None = None  # None where a measurement was added since the last fit
    most: int = 0  # replicas it ran with at most
    best: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)  # batch by (nodes, replicas)
    step_s: Float64 | None = None  # (50, allocations) by the model
    table: Float64 | None = None  # (nodes + 1, replicas + 1) goodput by the model and gradient


@dataclass(slots=True)
class Pollux:
    """Goodput-driven allocation; `generations` and `population` size the search of every round."""

    adapts: ClassVar[bool] = True
    seed: int = 0
    generations: int = 100
    population: int = 100
    random: np.random.Generator = field(init=False)
    learned: dict[int, _Learned] = field(default_factory=dict)
    front: tuple[list[int], State] | None = None  # jobs of the last search and its best states (k, jobs, nodes)
    grids: dict[tuple[str, int], Candidates] = field(default_factory=dict)
    ones: dict[tuple[str, int, int], Candidates] = field(default_factory=dict)
    models: dict[tuple[str, tuple[tuple[int, int, int], ...]], StepModel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    @property
    def facts(self) -> dict[str, Any]:
        """What a result says of the search."""
        return {
            "seed": self.seed, "generations": self.generations, "population": self.population, "fits": len(self.models)
        }  # fmt: skip

    def observe(self, job: Job, step_s: float, sync_s: float, sqr: float, var: float) -> None:
        """As `Policy.observe`."""
        known = self.learned.setdefault(job.at, _Learned())
        if known.gradient != (sqr, var):
            known.gradient, known.table = (sqr, var), None
            known.best.clear()
        key = len(job.placement), sum(job.placement), job.atomic
        if key not in known.measured:
            known.measured[key] = step_s, sync_s
            known.most = max(known.most, key[1])
            known.model = known.step_s = known.table = None
            known.best.clear()

    def split(self, job: Job) -> tuple[int, int]:
        """As `Policy.split`: the batch of best goodput once the job has measured anything, else the smallest."""
        app, nodes, replicas = job.app, len(job.placement), sum(job.placement)
        known = self.learned.get(job.at)
        batch = _FIXED_BATCH.get(app.name)
        if batch is None and known is None:
            batch = max(app.init_batch, app.min_local * replicas)
        if batch is not None:
            return app.split(batch, replicas)
        assert known is not None
        if (nodes, replicas) not in known.best:
            _, local, passes = self._goodput(job, known).best(self._one(job, nodes, replicas))
            known.best[nodes, replicas] = int(local[0]), int(passes[0])
        atomic, passes_ = known.best[nodes, replicas]
        return app.bounded(atomic, passes_, replicas), passes_

    def _goodput(self, job: Job, known: _Learned) -> Goodput:
        if known.model is None:
            # Measurements of an application are always the same, so jobs that tried the same learn the same.
            tried = job.app.name, tuple(sorted(known.measured))
            if tried not in self.models:
                values = np.array([known.measured[key] for key in tried[1]])
                self.models[tried] = fit_step_model(*np.array(tried[1]).T, *values.T)
            known.model = self.models[tried]
        return Goodput(known.model, *known.gradient, BatchLimits.of(job.app))

    def allocate(self, now: int, jobs: Mapping[int, Job], held: Allocations, nodes: Sequence[int]) -> Allocations:
        """As `Policy.allocate`."""
        order = sorted(jobs, key=lambda at: (jobs[at].service, jobs[at].submit_s))  # stable, as published
        base = np.zeros((len(order), len(nodes)), np.int16)
        for row, at in enumerate(order):
            np.add.at(base[row], held.get(at, []), 1)
        aim = Aim.of([jobs[at] for at in order], base, np.array(nodes, np.int16), now, self)
        states = search(aim, self._carried(order, base), self.population, self.generations, self.random)
        self.front = order, states
        chosen = states[int(np.argmin(aim.judge(states)[:, 0]))]
        return {at: np.repeat(np.arange(len(nodes)), chosen[row]).tolist() for row, at in enumerate(order)}

    def _carried(self, order: list[int], base: State) -> State:
        """The last search's best states for the jobs of now: (k, jobs, nodes); at first what jobs hold."""
        if self.front is None:
            return base[None]
        before, states = self.front
        row = {at: i for i, at in enumerate(before)}
        carried = np.zeros((len(states), *base.shape), np.int16)
        kept = [(i, row[at]) for i, at in enumerate(order) if at in row]
        if kept:
            to, of = (list(each) for each in zip(*kept, strict=True))
            carried[:, to] = states[:, of]
        return carried

    def speedups(self, job: Job, fair: int, per_node: int, count: int) -> Float64:
        """(count + 1, total + 1) speed-up over `fair` GPUs of one node, by nodes and replicas; 0 where impossible."""
        known = self.learned.get(job.at)
        total = per_node * count
        if known is None:
            return np.broadcast_to(np.arange(total + 1) / fair, (count + 1, total + 1))
        goodput = self._goodput(job, known)
        grid = self._grid(job, per_node, count)
        if known.step_s is None:
            known.step_s = goodput.model.step_s(grid.nodes, grid.replicas, grid.local, grid.passes)
        if known.table is None:
            worth = efficiency(*known.gradient, grid.scale)
            known.table = np.zeros((count + 1, total + 1))
            best = np.where(grid.allowed, grid.batch * worth / known.step_s, 0.0).max(axis=0)
            known.table[grid.nodes, grid.replicas] = best
        base = float(goodput.best(self._one(job, 1, fair))[0][0])
        return known.table / base if base > 0 else known.table

    def most(self, job: Job) -> int:
        """Replicas a job may have: at most twice as many as it has tried."""
        if job.app.name in _MOST_OF:
            return _MOST_OF[job.app.name]
        known = self.learned.get(job.at)
        tried = known.most if known else 0
        return min(max(2 * tried, 1), _MOST_REPLICAS, job.app.max_batch // job.app.min_local)

    def _grid(self, job: Job, per_node: int, count: int) -> Candidates:
        """All allocations that a job may have."""
        most = min(self.most(job), per_node * count)
        key = job.app.name, most
        if key not in self.grids:
            pairs = [(n, k) for k in range(1, most + 1) for n in range(-(-k // per_node), min(k, count) + 1)]
            self.grids[key] = Candidates.of(BatchLimits.of(job.app), *np.array(pairs).T)
        return self.grids[key]

    def _one(self, job: Job, nodes: int, replicas: int) -> Candidates:
        key = job.app.name, nodes, replicas
        if key not in self.ones:
            self.ones[key] = Candidates.of(BatchLimits.of(job.app), [nodes], [replicas])
        return self.ones[key]


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

    @classmethod
    def of(cls, jobs: list[Job], base: State, nodes: State, now: int, policy: Pollux) -> Aim:
        total = int(nodes.sum())
        fair = -(-total // len(jobs))
        most = [policy.most(job) for job in jobs]
        tables = [policy.speedups(job, fair, int(nodes.max()), len(nodes)) for job in jobs]
        age = np.array([now - job.submit_s for job in jobs])
        restarts = np.array([max(job.starts - 1, 0) for job in jobs])
        return cls(
            base=base,
            nodes=nodes,
            most=np.array(most, np.int64),
            speedup=np.stack(tables),
            kept=np.maximum(age - restarts * PAUSE_S, 0.0) / (age + PAUSE_S),
        )

    def judge(self, states: State) -> Float64:
        """(k, 2) values of (k, J, N) states, smaller is better."""
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
        """Changed copies: jobs put back to what they hold, nodes taken away, more given where GPUs are free."""
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
    """Sum in 16 bits, enough for GPUs of a cluster and several times as fast."""
    total: State = np.add.reduce(values, axis=axis, dtype=np.int16)
    return total


def search(aim: Aim, start: State, population: int, generations: int, random: np.random.Generator) -> State:
    """The states of the first front after NSGA-II from `start`: (k, J, N)."""
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
    """Positions of states that were not seen before, each once; adds them to `seen`."""
    fresh = []
    for at, state in enumerate(states):
        key = state.tobytes()
        if key not in seen:
            seen.add(key)
            fresh.append(at)
    return np.array(fresh, np.int64)


def _mate(states: State, values: Float64, crowd: Float64, wanted: int, random: np.random.Generator) -> State:
    """Pairs won by binary tournaments (dominance, then crowding) exchange their first jobs."""
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
    """(front, crowding) of (k, 2) values; front 0 is dominated by none.

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
