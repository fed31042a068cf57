"""Owners for the rows of embedding tables, and devices for whole tables (OPER, USENIX ATC 2024).

The largest things come first: each goes where it adds least to a smooth maximum of the loads, so a device with many
readers of a row is preferred until it is busier than the others (locality minus the price of load). Which tables are
added up, on which columns, and which rows are copied is what `bound` finds.

No row is copied in training. Gradients of copies have to be summed: a ring costs each device 4 (W - 1) / W rows for a
row that any of W devices reads, and to divide such rows evenly among owners never costs any device more.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from foretrace.arrays import Float64, Int64, Mask
from foretrace.compiled import njit
from foretrace.plan.rows.costs import RowChoice, RowCosts, exchanged
from foretrace.training.rows.placement import EVERYWHERE

_SHARPNESS = (4.0, 16.0, 64.0, 256.0)  # of the smooth maximum, pass by pass
_UNPLACED = -2
_TIGHT = 0.7  # of the free memory: from here on what is large may not fit when it comes last


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


def choose(costs: RowCosts, memory: float) -> RowChoice | None:
    """Return a first choice whose devices keep `memory` bytes each at most (inf: any): all tables whole, or all by
    rows without copies; None where neither fits.
    """
    none = np.zeros(len(costs.table))
    return best(costs, (with_rows(costs, memory, np.full(len(costs.asked), each), none) for each in (False, True)))


def with_rows(costs: RowCosts, memory: float, rows: Mask, copied: Float64) -> RowChoice | None:
    """Return devices for whole tables beside those `rows` (tables,) by rows, for which see `with_columns`."""
    shares, whole = np.zeros_like(costs.asked, np.int64), np.flatnonzero(~rows)
    owners = whole_tables(costs, costs.pooled, memory, chosen=~rows)
    if owners is None:
        return None
    shares[whole, owners[whole]] = costs.width
    return with_columns(costs, memory, shares, copied)


def best(costs: RowCosts, found: Iterable[RowChoice | None]) -> RowChoice | None:
    """Return the choice whose busiest device exchanges least; None where there is none."""
    fitting = (each for each in found if each is not None)
    return min(fitting, key=lambda each: costs.loads(each).max(), default=None)


def with_columns(costs: RowCosts, memory: float, shares: Int64, copied: Float64) -> RowChoice | None:
    """Return owners of rows beside columns `shares` (tables, devices), with about the shares `copied` (items,) of items
    on every device, as far as there is room; None where they do not fit.
    """
    rows = np.asarray(~shares.any(axis=1))
    left, kept = memory - costs.column_memory @ shares, costs.table_memory[rows].sum()
    saved = (costs.items.sum(axis=1) - costs.items.max(axis=1, initial=0)) / costs.item_memory  # of a byte copied
    order = np.argsort(-saved, kind="stable")
    order = order[rows[costs.table[order]]]
    copies = order[np.diff(np.floor(np.cumsum(copied[order]) + 0.5), prepend=0) > 0]
    sizes = np.cumsum(costs.item_memory[copies])
    fit = ((costs.profile.devices - 1) * sizes + kept <= left.sum()) & (sizes <= left.min())
    count = int(np.count_nonzero(fit))
    for less in (0, *(1 << each for each in range(count.bit_length() - 1)), count):  # others may need room in one place
        items = np.where(rows[costs.table], _UNPLACED, 0)
        items[copies[: count - less]] = EVERYWHERE
        if (found := _owned(costs, memory, shares, items)) is not None or not count:
            return found
    return None


def whole_tables(costs: RowCosts, values: Float64, memory: float, *, chosen: Mask | None = None) -> Int64 | None:
    """Return devices (tables,) for whole tables, of all or of those `chosen`, that readers exchange `values` with."""
    order = np.flatnonzero(np.ones(len(values)) if chosen is None else chosen)
    order = order[np.argsort(-values[order].sum(axis=1), kind="stable")]
    load, free = values[order].sum(axis=0), np.full(costs.profile.devices, memory, np.float64)
    owners = np.full(len(values), _UNPLACED, np.int64)
    return owners if assign(values, costs.table_memory, order, load, free, np.array(_SHARPNESS), owners) else None


def _owned(costs: RowCosts, memory: float, shares: Int64, items: Int64) -> RowChoice | None:
    """Return a choice with owners for what is yet unplaced of `items` (items,); None where they do not fit."""
    order = np.flatnonzero(items == _UNPLACED)
    order = order[np.argsort(-costs.items[order].sum(axis=1), kind="stable")]
    free = memory - costs.column_memory @ shares - costs.item_memory[items == EVERYWHERE].sum()
    if (free < 0).any():
        return None
    load = exchanged(costs.asked, shares > 0) + exchanged(costs.column, shares) + costs.items[order].sum(axis=0)
    load += costs.counts_of(items == _UNPLACED).sum()
    tight = costs.item_memory[order].sum() > _TIGHT * free.sum()
    found: list[RowChoice] = []
    for by_size in (False, True) if tight else (False,):
        owners, loads, left, rest = items.copy(), load.copy(), free.astype(np.float64), order
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
