"""Protocol P1b: kernels of GPUs that were never trained on, and what a few measurements of such a GPU change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.cost.devices.learned import fp32
from foretrace.cost.devices.learned.fp32 import ROW_OPS, VECTOR_OPS, BoardFeatures
from isolated import Isolated
from kernel_table import Floats, Kernels, boards, read
from reproductions.cdmpp.sampling import choose_tasks

SHOTS = (0, 10, 20, 50)
KINDS = ("bmm", "linear", "vector")
RIDGE = 3.0
MOST = 0.7  # a factor of two, as a logarithm: measurements that miss by more count as this much
FAR = 2.0  # standard deviations
HIDDEN_S = 500e-6  # shorter measurements may say more about the host
HOST_S = 100e-6  # and predictions below this are not changed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shift:
    """What a few measurements change: a ridge regression of log(true / said) on kind, dimensions and predicted time."""

    weights: Floats  # one per column of `_columns`
    mean: Floats
    std: Floats

    def factor(self, kind: npt.NDArray[np.int64], features: Floats, said_s: Floats) -> Floats:
        """Factor on the predicted time of each kernel."""
        columns = _columns(kind, features, said_s, self.mean, self.std)
        return np.asarray(np.exp(np.clip(columns @ self.weights, -MOST, MOST)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """All measured kernels of one device with their predictions, products first."""

    name: str
    kind: npt.NDArray[np.int64]  # index into KINDS
    group: npt.NDArray[np.int64]  # index into fp32.GROUPS
    features: Floats
    said_s: Floats  # as an isolated measurement would show
    true_s: Floats
    roofline_s: Floats


def pools(path: Path, model: Isolated, names: tuple[str, ...]) -> list[Pool]:
    """Test rows of these devices, predicted without any measurement of them."""
    products, vectors = read(path, "test", names)
    return [_pool(model, name, on, products.take(products.of(i)), vectors.take(vectors.of(i)))
            for i, (name, on) in enumerate(zip(names, boards(names), strict=True))]  # fmt: skip


def _pool(model: Isolated, name: str, on: BoardFeatures, p: Kernels, v: Kernels) -> Pool:
    linear = p.op.astype(np.float64)
    free, joules = model.product_s(p.b, p.m, p.k, p.n, linear, on)
    said_p = model.isolated_product_s(free, joules, linear, on)
    said_v = model.isolated_vector_s(model.vector_s(v.op, v.m, v.n, v.nbytes, on)[0], v.op)
    rows = v.op >= len(VECTOR_OPS) - len(ROW_OPS)
    features = np.concatenate([product_rows(p.b, p.m, p.k, p.n, linear), vector_rows(v.op, v.m, v.n)])
    roofline = [np.maximum(p.flops / on.peak_flops, p.nbytes / on.bytes_per_s), v.nbytes / on.bytes_per_s]
    return Pool(
        name=name, kind=np.concatenate([p.op, np.full(len(v), 2)]), group=np.concatenate([p.op, 2 + rows]),
        features=features, said_s=np.concatenate([said_p, said_v]), true_s=np.concatenate([p.seconds, v.seconds]),
        roofline_s=np.concatenate(roofline),
    )  # fmt: skip


def product_rows(b: Floats, m: Floats, k: Floats, n: Floats, linear: Floats) -> Floats:
    """Features of products for choosing and adapting."""
    return np.stack([linear, np.log2(b), np.log2(m), np.log2(k), np.log2(n)], axis=1)


def vector_rows(op: npt.NDArray[np.int64], rows: Floats, width: Floats) -> Floats:
    """Features of vector operators for choosing and adapting."""
    zero = np.zeros(len(op))
    of_rows = op >= len(VECTOR_OPS) - len(ROW_OPS)
    return np.stack([2.0 + of_rows, zero, np.log2(np.maximum(rows, 1)), zero, np.log2(np.maximum(width, 1))], axis=1)


def _columns(
    kind: npt.NDArray[np.int64], features: Floats, said_s: Floats, mean: Floats, std: Floats
) -> Floats:  # fmt: skip
    values = np.concatenate([features[:, 1:], np.log2(said_s)[:, None]], axis=1)
    near = np.clip((values - mean) / std, -FAR, FAR)  # networks hold sizes that no isolated kernel has
    return np.concatenate([kind[:, None] == np.arange(len(KINDS)), near / 2], axis=1)


def adapt(pool: Pool, k: int) -> tuple[Shift, npt.NDArray[np.int64]]:
    """Shift from the k kernels that KMeans task sampling chooses (no label is looked at), and their rows.

    Candidates are what is worth measuring: kernels whose predicted time is above HIDDEN_S. Form, ridge and threshold
    were chosen by leaving training GPUs out.
    """
    values = np.concatenate([pool.features[:, 1:], np.log2(pool.said_s)[:, None]], axis=1)
    mean, std = values.mean(axis=0), values.std(axis=0) + 1e-6
    candidates = np.flatnonzero(pool.said_s > HIDDEN_S)
    chosen = candidates[choose_tasks(pool.features[candidates], k)] if k else np.empty(0, np.int64)
    columns = _columns(pool.kind[chosen], pool.features[chosen], pool.said_s[chosen], mean, std)
    ratio = np.clip(np.log(pool.true_s[chosen] / pool.said_s[chosen]), -MOST, MOST)
    weights = np.linalg.solve(columns.T @ columns + RIDGE * np.eye(columns.shape[1]), columns.T @ ratio)
    return Shift(weights=weights, mean=mean, std=std), chosen


def score(pool: Pool, facts: Any) -> dict[str, float]:
    """Mean and median error in %, that of the roofline, and how often the 80 % range holds."""
    error, plain = (np.abs(said / pool.true_s - 1) for said in (pool.said_s, pool.roofline_s))
    low, high = fp32.factors(facts["intervals"], pool.group, pool.said_s)
    inside = (pool.true_s >= low * pool.said_s) & (pool.true_s <= high * pool.said_s)
    return {
        "rows": len(error), "mean": _percent(error.mean()), "median": _percent(np.median(error)),
        "roofline_mean": _percent(plain.mean()), "roofline_median": _percent(np.median(plain)),
        "covered_80": _percent(inside.mean()),
    }  # fmt: skip


def few_shot(pool: Pool, k: int) -> dict[str, float]:
    """Errors on the kernels that were not measured, after adapting to k of them."""
    shift, chosen = adapt(pool, k)
    factor = shift.factor(pool.kind, pool.features, pool.said_s)
    said = np.where(pool.said_s > HOST_S, pool.said_s * factor, pool.said_s)
    rest = np.ones(len(said), bool)
    rest[chosen] = False
    error = np.abs(said / pool.true_s - 1)[rest]
    return {"k": k, "mean": _percent(error.mean()), "median": _percent(np.median(error))}


def _percent(value: float | np.floating[Any]) -> float:
    return round(100 * float(value), 2)
