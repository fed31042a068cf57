"""How much of each GPU type every job is due: the allocation rules of Gavel and AlloX on plain matrices.

X[m, j] is the fraction of time that job m spends on type j: X >= 0, a job's fractions add up to at most 1, and
Σ_m scale_m · X[m, j] <= workers_j. Progress of a job is Σ_j T[m, j] · X[m, j] in steps per second.

Sources: Narayanan et al., OSDI'20 (Gavel), sections 4.1-4.3; Le et al., EuroSys'20 (AlloX), section 4.

Arguments everywhere: throughputs (m, types) steps per second, 0 where a job cannot run; scale (m,) GPUs of each job;
workers (types,) GPUs of each type. Results are (m, types) float64 and feasible. Linear programs are solved exactly by
HiGHS through SciPy; among several best X it returns a vertex. With no job the answer is an empty matrix.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.errors import ForetraceError, needing
from foretrace.fleet.workload import Float64

Bool = npt.NDArray[np.bool_]


def isolated(scale: npt.ArrayLike, workers: npt.ArrayLike) -> Float64:
    """Return an equal part of each type for every job, as if it had a cluster of its own that much smaller."""
    size, have = vector(scale), vector(workers)
    if not len(size):
        return np.zeros((0, len(have)))
    share = have[None, :] / len(size) / size[:, None]
    made: Float64 = share / np.maximum(share.sum(axis=1), 1.0)[:, None]
    return made


def proportional(jobs: int, workers: npt.ArrayLike) -> Float64:
    """Return (jobs, types) all of everybody's time, on each type as often as there are GPUs of it.

    What Gavel measures progress against; it takes no notice of how many jobs there are, so it is not feasible as such.
    """
    have = vector(workers)
    return np.tile(have / have.sum(), (jobs, 1))


def max_min(
    throughputs: npt.ArrayLike, scale: npt.ArrayLike, workers: npt.ArrayLike, weights: npt.ArrayLike | None = None
) -> Float64:
    """Make the smallest progress as large as it can be, as the least attained service policies of Gavel do.

    Progress counts against what the job would make with `proportional`, divided by its weight (1), times its scale.
    A job that runs on no type takes no part and gets nothing.
    """
    rates = matrix(throughputs)
    return best_worst(normalised(rates, scale, workers, weights), scale, workers)[0]


def normalised(
    throughputs: npt.ArrayLike, scale: npt.ArrayLike, workers: npt.ArrayLike, weights: npt.ArrayLike | None = None
) -> Float64:
    """Return (m, types) the gains per fraction of time that `max_min` levels; 0 for a job that runs nowhere."""
    rates = matrix(throughputs)
    weight = np.ones(len(rates)) if weights is None else vector(weights)
    base = (rates * proportional(len(rates), workers)).sum(axis=1) * weight
    gain = rates * (vector(scale) / np.where(base > 0, base, 1.0))[:, None]
    return np.where((base > 0)[:, None], gain, 0.0)


def makespan(
    throughputs: npt.ArrayLike, scale: npt.ArrayLike, workers: npt.ArrayLike, remaining: npt.ArrayLike
) -> tuple[Float64, float]:
    """Return the fastest X and the seconds until the last job ends if X stays; remaining: (m,) steps."""
    rates, left = matrix(throughputs), vector(remaining)
    work = np.where(left > 0, left, 1.0)
    x, speed = best_worst(np.where((left > 0)[:, None], rates / work[:, None], 0.0), scale, workers)
    return x, 1.0 / speed if speed > 0 else float("inf") if (left > 0).any() else 0.0


def finish_time_fairness(
    throughputs: npt.ArrayLike,
    scale: npt.ArrayLike,
    workers: npt.ArrayLike,
    *,
    elapsed: npt.ArrayLike,
    remaining: npt.ArrayLike,
    alone: npt.ArrayLike,
    tolerance: float = 1e-7,
) -> tuple[Float64, float]:
    """Return X and the largest ρ = (elapsed + remaining / progress) / alone, made as small as it can be.

    elapsed, alone: (m,) seconds since submission, and that the job would take in all by itself on its share of the
    cluster; remaining: (m,) steps. Jobs without remaining steps, or that run nowhere, take no part.

    At a given ρ a job needs remaining / (ρ · alone - elapsed) steps per second, which is convex in ρ. Each linear
    program takes the tangents of these needs at one ρ: its smallest ρ is a lower bound, where the next tangents are
    taken, and its X gives an upper bound; both meet after a few (Newton's method).
    """
    rates, left = matrix(throughputs), vector(remaining)
    past, fair = vector(elapsed), vector(alone)
    part = (left > 0) & (rates.max(axis=1, initial=0.0) > 0)
    made = np.zeros_like(rates)
    if not part.any():
        return made, 0.0
    rates, left, past, fair, size = rates[part], left[part], past[part], fair[part], vector(scale)[part]
    k, n = rates.shape
    have = vector(workers)

    def worst(x: Float64) -> float:
        progress = (rates * x).sum(axis=1)
        return float(((past + left / np.maximum(progress, 1e-300)) / fair).max())

    rows, limits = capacity(size, have)
    rows = np.hstack([rows, np.zeros((len(rows), 1))])
    best = isolated(size, have)
    rho = worst(best)
    least = float(((past + left / rates.max(axis=1)) / fair).max())  # as if each had the cluster to itself
    at = (least + rho) / 2 if least < rho else rho
    for _ in range(100):
        slack = at * fair - past  # seconds that each job may still take
        tangent = np.hstack([-per_job(rates * (slack / left)[:, None]), -(fair / slack)[:, None]])
        need = -(1.0 + fair * at / slack)
        found = solve(
            np.append(np.zeros(k * n), 1.0),
            np.vstack([rows, tangent]),
            np.concatenate([limits, need]),
            [(0.0, 1.0)] * (k * n) + [(least, None)],
        )
        assert found is not None  # a ρ that is large enough always exists
        x = feasible(found[:-1].reshape(k, n), size, have)
        reached = worst(x)
        if reached < rho:
            best, rho = x, reached
        least = max(least, float(found[-1]))
        if rho - least <= tolerance * rho or at == least:  # met, or no further in this arithmetic
            break
        at = least
    made[part] = best
    return made, rho


def best_worst(gain: npt.ArrayLike, scale: npt.ArrayLike, workers: npt.ArrayLike) -> tuple[Float64, float]:
    """Return X with the largest smallest Σ_j gain[m, j] · X[m, j] over jobs that have any gain, and that value."""
    value = matrix(gain)
    m, n = value.shape
    part = value.max(axis=1, initial=0.0) > 0
    if not part.any():
        return np.zeros((m, n)), 0.0
    used, size = value[part], vector(scale)[part]
    k = len(used)
    unit = used.max()  # HiGHS judges feasibility by absolute sizes
    rows, limits = capacity(size, vector(workers))
    level = np.hstack([-per_job(used / unit), np.ones((k, 1))])
    rows = np.vstack([np.hstack([rows, np.zeros((len(rows), 1))]), level])
    limits = np.concatenate([limits, np.zeros(k)])
    found = solve(np.append(np.zeros(k * n), -1.0), rows, limits, [(0.0, 1.0)] * (k * n) + [(0.0, None)])
    assert found is not None  # nothing at all is always feasible
    x = np.zeros((m, n))
    x[part] = feasible(found[:-1].reshape(k, n), size, workers)
    return x, float((value * x).sum(axis=1)[part].min())


def allox(
    throughputs: npt.ArrayLike,
    remaining: npt.ArrayLike,
    waited: npt.ArrayLike,
    free: npt.ArrayLike,
    *,
    alpha: float = 1.0,
) -> npt.NDArray[np.int64]:
    """Return (m,) the type that each one-GPU job starts on, −1 for those that wait: least sum of completion times.

    remaining (m,) steps, waited (m,) seconds since submission, free (types,) GPUs that nobody keeps. Only the
    max(⌊alpha · m⌋, free GPUs) jobs that waited longest take part. A job in the k-th place from the end of a GPU's
    list costs k times its run time there; the assignment of jobs to places is solved exactly (AlloX, section 4).
    """
    rates, have = matrix(throughputs), np.asarray(free, np.int64)
    lists = np.repeat(np.arange(len(have)), have)  # the type of each free GPU
    n = len(lists)
    oldest = np.argsort(-vector(waited), kind="stable")[: max(int(alpha * len(rates)), n)]
    chosen = np.full(len(rates), -1, np.int64)
    if not len(oldest) or not n:
        return chosen
    speed = np.where(rates == 0.0, 1e-10, rates)[oldest][:, lists]
    run = vector(remaining)[oldest][:, None] / speed
    places = np.arange(1, len(oldest) + 1)
    cost = (places[None, :, None] * run[:, None, :] + vector(waited)[oldest][:, None, None]).reshape(len(oldest), -1)
    with needing("this policy"):
        from scipy.optimize import linear_sum_assignment
    rows, columns = linear_sum_assignment(cost)
    first: dict[int, tuple[int, int]] = {}  # of each GPU: the place furthest from the end, and the job in it
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        gpu, place = column % n, column // n
        if gpu not in first or place > first[gpu][0]:
            first[gpu] = (place, row)
    for gpu, (_, row) in first.items():
        if rates[oldest[row], lists[gpu]] > 0:  # else it would hold back a GPU on which it cannot run
            chosen[oldest[row]] = lists[gpu]
    return chosen


def vector(values: npt.ArrayLike) -> Float64:
    """Return numbers in a row."""
    return np.asarray(values, np.float64).reshape(-1)


def matrix(values: npt.ArrayLike) -> Float64:
    """Return numbers by job and type; raises ValueError where they are not."""
    made = np.asarray(values, np.float64)
    if made.ndim != 2:
        raise ValueError("throughputs are a matrix of jobs by GPU types")
    return made


def per_job(values: Float64) -> Float64:
    """Return (m, m · types) a row per job with its values at its variables."""
    m, n = values.shape
    made: Float64 = (np.eye(m)[:, :, None] * values).reshape(m, m * n)
    return made


def capacity(scale: Float64, workers: Float64) -> tuple[Float64, Float64]:
    """Return rows and limits of: nobody gets more than all his time, no type gives more than it has."""
    m, n = len(scale), len(workers)
    types = np.kron(scale, np.eye(n)).reshape(n, m * n) if m else np.zeros((n, 0))
    return np.vstack([per_job(np.ones((m, n))), types]), np.concatenate([np.ones(m), workers])


def solve(cost: Float64, rows: Any, limits: Float64, bounds: list[tuple[float, float | None]]) -> Float64 | None:
    """Return the smallest cost · z where rows · z <= limits, None without one. Rows may be a sparse array."""
    with needing("this policy"):
        from scipy.optimize import linprog
        from scipy.sparse import csr_array
    found: Any = linprog(cost, A_ub=csr_array(rows), b_ub=limits, bounds=bounds, method="highs")
    if found.status == 2:
        return None
    if found.status != 0:
        raise ForetraceError(f"the linear program of an allocation was not solved ({found.message}); check the speeds.")
    return np.asarray(found.x, np.float64)


def feasible(x: Float64, scale: npt.ArrayLike, workers: npt.ArrayLike) -> Float64:
    """Take the solver's tolerance (1e-7) off, so that limits hold exactly but for rounding."""
    x = np.clip(x, 0.0, 1.0)
    x = x / np.maximum(x.sum(axis=1), 1.0)[:, None]
    used, have = (vector(scale)[:, None] * x).sum(axis=0), vector(workers)
    return x * np.where(used > have, have / np.where(used > 0, used, 1.0), 1.0)[None, :]
