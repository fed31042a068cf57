"""Alpa's planner (Zheng et al., OSDI 2022, section 5): stages that differ in layers, devices and degrees.

With p the seconds of a stage's passes for a micro-batch and of its messages to the stages beside it, and e those of
its update and of what is exchanged then, a step of B micro-batches takes at most about

    T = sum of p + (B - 1) max p + max e

While no p and no e is above a limit, the least sum of q stages of the last l layers on d devices is

    F(q, l, d) = min over n layers on a mesh of m devices of p(n, m, q) + F(q - 1, l - n, d - m)

p(n, m, q) is the quickest of all degrees (tensor, context, data, expert), recomputation and ZeRO that fit into
the memory of the mesh beside what a stage with q - 1 behind it has in flight. Meshes are Alpa's: powers of two
within a node, or whole nodes. Alpa tries limits one after another; here a limit falls to just below what was found
until nothing better can follow, with the same answer. Messages partly hide, so that the best are simulated beside the
best equal ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, inf

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.compiled import njit
from foretrace.errors import ForetraceError
from foretrace.plan.pipelines.lower import StageCost, lower
from foretrace.plan.transformers import kernels
from foretrace.plan.transformers.model import Parallelism, configuration_of, fields_of
from foretrace.plan.transformers.space import ParallelismSpace, divisors
from foretrace.simulate.timeline import simulate
from foretrace.training.pipeline.schedule import one_f_one_b_flush

_GAIN = 1e-4  # share of a step that a better one has to gain
_FREE = ("pipeline", "micro", "virtual", "versions")  # what cannot be given


@dataclass(frozen=True, kw_only=True)
class UnequalStage:
    """Layers of a stage on a mesh of their own."""

    layers: int
    configuration: Parallelism  # within the mesh; its pipeline degree is that of equal stages as large
    cost: StageCost
    nbytes: float  # of a device

    @property
    def devices(self) -> int:
        return self.configuration.devices // self.configuration.pipeline

    @property
    def pace_s(self) -> float:
        """Of a micro-batch's passes and messages."""
        return self.cost.forward_s + self.cost.backward_s + 2 * self.cost.hop_s


@dataclass(frozen=True, kw_only=True)
class UnequalPlan:
    """Stages, first to last, and their simulated step with its 80 % range."""

    stages: tuple[UnequalStage, ...]
    micro_batches: int
    step_s: float
    interval_s: tuple[float, float]
    equal_s: float  # of the best pipeline of equal stages, simulated; infinite where none fits


@njit()
def cut(
    paces: Float64, sizes: Int64, devices: int, least: float, limit: float, ceiling: float, best: Float64, choice: Int64
) -> float:
    """Return the least sum of stages of all layers on all devices, none above `limit`; infinite from `ceiling` on.

    `paces` (micro-batches in flight + 1, meshes, layers + 1, 4): s of a stage, by kind as in `stage_columns`. `sizes`:
    devices of each mesh, ascending. `least`: device seconds of a layer. `best` and `choice` (stages + 1, layers + 1,
    devices + 1) become the least sum of so many stages at the end of the pipeline, and the foremost of them,
    layers × meshes + mesh.
    """
    layers, meshes = paces.shape[2] - 1, len(sizes)
    best[:] = np.inf
    best[0, 0, 0] = 0.0
    found = np.inf
    for behind in range(len(best) - 1):
        flight = min(behind + 1, len(paces) - 1)
        for done in range(behind, layers):
            for used in range(behind, devices):
                sum_s = best[behind, done, used]
                if sum_s == np.inf:
                    continue
                for mesh in range(meshes):
                    there = used + sizes[mesh]
                    if there > devices:
                        break
                    for n in range(1, layers - done + 1):
                        rest = layers - done - n
                        pace = paces[flight, mesh, n, (1 if rest == 0 else 0) + (2 if behind == 0 else 0)]
                        total = sum_s + pace
                        if pace > limit or total >= ceiling or (rest == 0) != (there == devices):
                            continue
                        if rest and rest * least > limit * (devices - there):  # too few devices for what is left
                            continue
                        if total < best[behind + 1, done + n, there]:
                            best[behind + 1, done + n, there] = total
                            choice[behind + 1, done + n, there] = n * meshes + mesh
        found = min(found, best[behind + 1, layers, devices])
    return found


@dataclass(frozen=True)
class _Ways:
    """All ways to run stages with micro-batches of so many samples."""

    space: ParallelismSpace
    samples: int

    @property
    def count(self) -> int:
        return self.space.batch // self.samples

    @cached_property
    def rows(self) -> Int64:
        """Configurations within a mesh, as rows of `kernels.FIELDS`."""
        return np.array([fields_of(each) for each in self._configurations()]).reshape(-1, len(kernels.FIELDS))

    @cached_property
    def devices(self) -> Int64:
        return self.rows[:, kernels.TENSOR] * self.rows[:, kernels.CONTEXT] * self.rows[:, kernels.DATA]

    def _configurations(self) -> Iterator[Parallelism]:
        space, node = self.space, self.space.on.node
        for size in range(1, space.devices + 1):
            if size & (size - 1) if size < node else size % node:
                continue
            pipeline = max(space.devices // size, 2) if size < space.devices else 1
            for tensor, context in ((t, c) for t in divisors(size) for c in divisors(size // t)):
                at = Parallelism(tensor=tensor, context=context, data=size // (tensor * context))
                inside = all(space.allowed(name, getattr(at, name)) for name in ("tensor", "context", "data"))
                if inside and self.samples % at.data == 0 and kernels.fits(space.arrays[0], tensor, context):
                    at = replace(at, pipeline=pipeline, micro=self.samples // at.data, overlap=space.ends["overlap"][1])
                    yield from space.completed(at, ("expert", "sequence", "recompute", "zero"))

    @cached_property
    def columns(self) -> Float64:
        """What `kernels.stage_columns` says of every row."""
        space = self.space
        out = np.full((len(self.rows), space.model.layers + 1, 4, 4), inf)
        kernels.stage_columns(*space.arrays, self.rows, self.count, out)
        return out

    @cached_property
    def flights(self) -> Int64:
        """Micro-batches in flight that fit, of each row, number of layers and kind."""
        fixed, each = self.columns[..., 2], self.columns[..., 3]
        left = (self.space.on.capacity - fixed) / np.where(np.isfinite(each), each, 1.0)
        most = min(self.count, self.space.model.layers)
        return np.clip(np.nan_to_num(left, neginf=0.0), 0, most).astype(np.int64)

    def paces(self, sizes: Int64, limit: float) -> Float64:
        """Return the quickest stages on meshes of these sizes with ends within `limit`, as `cut` reads them."""
        most = min(self.count, self.space.model.layers)
        found = np.full((most + 1, len(sizes), self.space.model.layers + 1, 4), inf)
        way, layers, kind = np.nonzero((self.columns[..., 1] <= limit) & (self.flights > 0))
        at = self.flights[way, layers, kind], np.searchsorted(sizes, self.devices[way]), layers, kind
        np.minimum.at(found, at, self.columns[way, layers, kind, 0])
        return np.minimum.accumulate(found[::-1], axis=0)[::-1].copy()

    def stage(self, layers: int, size: int, kind: int, flight: int, limit: float) -> UnequalStage:
        """Return the quickest stage with these properties."""
        flight = min(flight, self.count)
        pace, end, fixed, each = self.columns[:, layers, kind].T
        fit = (self.devices == size) & (end <= limit) & (self.flights[:, layers, kind] >= flight)
        row = int(np.argmin(np.where(fit, pace, inf)))
        at = configuration_of(self.rows[row])
        cost = self.space.stage_cost(at, layers, last=kind >= 2)
        return UnequalStage(layers=layers, configuration=at, cost=cost, nbytes=float((fixed + flight * each)[row]))


def unequal_stages(space: ParallelismSpace) -> UnequalPlan:
    """Return the quickest pipeline of stages that may differ, by T to a thousandth; never slower than equal ones.

    Schedules are 1F1B, and what is fixed holds in every stage. Raises ForetraceError for what stages cannot differ in,
    and where nothing fits.
    """
    wrong = [each for each in _FREE if space.fixed.get(each, 0) > (each in ("virtual", "versions"))]
    if wrong:
        raise ForetraceError(f"stages that differ have no `{wrong[0]}=` in common; leave it out.")
    space = replace(space, fixed={**space.fixed, "virtual": 1})
    found = list[tuple[tuple[UnequalStage, ...], int]]()
    for at in space.sweep(1).configurations:
        found.append((_equal_stages(space, at), space.batch // (at.data * at.micro)))
    equal = [_simulated_s(*each) for each in found]
    best, count = (_step_s(*found[0]), found[0][1]) if found else (inf, 1)
    samples = [each for each in range(1, space.batch + 1) if space.batch % each == 0]
    for each in sorted(samples, key=lambda each: abs(space.batch // each - count)):
        for stages in _better(_Ways(space, each), best):
            found[len(equal) :] = [(stages, space.batch // each)]
            best = _step_s(*found[-1])
    if not found:
        raise ForetraceError(
            f"{space.model.name} does not fit on {space.devices} devices in stages of any size; give more devices."
        )
    times = equal + [_simulated_s(*each) for each in found[len(equal) :]]
    step_s, (stages, count) = min(zip(times, found, strict=True), key=lambda each: each[0])
    low, high = space.software.range_on(space.on.device, scored=False)
    return UnequalPlan(
        stages=stages, micro_batches=count, step_s=step_s, interval_s=(exp(low) * step_s, exp(high) * step_s),
        equal_s=equal[0] if equal else inf,
    )  # fmt: skip


def _equal_stages(space: ParallelismSpace, at: Parallelism) -> tuple[UnequalStage, ...]:
    memory, layers = space.cost(at).memory, space.model.layers // at.pipeline
    return tuple(
        UnequalStage(layers=layers, configuration=at, cost=cost, nbytes=sum(held.values()))
        for cost, held in zip(space.stage_costs(at), memory, strict=True)
    )


def _better(ways: _Ways, best: float) -> Iterator[tuple[UnequalStage, ...]]:
    """Yield better and better stages: each gains on `best` and on the one before."""
    if not len(ways.rows):
        return
    sizes, (layers, n) = np.unique(ways.devices), (ways.space.model.layers, ways.space.devices)
    cheapest, ends = float(ways.columns[:, 1:, :, 1].min()), inf
    shape = min(layers, n // int(sizes[0])) + 1, layers + 1, n + 1
    sums, choice = np.empty(shape), np.zeros(shape, dtype=np.int64)
    while True:
        paces = ways.paces(sizes, ends)
        layer = float((paces[1:, :, 1:] / np.arange(1, layers + 1)[:, None] * sizes[:, None, None]).min())
        floor, least, limit = layers * layer / n, inf, inf
        sum_s = floor  # that no sum of stages is below
        while True:
            goal = min(best * (1 - _GAIN) - cheapest, least)
            room = goal - sum_s
            limit = min(limit, room / (ways.count - 1)) if ways.count > 1 else limit
            ceiling = goal - (ways.count - 1) * floor
            if limit < floor or not cut(paces, sizes, n, layer, limit, ceiling, sums, choice) < inf:
                break
            stages = _traced(ways, sizes, sums, choice, ends)
            slowest = max(each.pace_s for each in stages)
            sum_s = sum(each.pace_s for each in stages)
            least = min(least, sum_s + (ways.count - 1) * slowest)
            if (found := _step_s(stages, ways.count)) < best * (1 - _GAIN):
                best = found
                yield stages
            if ways.count == 1:
                break
            limit = slowest - _GAIN * best / (ways.count - 1)
        ends = min(ends - _GAIN * best, best * (1 - _GAIN) - least)
        if not ends >= cheapest:  # also where no stages were found
            return


def _traced(ways: _Ways, sizes: Int64, sums: Float64, choice: Int64, ends: float) -> tuple[UnequalStage, ...]:
    """Return the stages of the least sum, first to last."""
    layers, n = ways.space.model.layers, ways.space.devices
    found = list[UnequalStage]()
    behind, done, used = int(np.argmin(sums[:, -1, -1])), layers, n
    while behind:
        mine, mesh = divmod(int(choice[behind, done, used]), len(sizes))
        kind = (done == layers) + 2 * (behind == 1)
        found.append(ways.stage(mine, int(sizes[mesh]), kind, behind, ends))
        behind, done, used = behind - 1, done - mine, used - int(sizes[mesh])
    return tuple(found)


def _step_s(stages: Sequence[UnequalStage], count: int) -> float:
    """Return T above."""
    paces = [each.pace_s for each in stages]
    return sum(paces) + (count - 1) * max(paces) + max(each.cost.update_s for each in stages)


def _simulated_s(stages: Sequence[UnequalStage], count: int) -> float:
    """Return seconds of a step on the simulator, one device per stage."""
    costs = [each.cost for each in stages]
    return simulate(lower(one_f_one_b_flush(len(costs), count, 1), costs)).window_ns / 1e9
