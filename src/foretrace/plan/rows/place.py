"""Choose a mode per table, the rows that every device keeps, and an owner for all else (OPER, USENIX ATC 2024).

1. Modes and copies by a price of memory: rows that save most per byte are copied, and each table takes the mode that is
   cheapest with these copies. Several prices are tried.
2. Devices of tables that are added up, then owners of rows, the largest things first: each goes where it adds least to
   a smooth maximum of the loads, so a device with many readers of a row is preferred until it is busier than the others
   (locality minus the price of load). A table is cut by columns where no device has room for it, or where that pays.

No row is copied in training. Gradients of copies have to be summed: a ring costs each device 4 (W - 1) / W rows for a
row that any of W devices reads, and to divide such rows evenly among owners never costs any device more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

import numpy as np

from foretrace.arrays import Float64, Int64, Mask
from foretrace.compiled import njit
from foretrace.plan.rows.costs import RowChoice, RowCosts, exchanged
from foretrace.training.rows.placement import EVERYWHERE

_SHARPNESS = (4.0, 16.0, 64.0, 256.0)  # of the smooth maximum, pass by pass
_UNPLACED = -2
_FEW = 100  # copies, of which fewer are tried though all have room
_TIGHT = 0.7  # of the free memory: from here on what is large may not fit when it comes last
_PRICES = 13  # of a byte of memory that are tried: half a decade apart


@njit()
def assign(
    values: Float64, size: Int64, order: Int64, load: Float64, free: Float64, sharpness: Float64, owners: Int64
) -> bool:
    """Give an owner to each of `order`, in as many passes as there is sharpness; whether all had room.

    `values` (things, devices) and `size` (things,) are bytes exchanged and kept; `load`, `free` (devices,) and `owners`
    (things,) are brought up to date. Later passes move what would be better elsewhere by now.
    """
    devices = len(load)
    for sharp in sharpness:
        for thing in order:
            total = values[thing].sum()
            old = owners[thing]
            if old >= 0:
                load[old] -= total - 2 * values[thing, old]
                free[old] += size[thing]
            best, least, top = -1, np.inf, max(load.max(), 1e-300)
            for device in range(devices):
                if size[thing] <= free[device]:
                    added = total - 2 * values[thing, device]
                    price = np.exp(sharp * (load[device] - top) / top) * np.expm1(min(sharp * added / top, 600.0))
                    if price < least or (price == least and free[device] > free[best]):
                        best, least = device, price
            if best < 0:
                return False
            owners[thing] = best
            load[best] += total - 2 * values[thing, best]
            free[best] -= size[thing]
    return True


@njit()
def deal(
    asked: Float64, column: Float64, size: Int64, order: Int64, load: Float64, free: Float64, sharpness: Float64,
    width: int, shares: Int64,
) -> bool:  # fmt: skip
    """Deal the columns of each table of `order` out, in as many passes as there is sharpness; whether all had room.

    `asked` (tables, devices), `column` (devices,) and `size` (tables,) are bytes that a device with columns is asked,
    that are exchanged for one, and that it keeps of one. `load` (devices,), which counts every table as kept by one
    other device, `free` (devices,) and `shares` (tables, devices) are brought up to date. A table gets one device more
    as long as it has no room without or that pays; its columns go one by one to the one with the least load.
    """
    devices = len(load)
    per_column = column.sum() - 2 * column
    for sharp in sharpness:
        for table in order:
            readers = asked[table]
            owner = readers.sum() - 2 * readers
            had = shares[table] > 0
            if had.any():
                load -= (had.sum() - 1) * readers + had * owner + shares[table] * per_column
                free += shares[table] * size[table]
            top = max(load.max(), 1e-300)
            keeps, least = np.zeros(devices, np.bool_), np.inf
            while not keeps.all():
                most, cheapest, next_one = -1, np.inf, -1
                for device in range(devices):
                    if keeps[device]:
                        continue
                    keeps[device] = True
                    loads, own = load + (keeps.sum() - 1) * readers + keeps * owner, np.zeros_like(shares[table])
                    for _ in range(width):
                        to = -1
                        for each in range(devices):
                            room = keeps[each] and (own[each] + 1) * size[table] <= free[each]
                            if room and (to < 0 or loads[each] < loads[to]):
                                to = each
                        if to < 0:
                            break
                        own[to] += 1
                        loads[to] += per_column[to]
                    placed, price = own.sum(), np.exp(np.minimum(sharp * (loads / top - 1), 600.0)).sum()
                    if placed > most or (placed == most and price < cheapest):
                        most, cheapest, next_one = placed, price, device
                        if placed == width and price < least:
                            least, shares[table] = price, own
                    keeps[device] = False
                if least < np.inf and cheapest > least:
                    break
                keeps[next_one] = True
            if least == np.inf:
                return False
            had = shares[table] > 0
            load += (had.sum() - 1) * readers + had * owner + shares[table] * per_column
            free -= shares[table] * size[table]
    return True


def choose(
    costs: RowCosts, memory: float, shares: Int64 | None = None, copied: Float64 | None = None
) -> RowChoice | None:
    """Return the best choice found whose devices keep `memory` bytes each at most (inf: any); None where none was
    found.

    With `shares` (tables, devices) these are its columns, and of the items (items,) about these shares are `copied`.
    """
    saved = 2 * (costs.items.sum(axis=1) - costs.items.max(axis=1, initial=0)) / costs.item_memory  # of a byte copied
    if shares is not None:
        order = np.argsort(-saved, kind="stable")
        copies = np.zeros(len(saved), np.bool_)
        copies[order] = np.diff(np.floor(np.cumsum(copied[order]) + 0.5), prepend=0) > 0
        first = np.where(copies, saved + saved.max(initial=0) + 1, saved)
        return best(costs, _copied(costs, first, shares.sum(axis=1) == 0, memory, shares))
    highest = 2 * float(saved.max(initial=0))
    prices = [inf] if costs.training or not highest else [inf, *np.geomspace(highest, highest / 1e6, _PRICES)]
    every = {each.tobytes(): each for each in (_by_rows(costs, saved, price, memory) for price in prices)}
    found = [each for rows in every.values() for each in _copied(costs, saved, rows, memory)]
    none, tables = np.zeros(len(saved), np.bool_), len(costs.table_rows)
    found += [_owned(costs, np.full(tables, each), none, memory) for each in (False, True)]
    if (owners := whole_tables(costs, costs.pooled, memory)) is not None:
        whole = costs.width * np.eye(costs.profile.devices, dtype=np.int64)[owners]
        found.append(RowChoice(shares=whole, items=np.full(len(saved), _UNPLACED)))
    return best(costs, found)


def best(costs: RowCosts, found: Iterable[RowChoice | None]) -> RowChoice | None:
    """Return the choice whose busiest device exchanges least; None where there is none."""
    fitting = (each for each in found if each is not None)
    return min(fitting, key=lambda each: costs.loads(each).max(), default=None)


def _by_rows(costs: RowCosts, saved: Float64, price: float, memory: float) -> Mask:
    """Return the tables (tables,) that exchange least in all by rows, with copies that cost `price` per byte."""
    copied = saved >= price
    paid = np.where(copied, price * (costs.profile.devices - 1), saved) if copied.any() else saved
    rows = costs.per_table(paid * costs.item_memory) + costs.counts_of(~copied) * costs.profile.devices
    whole = costs.pooled.sum(axis=1) - costs.pooled.max(axis=1)
    cut = np.maximum(np.ceil(costs.table_memory / memory) - 1, 0) * costs.asked.mean(axis=1)  # other devices are asked
    return np.asarray(rows < 2 * (whole + cut * (costs.profile.devices - 1)))


def _copied(
    costs: RowCosts, saved: Float64, rows: Mask, memory: float, shares: Int64 | None = None
) -> Iterator[RowChoice | None]:
    """Yield choices with these tables by rows, where rows that save most are copied as far as there is room."""
    copies = np.flatnonzero(rows[costs.table]) if not costs.training else np.zeros(0, np.int64)
    copies = copies[np.argsort(-saved[copies], kind="stable")]
    others, kept = costs.profile.devices - 1, np.cumsum(costs.item_memory[copies])
    fit = others * kept <= (others + 1) * memory - costs.table_memory.sum()
    if shares is not None:
        fit &= kept <= memory - (costs.column_memory @ shares).max()
    copies = copies[: np.count_nonzero(fit)]
    fewer = [0, *(1 << each for each in range(len(copies).bit_length() - 1)), len(copies)]
    for less in fewer:  # the others need room where they are read; of few rows, fewer copies may be better
        copied = np.zeros(len(saved), np.bool_)
        copied[copies[: len(copies) - less]] = True
        yield (owned := _owned(costs, rows, copied, memory, shares))
        if not len(copies) or (len(copies) > _FEW and owned is not None):
            break


def whole_tables(costs: RowCosts, values: Float64, memory: float, *, chosen: Mask | None = None) -> Int64 | None:
    """Return devices (tables,) for whole tables, of all or of those `chosen`, that readers exchange `values` with."""
    order = np.flatnonzero(np.ones(len(values)) if chosen is None else chosen)
    order = order[np.argsort(-values[order].sum(axis=1), kind="stable")]
    load, free = values[order].sum(axis=0), np.full(costs.profile.devices, memory, np.float64)
    owners = np.full(len(values), _UNPLACED, np.int64)
    return owners if assign(values, costs.table_memory, order, load, free, np.array(_SHARPNESS), owners) else None


def _owned(costs: RowCosts, rows: Mask, copied: Mask, memory: float, shares: Int64 | None = None) -> RowChoice | None:
    """Return columns, unless these are given, and owners for tables `rows` (tables,) by rows and `copied` items
    (items,) of them; None where they do not fit.
    """
    copied = copied & rows[costs.table]
    order = np.flatnonzero(rows[costs.table] & ~copied)
    load = costs.items[order].sum(axis=0) + costs.counts_of(~copied)[rows].sum()
    free = np.full(costs.profile.devices, memory - costs.item_memory[copied].sum(), np.float64)
    if shares is None:
        shares, sums = np.zeros((len(rows), len(free)), np.int64), np.flatnonzero(~rows)
        sums = sums[np.lexsort((-costs.table_memory[sums], -costs.pooled[sums].sum(axis=1)))]
        load += costs.pooled[sums].sum(axis=0)
        if not deal(
            costs.asked, costs.column, costs.column_memory, sums, load, free, np.array(_SHARPNESS), costs.width, shares
        ):
            return None
    else:
        load += exchanged(costs.asked, shares > 0) + exchanged(costs.column, shares)
        free -= costs.column_memory @ shares
        if (free < 0).any():
            return None
    items = np.where(copied, EVERYWHERE, _UNPLACED)
    order = order[np.argsort(-costs.items[order].sum(axis=1), kind="stable")]
    tight = costs.item_memory[order].sum() > _TIGHT * free.sum()
    found: list[RowChoice] = []
    for by_size in (False, True) if tight else (False,):
        owners, loads, left, rest = items.copy(), load.copy(), free.copy(), order
        if by_size:  # parts of many rows go where most room is left, whoever reads them
            many = costs.profile.size[order] > 1
            parts, rest = order[many], order[~many]
            parts = parts[np.argsort(-costs.item_memory[parts], kind="stable")]
            if not assign(0 * costs.items, costs.item_memory, parts, loads, left, np.array(_SHARPNESS[:1]), owners):
                continue
            own = costs.items[parts].sum(axis=1) - 2 * costs.items[parts, owners[parts]]
            loads += np.bincount(owners[parts], own, minlength=len(loads))
        if assign(costs.items, costs.item_memory, rest, loads, left, np.array(_SHARPNESS), owners):
            found.append(RowChoice(shares=shares, items=owners))
    return best(costs, found)
