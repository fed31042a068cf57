"""A lower bound on the busiest device's bytes, which no placement is below, and columns of tables near to it.

1. The linear program over all fractional choices, by its prices. It has a variable for every row and device, and for
   every table and device: a device with a part of the columns for which it has room counts as asked that part of the
   time. The dual has a price for the bytes of every device (they sum to 1) and one for its memory; given the prices
   each row and table chooses for itself, and what they pay is a bound. The highest is found by cutting planes (Kelley
   1960): each choice is a plane above the bound, and a small linear program takes the prices at which the lowest plane
   is highest.
2. Where few large tables fill the memory, fractions of them say little: a program with whole columns, in which a device
   is asked or not and a table is copied as a whole or not, by branch and cut. Rows are in it by what they pay at least
   at the prices above (Benders 1962); few rows each with its owner, so that small problems are solved.
3. Columns that are found are tried. The linear program with these columns says which share of rows is copied.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.errors import needing
from foretrace.plan.rows.costs import RowChoice, RowCosts
from foretrace.plan.rows.place import best, with_columns, with_rows
from foretrace.training.rows.placement import EVERYWHERE

_Paid = tuple[Float64, Float64, Float64]  # prices and rents (devices,), and what each table pays by rows (tables,)
_CUTS = 150
_CLOSE = 0.002  # of the bound: as near to the program's value as is asked for
_GOOD = 0.02  # of the bound, by which a placement may exceed it without whole tables being looked at
_PRICES = 15  # of a linear program, at which rows pay there: the last ones
_RENTS = 25  # a quarter of a decade apart
_ROUNDS = 8  # of branch and cut at most, each with the prices at what the one before found
_WORK, _GAP = 5_000_000, 0.01  # where branch and cut ends: nodes in all times the squared number of tables and devices
# By training: owners that rows may have in all, up to which each is in the program. Few are not copied in inference.
_FEW, _FEW_WORK = {True: 400, False: 4_000}, 50_000_000
_UNIT = 1e6  # bytes, in which the programs count: solvers want numbers near 1
_SAFE = 1e-5  # of the bound: solvers keep constraints so well


def bound(costs: RowCosts, memory: float, choice: RowChoice | None) -> tuple[float, RowChoice | None]:
    """Return bytes that the busiest device exchanges at least, and the best of this choice and those that are met.

    Raises MissingExtraError without SciPy.
    """
    busiest = _busiest(costs, choice)
    lower, paid, rows, copied = relaxed(costs, memory, busiest)
    paid = paid[-_PRICES:]
    if busiest > lower * (1 + _GOOD):
        choice = best(costs, (choice, with_rows(costs, memory, rows > 1 / 2, copied)))
        busiest = _busiest(costs, choice)
    if busiest > lower * (1 + _GOOD) and memory < inf:  # what memory is worth to rows, up to a copy of the most read
        even = np.full(costs.profile.devices, 1 / costs.profile.devices)
        dearest = float((costs.items.sum(axis=1) / costs.item_memory).max(initial=0))
        for rent in np.geomspace(dearest, dearest / 1e6, _RENTS) if dearest else ():
            rents = np.full_like(even, rent)
            paid.append((even, rents, cheapest(costs, _most(costs, memory), even, rents)[0]))
    shares, owners = None if choice is None else choice.shares, costs.items.size
    left = nodes = 1 + (_WORK // costs.asked.size**2 if owners > _FEW[costs.training] else _FEW_WORK // owners**2)
    while busiest > lower * (1 + _GOOD):
        if shares is not None:
            _, more, _, copied = relaxed(costs, memory, busiest, shares)
            paid += more[-_PRICES:]  # what rows pay beside these columns, and beside the same on other devices
            for turn in range(1, len(more[-1][0])):
                prices, rents = (np.roll(each, turn) for each in more[-1][:2])
                paid.append((prices, rents, cheapest(costs, _most(costs, memory), prices, rents)[0]))
            choice = best(costs, (choice, with_columns(costs, memory, shares, copied)))
            busiest = _busiest(costs, choice)
        if left < 1 or busiest <= lower * (1 + _GOOD):
            break
        whole, found, searched = _whole_tables(costs, memory, paid, max(lower, 1.0), left)
        lower, left = max(lower, whole), left - max(searched, nodes // _ROUNDS, 1)
        if found is None:
            break
        shares = found.shares
        if len(found.items) and costs.memory(found).max() <= memory:
            choice = best(costs, (choice, found))
            busiest = _busiest(costs, choice)
    return min(lower, busiest), choice


def _busiest(costs: RowCosts, choice: RowChoice | None) -> float:
    return inf if choice is None else float(costs.loads(choice).max())


def relaxed(
    costs: RowCosts, memory: float, busiest: float = inf, shares: Int64 | None = None
) -> tuple[float, list[_Paid], Float64, Float64]:
    """Return the value of the linear program, what tables pay by rows at the prices that were tried, and shares in its
    solution: of every table (tables,) that is by rows, of every item (items,) that is copied.

    The search ends early at what `busiest` leaves no room below. With `shares` (tables, devices) these are the columns.
    """
    with needing("the bound of a placement"):
        from scipy.optimize import linprog
    devices, limited = costs.profile.devices, memory < inf
    prices, highest = np.full(devices, 1 / devices), 0.0
    rents, most = np.zeros(devices), _most(costs, memory)
    planes, paid = [], []
    for _ in range(_CUTS):
        by_rows, answer = cheapest(costs, most, prices, rents)
        if shares is not None:
            answer = RowChoice(shares=shares, items=answer.items)
        paid.append((prices, rents, by_rows))
        load = costs.loads(answer, answer.shares / most if shares is None else None)
        over = costs.memory(answer) - (memory if limited else 0.0)
        highest = max(highest, float(prices @ load + (rents @ over if limited else 0.0)))
        # height <= prices · load + rents · over, with rents in bytes exchanged per unit kept
        planes.append(np.concatenate([[1.0], -load, *([-over / _UNIT] if limited else [])]))
        unknowns = len(planes[0]) - 1
        found = linprog(
            np.concatenate([[-1.0], np.zeros(unknowns)]), A_ub=np.array(planes), b_ub=np.zeros(len(planes)),
            A_eq=np.concatenate([[0.0], np.ones(devices), np.zeros(unknowns - devices)])[None], b_eq=[1.0],
            bounds=[(None, None), *[(0, 1)] * devices, *[(0, 1e9)] * (unknowns - devices)], method="highs",
        )  # fmt: skip
        if found.status != 0 or -found.fun <= highest * (1 + _CLOSE) or highest >= busiest * (1 - 1e-9):
            break
        prices = np.maximum(found.x[1 : devices + 1], 0)
        prices /= prices.sum()  # to the last bit: what solvers leave would lift the bound
        rents = np.maximum(found.x[devices + 1 :], 0) / _UNIT if limited else rents
    rows, copied = np.zeros(len(costs.asked)), np.zeros(len(costs.table))
    if found.status == 0:  # the program's solution is a mean of the answers, by the prices of their planes
        for weight, (prices, rents, _) in zip(-found.ineqlin.marginals, paid, strict=True):
            if weight > 0:
                _, answer = cheapest(costs, most, prices, rents)
                rows += weight * answer.rows
                copied += weight * (answer.items == EVERYWHERE)
    return highest, paid, rows, copied


def _most(costs: RowCosts, memory: float) -> Int64:
    """Return columns of every table for which a device has room, 1 where it has none: (tables, 1)."""
    return np.clip(memory / costs.column_memory, 1, costs.width).astype(np.int64)[:, None]


def cheapest(costs: RowCosts, most: Int64, prices: Float64, rents: Float64) -> tuple[Float64, RowChoice]:
    """Return what every table pays at least by rows that are not all copied (tables,), and what every row and table
    chooses for itself, where a byte in or out of a device costs `prices` and one kept `rents`; `most` (tables, 1)
    columns fit on a device.
    """
    owned = _owners(costs.items, prices) + costs.item_memory[:, None] * rents
    items, paid = owned.argmin(axis=1), owned.min(axis=1)
    if not costs.training:
        copied = costs.item_memory * rents.sum()
        items, paid = np.where(copied < paid, EVERYWHERE, items), np.minimum(copied, paid)
    rows = costs.per_table(paid) + costs.counts
    everywhere = np.full_like(rows, inf) if costs.training else costs.table_memory * rents.sum()  # without counts
    items, by_rows = np.where((everywhere < rows)[costs.table], EVERYWHERE, items), np.minimum(rows, everywhere)
    columns = _owners(costs.asked / most + costs.column, prices) + costs.column_memory[:, None] * rents
    shares = np.clip(costs.width - most * columns.argsort(axis=1).argsort(axis=1), 0, most)  # the cheapest first
    summed = np.where(shares.sum(axis=1) < costs.width, inf, (shares * columns).sum(axis=1))
    return rows, RowChoice(shares=np.where((by_rows < summed)[:, None], 0, shares), items=items)


def _whole_tables(
    costs: RowCosts, memory: float, paid: list[_Paid], unit: float, nodes: int
) -> tuple[float, RowChoice | None, int]:
    """Return the bound of the program with whole tables and columns, the best choice that was found, without items
    where there are many, and how many of the `nodes` of its tree were searched.

    Its unknowns are the busiest device's bytes; by table, whether it is by rows; by table and device, whether it is
    asked for sums, columns, bytes of rows, and memory of rows that it alone has; by table, memory of copies, and
    whether all of it is copied. Of few items also by device whether that owns one, and whether all have it.
    """
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    tables, devices = costs.asked.shape
    items = len(costs.table) if costs.items.size <= _FEW[costs.training] else 0
    room = memory if memory < inf else float(costs.table_memory.sum())  # unit of memory: solvers want numbers near 1
    sizes = 1, tables, *[tables * devices] * 4, tables, tables, items * devices, items

    def limit(low: float | Int64, high: float | Int64, *blocks: Any) -> LinearConstraint:
        height = next(each.shape[0] for each in blocks if each is not None)
        full = (sparse.csr_array((height, size)) if each is None else each for each, size in zip_longest(blocks, sizes))
        return LinearConstraint(sparse.hstack(list(full), format="csr"), low, high)

    def owners(values: Float64) -> Float64:
        return values[:, None] + np.diag(values.sum() - 2 * values)  # what each device exchanges with each owner

    def of_pairs(values: Float64, width: int) -> Any:
        """Each pair of prices and a table in a row: its `width` values (pairs, width), at the unknowns of the table."""
        columns = np.tile(np.arange(tables * width), len(paid))
        return sparse.csr_array((values.ravel(), columns, np.arange(0, values.size + 1, width)))

    prices, rents, by_rows = (np.array(each) for each in zip(*paid, strict=True))
    by_price, by_rent = np.repeat(prices, tables, axis=0), np.repeat(rents * (room / unit), tables, axis=0)
    table, device, all_tables = sparse.eye_array(tables), sparse.eye_array(devices), np.ones((1, tables))
    of_table, of_device = sparse.kron(table, np.ones((1, devices))), sparse.kron(all_tables, device)
    asked = np.hstack([owners(each) for each in costs.asked / unit])
    columns = np.kron(all_tables, owners(costs.column / unit))
    most = _most(costs, memory)[:, 0].astype(np.float64)
    needed, full = np.ceil(costs.width / most), sparse.kron(sparse.diags_array(most), device)  # devices, columns
    tables_kept = sparse.diags_array(costs.table_memory / room)
    no = None, None, None
    limits = [
        limit(-inf, 0, -np.ones((devices, 1)), None, asked, columns, of_device),
        limit(costs.width, costs.width, None, costs.width * table, None, of_table, *no, costs.width * table),
        limit(needed, inf, None, sparse.diags_array(needed), of_table, *no, None, sparse.diags_array(needed)),
        limit(-inf, 0, None, None, -full, sparse.eye_array(tables * devices)),
        limit(0, 0, None, -tables_kept, None, None, None, of_table, table),
        limit(0, inf, None, of_pairs(-by_rows / unit, 1), None, None, of_pairs(by_price, devices),
              of_pairs(by_rent, devices), of_pairs(by_rent.sum(axis=1), 1)),
    ]  # fmt: skip
    if memory < inf:
        kept = sparse.kron(costs.column_memory[None] / room, device)
        alike = np.ones((devices, tables))
        limits.append(limit(-inf, 1, *no, kept, None, of_device, alike, alike * (costs.table_memory / room)))
    if items:
        item, own = sparse.eye_array(items), sparse.csr_array((np.ones(items), (costs.table, np.arange(items))))
        own.resize(tables, items)
        owned, size = sparse.kron(item, np.ones((1, devices))), own * (costs.item_memory / room)
        moved = sparse.hstack([
            sparse.kron(own[:, [at]], owners(each)) for at, each in enumerate(costs.items / unit)
        ])  # fmt: skip
        counts = sparse.kron(table, np.full((devices, 1), costs.counts / unit))
        limits += [
            limit(0, 0, None, -own.T, *no, *no, owned, item),
            limit(-inf, 0, None, counts, None, None, -sparse.eye_array(tables * devices), *no, moved),
            limit(0, 0, *no, None, None, -sparse.eye_array(tables * devices), None, None, sparse.kron(size, device)),
            limit(0, 0, *no, *no, -table, None, None, size),
        ]
    copies, one = (0, 0) if costs.training else (inf, 1)
    with quiet():
        found = milp(
            np.eye(1, sum(sizes))[0], constraints=limits, integrality=np.repeat([0, 1, 1, 1, 0, 0, 0, 1, 1, 1], sizes),
            bounds=Bounds(0, np.repeat([inf, 1, 1, costs.width, inf, inf, copies, one, 1, one], sizes)),
            options={"node_limit": nodes, "mip_rel_gap": _GAP, "presolve": False},
        )  # fmt: skip
    least = found.mip_dual_bound
    lower = (1 - _SAFE) * unit * least if least is not None and isfinite(least) else 0.0
    if found.x is None:
        return lower, None, nodes
    whole = np.split(found.x.round().astype(np.int64), np.cumsum(sizes)[:-1])
    shares, owned = whole[3].reshape(tables, devices), whole[-2].reshape(items, devices)
    choice = RowChoice(shares=shares, items=np.where(owned.any(axis=1), owned.argmax(axis=1), EVERYWHERE))
    return lower, choice, int(found.mip_node_count)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what HiGHS prints, whatever it is told, out of standard output, which is for answers."""
    kept = os.dup(1)
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), 1)
        try:
            yield
        finally:
            ctypes.CDLL(None).fflush(None)  # what C has not written yet
            os.dup2(kept, 1)
            os.close(kept)


def _owners(values: Float64, prices: Float64) -> Float64:
    """Return what each thing pays with each device as its owner: (..., devices)."""
    at_owner = values.sum(axis=-1, keepdims=True) - 2 * values
    return np.asarray(np.expand_dims(values @ prices, -1) + at_owner * prices, np.float64)
