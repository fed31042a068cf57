"""Allocation rules of Gavel that only its published simulator needs: pairs of jobs, and the most progress."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from foretrace.errors import ForetraceError
from foretrace.fleet.allocations import capacity, feasible, matrix, per_job, proportional, solve, vector
from foretrace.fleet.workload import Float64


def max_min_shared(
    members: npt.ArrayLike,
    rates: npt.ArrayLike,
    scale: npt.ArrayLike,
    workers: npt.ArrayLike,
    weights: npt.ArrayLike | None = None,
) -> Float64:
    """(entries, types) `max_min` where two jobs may share their GPUs: what runs is a job alone or a pair.

    members: (entries, 2) positions of the jobs of an entry, -1 in the second place for a job alone; every job stands
    alone in one entry. rates: (entries, types, 2) steps per second of both members; 0 in the second place for one
    alone. scale, weights: (m,) as in `max_min`; the members of a pair have the same scale. A job's fractions add up to
    at most 1 over all entries that it is in.
    """
    who, speed = np.asarray(members, np.int64), np.asarray(rates, np.float64)
    size, have = vector(scale), vector(workers)
    entries, n = len(who), len(have)
    if not entries:
        return np.zeros((0, n))
    m = len(size)
    alone = who[:, 1] < 0
    own = np.zeros((m, n))
    own[who[alone, 0]] = speed[alone, :, 0]
    weight = np.ones(m) if weights is None else vector(weights)
    base = (own * proportional(m, have)).sum(axis=1) * weight
    part = np.flatnonzero(base > 0)
    row_of = np.full(m, -1)
    row_of[part] = np.arange(len(part))
    at = np.arange(entries)[:, None] * n + np.arange(n)[None, :]  # the variable of each entry and type
    held: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Float64]] = []  # row, variable, value
    for place in (0, 1):
        here = np.flatnonzero(who[:, place] >= 0)
        job = who[here, place]
        held.append((np.repeat(job, n), at[here].ravel(), np.ones(len(here) * n)))
        some = base[job] > 0
        here, job = here[some], job[some]
        gain = speed[here, :, place] * (size[job] / base[job])[:, None]
        held.append((np.repeat(m + n + row_of[job], n), at[here].ravel(), -gain.ravel()))
    used = size[who[:, 0]]
    held.append((m + np.tile(np.arange(n), entries), at.ravel(), np.repeat(used, n)))
    level = entries * n
    held.append((m + n + np.arange(len(part)), np.full(len(part), level), np.ones(len(part))))
    row, column, value = (np.concatenate(each) for each in zip(*held, strict=True))
    limits = np.concatenate([np.ones(m), have, np.zeros(len(part))])
    cost = np.append(np.zeros(level), -1.0)
    rows = csr_array((value, (row, column)), shape=(len(limits), len(cost)))
    found = solve(cost, rows, limits, [(0.0, 1.0)] * level + [(0.0, None)])
    assert found is not None  # nothing at all is always feasible
    x = np.clip(found[:level].reshape(entries, n), 0.0, 1.0)
    over = max(
        _busiest(who, x, m),
        float(((used[:, None] * x).sum(axis=0) / np.where(have > 0, have, np.inf)).max()),
        1.0,
    )
    return x / over


def _busiest(who: npt.NDArray[np.int64], x: Float64, jobs: int) -> float:
    """The most time that any job has over all entries."""
    time = np.zeros(jobs)
    for place in (0, 1):
        here = who[:, place] >= 0
        np.add.at(time, who[here, place], x[here].sum(axis=1))
    return float(time.max())


def most_progress(
    throughputs: npt.ArrayLike,
    scale: npt.ArrayLike,
    workers: npt.ArrayLike,
    *,
    cost: npt.ArrayLike | None = None,
    at_least: npt.ArrayLike | None = None,
) -> Float64:
    """The largest sum of steps per second, or per unit of money with `cost` (types,) per GPU type.

    at_least: (m,) steps per second each job must make. Raises ForetraceError where that cannot be for all.
    """
    rates = matrix(throughputs)
    m, n = rates.shape
    if not m:
        return np.zeros((0, n))
    price = np.ones(n) if cost is None else vector(cost)
    rows, limits = capacity(vector(scale), vector(workers))
    if at_least is not None:
        rows = np.vstack([rows, -per_job(rates)])
        limits = np.concatenate([limits, -vector(at_least)])
    found = solve(-(rates / price).ravel(), rows, limits, [(0.0, 1.0)] * (m * n))
    if found is None:
        raise ForetraceError("no allocation gives every job the progress that is asked for; lower it or add GPUs.")
    return feasible(found.reshape(m, n), scale, workers)
