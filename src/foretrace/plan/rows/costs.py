"""What a placement of rows costs on a profile: bytes in and out of every device, and its memory.

If every read were remote, a reader of a row would exchange `row_bytes` for it; to own a row adds those of the other
readers and takes off one's own. So of all loads only the owner's depends on the owner, and the same holds for tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from foretrace.arrays import Float64, Int64, Mask
from foretrace.plan.rows.profile import AccessProfile
from foretrace.training.rows.placement import (
    EVERYWHERE,
    FLOAT,
    WORD,
    PlacedTable,
    RowPlacement,
    column_shares,
)

Choosable = Literal["pooled", "columns", "rows"]
POOLED, COLUMNS, ROWS = range(3)  # of `RowChoice.modes`


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChoice:
    """A mode per table (tables,), an owner per pooled table (tables,) and one per item (items,), which may be all."""

    modes: Int64
    tables: Int64
    items: Int64


class RowCosts:
    """Bytes of a batch by device, and bytes of memory, for tables of `width` columns."""

    def __init__(self, profile: AccessProfile, width: int, *, training: bool) -> None:
        self.profile, self.width, self.training = profile, width, training
        devices, columns = profile.devices, column_shares(width, profile.devices)
        base = RowPlacement(devices=devices, width=width, training=training, tables=())
        asked = WORD * (profile.samples + profile.ids)
        self.items = base.row_bytes * profile.reads  # (items, devices) if each is read from elsewhere
        number = FLOAT * (1 + training)  # bytes, there and in training back
        self.pooled = asked + number * width * profile.samples  # (tables, devices)
        shares = np.where(columns > 0, asked[..., None] + number * np.outer(profile.samples, columns), 0)
        shares[:, np.arange(devices), np.arange(devices)] = 0  # (tables, reader, owner)
        self.columns = shares.sum(axis=1) + shares.sum(axis=2)
        self.counts = 2.0 * WORD * (devices - 1)  # of a table by rows, on each device
        self.table = np.repeat(np.arange(len(profile.tables)), np.diff(profile.starts))  # of every item
        self.item_memory = FLOAT * width * profile.size
        self.table_rows = np.array([each.rows for each in profile.tables], np.int64)
        self.table_memory = FLOAT * width * self.table_rows
        self.column_memory = FLOAT * np.outer(self.table_rows, columns)

    def per_table(self, values: Float64 | Mask) -> Float64:
        """Return sums over the items of every table: (tables,)."""
        return np.bincount(self.table, values, minlength=len(self.table_rows)).astype(np.float64)

    def counts_of(self, apart: Mask) -> Float64:
        """Return bytes (tables,) of the counts of each table by rows, on each device; none where no item is
        kept apart.
        """
        return np.where(self.per_table(apart) > 0, self.counts, 0.0)

    def loads(self, choice: RowChoice) -> Float64:
        """Return bytes in and out of every device: (devices,)."""
        rows, pooled = choice.modes == ROWS, choice.modes == POOLED
        apart = rows[self.table] & (choice.items != EVERYWHERE)
        found = self.columns[choice.modes == COLUMNS].sum(axis=0) + self.counts_of(apart)[rows].sum()
        found = found + _owned(self.items, choice.items, apart)
        return np.asarray(np.maximum(found + _owned(self.pooled, choice.tables, pooled), 0.0), np.float64)

    def memory(self, choice: RowChoice) -> Int64:
        """Return bytes on every device: (devices,)."""
        rows = (choice.modes == ROWS)[self.table]
        everywhere = rows & (choice.items == EVERYWHERE)
        found = self.column_memory[choice.modes == COLUMNS].sum(axis=0) + self.item_memory[everywhere].sum()
        devices, apart, pooled = self.profile.devices, rows & ~everywhere, choice.modes == POOLED
        found = found + np.bincount(choice.items[apart], self.item_memory[apart], minlength=devices)
        found = found + np.bincount(choice.tables[pooled], self.table_memory[pooled], minlength=devices)
        return np.asarray(found, np.int64)

    def placement(self, choice: RowChoice) -> RowPlacement:
        """Return the placement that a choice means."""
        tables, starts = [], self.profile.starts.tolist()
        for at, (table, seen, item) in enumerate(
            zip(self.profile.tables, self.profile.seen, self.profile.item, strict=True)
        ):
            mode: Choosable = get_args(Choosable)[choice.modes[at]]
            owner = int(choice.tables[at]) if mode == "pooled" else 0
            placed = PlacedTable(name=table.name, rows=table.rows, mode=mode, owner=owner)
            if mode == "rows":
                own, rest = np.split(choice.items[starts[at] : starts[at + 1]], [item.max(initial=-1) + 1])
                placed = PlacedTable(name=table.name, rows=table.rows, mode=mode, ids=seen, owners=own[item], rest=rest)
            tables.append(placed)
        return RowPlacement(
            devices=self.profile.devices, width=self.width, training=self.training, tables=tuple(tables)
        )


def _owned(values: Float64, owners: Int64, which: Mask) -> Float64:
    """Return loads (devices,) of some of the things whose readers exchange `values` (things, devices) with their
    owners.
    """
    values, owners = values[which], owners[which]
    own = values.sum(axis=1) - 2 * values[np.arange(len(owners)), owners]
    return np.asarray(values.sum(axis=0) + np.bincount(owners, own, minlength=values.shape[1]), np.float64)
