"""What a placement of rows costs on a profile: bytes in and out of every device, and its memory.

If every read were remote, a reader of a row would exchange `row_bytes` for it; to own a row adds those of the other
readers and takes off one's own. So of all loads only the owner's depends on the owner. The same holds for what is asked
of every device that keeps columns of a table, and for the sums of every column.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Float64, Int64, Mask
from foretrace.errors import ForetraceError
from foretrace.training.rows.lookups import EmbeddingTable, Lookups
from foretrace.training.rows.placement import EVERYWHERE, FLOAT, WORD, Mode, PlacedTable, RowPlacement, part_sizes
from foretrace.training.rows.rows import distinct


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
        """Return bytes (tables,) of the counts of each table by rows, on each device; none where no item is apart."""
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


PARTS = 256  # into which rows of a table that were read alike are divided, about: a multiple of the devices
MOST_ROWS = 1 << 40  # of a table: ids are multiplied by batches and devices
_MOST_PRIOR = 64.0  # reads that what is usual in the table may weigh as much as


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessProfile:
    """Expected reads of a batch. An item is a part of the rows of a table that each device read equally often.

    Items are in the order of `tables`, those of unread rows last: those of table t are `starts[t]` to `starts[t + 1]`.
    """

    tables: tuple[EmbeddingTable, ...]
    seen: tuple[Int64, ...]  # ids that were read, rising, by table
    item: tuple[Int64, ...]  # of each of these, counted from the table's first
    starts: Int64  # (tables + 1,)
    reads: Float64  # (items, devices) rows that a device is expected to read in a batch
    size: Int64  # (items,) rows
    samples: Float64  # (devices,) of a batch
    ids: Float64  # (tables, devices) ids in a batch, repeated ones included

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.samples)


def profile(lookups: Lookups, devices: int, batches: range) -> AccessProfile:
    """Count reads in consecutive batches, and expect what follows from them.

    A row that was read once was not read for good: `_expected` takes off what rows that are yet unread will get, and
    moves the readers of rare rows towards those of the table. Raises ForetraceError for tables beyond MOST_ROWS.
    """
    if large := [each.name for each in lookups.tables if each.rows > MOST_ROWS]:
        raise ForetraceError(f"Table {large[0]} has more than {MOST_ROWS:,} rows; number its rows from 0.")
    edges = np.linspace(0, lookups.samples, devices + 1).astype(np.int64)
    worker = np.repeat(np.arange(devices), np.diff(edges))
    slots = (np.arange(len(batches))[:, None] * devices + worker).ravel()
    begin, end = batches.start * lookups.samples, batches.stop * lookups.samples
    parts = -(-PARTS // devices) * devices
    seen, items, reads, sizes, ids = [], [], [], [], []
    for table in lookups.tables:
        offsets = table.offsets[begin : end + 1]
        slot = np.repeat(slots, np.diff(offsets))
        pairs = distinct(table.ids[offsets[0] : offsets[-1]] * (len(batches) * devices) + slot)
        row = pairs // (len(batches) * devices)
        first = np.diff(row, prepend=-1) > 0
        rows, at = row[first], np.cumsum(first) - 1
        counts = np.bincount(at * devices + pairs % devices, minlength=len(rows) * devices).reshape(-1, devices)
        left = table.rows - len(rows)
        unread_sizes = part_sizes(left, min(parts, left))
        expected, unread = _expected(counts.astype(np.float64), left)
        item = _alike(counts, parts)
        of_items = [np.bincount(item, column) for column in expected.T]
        seen.append(rows)
        items.append(item)
        reads.append(np.vstack([np.stack(of_items, 1), np.outer(unread_sizes / max(left, 1), unread)]) / len(batches))
        sizes.append(np.concatenate([np.bincount(item), unread_sizes]))
        ids.append(np.bincount(slot % devices, minlength=devices) / len(batches))
    return AccessProfile(
        tables=lookups.tables, seen=tuple(seen), item=tuple(items), starts=np.cumsum([0, *map(len, sizes)]),
        reads=np.concatenate(reads), size=np.concatenate(sizes), samples=np.diff(edges).astype(np.float64),
        ids=np.array(ids),
    )  # fmt: skip


def _alike(counts: Int64, parts: int) -> Int64:
    """Return the item of each row (rows,): rows of the same counts (rows, devices), in `parts` items at most."""
    kind = np.zeros(len(counts), np.int64)
    for column in counts.T:
        kind = np.unique(kind * (1 + int(column.max(initial=0))) + column, return_inverse=True)[1]
    sizes = np.bincount(kind)
    begins, many = np.cumsum(sizes) - sizes, np.minimum(sizes, parts)
    order = np.argsort(kind, kind="stable")
    item = np.empty_like(order)
    kind = kind[order]
    item[order] = (np.cumsum(many) - many)[kind] + (np.arange(len(order)) - begins[kind]) * many[kind] // sizes[kind]
    return item


def _expected(counts: Float64, left: int) -> tuple[Float64, Float64]:
    """Return reads (rows, devices) to expect in as many batches again, and reads (devices,) of the `left` unread rows.

    What is taken off every row, n1 / (n1 + 2 n2) with n1 rows read once and n2 twice, is the discount of Ney, Essen
    and Kneser (Computer Speech and Language 8, 1994). Readers of a row are taken as Dirichlet-multinomial around those
    of the table: two reads of one row agree on the device more often than two of the table, which shows how much.
    """
    totals = counts.sum(axis=1)
    if not len(counts):
        return counts, np.zeros(counts.shape[1])
    usual = counts.sum(axis=0) / totals.sum()
    once, twice = int((totals == 1).sum()), int((totals == 2).sum())
    discount = once / (once + 2 * twice) if once and left else 0.0
    several = totals > 1
    agree = (counts * (counts - 1)).sum(axis=1)[several] / (totals[several] - 1)
    more = agree.sum() / max(totals[several].sum(), 1.0) - (usual**2).sum()
    prior = min((1 - (usual**2).sum()) / more - 1, _MOST_PRIOR) if more > 0 else _MOST_PRIOR
    readers = (counts + prior * usual) / (totals + prior)[:, None]
    return (totals - discount)[:, None] * readers, discount * len(counts) * usual
