"""Predictions of measured servers that were not fitted: splits, ranges, one measured run, and what the pages say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from foretrace.arrays import Float64, Mask
from foretrace.serving.llm.operator_tables import OperatorTables
from reproductions.aiconfigurator.model import DEFAULTS, Aggregated, Disaggregated, Predicted, dense, fitted
from reproductions.aiconfigurator.sample import Measured

LEVEL = 0.8  # of ranges
SHARES = (0.0, 0.25, 0.5, 0.65, 0.8, 0.9, 1.0)  # of a run's error that is taken over to other loads,
FADES = (0.0, 0.05, 0.1, 0.2, 0.3)  # by the power of how many times its clients they have: steps are other ones then
Key = Callable[[Measured], Hashable]
SPLITS: Mapping[str, Key] = {
    "(architecture, system)": lambda one: one.group,
    "system": lambda one: one.system,
    "architecture": lambda one: one.architecture,
}


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Rows, and for each (n, 2: TPOT, TTFT) the logarithm of predicted over measured, its group not fitted."""

    rows: tuple[Measured, ...]
    groups: tuple[Hashable, ...]
    errors: Float64


def held_out(
    rows: Sequence[Measured], key: Key, *, tables: OperatorTables | None = None, begun: Sequence[Measured] = (),
    told: Callable[[str], None] = lambda _: None,
) -> HeldOut:  # fmt: skip
    """Fit to all other groups, predict each group.

    With `begun`, rows have two pools, and their fit begins from one of those rows with one pool, without the group.
    Rows of measured operators are predicted from `tables` with host times and latencies of the fit.
    """
    make = Disaggregated if begun else Aggregated
    groups = tuple(key(one) for one in rows)
    errors = np.empty((len(rows), 2))
    for group in sorted(set(groups), key=str):
        others = [one for one, of in zip(rows, groups, strict=True) if of != group]
        one_pool = [one for one in begun if key(one) != group]
        start = fitted(Aggregated(one_pool)) if one_pool else DEFAULTS
        mine = [i for i, of in enumerate(groups) if of == group]
        errors[mine] = errors_of([rows[i] for i in mine], fitted(make(others), start=start), make, tables)
        told(f"{group}: {len(mine)} rows")
    return HeldOut(rows=tuple(rows), groups=groups, errors=errors)


def errors_of(
    rows: Sequence[Measured], logs: Float64, make: Callable[[Sequence[Measured]], Predicted],
    tables: OperatorTables | None,
) -> Float64:  # fmt: skip
    """(n, 2) logarithms of predicted over measured by a fit; rows of measured operators from `tables`."""
    found = np.empty((len(rows), 2))
    for from_tables in (False, True):
        at = [i for i, one in enumerate(rows) if (dense(one) and tables is not None) == from_tables]
        if at:
            mine = [rows[i] for i in at]
            data = Aggregated(mine, tables=tables) if from_tables else make(mine)
            found[at] = data.predict(logs[None])[0] - data.measured
    return found


def medians(errors: Float64) -> tuple[float, float]:
    """Median absolute error of TPOT and TTFT, as shares of what was measured."""
    found = np.median(np.abs(np.expm1(errors)), axis=0)
    return float(found[0]), float(found[1])


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """Factors (measured over predicted) that hold `LEVEL` of rows, and how many rows of other groups they held."""

    low: tuple[float, float]
    high: tuple[float, float]
    held: tuple[float, float]


def ranges(found: HeldOut) -> Ranges:
    """Conformal ranges of groups: the quantiles of the other groups' errors, each group with weight 1."""
    off = -found.errors
    held = np.empty_like(off, dtype=np.bool_)
    names = sorted(set(found.groups), key=str)
    at = {name: np.array([of == name for of in found.groups]) for name in names}
    for name in names:
        low, high = _quantiles(off, [at[other] for other in names if other != name])
        held[at[name]] = (off[at[name]] >= low) & (off[at[name]] <= high)
    low, high = (np.exp(each).tolist() for each in _quantiles(off, list(at.values())))
    share = held.mean(axis=0).tolist()
    return Ranges(low=(low[0], low[1]), high=(high[0], high[1]), held=(share[0], share[1]))


def _quantiles(values: Float64, groups: Sequence[Mask]) -> tuple[Float64, Float64]:
    """Both ends of the range of each column, groups weighted alike but never a group of few rows like one of many."""
    weights = np.concatenate([np.full(mask.sum(), 1 / np.sqrt(mask.sum())) for mask in groups])
    ends = []
    for column in range(values.shape[1]):
        all_ = np.concatenate([values[mask, column] for mask in groups])
        order = np.argsort(all_)
        share = np.cumsum(weights[order]) / weights.sum()
        ends.append([all_[order][np.searchsorted(share, each)] for each in ((1 - LEVEL) / 2, (1 + LEVEL) / 2)])
    found = np.array(ends)
    return found[:, 0], found[:, 1]


def by_one_run(found: HeldOut) -> HeldOut:
    """The other rows of each deployment and version after its run of the fewest clients was measured.

    A share of that run's error is taken over, and less the more clients there are; both are the best of SHARES and
    FADES on all other groups.
    """
    servers: dict[Hashable, list[int]] = defaultdict(list)
    for i, one in enumerate(found.rows):
        servers[one.deployment, one.version, one.harness].append(i)

    def load(i: int) -> tuple[int, int, int, str]:
        one = found.rows[i]
        return one.clients, one.prompt, one.output, one.id

    first = {i: min(rows, key=load) for rows in servers.values() for i in rows}
    kept = np.array([i for i in range(len(found.rows)) if first[i] != i])
    mine, known = found.errors[kept], found.errors[[first[i] for i in kept]]
    times = np.array([found.rows[i].clients / found.rows[first[i]].clients for i in kept])
    groups = np.array([str(found.groups[i]) for i in kept])
    errors = np.empty((len(kept), 2))
    for column in range(2):
        left = [
            mine[:, column] - share * times**-fade * known[:, column] for share, fade in product(SHARES, FADES)
        ]  # fmt: skip
        for group in sorted(set(groups)):
            other = groups != group
            scores = [float(np.median(np.abs(np.expm1(each[other])))) for each in left]
            errors[~other, column] = left[int(np.argmin(scores))][~other]
    return HeldOut(rows=tuple(found.rows[i] for i in kept), groups=tuple(found.groups[i] for i in kept), errors=errors)
