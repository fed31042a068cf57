"""Which few operators to measure on a new device: KMeans task sampling (CDMPP, EuroSys 2024, section 5).

The pool of candidate tasks is clustered by its features alone, no label is looked at. Clusters are visited from the
largest to the smallest, and each gives the task nearest to its centre that was not taken before. So k measurements
cover the pool as its density is, and the result does not depend on chance: the same pool gives the same tasks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foretrace.errors import ForetraceError

_ITERATIONS = 50
_SEED = 0  # of the first centres; fixed, so that a pool always gives the same tasks
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def choose_tasks(features: ArrayLike, k: int, *, tasks: ArrayLike | None = None, standardise: bool = True) -> Ints:
    """Choose the k tasks to measure.

    Args:
        features: [samples x features] numbers, one row per sample, all finite; no units are assumed, so take logarithms
            of sizes first.
        k: how many tasks to choose; where the pool holds fewer, all of them are returned.
        tasks: [samples] whole numbers that say which task a sample belongs to (several schedules of one task, say);
            without it every sample is a task of its own. A task's distance from a centre is the mean of its samples'.
        standardise: bring each feature to mean 0 and deviation 1 first; features that never change count nothing.

    Returns:
        The chosen tasks, in the order in which they are to be measured: from the largest cluster down. Row numbers, or
        values of `tasks` if that is given. The first few are themselves a fair choice of fewer.

    Raises:
        ForetraceError: if features are no table of finite numbers, k is negative, or `tasks` has another length.

    """
    points = _points(features, standardise)
    if k < 0:
        raise ForetraceError(f"{k} tasks were asked for; ask for 0 or more.")
    if tasks is None:
        ids, member = np.arange(len(points)), None
    else:
        given = np.asarray(tasks)
        if given.shape != (len(points),):
            raise ForetraceError(
                f"tasks has the shape {given.shape} but there are {len(points)} rows of features; give one per row."
            )
        ids, member = np.unique(given, return_inverse=True)
    if k == 0 or not len(ids):
        return np.empty(0, np.int64)
    k = min(len(ids), k)
    centres, sizes = cluster(points, k)
    distances = np.sqrt(_squared(points, centres))
    if member is not None:
        count = np.bincount(member, minlength=len(ids))
        sums = [np.bincount(member, weights=column, minlength=len(ids)) for column in distances.T]
        distances = np.stack(sums, axis=1) / count[:, None]
    free = np.ones(len(ids), bool)
    chosen: list[int] = []
    order = np.argsort(-sizes, kind="stable")
    while len(chosen) < k:  # more rounds than one only where points coincide and clusters are fewer than k
        for centre in order[: k - len(chosen)]:
            task = int(np.argmin(np.where(free, distances[:, centre], np.inf)))
            free[task] = False
            chosen.append(task)
    return np.asarray(ids[chosen], np.int64)


def cluster(points: Floats, k: int) -> tuple[Floats, Ints]:
    """Return centres [at most k x features] and sizes of the clusters of KMeans, from spread-out first centres
    (k-means++).
    """
    rng = np.random.RandomState(_SEED)
    centres = points[[rng.randint(len(points))]]
    nearest = _squared(points, centres)[:, 0]
    while len(centres) < k and nearest.max() > 0:
        step = np.cumsum(nearest)
        following = min(int(np.searchsorted(step, rng.random_sample() * step[-1], side="right")), len(points) - 1)
        centres = np.concatenate([centres, points[[following]]])
        nearest = np.minimum(nearest, _squared(points, centres[-1:])[:, 0])
    label = np.full(len(points), -1)
    for _ in range(_ITERATIONS):
        before, label = label, np.argmin(_squared(points, centres), axis=1)
        if np.array_equal(before, label):
            break
        sizes = np.bincount(label, minlength=len(centres))
        sums = np.stack([np.bincount(label, weights=column, minlength=len(centres)) for column in points.T], axis=1)
        centres = np.where(sizes[:, None] > 0, sums / np.maximum(sizes, 1)[:, None], centres)
    return centres, np.bincount(label, minlength=len(centres)).astype(np.int64)


def _points(features: ArrayLike, standardise: bool) -> Floats:
    points = np.asarray(features, np.float64)
    if points.ndim != 2:
        raise ForetraceError(f"features has {points.ndim} dimensions; give a table, one row per sample.")
    if not np.isfinite(points).all():
        row = int(np.flatnonzero(~np.isfinite(points).all(axis=1))[0])
        raise ForetraceError(f"row {row} of features holds a value that is not finite; leave such samples out.")
    if not standardise or not len(points):
        return points
    spread = points.std(axis=0)
    varies = spread > 1e-12 * np.maximum(1.0, np.abs(points).max(axis=0))
    if not varies.any():
        return np.zeros((len(points), 1))
    return np.asarray((points[:, varies] - points[:, varies].mean(axis=0)) / spread[varies])


def _squared(points: Floats, centres: Floats) -> Floats:
    """Return squared distances [points x centres]."""
    cross = (points**2).sum(axis=1)[:, None] - 2 * points @ centres.T + (centres**2).sum(axis=1)[None, :]
    return np.asarray(np.maximum(cross, 0.0))
