"""Random legal schedules: what a tensor compiler's search would try, good ones and bad ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretrace.cost.programs import schedules
from foretrace.cost.programs.tasks import Definition, Fill, Task

_MOST_UNROLLED = 64  # iterations of a leaf that are written out
Rng = np.random.Generator


def draw(task: Task, rng: Rng) -> schedules.LoopSchedule:
    """Return a random schedule of the task. The same generator state gives the same schedule."""
    definition = task.define()
    groups: list[schedules.Group] = []
    stages: list[Fill] = []
    for i, stage in enumerate(definition.stages):
        stages.append(stage)
        following = definition.stages[i + 1 : i + 2]
        if following and schedules.shareable(definition, [*stages, *following]) and rng.random() < 0.7:
            continue
        groups.append(_group(definition, stages, rng))
        stages = []
    return schedules.LoopSchedule(groups=tuple(groups))


def _group(definition: Definition, stages: Sequence[Fill], rng: Rng) -> schedules.Group:
    shared: list[tuple[str, int]] = []
    if len(stages) > 1:
        axes = list(schedules.shareable(definition, stages))
        sizes = dict(stages[0].spatial)
        count = int(rng.integers(1, len(axes) + 1))
        for axis in rng.permutation(axes)[:count] if rng.random() < 0.3 else axes[:count]:
            lanes = schedules.lane_counts(sizes[str(axis)])
            tile = int(rng.choice(lanes if lanes and rng.random() < 0.4 else schedules.divisors(sizes[str(axis)], 64)))
            shared.append((str(axis), tile))
    extents = dict(stages[0].spatial)
    inside = any(extents[axis] > tile for axis, tile in shared)
    plans = tuple(_plan(stage, dict(shared), inside, rng) for stage in stages)
    return schedules.Group(
        shared=tuple(shared),
        plans=plans,
        parallel=bool(_outermost_is_spatial(stages[0], shared, plans) and rng.random() < 0.5),
        shrink=bool(inside and rng.random() < 0.6),
    )


def _outermost_is_spatial(stage: Fill, shared: Sequence[tuple[str, int]], plans: Sequence[schedules.StagePlan]) -> bool:
    extents = dict(stage.spatial)
    if shared:
        return any(extents[axis] > tile for axis, tile in shared)
    plan, splits = plans[0], dict(plans[0].splits)
    loops = [each for each in plan.order if splits[each[0]][each[1]] > 1]
    return len(loops) > 1 and loops[0][0] in extents and loops[0] not in plan.unrolled


def _plan(stage: Fill, shared: dict[str, int], inside: bool, rng: Rng) -> schedules.StagePlan:
    left = {axis: shared.get(axis, extent) for axis, extent in (*stage.spatial, *stage.reduced)}
    spatial = [axis for axis, _ in stage.spatial]
    reduced = [axis for axis, _ in stage.reduced]
    last = _lane_axis(stage, left, spatial, reduced, rng)
    splits = {axis: _factors(extent, 3 if axis in spatial else 2, rng) for axis, extent in left.items()}
    if last is not None:
        lanes = int(rng.choice(schedules.lane_counts(left[last])))
        splits[last] = (*_factors(left[last] // lanes, 2, rng), lanes)
    order = _order(splits, spatial, reduced, rng)
    if last is not None:
        innermost = (last, len(splits[last]) - 1)
        order = [*(each for each in order if each != innermost), innermost]
    rfactor = last is not None and last in reduced
    unrolled = _unrolled(splits, order[:-1] if last is not None else order, rng)
    return schedules.StagePlan(
        splits=tuple(splits.items()),
        order=tuple(order),
        unrolled=tuple(unrolled),
        vectorised=last is not None and not rfactor,
        local=bool(reduced and not rfactor and _can_keep(splits, order, spatial, inside) and rng.random() < 0.5),
        rfactor=rfactor and _can_keep(splits, order, spatial, inside, lanes=True),
    )


def _lane_axis(
    stage: Fill, left: dict[str, int], spatial: Sequence[str], reduced: Sequence[str], rng: Rng
) -> str | None:
    """Return the axis whose innermost part becomes vector lanes: mostly the one that is contiguous in memory."""
    if rng.random() < 0.2:
        return None
    if reduced and schedules.lane_counts(left[reduced[-1]]) and left[reduced[-1]] >= 16:
        contiguous = any(read.index[-1] == ((reduced[-1], 1),) for read in stage.reads)
        if contiguous and rng.random() < 0.5:
            return reduced[-1]
    if rng.random() < 0.85 and schedules.lane_counts(left[spatial[-1]]):
        return spatial[-1]
    fit = [axis for axis in spatial if schedules.lane_counts(left[axis])]
    return str(rng.choice(fit)) if fit else None


def _factors(extent: int, most: int, rng: Rng) -> tuple[int, ...]:
    """Return the extent as a product of up to `most` factors."""
    found: list[int] = []
    for _ in range(int(rng.integers(1, most + 1)) - 1):
        inner = int(rng.choice(schedules.divisors(extent, 64)))
        found.append(inner)
        extent //= inner
    return (extent, *reversed(found))


def _order(
    splits: dict[str, tuple[int, ...]], spatial: Sequence[str], reduced: Sequence[str], rng: Rng
) -> list[tuple[str, int]]:
    """Return half of the time levels alternate as in hand-written kernels, else any order that keeps outer before
    inner.
    """
    loops = [(axis, level) for axis, factors in splits.items() for level in range(len(factors))]
    if rng.random() < 0.5:
        ranks = {each: each[1] * 2 + (each[0] in reduced) for each in loops}
        where = {axis: int(i) for i, axis in enumerate(spatial if rng.random() < 0.7 else rng.permutation(spatial))}
        where.update({axis: i for i, axis in enumerate(reduced)})
        return sorted(loops, key=lambda each: (ranks[each], where[each[0]]))
    waiting = {axis: list(range(len(factors))) for axis, factors in splits.items()}
    found: list[tuple[str, int]] = []
    while waiting:
        axis = list(waiting)[int(rng.integers(len(waiting)))]
        found.append((axis, waiting[axis].pop(0)))
        if not waiting[axis]:
            del waiting[axis]
    return found


def _unrolled(splits: dict[str, tuple[int, ...]], order: Sequence[tuple[str, int]], rng: Rng) -> list[tuple[str, int]]:
    """Return inner loops to be written out."""
    found: list[tuple[str, int]] = []
    budget = 1
    for axis, level in reversed(order):
        extent = splits[axis][level]
        if extent * budget > _MOST_UNROLLED or rng.random() < 0.45:
            break
        if extent > 1:
            found.append((axis, level))
            budget *= extent
    return found


def _can_keep(
    splits: dict[str, tuple[int, ...]], order: Sequence[tuple[str, int]], spatial: Sequence[str], inside: bool,
    *, lanes: bool = False,
) -> bool:  # fmt: skip
    """Return whether the results inside the outermost reduction loop fit a local buffer."""
    loops = [each for each in order if splits[each[0]][each[1]] > 1]
    position = next((i for i, each in enumerate(loops) if each[0] not in spatial), len(loops))
    kept = [each for each in loops[position:] if each[0] in spatial]
    count = schedules.fitting(splits, kept) * (schedules.fitting(splits, loops[-1:]) if lanes else 1)
    return count <= schedules.MAX_LOCAL and (position > 0 or inside)
