"""The policy Pollux as its simulator has it: allocations by a genetic search, jobs that learn how fast they are.

Source of the mechanism: petuum/adaptdl, branch osdi21-artifact, simulator (Pollux, OSDI'21). The search is
`genetic.py`. Every job fits its own step model to what it measured while it ran, and chooses its
batch size by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from foretrace.fleet.pollux.goodput import BatchLimits, Candidates, Goodput, StepModel, efficiency, fit_step_model
from foretrace.fleet.workload import Float64
from reproductions.pollux.genetic import Aim, State, search
from reproductions.pollux.policies import PAUSE_S, Allocations, Job

_MOST_REPLICAS = 64  # of one job, as published
# As published: ncf trains with one batch size on one GPU.
_FIXED_BATCH = {"ncf": 32768}
_MOST_OF = {"ncf": 1}


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
        aim = self.aim([jobs[at] for at in order], base, np.array(nodes, np.int16), now)
        states = search(aim, self._carried(order, base), self.population, self.generations, self.random)
        self.front = order, states
        chosen = states[int(np.argmin(aim.judge(states)[:, 0]))]
        return {at: np.repeat(np.arange(len(nodes)), chosen[row]).tolist() for row, at in enumerate(order)}

    def aim(self, jobs: list[Job], base: State, nodes: State, now: int) -> Aim:
        """What the search of this round is for."""
        total = int(nodes.sum())
        fair = -(-total // len(jobs))
        most = [self.most(job) for job in jobs]
        tables = [self.speedups(job, fair, int(nodes.max()), len(nodes)) for job in jobs]
        age = np.array([now - job.submit_s for job in jobs])
        restarts = np.array([max(job.starts - 1, 0) for job in jobs])
        return Aim(
            base=base,
            nodes=nodes,
            most=np.array(most, np.int64),
            speedup=np.stack(tables),
            kept=np.maximum(age - restarts * PAUSE_S, 0.0) / (age + PAUSE_S),
        )

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
