"""What a placement of rows costs on a profile: bytes in and out of every device, and its memory.

If every read were remote, a reader of a row would exchange `row_bytes` for it; to own a row adds those of the other
readers and takes off one's own. So of all loads only the owner's depends on the owner. The same holds for what is asked
of every device that keeps columns of a table, and for the sums of every column.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Float64, Int64, Mask
from foretrace.plan.rows.profile import AccessProfile
from foretrace.training.rows.placement import EVERYWHERE, FLOAT, WORD, Mode, PlacedTable, RowPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChoice:
    """Columns of every table that each device keeps and adds up (tables, devices), none of a table by rows; an owner
    per item (items,) of those, which may be all.
    """

    shares: Int64
    items: Int64

    @property
    def rows(self) -> Mask:
        """Return which tables are by rows: (tables,)."""
        return np.asarray(~self.shares.any(axis=1))


class RowCosts:
    """Bytes of a batch by device, and bytes of memory, for tables of `width` columns."""

    def __init__(self, profile: AccessProfile, width: int, *, training: bool) -> None:
        self.profile, self.width, self.training = profile, width, training
        base = RowPlacement(devices=profile.devices, width=width, training=training, tables=())
        self.items = base.row_bytes * profile.reads  # (items, devices) if each is read from elsewhere
        self.asked = WORD * (profile.samples + profile.ids)  # (tables, devices) of each device that keeps columns
        self.column = FLOAT * (1 + training) * profile.samples  # (devices,) sums, there and in training back
        self.pooled = self.asked + width * self.column  # (tables, devices) if another device keeps the table
        self.counts = 2.0 * WORD * (profile.devices - 1)  # of a table by rows, on each device
        self.table = np.repeat(np.arange(len(profile.tables)), np.diff(profile.starts))  # of every item
        self.item_memory = FLOAT * width * profile.size
        self.table_rows = np.array([each.rows for each in profile.tables], np.int64)
        self.column_memory = FLOAT * self.table_rows  # (tables,)
        self.table_memory = width * self.column_memory

    def per_table(self, values: Float64 | Mask) -> Float64:
        """Return sums over the items of every table: (tables,)."""
        return np.bincount(self.table, values, minlength=len(self.table_rows)).astype(np.float64)

    def counts_of(self, apart: Mask) -> Float64:
        """Return bytes (tables,) of the counts of each table by rows, on each device; none where no item is
        kept apart.
        """
        return np.where(self.per_table(apart) > 0, self.counts, 0.0)

    def loads(self, choice: RowChoice, asked: Float64 | Mask | None = None) -> Float64:
        """Return bytes in and out of every device (devices,); `asked` (tables, devices) is how often a device is asked
        for sums, by default whether it has columns.
        """
        asked = choice.shares > 0 if asked is None else asked
        rows = choice.rows
        apart = rows[self.table] & (choice.items != EVERYWHERE)
        owned = np.zeros((apart.sum(), self.profile.devices))
        owned[np.arange(len(owned)), choice.items[apart]] = 1
        found = exchanged(self.items[apart], owned) + self.counts_of(apart)[rows].sum()
        found += exchanged(self.asked, asked) + exchanged(self.column, choice.shares)
        return np.asarray(np.maximum(found, 0.0), np.float64)

    def memory(self, choice: RowChoice) -> Int64:
        """Return bytes on every device: (devices,)."""
        rows = choice.rows[self.table]
        everywhere = rows & (choice.items == EVERYWHERE)
        apart = rows & ~everywhere
        found = self.column_memory @ choice.shares + self.item_memory[everywhere].sum()
        found = found + np.bincount(choice.items[apart], self.item_memory[apart], minlength=self.profile.devices)
        return np.asarray(found, np.int64)

    def placement(self, choice: RowChoice) -> RowPlacement:
        """Return the placement that a choice means."""
        tables, starts = [], self.profile.starts.tolist()
        for at, (table, seen, item) in enumerate(
            zip(self.profile.tables, self.profile.seen, self.profile.item, strict=True)
        ):
            if keep := np.count_nonzero(choice.shares[at]):
                mode: Mode = "pooled" if keep == 1 else "columns"
                placed = PlacedTable(name=table.name, rows=table.rows, mode=mode, shares=choice.shares[at])
            else:
                own, rest = np.split(choice.items[starts[at] : starts[at + 1]], [item.max(initial=-1) + 1])
                placed = PlacedTable(
                    name=table.name, rows=table.rows, mode="rows", ids=seen, owners=own[item], rest=rest
                )
            tables.append(placed)
        return RowPlacement(
            devices=self.profile.devices, width=self.width, training=self.training, tables=tuple(tables)
        )


def exchanged(values: Float64, kept: Float64 | Int64 | Mask) -> Float64:
    """Return loads (devices,) of things of which `kept` (things, devices) is on each device, whose readers exchange
    `values` (things, devices) with each that has them, by what it has.
    """
    values = np.broadcast_to(values, kept.shape)
    return np.asarray(
        kept.sum(axis=1) @ values + (kept * (values.sum(axis=1, keepdims=True) - 2 * values)).sum(axis=0), np.float64
    )
