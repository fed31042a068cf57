"""Interior solutions of Gavel's linear programs.

Where many allotments are equally good, the round mechanism behaves differently with a vertex, which gives a job one
type, and with a point in the middle, which gives it some of each; even which of two fractions of 1e-10 is larger
decides who gets GPUs that are left over. Gavel solves with ECOS, an interior-point method, whose answer lies in the
middle of the best ones. This is the same method for linear programs, after the papers: the homogeneous self-dual
embedding, with Mehrotra's predictor and corrector (Domahidi, Chu and Boyd, ECC'13; Vandenberghe, "The CVXOPT linear and
quadratic cone program solvers", 2010), the constants of that paper, and rows and columns scaled to similar sizes first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.errors import ForetraceError, MissingExtraError
from foretrace.fleet.workload import Float64

_ROUNDS = 100
_TOLERANCE = 1e-8
_SCALINGS = 3
_EASE = 7e-8  # added to the diagonal of each system so that it can always be solved
_REFINEMENTS = 2


def level_centre(gain: npt.ArrayLike, scale: npt.ArrayLike, workers: npt.ArrayLike) -> Float64:
    """(m, types) X in the middle of those with the largest smallest Σ_j gain[m, j] · X[m, j]; every job gains.

    Raises ForetraceError where the method fails, MissingExtraError without SciPy.
    """
    value = np.asarray(gain, np.float64)
    m, n = value.shape
    rows, limits = _base(value.shape, np.asarray(scale, np.float64), np.asarray(workers, np.float64))
    level = np.concatenate([np.ones(m), np.zeros(len(limits))])
    rows = np.column_stack([level, np.vstack([-_by_type(value), rows])])
    cost = np.concatenate([[-1.0], np.zeros(m * n)])
    return _clipped(_solve(cost, rows, np.concatenate([np.zeros(m), limits]))[1:], value, scale)


def inside_centre(gain: npt.ArrayLike, scale: npt.ArrayLike, workers: npt.ArrayLike) -> Float64:
    """(m, types) X in the middle of those with Σ_j gain[m, j] · X[m, j] >= 1 for all jobs; there must be such X.

    Raises as `level_centre` does.
    """
    value = np.asarray(gain, np.float64)
    rows, limits = _base(value.shape, np.asarray(scale, np.float64), np.asarray(workers, np.float64))
    rows = np.vstack([rows, -_by_type(value)])
    limits = np.concatenate([limits, -np.ones(len(value))])
    return _clipped(_solve(np.zeros(rows.shape[1]), rows, limits), value, scale)


def total_centre(gain: npt.ArrayLike, scale: npt.ArrayLike, workers: npt.ArrayLike) -> Float64:
    """(m, types) X in the middle of those with the largest Σ gain[m, j] · X[m, j]; raises as `level_centre` does."""
    value = np.asarray(gain, np.float64)
    rows, limits = _base(value.shape, np.asarray(scale, np.float64), np.asarray(workers, np.float64))
    return _clipped(_solve(-value.T.ravel(), rows, limits), value, scale)


def _clipped(flat: Float64, value: Float64, scale: npt.ArrayLike) -> Float64:
    """(m, types) within 0 and 1; jobs that are alike get exactly alike, so that no rounding decides between them."""
    m, n = value.shape
    x = flat.reshape(n, m).T
    _, alike, count = np.unique(
        np.column_stack([value, np.asarray(scale, np.float64)]), axis=0, return_inverse=True, return_counts=True
    )
    sums = np.zeros((len(count), n))
    np.add.at(sums, alike.ravel(), x)
    return np.asarray(np.clip(sums / count[:, None], 0.0, 1.0)[alike.ravel()], np.float64)


def _by_type(value: Float64) -> Float64:
    """(m, types · m) a row per job; variables stand type by type."""
    return np.hstack([np.diag(column) for column in value.T])


def _base(shape: tuple[int, ...], scale: Float64, workers: Float64) -> tuple[Float64, Float64]:
    """X >= 0, GPUs of each type, time of each job."""
    m, n = shape
    gpus = np.kron(np.eye(n), scale[None, :])
    rows = np.vstack([-np.eye(m * n), gpus, _by_type(np.ones((m, n)))])
    return rows, np.concatenate([np.zeros(m * n), workers, np.ones(m)])


def _solve(cost: Float64, rows: Float64, limits: Float64) -> Float64:
    """X in the middle of those with the smallest cost · x where rows · x <= limits."""
    try:
        from scipy.sparse import block_array, csc_array, eye_array
        from scipy.sparse.linalg import splu
    except ImportError:
        raise MissingExtraError(
            "this policy of Gavel solves linear programs with SciPy: pip install 'foretrace[fleet]'."
        ) from None
    by_row, by_column = _sizes(rows)
    c, h = cost / by_column, limits / by_row
    g = csc_array(rows / by_row[:, None] / by_column[None, :])
    gt = csc_array(g.T)
    k, n = g.shape
    empty = csc_array(block_array([[_EASE * eye_array(n), gt], [g, -eye_array(k)]]))
    empty.sort_indices()
    diagonal = empty.indptr[n + 1 :] - 1  # where the last k diagonal entries stand: last in their columns

    def factor(weight: Float64) -> Any:
        system = empty.copy()
        system.data[diagonal] = -weight - _EASE
        return system, splu(system)

    def both(lu: Any, top: Float64, bottom: Float64) -> tuple[Float64, Float64]:
        right = np.concatenate([top, bottom])
        found = lu[1].solve(right)
        for _ in range(_REFINEMENTS):
            found = found + lu[1].solve(right - lu[0] @ found)
        return found[:n], found[n:]

    start = factor(np.ones(k))
    x, minus = both(start, np.zeros(n), h)
    s = _inside(-minus)
    z = _inside(both(start, -c, np.zeros(k))[1])
    tau = kappa = 1.0
    size_c, size_h = max(1.0, float(np.linalg.norm(c))), max(1.0, float(np.linalg.norm(h)))
    best, best_off = x, np.inf
    for _ in range(_ROUNDS):
        right_x = -(gt @ z) - c * tau
        right_z = s + g @ x - h * tau
        cx, hz = float(c @ x), float(h @ z)
        right_t = kappa + cx + hz
        gap = float(s @ z)
        mean = (gap + kappa * tau) / (k + 1)
        lengths = float(np.linalg.norm(x)), float(np.linalg.norm(z)), float(np.linalg.norm(s))
        infeasible = max(
            float(np.linalg.norm(right_z)) / (size_h + lengths[0] + lengths[2]),
            float(np.linalg.norm(right_x)) / (size_c + lengths[1]),
        ) / tau  # fmt: skip
        value = max(-cx, -hz) / tau  # of what is asked for, or of its bound
        relative = gap / value if value > 0 else np.inf
        off = max(infeasible, min(gap, relative))
        if off < best_off:
            best, best_off = x / tau, off
        if off < _TOLERANCE:
            break
        try:
            lu = factor(s / z)
        except RuntimeError:  # singular: as far as this arithmetic goes
            break
        x1, z1 = both(lu, -c, h)
        denominator = kappa / tau - float(c @ x1) - float(h @ z1)

        def direction(part: float, sz: Float64, tk: float) -> tuple[Float64, Float64, float, Float64, float]:
            """Newton step that takes `part` of the residuals away and moves products by -sz and -tk."""
            x2, z2 = both(lu, part * right_x, -part * right_z + sz / z)  # noqa: B023
            step_t = (part * right_t - tk / tau + float(c @ x2) + float(h @ z2)) / denominator  # noqa: B023
            dx, dz = x2 + step_t * x1, z2 + step_t * z1  # noqa: B023
            return dx, dz, step_t, -(sz + s * dz) / z, -(tk + kappa * step_t) / tau  # noqa: B023

        def reach(dz: Float64, dt: float, ds: Float64, dk: float) -> float:
            """How far one can go before a number falls to zero."""
            now = np.concatenate([s, z, [tau, kappa]])  # noqa: B023
            step = np.concatenate([ds, dz, [dt, dk]])
            falling = step < 0
            return float((-now[falling] / step[falling]).min(initial=np.inf))

        _, dz, dt, ds, dk = direction(1.0, s * z, kappa * tau)
        ahead = min(max(reach(dz, dt, ds, dk), 1e-6), 0.999)
        centring = min(max((1.0 - ahead) ** 3, 1e-4), 1.0)
        aim = centring * mean
        dx, dz, dt, ds, dk = direction(1.0 - centring, s * z + ds * dz - aim, kappa * tau + dk * dt - aim)
        far = 0.99 * min(max(reach(dz, dt, ds, dk), 1e-6), 0.999)
        x, z, s = x + far * dx, z + far * dz, s + far * ds
        tau, kappa = tau + far * dt, kappa + far * dk
    if best_off > 1e-4:
        raise ForetraceError("no allotment was found for the jobs that are active; check their speeds.")
    return np.asarray(best / by_column, np.float64)


def _sizes(rows: Float64) -> tuple[Float64, Float64]:
    """What to divide rows and columns by so that their largest entries come near 1 (Ruiz)."""
    size = np.abs(rows)
    by_row, by_column = np.ones(size.shape[0]), np.ones(size.shape[1])
    for _ in range(_SCALINGS):
        row, column = (np.sqrt(np.where(each < 1e-6, 1.0, each)) for each in (size.max(axis=1), size.max(axis=0)))
        size = size / row[:, None] / column[None, :]
        by_row, by_column = by_row * row, by_column * column
    return by_row, by_column


def _inside(values: Float64) -> Float64:
    """Moved until all are above zero."""
    lack = -float(values.min())
    return values if lack < 0 else values + (1.0 + lack)
