"""Choose a mode per table, the rows that every device keeps, and an owner for all else (OPER, USENIX ATC 2024).

1. Modes and copies by a price of memory: rows that save most per byte are copied, and each table takes the mode that is
   cheapest with these copies. Several prices are tried.
2. Owners, the largest things first: each goes where it adds least to a smooth maximum of the loads, so a device with
   many readers of a row is preferred until it is busier than the others (locality minus the price of load).

No row is copied in training. Gradients of copies have to be summed: a ring costs each device 4 (W - 1) / W rows for a
row that any of W devices reads, and to divide such rows evenly among owners never costs any device more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import product
from math import inf

import numpy as np

from foretrace.arrays import Float64, Int64, Mask
from foretrace.compiled import njit
from foretrace.plan.rows.costs import COLUMNS, POOLED, ROWS, RowChoice, RowCosts
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


def choose(costs: RowCosts, memory: float) -> RowChoice | None:
    """Return the best choice found whose devices keep `memory` bytes each at most (inf: any); None where none was
    found.
    """
    saved = 2 * (costs.items.sum(axis=1) - costs.items.max(axis=1, initial=0)) / costs.item_memory  # of a byte copied
    none = np.zeros(len(saved), np.bool_)
    highest = 2 * float(saved.max(initial=0))
    prices = [inf] if costs.training or not highest else [inf, *np.geomspace(highest, highest / 1e6, _PRICES)]
    found: list[RowChoice | None] = []
    known = set[bytes]()
    for price, full in product(prices, (False, True)):  # whether pooled tables make room for copies, too
        copied = saved >= price
        modes = _cheapest(costs, saved, copied, price, memory, room=copied if full else none)
        if modes.tobytes() not in known:
            known.add(modes.tobytes())
            found += _copied(costs, saved, modes, memory)
    found += [_owned(costs, np.full_like(modes, each), none, memory) for each in (POOLED, COLUMNS, ROWS)]
    fitting = [each for each in found if each is not None]
    return min(fitting, key=lambda each: costs.loads(each).max(), default=None)


def _copied(costs: RowCosts, saved: Float64, modes: Int64, memory: float) -> Iterator[RowChoice | None]:
    """Yield choices with these modes, where rows that save most per byte are copied as far as there is room."""
    none, copies = np.zeros(len(saved), np.bool_), np.zeros(0, np.int64)
    if not costs.training:
        copies = np.flatnonzero((modes == ROWS)[costs.table])
        copies = copies[np.argsort(-saved[copies], kind="stable")]
        full = bisect_left(
            range(1, len(copies) + 1), True,
            key=lambda count: not _has_room(costs, modes, _mask(none, copies[:count]), memory),
        )  # fmt: skip
        copies = copies[:full]
    fewer = [0, *(1 << each for each in range(len(copies).bit_length() - 1)), len(copies)]
    for less in fewer:  # the others need room where they are read; of few rows, fewer copies may be better
        copied = _mask(none, copies[: len(copies) - less])
        for each in (*_cut(costs, modes, copied, memory), modes):
            yield (owned := _owned(costs, each, copied, memory))
        if not len(copies) or (len(copies) > _FEW and owned is not None):
            break


def _cheapest(costs: RowCosts, saved: Float64, copied: Mask, price: float, memory: float, *, room: Mask) -> Int64:
    """Return the mode of every table that exchanges least in all, with copies that cost `price` per byte.

    Where pooled tables leave no room for all rows beside copies of those in `room`, those that lose least per byte take
    another mode.
    """
    others = costs.profile.devices - 1
    paid_copies = np.where(copied, price * others, saved) if copied.any() else saved
    rows = costs.per_table(paid_copies * costs.item_memory) + costs.counts_of(~copied) * costs.profile.devices
    pooled = 2 * (costs.pooled.sum(axis=1) - costs.pooled.max(axis=1))
    paid = np.array([np.where(costs.table_memory <= memory, pooled, inf), costs.columns.sum(axis=1), rows])
    modes, next_best = paid.argmin(axis=0), 1 + paid[1:].argmin(axis=0)
    for table in np.argsort((paid[1:].min(axis=0) - pooled) / costs.table_memory, kind="stable"):
        if _has_room(costs, modes, room & (modes == ROWS)[costs.table], memory):
            break
        modes[table] = next_best[table] if modes[table] == POOLED else modes[table]
    return np.asarray(modes, np.int64)


def _mask(none: Mask, which: Int64) -> Mask:
    found = none.copy()
    found[which] = True
    return found


def _has_room(costs: RowCosts, modes: Int64, copied: Mask, memory: float) -> bool:
    if memory == inf:
        return True
    base = _pooled(costs, modes, copied, memory)
    return base is not None and costs.item_memory[(modes == ROWS)[costs.table] & ~copied].sum() <= base[2].sum()


def _pooled(costs: RowCosts, modes: Int64, copied: Mask, memory: float) -> tuple[Int64, Float64, Float64] | None:
    """Return owners of pooled tables (tables,), loads without what rows add to their owners, and free memory
    (devices,).
    """
    rows = (modes == ROWS)[costs.table]
    load = costs.columns[modes == COLUMNS].sum(axis=0) + costs.counts_of(~copied)[modes == ROWS].sum()
    load = load + costs.items[rows & ~copied].sum(axis=0) + costs.pooled[modes == POOLED].sum(axis=0)
    kept = costs.column_memory[modes == COLUMNS].sum(axis=0) + costs.item_memory[rows & copied].sum()
    free = np.broadcast_to(memory - kept, load.shape).astype(np.float64)
    owners = None if (free < 0).any() else _dealt(costs, costs.pooled, modes == POOLED, load, free)
    return None if owners is None else (owners, load, free)


def whole_tables(costs: RowCosts, values: Float64, memory: float, *, chosen: Mask | None = None) -> Int64 | None:
    """Return devices (tables,) for whole tables, of all or of those `chosen`, that readers exchange `values` with."""
    every = np.ones(len(values), np.bool_) if chosen is None else chosen
    free = np.full(costs.profile.devices, memory, np.float64)
    return _dealt(costs, values, every, values[every].sum(axis=0), free)


def _dealt(costs: RowCosts, values: Float64, which: Mask, load: Float64, free: Float64) -> Int64 | None:
    order = np.flatnonzero(which)
    order = order[np.argsort(-values[order].sum(axis=1), kind="stable")]
    owners = np.full(len(values), _UNPLACED, np.int64)
    fits = assign(values, costs.table_memory, order, load, free, np.array(_SHARPNESS), owners)
    return owners if fits else None


def _owned(costs: RowCosts, modes: Int64, copied: Mask, memory: float) -> RowChoice | None:
    """Return owners for these modes and copies; None where they do not fit."""
    base = _pooled(costs, modes, copied, memory)
    if base is None:
        return None
    tables, load, free = base
    items = np.where(copied, EVERYWHERE, _UNPLACED)
    order = np.flatnonzero((modes == ROWS)[costs.table] & ~copied)
    order = order[np.argsort(-costs.items[order].sum(axis=1), kind="stable")]
    tight = costs.item_memory[order].sum() > _TIGHT * free.sum()
    found: list[RowChoice] = []
    for by_size in (False, True) if tight else (False,):
        owners, loads, left, rows = items.copy(), load.copy(), free.copy(), order
        if by_size:  # parts of many rows go where most room is left, whoever reads them
            many = costs.profile.size[order] > 1
            parts, rows = order[many], order[~many]
            parts = parts[np.argsort(-costs.item_memory[parts], kind="stable")]
            if not assign(0 * costs.items, costs.item_memory, parts, loads, left, np.array(_SHARPNESS[:1]), owners):
                continue
            own = costs.items[parts].sum(axis=1) - 2 * costs.items[parts, owners[parts]]
            loads += np.bincount(owners[parts], own, minlength=len(loads))
        if assign(costs.items, costs.item_memory, rows, loads, left, np.array(_SHARPNESS), owners):
            found.append(RowChoice(modes=modes, tables=tables, items=owners))
    return min(found, key=lambda each: costs.loads(each).max(), default=None)


def _cut(costs: RowCosts, modes: Int64, copied: Mask, memory: float) -> list[Int64]:
    """Return the same with some pooled tables cut by columns, as far as whole ones cannot be dealt out evenly."""
    pooled = np.flatnonzero(modes == POOLED)
    pooled = pooled[np.argsort(-costs.pooled[pooled].sum(axis=1), kind="stable")]
    found = []
    for count in range(1, min(costs.profile.devices - 1, len(pooled)) + 1):
        cut = modes.copy()
        cut[pooled[:count]] = COLUMNS
        base = _pooled(costs, cut, copied, memory)
        if base is not None:
            found.append((float(base[1].max()), count, cut))
    return [min(found)[2]] if found else []
