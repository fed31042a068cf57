"""A lower bound on the busiest device's bytes: the linear program over all fractional choices, by its prices.

The program has a variable for every row and device. Its dual has a price for the bytes of every device (they sum to 1)
and one for its memory; given the prices each row and table chooses for itself, and what they pay is a bound. The
highest is found by cutting planes (Kelley 1960): each choice is a plane above the bound, and a small linear program
takes the prices at which the lowest plane is highest.
"""

from __future__ import annotations

from math import inf

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.errors import MissingExtraError
from foretrace.plan.rows.costs import COLUMNS, POOLED, ROWS, RowChoice, RowCosts
from foretrace.training.rows.placement import EVERYWHERE

_CUTS = 150
_CLOSE = 0.002  # of the bound: as near to the program's value as is asked for


def bound(costs: RowCosts, memory: float, busiest: float = inf) -> float:
    """Return bytes that the busiest device exchanges at least; the search ends early at what `busiest` leaves no room
    below.

    Raises MissingExtraError without SciPy.
    """
    try:
        from scipy.optimize import linprog
    except ImportError:
        raise MissingExtraError(
            "SciPy is needed for the bound of a placement: pip install 'foretrace[plan]'."
        ) from None
    devices, limited = costs.profile.devices, memory < inf
    prices, highest = np.full(devices, 1 / devices), 0.0
    rents = np.zeros(devices)
    planes, heights = [], []
    for _ in range(_CUTS):
        answer = cheapest(costs, prices, rents, memory)
        load, over = costs.loads(answer), costs.memory(answer) - (memory if limited else 0.0)
        highest = max(highest, float(prices @ load + (rents @ over if limited else 0.0)))
        # height <= prices · load + rents · over, with rents in bytes exchanged per MB kept
        planes.append(np.concatenate([[1.0], -load, *([-over / 1e6] if limited else [])]))
        heights.append(0.0)
        unknowns = len(planes[0]) - 1
        found = linprog(
            np.concatenate([[-1.0], np.zeros(unknowns)]), A_ub=np.array(planes), b_ub=heights,
            A_eq=np.concatenate([[0.0], np.ones(devices), np.zeros(unknowns - devices)])[None], b_eq=[1.0],
            bounds=[(None, None), *[(0, 1)] * devices, *[(0, 1e9)] * (unknowns - devices)], method="highs",
        )  # fmt: skip
        if found.status != 0 or -found.fun <= highest * (1 + _CLOSE) or highest >= busiest * (1 - 1e-9):
            break
        prices = found.x[1 : devices + 1]
        rents = found.x[devices + 1 :] / 1e6 if limited else rents
    return min(highest, busiest)


def cheapest(costs: RowCosts, prices: Float64, rents: Float64, memory: float) -> RowChoice:
    """Return what every row and table chooses where a byte in or out of a device costs `prices`, and one kept
    `rents`.
    """
    owned = _owners(costs.items, costs.item_memory, prices, rents)
    items, paid = owned.argmin(axis=1), owned.min(axis=1)
    if not costs.training:
        copied = costs.item_memory * rents.sum()
        items, paid = np.where(copied < paid, EVERYWHERE, items), np.minimum(copied, paid)
    whole = _owners(costs.pooled, costs.table_memory, prices, rents)
    whole[costs.table_memory > memory] = inf
    columns = costs.columns @ prices + costs.column_memory @ rents
    rows = costs.per_table(paid) + costs.counts_of(items >= 0)
    if not costs.training:  # copies of all rows need no counts
        all_copied = costs.table_memory * rents.sum()
        items = np.where((all_copied < rows)[costs.table], EVERYWHERE, items)
        rows = np.minimum(rows, all_copied)
    modes = np.array([POOLED, COLUMNS, ROWS])[np.argmin([whole.min(axis=1), columns, rows], axis=0)]
    return RowChoice(modes=modes, tables=whole.argmin(axis=1), items=items)


def _owners(values: Float64, memory: Int64, prices: Float64, rents: Float64) -> Float64:
    """Return what each thing pays with each device as its owner: (things, devices)."""
    at_owner = values.sum(axis=1)[:, None] - 2 * values
    return np.asarray((values @ prices)[:, None] + at_owner * prices + memory[:, None] * rents, np.float64)
